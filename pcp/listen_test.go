// SPDX-License-Identifier: Apache-2.0

package pcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestListen sends requests to a gateway without a loopback, by either family and to either address. Its sockets
// follow the interfaces, and errors are logged.
func TestListen(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "pcp", Nodes: []lab.NodeSpec{{Name: "gateway"}, {Name: "host"}}, Links: []lab.LinkSpec{{
		A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.0.1/24", "10.0.0.9/24", "fd00::1/64"}},
		B: lab.End{Node: "host", Iface: "eth0", Addresses: []string{alice + "/24", six + "/64"}}}}})
	gateway := l.Node("gateway")
	ip := func(args string) {
		t.Helper()
		if out, err := gateway.Command(t.Context(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", args, err, out)
		}
	}
	ip("link set lo down")
	b := newBench(t, rule("six", "2001:db8::1", "fd00::/64"))
	sockets := map[link]*net.UDPConn{}
	follow := func() (err error) {
		return gateway.Do(func() error { return b.updateSockets(t.Context(), sockets) })
	}
	asks := func(from, to string) {
		t.Helper()
		c, err := l.Node("host").Dial(t.Context(), &net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(from), 0))},
			"udp", net.JoinHostPort(to, port[1:]))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		labtest.Eventually(t, time.Minute, "an answer to "+from+" from "+to, func() error {
			if _, err := c.Write(message(from, 1, flow.TCP, 80, hour, anyPort)); err != nil {
				return err
			}
			_ = c.SetReadDeadline(time.Now().Add(time.Second))
			_, err := c.Read(make([]byte, maxMessage))
			return err
		})
	}
	if err := follow(); err != nil {
		t.Fatal(err)
	}
	asks(alice, "10.0.0.1")
	asks(alice, "10.0.0.9")
	asks(six, "fd00::1")

	ip("link set lan0 down")
	ip("link set lan0 name lan9")
	ip("link set lan9 up")
	if err := follow(); err != nil {
		t.Fatal(err)
	}
	if len(sockets) != 1 || len(b.networks["lan9"]) == 0 {
		t.Errorf("sockets %v, networks %v after a rename", sockets, b.networks)
	}
	asks(alice, "10.0.0.1")

	for _, c := range sockets {
		c.Close()
	}
	var four *net.UDPConn
	if err := gateway.Do(func() (err error) {
		four, err = openAs(t.Context(), "udp4", "lan9")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	go b.serve(four, link{name: "lan9"}, func(netip.Addr) bool { return true })
	asks(alice, "10.0.0.9")

	clear(sockets)
	if err := follow(); err == nil || !strings.Contains(err.Error(), "interface lan9") || !strings.Contains(err.Error(), "another PCP") {
		t.Errorf("beside another server: %v", err)
	}
	four.Close()
	err := gateway.Do(func() error { _, err := open(t.Context(), "none0"); return err })
	if err == nil || strings.Contains(err.Error(), "another PCP") {
		t.Errorf("on an interface that is not there: %v", err)
	}
}

// scripted is a table that is read with the outcomes of a channel.
type scripted struct {
	*table
	outcomes chan error
}

func (s scripted) Mappings() ([]datapath.Mapping, error) { return nil, <-s.outcomes }

// TestWhatFailsIsSaidOnce lets a datapath fail twice, work and fail again.
func TestWhatFailsIsSaidOnce(t *testing.T) {
	b := newBench(t)
	b.allowed = nil
	var text bytes.Buffer
	b.log = slog.New(slog.NewTextHandler(&text, nil))
	outcomes := make(chan error)
	b.mapper = scripted{b.table, outcomes}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { b.Run(ctx); close(done) }()
	for _, err := range []error{unix.EIO, unix.EIO, nil, unix.EIO} {
		outcomes <- err
		b.Kick()
	}
	cancel()
	for running := true; running; {
		select {
		case outcomes <- unix.EIO:
		case <-done:
			running = false
		}
	}
	if n := strings.Count(text.String(), "\n"); n != 2 {
		t.Errorf("said %d times, want twice:\n%s", n, &text)
	}
}

// TestUnusedAddresses: replies to addresses without a host wait for ARP or neighbour discovery. Requests from
// such addresses are counted and do not delay other hosts.
func TestUnusedAddresses(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "pcpflood", Nodes: []lab.NodeSpec{{Name: "gateway"}, {Name: "host"}}, Links: []lab.LinkSpec{{
		A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.0.1/24", "fd00::1/64"}},
		B: lab.End{Node: "host", Iface: "eth0", Addresses: []string{alice + "/24", six + "/64"}}}}})
	b := newBench(t, rule("six", "2001:db8::1", "fd00::/64"))
	sockets := map[link]*net.UDPConn{}
	if err := l.Node("gateway").Do(func() error { return b.updateSockets(t.Context(), sockets) }); err != nil {
		t.Fatal(err)
	}
	unused := net.ListenConfig{Control: func(network, _ string, raw syscall.RawConn) (err error) {
		outer := raw.Control(func(fd uintptr) {
			if err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1); network == "udp6" {
				err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
			}
		})
		return errors.Join(outer, err)
	}}
	// The gateway's hardware address is known to the host from the first request on.
	for _, f := range []struct{ family, host, prefix, gateway string }{{"udp4", alice, "10.0.0.", "10.0.0.1"}, {"udp6", six, "fd00::1:", "fd00::1"}} {
		host, err := l.Node("host").Dial(t.Context(), &net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(f.host), 0))},
			f.family, net.JoinHostPort(f.gateway, port[1:]))
		if err != nil {
			t.Fatal(err)
		}
		answers := 0
		ask := func() error {
			if _, err := host.Write(message(f.host, 1, flow.TCP, 80, hour, anyPort)); err != nil {
				return err
			}
			_ = host.SetReadDeadline(time.Now().Add(time.Second))
			_, err := host.Read(make([]byte, maxMessage))
			return err
		}
		labtest.Eventually(t, time.Minute, "an answer", ask)
		for round := range 20 {
			for n := range 100 {
				from := fmt.Sprintf("%s%d", f.prefix, 50+(100*round+n)%200)
				if err := l.Node("host").Do(func() error {
					c, err := unused.ListenPacket(t.Context(), f.family, net.JoinHostPort(from, "0"))
					if err != nil {
						return err
					}
					defer c.Close()
					_, err = c.WriteTo(message(from, 1, flow.TCP, 80, hour, anyPort), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(net.JoinHostPort(f.gateway, port[1:]))))
					return err
				}); err != nil {
					t.Fatal(err)
				}
			}
			if ask() == nil {
				answers++
			}
			b.Server.mu.Lock()
			b.now += 100 * time.Millisecond // 1,000 requests a second
			b.Server.mu.Unlock()
		}
		if answers < 15 {
			t.Errorf("%s: %d of 20 requests of the host were answered", f.family, answers)
		}
		host.Close()
	}
	if counts := b.Counts(); counts[Count{"map", "unresolved"}] == 0 {
		t.Errorf("counted are %v", counts)
	}
}

// TestFullSendBuffer: a reply for which the send buffer has no room is dropped and counted.
func TestFullSendBuffer(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "pcpfull", Nodes: []lab.NodeSpec{{Name: "gateway"}, {Name: "host"}}, Links: []lab.LinkSpec{{
		A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.0.1/24"}}, B: lab.End{Node: "host", Iface: "eth0", Addresses: []string{alice + "/24"}}}}})
	b := newBench(t)
	for _, family := range []string{"udp4", "udp6"} {
		var c *net.UDPConn
		if err := l.Node("gateway").Do(func() (err error) { c, err = openAs(t.Context(), family, "lan0"); return err }); err != nil {
			t.Fatal(err)
		}
		before := b.Counts()[Count{"reply", "dropped"}]
		for i := range 100_000 { // each waits for ARP
			b.send(c, make([]byte, maxMessage), nil, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(50 + i%200)}), 5000))
			if b.Counts()[Count{"reply", "dropped"}] > before {
				break
			}
		}
		if b.Counts()[Count{"reply", "dropped"}] == before {
			t.Errorf("%s: no reply was dropped", family)
		}
		c.Close()
	}
}
