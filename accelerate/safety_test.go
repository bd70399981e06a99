// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// accelerated is a router with a fast connection.
func accelerated(t *testing.T, network, by string) (*lab.Lab, *running, *talk) {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("conntrack"), labtest.Tool("iptables-nft-restore"), labtest.Tool("iptables-legacy-restore"))
	l := labtest.New(t, router())
	rules[by](t, l.Node("router"))
	echo(t, l.Node("server"), 7)
	r := begin(t, l.Node("router"))
	k := dial(t, l.Node("client"), network, "10.0.2.2:7")
	k.fast(r)
	return l, r, k
}

// stops exchanges messages until one is lost, and returns the time that this took.
func (k *talk) stops() time.Duration {
	k.t.Helper()
	_ = k.conn.SetDeadline(time.Time{}) // of exchange
	begin := time.Now()
	b := make([]byte, 2048)
	last := begin
	for lost := 0; lost < 25; lost++ { // a count, because a busy machine may not run this process for a second
		if time.Since(begin) > patience {
			k.t.Fatal("packets still pass")
		}
		_, _ = k.conn.Write([]byte("message"))
		_ = k.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := k.conn.Read(b); err == nil {
			last, lost = time.Now(), 0
		}
	}
	return last.Sub(begin)
}

// TestNewDropRule adds a rule that drops an accelerated flow.
func TestNewDropRule(t *testing.T) {
	for _, c := range []struct{ by, add, remove string }{
		{"nft", "nft insert rule ip filter forward udp dport 7 drop", "nft flush chain ip filter forward"},
		{"iptables-nft", "iptables-nft -I FORWARD -p udp --dport 7 -j DROP", "iptables-nft -D FORWARD 1"},
		{"iptables-legacy", "iptables-legacy -I FORWARD -p udp --dport 7 -j DROP", "iptables-legacy -D FORWARD 1"},
	} {
		t.Run(c.by, func(t *testing.T) {
			l, r, k := accelerated(t, "udp", c.by)
			command(t, l.Node("router"), "", strings.Fields(c.add)...)
			t.Logf("packets passed for another %v", k.stops())
			command(t, l.Node("router"), "", strings.Fields(c.remove)...)
			if c.by == "nft" {
				command(t, l.Node("router"), "", "nft", "add", "rule", "ip", "filter", "forward", "accept")
			}
			k.fast(r)
		})
	}
}

// TestConntrackDeleted deletes the entry of an accelerated flow. The next packets begin a new connection, and a rule drops
// them.
func TestConntrackDeleted(t *testing.T) {
	l, _, k := accelerated(t, "udp", "nft")
	n := l.Node("router")
	command(t, n, "", "nft", "insert", "rule", "ip", "filter", "forward", "ct", "state", "new", "udp", "dport", "7", "drop")
	for range 40 {
		if err := k.exchange(); err != nil {
			t.Fatalf("an established connection after the new rule: %v", err)
		}
	}
	command(t, n, "", "conntrack", "-D", "-p", "udp")
	t.Logf("packets passed for another %v", k.stops())
}

// TestKilled kills and stops the process: the kernel forwards the packets of open connections.
func TestKilled(t *testing.T) {
	for _, c := range []struct {
		name   string
		signal syscall.Signal
	}{{"killed", syscall.SIGKILL}, {"stopped", syscall.SIGSTOP}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l, r, k := accelerated(t, "tcp", "iptables-nft")
			n := l.Node("router")
			if err := r.cmd.Process.Signal(c.signal); err != nil {
				t.Fatal(err)
			}
			// A drop rule takes effect, because the kernel handles the packets again.
			for range 100 {
				if err := k.exchange(); err != nil {
					t.Fatal(err)
				}
			}
			command(t, n, "", "iptables-nft", "-I", "FORWARD", "-p", "tcp", "--dport", "7", "-j", "DROP")
			t.Logf("packets passed for another %v", k.stops())
			command(t, n, "", "iptables-nft", "-D", "FORWARD", "1")
			_ = k.conn.SetDeadline(time.Now().Add(patience))
			labtest.Eventually(t, patience, "the connection continues", func() error {
				out := command(t, n, "", "conntrack", "-L", "-p", "tcp")
				if !strings.Contains(out, "ESTABLISHED") {
					return fmt.Errorf("conntrack: %s", out)
				}
				b := make([]byte, 65536)
				_, err := k.conn.Read(b)
				return err
			})
		})
	}
}

// TestStopLeavesNothing compares the interfaces before the start and after the stop.
func TestStopLeavesNothing(t *testing.T) {
	l, r, k := accelerated(t, "tcp", "nft")
	n := l.Node("router")
	if err := Stop(t.Context(), n.StateDir()); err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Wait(); err != nil {
		t.Errorf("the process ended with %v", err)
	}
	if err := k.exchange(); err != nil {
		t.Errorf("an open connection after the stop: %v", err)
	}
	if out := command(t, n, "", "ip", "-d", "link"); strings.Contains(out, "xdp") {
		t.Errorf("after the stop:\n%s", out)
	}
	if _, err := StatusOf(t.Context(), n.StateDir(), 0); err != ErrNotRunning {
		t.Errorf("after the stop: %v", err)
	}
	if out := command(t, n, "", "ls", "-A", n.StateDir()); strings.Contains(out, "accelerate") {
		t.Errorf("the state directory contains %s", out)
	}
	begin(t, n)
}

var transfers = flag.Int("transfers", 1, "16 MiB to transfer in both directions before a connection of TestClosing ends; from 128 on, the kernel calls a RST invalid")

// closing returns the conntrack states that a connection passes to at its end, without and with acceleration.
func closing(t *testing.T, reset bool) [2]string {
	var states [2]string
	l := labtest.New(t, router())
	n := l.Node("router")
	rules["nft"](t, n)
	if err := n.Sysctl("net.netfilter.nf_conntrack_tcp_timeout_close", "600"); err != nil { // until the test reads the state
		t.Fatal(err)
	}
	echo(t, l.Node("server"), 7)
	for i := range states {
		var r *running
		if i == 1 {
			r = begin(t, n)
		}
		k := dial(t, l.Node("client"), "tcp", "10.0.2.2:7")
		for range 40 {
			if err := k.exchange(); err != nil {
				t.Fatal(err)
			}
		}
		if i == 1 {
			k.fast(r)
		}
		for range *transfers {
			k.bulk(16 << 20)
		}
		tcp := k.conn.(*net.TCPConn)
		if reset {
			_ = tcp.SetLinger(0)
		}
		local := tcp.LocalAddr().(*net.TCPAddr).AddrPort()
		tcp.Close()
		labtest.Eventually(t, patience, "the end of the connection", func() error {
			out := command(t, n, "", "conntrack", "-L", "-p", "tcp", "--sport", fmt.Sprint(local.Port()))
			fields := strings.Fields(out)
			if len(fields) < 4 || fields[3] == "ESTABLISHED" || fields[3] == "FIN_WAIT" || fields[3] == "LAST_ACK" || fields[3] == "CLOSE_WAIT" {
				return fmt.Errorf("conntrack: %s", out)
			}
			states[i] = fields[3]
			return nil
		})
		if i == 1 {
			if f := r.packets(netip.AddrPortFrom(local.Addr(), local.Port())); f != [2]uint64{} {
				t.Errorf("the connection has ended, and the fast path knows it: %v", f)
			}
		}
	}
	return states
}

// TestClosing ends connections by FIN and by RST: the conntrack entries end in the same states as without acceleration.
func TestClosing(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("conntrack"))
	for name, reset := range map[string]bool{"FIN": false, "RST": true} {
		t.Run(name, func(t *testing.T) {
			if states := closing(t, reset); states[0] != states[1] {
				t.Errorf("without acceleration the state is %s, with it %s", states[0], states[1])
			}
		})
	}
}

// TestLifetimeRenewed keeps a UDP connection busy for longer than its lifetime.
func TestLifetimeRenewed(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("conntrack"))
	t.Parallel()
	l := labtest.New(t, router())
	n := l.Node("router")
	rules["nft"](t, n)
	if err := n.Sysctl("net.netfilter.nf_conntrack_udp_timeout_stream", "2"); err != nil {
		t.Fatal(err)
	}
	echo(t, l.Node("server"), 7)
	r := begin(t, n)
	k := dial(t, l.Node("client"), "udp", "10.0.2.2:7")
	k.fast(r)
	id := strings.Fields(command(t, n, "", "conntrack", "-L", "-o", "id", "-p", "udp"))
	for begin := time.Now(); time.Since(begin) < 5*time.Second; time.Sleep(100 * time.Millisecond) {
		if err := k.exchange(); err != nil {
			t.Fatal(err)
		}
	}
	after := strings.Fields(command(t, n, "", "conntrack", "-L", "-o", "id", "-p", "udp"))
	find := func(words []string) string {
		for _, w := range words {
			if strings.HasPrefix(w, "id=") {
				return w
			}
		}
		return ""
	}
	if find(id) == "" || find(id) != find(after) {
		t.Errorf("before: %v\nafter: %v", id, after)
	}
	if s := r.status(); s.Ended != 0 {
		t.Errorf("a flow ended: %+v", s)
	}
}

// TestRefused: a rule that acts on single packets excludes all flows, while it exists.
func TestRefused(t *testing.T) {
	l, r, k := accelerated(t, "udp", "nft")
	n := l.Node("router")
	command(t, n, "", "nft", "add", "chain", "ip", "filter", "quotas", "{ type filter hook postrouting priority 1; }")
	command(t, n, "", "nft", "add", "rule", "ip", "filter", "quotas", "quota", "over", "100000", "mbytes", "drop")
	labtest.Eventually(t, patience, "the refusal", func() error {
		if s := r.status(); len(s.Refused) != 1 || !strings.Contains(s.Refused[0], "quota") || s.Fast != 0 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	before := r.status()
	for range 100 {
		if err := k.exchange(); err != nil {
			t.Fatal(err)
		}
	}
	if s := r.status(); s.XDP+s.TC != before.XDP+before.TC {
		t.Errorf("%d packets took the fast path in spite of the rule", s.XDP+s.TC-before.XDP-before.TC)
	}
	command(t, n, "", "nft", "flush", "chain", "ip", "filter", "quotas")
	k.fast(r)
}

// TestRouteChanges moves the server behind another interface.
func TestRouteChanges(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	topology := router()
	topology.Links = append(topology.Links, lab.LinkSpec{A: lab.End{Node: "router", Iface: "wan1", GRO: true, Addresses: []string{"10.0.3.1/24"}},
		B: lab.End{Node: "server", Iface: "eth1", GRO: true, Addresses: []string{"10.0.3.2/24"}}})
	topology.Nodes[2].Addresses = []string{"192.0.2.1/32"}
	l := labtest.New(t, topology)
	n, server := l.Node("router"), l.Node("server")
	command(t, n, "table ip nat {\n chain pre {\n type nat hook prerouting priority dstnat\n ip daddr 192.0.2.9 dnat to 192.0.2.1\n}\n}\n", "nft", "-f", "-")
	command(t, n, "", "ip", "route", "add", "192.0.2.1/32", "via", "10.0.2.2")
	command(t, n, "", "sysctl", "-w", "net.ipv4.conf.all.rp_filter=0")
	command(t, server, "", "ip", "route", "add", "10.0.1.0/24", "via", "10.0.2.1")
	command(t, server, "", "sysctl", "-w", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.eth1.rp_filter=0")
	echo(t, server, 7)
	r := begin(t, n)
	k := dial(t, l.Node("client"), "tcp", "192.0.2.9:7")
	k.fast(r)
	command(t, n, "", "ip", "route", "replace", "192.0.2.1/32", "via", "10.0.3.2")
	for range 200 {
		if err := k.exchange(); err != nil {
			t.Fatal(err)
		}
	}
	labtest.Eventually(t, patience, "the new route", func() error {
		_ = k.exchange()
		for _, f := range r.status().Flows {
			if f.Out == "wan1" && f.Hook != "" {
				return nil
			}
		}
		return fmt.Errorf("%+v", r.status())
	})
}
