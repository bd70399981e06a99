// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
)

// TestFirstPacketToAnUnknownNeighbour sends one packet to each of several hosts that are not in the
// neighbour table, with an address of the gateway. The kernel drops such IPv4 packets, so that only
// the daemon sends them. The second server adds a fragmented datagram.
func TestFirstPacketToAnUnknownNeighbour(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			for _, to := range []struct{ node, addr string }{{"s1", "10.0.2.2:5353"}, {"s1", "[fd00:2::2]:5353"}, {"s2", "10.0.2.3:5353"}} {
				echo(t, l.Node(to.node), to.addr)
			}
			serve(t, l.Node("s3"), "10.0.2.4:8080")
			d := gateway(t, l.Node("gateway"), hook, "nat: [{name: m, type: masquerade, source: [10.0.1.0/24, \"fd00:1::/64\"], out: lan0}]\n"+
				"tables: {flows: 4096, flows6: 4096}\n")
			for _, to := range []struct{ network, addr, server string }{
				{"udp", "10.0.2.2:5353", "s1"}, {"udp", "[fd00:2::2]:5353", "s1"}, {"tcp", "10.0.2.4:8080", "s3"},
			} {
				started := time.Now()
				server, client, err := ask(l.Node("client"), to.network, to.addr)
				if err != nil || server != to.server || strings.HasPrefix(client, "10.0.1.") {
					t.Errorf("%s %s: %q sees %q: %v\n%s", to.network, to.addr, server, client, err, describeReasons(d))
				}
				t.Logf("%s %s is answered after %v", to.network, to.addr, time.Since(started))
			}
			if n := counted(t, d, "unresolved"); n != 3 {
				t.Errorf("%d packets waited for their next hop, want 3\n%s", n, describeReasons(d))
			}
			shorten(t, l.Node("gateway"), "lan0", 1000)
			if n, err := large(t, l.Node("client"), "10.0.2.3:5353", 1200); err != nil || n == 0 {
				t.Errorf("a datagram that goes on in fragments is not answered: %v\n%s", err, describeReasons(d))
			}
		})
	}
}

// TestUnresolvedNextHopIsReported sends packets to hosts that do not exist, by a port-forward, a
// service in mode tunnel and masquerade. Each sender gets an ICMP error about the packet that it sent:
// its connected socket reports "no route to host".
func TestUnresolvedNextHopIsReported(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			for _, family := range []string{"ipv4", "ipv6"} {
				for key, value := range map[string]string{"retrans_time_ms": "50", "mcast_solicit": "1"} {
					if err := l.Node("gateway").Sysctl("net."+family+".neigh.lan0."+key, value); err != nil {
						t.Fatal(err)
					}
				}
			}
			gateway(t, l.Node("gateway"), hook, `
services:
  - {name: far, listen: [{address: 192.0.2.12, ports: [53]}, {address: "2001:db8::12", ports: [53]}], protocol: udp, mode: tunnel, tunnel: {type: gue}, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.78}, {name: b, address: "fd00:2::78"}]}
nat:
  - {name: forward, type: port-forward, listen: {address: 192.0.2.13, ports: [53]}, protocol: udp, to: {address: 10.0.2.77, port: 5353}}
  - {name: forward6, type: port-forward, listen: {address: "2001:db8::13", ports: [53]}, protocol: udp, to: {address: "fd00:2::77", port: 5353}}
  - {name: m, type: masquerade, source: [10.0.1.0/24, "fd00:1::/64"], out: lan0}
tables: {flows: 4096, flows6: 4096}
`)
			for _, to := range []string{"192.0.2.12:53", "192.0.2.13:53", "10.0.2.79:53", "[2001:db8::12]:53", "[2001:db8::13]:53", "[fd00:2::79]:53"} {
				c, err := l.Node("client").Dial(t.Context(), &net.Dialer{Control: reportErrors}, "udp", to)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				c.SetDeadline(time.Now().Add(patience))
				if _, err := c.Write([]byte("query")); err != nil {
					t.Fatal(err)
				}
				if _, err := c.Read(make([]byte, 9)); !errors.Is(err, unix.EHOSTUNREACH) {
					t.Errorf("%s: %v, want %v", to, err, unix.EHOSTUNREACH)
				}
			}
		})
	}
}

// TestUnresolvedDuringChange sends first packets to unresolved next hops while a change of the
// configuration is in progress, which takes up to seconds. The packets pass meanwhile.
func TestUnresolvedDuringChange(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			for _, addr := range []string{"10.0.2.2:5353", "[fd00:2::2]:5353"} {
				echo(t, l.Node("s1"), addr)
			}
			d := gateway(t, l.Node("gateway"), hook, "nat: [{name: m, type: masquerade, source: [10.0.1.0/24, \"fd00:1::/64\"], out: lan0}]\n"+
				"tables: {flows: 4096, flows6: 4096}\n")
			d.mu.Lock()
			defer d.mu.Unlock()
			for _, to := range []string{"10.0.2.2:5353", "[fd00:2::2]:5353"} {
				server, client, err := ask(l.Node("client"), "udp", to)
				if err != nil || server != "s1" || strings.Contains(client, "10.0.1.") || strings.Contains(client, "fd00:1:") {
					t.Errorf("%s: %q sees %q: %v", to, server, client, err)
				}
			}
		})
	}
}

// TestHeldProgramsFollowChanges applies configurations that need different programs, and one that
// fails while the programs are attached. After each, held packets run through the programs in force.
func TestHeldProgramsFollowChanges(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	gw := l.Node("gateway")
	handle, err := gw.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	if err := handle.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "noxdp", Flags: net.FlagUp}}); err != nil {
		t.Fatal(err)
	}
	const masquerade = "nat: [{name: m, type: masquerade, source: [10.0.1.0/24], out: lan0}]\ntables: {flows: 4096, flows6: 4096}\ninterfaces: [wan0, lan0"
	const rule = "]\nfirewall: {rules: [{name: r, hook: ingress, source: 198.51.100.0/24, action: drop}]}\n"
	d := gateway(t, gw, config.AttachXDP, masquerade+"]\n")
	check := func(server string) {
		t.Helper()
		if d.held.switches != d.switches {
			t.Errorf("the programs for held packets have the switches %+v, want %+v", d.held.switches, d.switches)
		}
		addr := map[string]string{"s1": "10.0.2.2:5353", "s2": "10.0.2.3:5353", "s3": "10.0.2.4:5353"}[server]
		echo(t, l.Node(server), addr)
		if by, client, err := ask(l.Node("client"), "udp", addr); err != nil || by != server || !strings.HasPrefix(client, "10.0.2.1:") {
			t.Errorf("%q sees %q: %v\n%s", by, client, err, describeReasons(d))
		}
	}
	check("s1")
	before := d.switches
	if apply(t, d, config.AttachXDP, masquerade+rule); d.switches == before {
		t.Fatal("both configurations need the same programs")
	}
	check("s2")
	if _, err := d.Apply(t.Context(), snapshotOf(t, config.AttachXDP, masquerade+", noxdp]\n")); err == nil {
		t.Fatal("an interface without XDP gets a program")
	}
	check("s3")
}

// TestUnresolvedWithoutDaemon sends first packets to unresolved next hops after the daemon has
// stopped. The kernel resolves the next hop if it accepts the packet's source. Packets with an
// address of the gateway as their source wait for the next start of the daemon. No packet leaves
// untranslated.
func TestUnresolvedWithoutDaemon(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			for _, to := range []struct{ node, addr string }{{"s1", "10.0.2.2:5353"}, {"s1", "[fd00:2::2]:5353"}, {"s2", "10.0.2.3:5354"}, {"s2", "[fd00:2::3]:5354"}} {
				echo(t, l.Node(to.node), to.addr)
			}
			const yaml = `
nat:
  - {name: forward, type: port-forward, listen: {address: 192.0.2.13, ports: [53]}, protocol: udp, to: {address: 10.0.2.2, port: 5353}}
  - {name: forward6, type: port-forward, listen: {address: "2001:db8::13", ports: [53]}, protocol: udp, to: {address: "fd00:2::2", port: 5353}}
  - {name: m, type: masquerade, source: [10.0.1.0/24, "fd00:1::/64"], out: lan0}
tables: {flows: 4096, flows6: 4096}
`
			dir := pinsOf(t)
			open := func() (d *Datapath) {
				t.Helper()
				if err := l.Node("gateway").Do(func() (err error) {
					d, err = Open(Options{StateDir: t.TempDir(), Dir: dir})
					return err
				}); err != nil {
					t.Fatal(err)
				}
				apply(t, d, hook, yaml)
				return d
			}
			if err := open().Close(); err != nil {
				t.Fatal(err)
			}
			handle, err := l.Node("gateway").Handle()
			if err != nil {
				t.Fatal(err)
			}
			defer handle.Close()
			lan, err := l.Node("gateway").Interface("lan0")
			if err != nil {
				t.Fatal(err)
			}
			for _, host := range []string{"10.0.2.2", "fd00:2::2"} {
				err := handle.NeighDel(&netlink.Neigh{LinkIndex: lan.Index, IP: net.ParseIP(host)})
				if err != nil && !errors.Is(err, unix.ENOENT) {
					t.Fatal(err)
				}
			}
			for _, to := range []string{"192.0.2.13:53", "[2001:db8::13]:53"} {
				if server, _, err := ask(l.Node("client"), "udp", to); err != nil || server != "s1" {
					t.Errorf("%s: %q answers: %v", to, server, err)
				}
			}
			asked := make(chan error)
			for _, to := range []string{"10.0.2.3:5354", "[fd00:2::3]:5354"} {
				c, err := l.Node("client").Dial(t.Context(), &net.Dialer{}, "udp", to)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if _, err := c.Write([]byte("query")); err != nil {
					t.Fatal(err)
				}
				go func() { asked <- translatedAnswer(c) }()
			}
			d := open()
			defer d.Close()
			for range 2 {
				if err := <-asked; err != nil {
					t.Errorf("%v\n%s", err, describeReasons(d))
				}
			}
		})
	}
}

// translatedAnswer waits for the answer to a datagram, and repeats the datagram meanwhile. The answer
// contains the source that the server sees, which must not be the client's.
func translatedAnswer(c net.Conn) error {
	b := make([]byte, 100)
	for until := time.Now().Add(patience); ; {
		c.SetReadDeadline(time.Now().Add(time.Second))
		n, err := c.Read(b)
		switch {
		case err == nil:
			if _, seen, _ := strings.Cut(string(b[:n]), " "); seen == c.LocalAddr().String() {
				return fmt.Errorf("%s receives a datagram from the inside source %s", c.RemoteAddr(), seen)
			}
			return nil
		case !errors.Is(err, os.ErrDeadlineExceeded) || time.Now().After(until):
			return err
		}
		if _, err := c.Write([]byte("query")); err != nil {
			return err
		}
	}
}

// reportErrors makes a UDP socket report all ICMP errors.
func reportErrors(network, _ string, c syscall.RawConn) (err error) {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if network == "udp6" {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) }); e != nil {
		return e
	}
	return err
}

// shorten gives an interface of a node another MTU.
func shorten(t *testing.T, n *lab.Node, name string, mtu int) {
	t.Helper()
	if err := n.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkSetMTU(link, mtu)
	}); err != nil {
		t.Fatal(err)
	}
}

// large sends one datagram that may be fragmented, and returns the length of the answer.
func large(t *testing.T, n *lab.Node, to string, size int) (int, error) {
	t.Helper()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if e := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT)
		}); e != nil {
			return e
		}
		return err
	}}
	c, err := n.Dial(t.Context(), &d, "udp", to)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(make([]byte, size)); err != nil {
		return 0, err
	}
	return c.Read(make([]byte, size))
}
