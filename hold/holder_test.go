// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/packet"
)

// segment is a switch with two gateways and a neighbour, of both families.
func segment(t *testing.T) *lab.Lab {
	labtest.Require(t, labtest.Root)
	top := lab.Topology{Name: "hold", Nodes: []lab.NodeSpec{{Name: "g1"}, {Name: "g2"}, {Name: "host"}, {Name: "sw", Switch: true}}}
	for i, n := range []string{"g1", "g2", "host"} {
		top.Links = append(top.Links, lab.LinkSpec{
			A: lab.End{Node: n, Iface: "eth0", Addresses: []string{fmt.Sprintf("192.0.2.%d/24", i+1), fmt.Sprintf("2001:db8::%d/64", i+1)}},
			B: lab.End{Node: "sw", Iface: "p" + n}})
	}
	return labtest.New(t, top)
}

// gate is a holder in a node.
type gate struct {
	*Holder
	t    *testing.T
	node *lab.Node
	dir  string
	end  func() // leaves everything, as kill -9 does
}

func open(t *testing.T, n *lab.Node, dir string, wants ...Want) *gate {
	t.Helper()
	var h *Holder
	if err := n.Do(func() (err error) {
		h, err = New(Options{StateDir: dir, Log: slog.New(slog.DiscardHandler)})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	g := &gate{Holder: h, t: t, node: n, dir: dir}
	g.set(wants...)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Do(func() error { h.Run(ctx); return nil }) }()
	g.end = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(g.end)
	return g
}

func (g *gate) set(wants ...Want) {
	g.t.Helper()
	if err := g.node.Do(func() error { _, err := g.Set(wants); return err }); err != nil {
		g.t.Fatal(err)
	}
}

// becomes waits until the addresses have the expected states.
func (g *gate) becomes(want string) {
	g.t.Helper()
	labtest.Eventually(g.t, time.Minute, want, func() error {
		var out []string
		for _, s := range g.Statuses() {
			out = append(out, fmt.Sprintf("%s %s", s.Range(), s.State))
		}
		if got := strings.Join(out, "; "); got != want {
			return errors.New(got)
		}
		return nil
	})
}

// has lists the held addresses that the kernel has.
func (g *gate) has() (out []string) {
	g.t.Helper()
	err := g.node.Do(func() error {
		list, err := readAddresses()
		for _, a := range list {
			if a.proto == Protocol {
				out = append(out, a.at.String())
			}
		}
		return err
	})
	if err != nil {
		g.t.Fatal(err)
	}
	return out
}

func (g *gate) holds(want ...string) {
	g.t.Helper()
	labtest.Eventually(g.t, time.Minute, fmt.Sprint("addresses ", want), func() error {
		if got := g.has(); strings.Join(got, " ") != strings.Join(want, " ") {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
}

func (g *gate) ip(args string) {
	g.t.Helper()
	if out, err := g.node.Command(g.t.Context(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		g.t.Fatalf("ip %s: %v: %s", args, err, out)
	}
}

// answers expects that a neighbour reaches an address, and checks the hardware address in its entry.
func answers(t *testing.T, l *lab.Lab, address, node string) {
	t.Helper()
	host := l.Node("host")
	labtest.Eventually(t, time.Minute, address+" answered by "+node, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := host.Ping(ctx, netip.Addr{}, netip.MustParseAddr(address)); err != nil {
			return err
		}
		neigh, err := host.Command(t.Context(), "ip", "neigh", "show", address).CombinedOutput()
		mac, err2 := l.Node(node).Command(t.Context(), "cat", "/sys/class/net/eth0/address").CombinedOutput()
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		if !strings.Contains(string(neigh), strings.TrimSpace(string(mac))) {
			return fmt.Errorf("neighbour %s, want %s", neigh, mac)
		}
		return nil
	})
}

const four, six = "192.0.2.10", "2001:db8::10"

// TestHold holds an address of each family, gives one back, and the rest at the end.
func TestHold(t *testing.T) {
	l := segment(t)
	g := open(t, l.Node("g1"), t.TempDir(), one("a", four), one("a", six), one("a", "198.51.100.1"), one("a", "192.0.2.1"))
	g.becomes("192.0.2.1 own; 192.0.2.10 held; 198.51.100.1 routed; 2001:db8::10 held")
	g.holds(four, six)
	answers(t, l, four, "g1")
	answers(t, l, six, "g1")
	// Neither address becomes the source of the host's packets.
	for to, own := range map[string]string{"192.0.2.3": "192.0.2.1", "2001:db8::3": "2001:db8::1"} {
		out, err := g.node.Command(t.Context(), "ip", "route", "get", to).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "src "+own+" ") {
			t.Errorf("source towards %s: %v: %s", to, err, out)
		}
	}
	g.set(one("a", six))
	g.holds(six)
	// Taken away by somebody, with its interface, and with the carrier.
	g.ip("address del " + six + "/128 dev eth0")
	g.Kick()
	g.holds(six)
	g.ip("link set eth0 down")
	g.Kick()
	g.becomes("2001:db8::10 routed")
	g.ip("link set eth0 up")
	g.ip("address add 2001:db8::1/64 dev eth0 nodad")
	g.Kick()
	g.holds(six)
	g.end()
	if err := g.node.Do(func() error { return g.Release(false) }); err != nil {
		t.Fatal(err)
	}
	g.holds()
	if left, err := Left(g.dir); left || err != nil {
		t.Errorf("the record is left: %v", err)
	}
}

// TestLost has the host lose an address of its own: it is not taken over, before it has been
// the host's again and wanted anew.
func TestLost(t *testing.T) {
	l := segment(t)
	g := open(t, l.Node("g1"), t.TempDir(), one("a", "192.0.2.1"))
	g.becomes("192.0.2.1 own")
	g.ip("address del 192.0.2.1/24 dev eth0")
	g.ip("address add 192.0.2.77/24 dev eth0")
	g.Kick()
	g.becomes("192.0.2.1 lost")
	g.set(one("a", "192.0.2.1"), one("b", "198.51.100.1"))
	g.becomes("192.0.2.1 lost; 198.51.100.1 routed")
	g.holds()
	g.ip("address add 192.0.2.1/24 dev eth0")
	g.Kick()
	g.becomes("192.0.2.1 own; 198.51.100.1 routed")
}

// TestDuplicates has two gateways want the same addresses: one gets them, and the other
// when it has given them back.
func TestDuplicates(t *testing.T) {
	l := segment(t)
	g1 := open(t, l.Node("g1"), t.TempDir(), one("a", four), one("a", six))
	g1.becomes("192.0.2.10 held; 2001:db8::10 held")
	answers(t, l, four, "g1")
	answers(t, l, six, "g1")
	g2 := open(t, l.Node("g2"), t.TempDir(), one("a", four), one("a", six))
	g2.becomes("192.0.2.10 foreign; 2001:db8::10 foreign")
	mac, err := l.Node("g1").Command(t.Context(), "cat", "/sys/class/net/eth0/address").Output()
	if s := g2.Statuses()[0]; err != nil || s.Station != strings.TrimSpace(string(mac)) || !strings.Contains(s.Why, s.Station) {
		t.Errorf("%v: %+v, want station %s", err, s, mac)
	}
	g2.holds()
	g1.end()
	if err := g1.node.Do(func() error { return g1.Release(false) }); err != nil {
		t.Fatal(err)
	}
	g2.becomes("192.0.2.10 held; 2001:db8::10 held")
	// The gratuitous frame updates the neighbour's entries of the first gateway; the neighbour sends no request.
	answers(t, l, four, "g2")
	answers(t, l, six, "g2")
}

// TestAfterACrash adopts wanted addresses and removes the others.
func TestAfterACrash(t *testing.T) {
	l := segment(t)
	dir := t.TempDir()
	g := open(t, l.Node("g1"), dir, one("a", four), one("a", six))
	g.holds(four, six)
	g.end()
	next := open(t, l.Node("g1"), dir, one("a", four))
	if s := next.Statuses(); s[0].State != Held {
		t.Errorf("adopted as %+v", s)
	}
	next.holds(four)
	next.end()
	if left, err := Left(dir); !left || err != nil {
		t.Errorf("nothing is recorded: %v", err)
	}
	if err := next.node.Do(func() error { return Remove(dir) }); err != nil {
		t.Fatal(err)
	}
	next.holds()
	if err := os.WriteFile(dir+"/"+recordFile, []byte("["), 0o600); err != nil {
		t.Fatal(err)
	}
	// A damaged record is made again from the marks.
	for name, damage := range map[string]func(path string) error{
		"cut":        func(path string) error { return os.WriteFile(path, []byte("["), 0o600) },
		"empty":      func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"no address": func(path string) error { return os.WriteFile(path, []byte("[{}]"), 0o600) },
		"pipe":       func(path string) error { return errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)) },
	} {
		g := open(t, l.Node("g1"), dir, one("a", four), one("a", six))
		g.holds(four, six)
		g.end()
		if err := damage(filepath.Join(dir, recordFile)); err != nil {
			t.Fatal(err)
		}
		next := open(t, l.Node("g1"), dir, one("a", four))
		if w := next.Warnings(); len(w) != 1 || !strings.Contains(w[0], recordFile) {
			t.Errorf("%s: warnings %v", name, w)
		}
		next.holds(four)
		next.end()
		if err := next.node.Do(func() error { return Remove(dir) }); err != nil {
			t.Fatal(err)
		}
		next.holds()
	}
}

// TestTakenOver gives an address back that the operator puts on an interface.
func TestTakenOver(t *testing.T) {
	l := segment(t)
	g := open(t, l.Node("g1"), t.TempDir(), one("a", four))
	g.becomes("192.0.2.10 held")
	g.ip("address add " + four + "/24 dev eth0")
	g.Kick()
	g.becomes("192.0.2.10 own")
	g.holds()
	answers(t, l, four, "g1")
}

// TestFrames compares the frames with the RFCs.
func TestFrames(t *testing.T) {
	mac := []byte{2, 0, 0, 0, 0, 1}
	for want, frame := range map[string][]byte{
		"eth(src=02:00:00:00:00:01,dst=ff:ff:ff:ff:ff:ff)/arp(sha=02:00:00:00:00:01,spa=0.0.0.0,tha=00:00:00:00:00:00,tpa=192.0.2.10)":    probeFrame(mac, netip.MustParseAddr(four)),
		"eth(src=02:00:00:00:00:01,dst=ff:ff:ff:ff:ff:ff)/arp(sha=02:00:00:00:00:01,spa=192.0.2.10,tha=00:00:00:00:00:00,tpa=192.0.2.10)": gratuitousFrame(mac, netip.MustParseAddr(four), false),
	} {
		if got := packet.MustText(want).Build(); string(got) != string(frame) {
			t.Errorf("% x\nwant % x", frame, got)
		}
	}
	ns, na := probeFrame(mac, netip.MustParseAddr(six)), gratuitousFrame(mac, netip.MustParseAddr(six), true)
	if string(ns[:6]) != "\x33\x33\xff\x00\x00\x10" || ns[21] != 255 || len(ns) != 14+40+24 {
		t.Errorf("solicitation % x", ns)
	}
	if string(na[:6]) != "\x33\x33\x00\x00\x00\x01" || len(na) != 14+40+32 || binary.BigEndian.Uint32(na[58:]) != 0xa0000000 {
		t.Errorf("advertisement % x", na)
	}
	for _, f := range [][]byte{ns, na, probeFrame(mac, netip.MustParseAddr(four)), gratuitousFrame(mac, netip.MustParseAddr(four), false)} {
		a, station, ok := claimedAddress(f)
		if !ok || station != string(mac) || a.String() != four && a.String() != six {
			t.Errorf("% x shows %v of %x, %v", f, a, station, ok)
		}
		for n := range f {
			claimedAddress(f[:n])
		}
	}
}

// TestSameAddressesAgain: setting the same addresses does not read the host again. This thread would see another
// host.
func TestSameAddressesAgain(t *testing.T) {
	l := segment(t)
	wants := []Want{{First: netip.MustParseAddr("192.0.2.10"), Last: netip.MustParseAddr("192.0.2.10"), Owner: "service web"}}
	g := open(t, l.Node("g1"), t.TempDir(), wants...)
	g.becomes("192.0.2.10 held")
	if change, err := g.Set(wants); err != nil || !change.Empty() {
		t.Errorf("%+v, %v", change, err)
	}
	if s := g.Statuses(); s[0].State != Held {
		t.Errorf("%+v", s)
	}
	g.set()
	g.holds()
}
