// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// natpmp is a request for a mapping.
func natpmp(op natpmpOp, internal, external uint16, lifetime uint32) []byte {
	b := binary.BigEndian.AppendUint16([]byte{0, byte(op), 0, 0}, internal)
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16(b, external), lifetime)
}

// askNATPMP sends a message as client and returns the result code with what follows.
func (b *bench) askNATPMP(client, iface string, m []byte) string {
	b.t.Helper()
	out := b.answerMessage(m, netip.MustParseAddr(client), iface, true)
	if out == nil {
		return "silence"
	}
	if len(out) < natpmpHeader || out[0] != 0 || out[1] != m[1]|0x80 || binary.BigEndian.Uint32(out[4:]) != uint32(max(b.now-b.epoch, 0)/time.Second) {
		b.t.Fatalf("answer to % x:\n% x", m, out)
	}
	text, rest := fmt.Sprint(binary.BigEndian.Uint16(out[2:])), out[natpmpHeader:]
	switch len(rest) {
	case 0:
	case 4:
		text += " " + netip.AddrFrom4([4]byte(rest)).String()
	case 8:
		text += fmt.Sprintf(" %d %d %d", binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:]), binary.BigEndian.Uint32(rest[4:]))
	default:
		b.t.Fatalf("answer to % x:\n% x", m, out)
	}
	return text
}

// TestNATPMPRequests asks a fresh server one thing each. Sections are of RFC 6886.
func TestNATPMPRequests(t *testing.T) {
	for _, c := range []struct {
		name, client, iface string
		m                   []byte
		want                string
	}{
		{"§3.2: the outside address", alice, "lan0", []byte{0, 0}, "0 203.0.113.1"},
		{"§3.3: TCP", alice, "lan0", natpmp(natpmpMapTCP, 80, 8080, hour), "0 80 8080 3600"},
		{"§3.3: UDP", alice, "lan0", natpmp(natpmpMapUDP, 80, 8080, hour), "0 80 8080 3600"},
		{"§3.3: any outside port", alice, "lan0", natpmp(natpmpMapUDP, 80, 0, hour), "0 80 40001 3600"},
		{"§3.3: no longer than was asked for", alice, "lan0", natpmp(natpmpMapUDP, 80, 8080, 30), "0 80 8080 30"},
		{"§3.3: longer than a day", alice, "lan0", natpmp(natpmpMapUDP, 80, 8080, 1<<31), "0 80 8080 86400"},
		{"§3.3: no inside port", alice, "lan0", natpmp(natpmpMapUDP, 0, 8080, hour), "2 0 0 0"},
		{"§3.4: deletion of nothing", alice, "lan0", natpmp(natpmpMapTCP, 80, 0, 0), "0 80 0 0"},
		{"§3.4: deletion of all", alice, "lan0", natpmp(natpmpMapTCP, 0, 0, 0), "0 0 0 0"},
		{"half a request", alice, "lan0", natpmp(natpmpMapTCP, 80, 0, 0)[:11], "silence"},
		{"an answer", alice, "lan0", []byte{0, 0x80}, "silence"},
		{"§3.5: an opcode that is not known", alice, "lan0", []byte{0, 3}, "5"},
		{"§3.5: opcode 127", alice, "lan0", []byte{0, 127}, "5"},
		{"§3.5: a neighbour that no rule lets ask", "10.0.1.9", "lan0", natpmp(natpmpMapTCP, 80, 0, hour), "2 80 0 0"},
		{"§3.5: and its question for the address", "10.0.1.9", "lan0", []byte{0, 0}, "2 0.0.0.0"},
		{"§3.3: MUST NOT: by the outside interface", alice, "wan0", natpmp(natpmpMapTCP, 80, 0, hour), "2 80 0 0"},
		{"a host of no rule", "192.0.2.1", "lan0", []byte{0, 0}, "silence"},
		{"IPv6", six, "lan0", []byte{0, 0}, "silence"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := newBench(t).askNATPMP(c.client, c.iface, c.m); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

// TestNATPMPRefusals has a line without an address, a full pool and a client with its quota used up.
func TestNATPMPRefusals(t *testing.T) {
	b := newBench(t)
	b.allowed[0].Outside = nil
	for want, m := range map[string][]byte{"3 0.0.0.0": {0, 0}, "3 80 0 0": natpmp(natpmpMapTCP, 80, 0, hour)} {
		if err := b.load(); err != nil {
			t.Fatal(err)
		}
		if got := b.askNATPMP(alice, "lan0", m); got != want {
			t.Errorf("without an outside address: got %s, want %s", got, want)
		}
	}
	b = newBench(t)
	for _, err := range []error{datapath.ErrNoPort, datapath.ErrQuota} {
		b.err = err
		if got, want := b.askNATPMP(alice, "lan0", natpmp(natpmpMapTCP, 80, 0, hour)), "4 80 0 0"; got != want {
			t.Errorf("%v: got %s, want %s", err, got, want)
		}
	}
}

// TestNATPMPLife follows mappings through renewal and deletion, together with PCP mappings.
func TestNATPMPLife(t *testing.T) {
	b := newBench(t)
	for _, step := range []struct {
		name, client string
		m            []byte
		want         string
		left         int // mappings
	}{
		{"a mapping", alice, natpmp(natpmpMapTCP, 80, 8080, hour), "0 80 8080 3600", 1},
		{"renewed with another suggested port", alice, natpmp(natpmpMapTCP, 80, 9, 7200), "0 80 8080 7200", 1},
		{"UDP beside it", alice, natpmp(natpmpMapUDP, 80, 8080, hour), "0 80 40001 3600", 2},
		{"the same port for another host", bob, natpmp(natpmpMapTCP, 80, 8080, hour), "0 80 40002 3600", 3},
		{"another host's port taken back", bob, natpmp(natpmpMapTCP, 80, 0, 0), "0 80 0 0", 2},
		{"all TCP", alice, natpmp(natpmpMapTCP, 0, 0, 0), "0 0 0 0", 1},
		{"all UDP", alice, natpmp(natpmpMapUDP, 0, 0, 0), "0 0 0 0", 0},
	} {
		if got := b.askNATPMP(step.client, "lan0", step.m); got != step.want {
			t.Errorf("%s: got %s, want %s", step.name, got, step.want)
		}
		if len(b.table.mappings) != step.left {
			t.Errorf("%s: %d mappings, want %d", step.name, len(b.table.mappings), step.left)
		}
	}
	if got := b.ask(alice, message(alice, 7, flow.TCP, 81, hour, anyPort)); got != "success 3600 203.0.113.1:40003" {
		t.Fatal(got)
	}
	for _, lifetime := range []uint32{hour, 0} {
		if got, want := b.askNATPMP(alice, "lan0", natpmp(natpmpMapTCP, 81, 0, lifetime)), "2 81 0 0"; got != want {
			t.Errorf("what was mapped by PCP with a nonce, for %d s: got %s, want %s", lifetime, got, want)
		}
	}
	if n := b.Counts()[Count{"natpmp-map", "not-authorized"}]; n != 2 {
		t.Errorf("%d requests are counted as refused, want 2", n)
	}
}

// TestNATPMPPool assigns a host of a pool with several addresses always the same address, as for its mappings.
func TestNATPMPPool(t *testing.T) {
	b := newBench(t)
	b.allowed[0].Outside = []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")}
	if err := b.load(); err != nil {
		t.Fatal(err)
	}
	if one, two := b.askNATPMP(alice, "lan0", []byte{0, 0}), b.askNATPMP(bob, "lan0", []byte{0, 0}); one != "0 203.0.113.1" || two != "0 203.0.113.2" {
		t.Errorf("hosts are told %s and %s", one, two)
	}
	b.askNATPMP(bob, "lan0", natpmp(natpmpMapTCP, 80, 0, hour)) // the table maps to its first address
	if got := b.askNATPMP(bob, "lan0", []byte{0, 0}); got != "0 203.0.113.1" {
		t.Errorf("a host with a mapping is told %s", got)
	}
}

// TestWhenToAnnounce counts announcements and the time between them.
func TestWhenToAnnounce(t *testing.T) {
	var a announcer
	rules := []datapath.MappingRule{rule("office", outer, "10.0.0.0/24")}
	a.detectChange(rules, start, start)
	now, n := start, 0
	for a.left > 0 {
		now = a.at
		a.next(now)
		n++
	}
	if n != 10 || now-start != 127750*time.Millisecond {
		t.Errorf("%d announcements within %v", n, now-start)
	}
	a.detectChange(rules, start, now)
	if a.nextTimer(now) != nil {
		t.Error("announced although nothing changed")
	}
	a.detectChange(rules, start+time.Second, now)
	if a.left != announceTimes {
		t.Error("lost mappings are not announced")
	}
	a.left = 0
	a.detectChange([]datapath.MappingRule{rule("office", "203.0.113.2", "10.0.0.0/24")}, start+time.Second, now)
	if a.left != announceTimes {
		t.Error("another address is not announced")
	}
	a.detectChange(nil, start+time.Second, now)
	if a.left != 0 {
		t.Error("nothing is announced")
	}
}

// TestAnnouncements runs a server and hears, as a host, which outside address it has now.
func TestAnnouncements(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "pcpnews", Nodes: []lab.NodeSpec{{Name: "gateway"}, {Name: "host"}}, Links: []lab.LinkSpec{{
		A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.0.1/24", "fd00::1/64"}},
		B: lab.End{Node: "host", Iface: "eth0", Addresses: []string{alice + "/24", six + "/64"}}}}})
	b := newBench(t, rule("six", "2001:db8::1", "fd00::/64"))
	var heard [2]net.PacketConn
	if err := l.Node("host").Do(func() (err error) {
		eth, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		if heard[0], err = net.ListenMulticastUDP("udp4", eth, &net.UDPAddr{IP: net.IP(allHosts4.AsSlice()), Port: clientPort}); err != nil {
			return err
		}
		heard[1], err = net.ListenMulticastUDP("udp6", eth, &net.UDPAddr{IP: net.IP(allNodes6.AsSlice()), Port: clientPort, Zone: "eth0"})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Node("gateway").Do(func() error { b.Run(ctx); return nil }) }()
	defer func() { cancel(); <-done }()
	hear := func(c net.PacketConn, what string, want []byte) {
		t.Helper()
		buf := make([]byte, 64)
		for deadline := time.Now().Add(time.Minute); ; {
			_ = c.SetReadDeadline(deadline)
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if slices.Equal(buf[:n], want) && from.(*net.UDPAddr).Port == 5351 {
				return
			}
		}
	}
	reset := []byte{2, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	hear(heard[0], "the address", []byte{0, 0x80, 0, 0, 0, 0, 0, 7, 203, 0, 113, 1})
	hear(heard[0], "PCP by IPv4", reset)
	hear(heard[1], "PCP by IPv6", reset)
	b.mu.Lock()
	b.allowed = []datapath.MappingRule{rule("office", "203.0.113.2", "10.0.0.0/24")}
	b.mu.Unlock()
	b.Kick()
	hear(heard[0], "the new address", []byte{0, 0x80, 0, 0, 0, 0, 0, 7, 203, 0, 113, 2})
}
