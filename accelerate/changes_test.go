// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// lifetime returns the lifetime of the only TCP entry of connection tracking in seconds.
func lifetime(t *testing.T, n *lab.Node) int {
	t.Helper()
	out := command(t, n, "", "conntrack", "-L", "-p", "tcp")
	fields := strings.Fields(out)
	at := slices.Index(fields, "tcp")
	if at < 0 || at+2 >= len(fields) {
		t.Fatalf("conntrack: %s", out)
	}
	seconds, err := strconv.Atoi(fields[at+2])
	if err != nil {
		t.Fatalf("conntrack: %s", out)
	}
	return seconds
}

// invalidate ends the validity of all learned flows.
func invalidate(t *testing.T, n *lab.Node) {
	t.Helper()
	command(t, n, "", "ip", "route", "add", "198.51.100.0/24", "dev", "lo")
	command(t, n, "", "ip", "route", "del", "198.51.100.0/24", "dev", "lo")
}

// change invalidates all learned flows, and waits until the next packets learn them again.
func change(t *testing.T, n *lab.Node) {
	t.Helper()
	invalidate(t, n)
	time.Sleep(100 * time.Millisecond) // the programs learn again after programsLimitSETTLE_MILLISECONDS
}

// TestLifetimeOfIdleConnection exchanges one message on flows that are learned again. The kernel has not seen its
// acknowledgement and shortens the lifetime, so the fast path must renew it although the connection becomes idle.
func TestLifetimeOfIdleConnection(t *testing.T) {
	l, r, k := accelerated(t, "tcp", "nft")
	n := l.Node("router")
	for range 3 {
		change(t, n)
		if err := k.exchange(); err != nil {
			t.Fatal(err)
		}
		labtest.Eventually(t, patience, "the lifetime of an idle connection", func() error {
			if s := lifetime(t, n); s <= 300 {
				return fmt.Errorf("conntrack ends the connection in %d s: %+v", s, r.status())
			}
			return nil
		})
	}
}

// TestReusedPort ends a connection while its flows are invalid. A new connection with the same addresses and ports must
// not take the fast path before its window checks are liberal.
func TestReusedPort(t *testing.T) {
	l, r, k := accelerated(t, "tcp", "nft")
	n := l.Node("router")
	local := k.conn.LocalAddr().(*net.TCPAddr)
	time.Sleep(100 * time.Millisecond) // after the last acknowledgement, so that no packet learns the flows again
	invalidate(t, n)
	_ = k.conn.(*net.TCPConn).SetLinger(0)
	k.conn.Close()
	dialer := net.Dialer{Timeout: patience, LocalAddr: local}
	labtest.Eventually(t, patience, "a new connection", func() error {
		c, err := l.Node("client").Dial(t.Context(), &dialer, "tcp", "10.0.2.2:7")
		if err == nil {
			k = &talk{t: t, conn: c}
			t.Cleanup(func() { c.Close() })
		}
		return err
	})
	k.bulk(16 << 20)
	change(t, n)
	if err := k.exchange(); err != nil {
		t.Fatalf("after 16 MiB and a change: %v, %+v", err, r.status())
	}
	k.fast(r)
}

// TestConntrackMark changes the mark of an accelerated connection. A rule drops connections with this mark.
func TestConntrackMark(t *testing.T) {
	l, r, k := accelerated(t, "udp", "nft")
	n := l.Node("router")
	command(t, n, "", "nft", "insert", "rule", "ip", "filter", "forward", "ct", "mark", "1", "drop")
	labtest.Eventually(t, patience, "the new rule", func() error {
		if s := r.status(); s.Invalidations["nftables"] == 0 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	k.fast(r)
	before := r.status().Ended
	err := n.Do(func() error { // conntrack -U cannot change translated entries
		list, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		for _, f := range list {
			if f.Forward.Protocol == unix.IPPROTO_UDP {
				f.Mark = 1
				err = errors.Join(err, netlink.ConntrackUpdate(netlink.ConntrackTable, unix.AF_INET, f))
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("packets passed for another %v", k.stops())
	if s := r.status(); s.Ended == before { // the packets would also stop when the flow is learned again
		t.Errorf("the flow has not ended: %+v", s)
	}
}

// TestRoutingByDSCP sends packets of an accelerated flow with a type of service that a routing rule refuses.
func TestRoutingByDSCP(t *testing.T) {
	l, r, k := accelerated(t, "udp", "nft")
	command(t, l.Node("router"), "", "ip", "rule", "add", "tos", "0x10", "prohibit")
	k.fast(r)
	conn, err := k.conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, 0x10) }); err != nil {
		t.Fatal(err)
	}
	before := r.status()
	k.stops()
	if s := r.status(); s.XDP+s.TC != before.XDP+before.TC {
		t.Errorf("%d packets took the fast path", s.XDP+s.TC-before.XDP-before.TC)
	}
}

// TestStationMoves moves a container to another port of the bridge.
func TestStationMoves(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("iptables-nft-restore"))
	l := docker(t, "iptables-nft-restore")
	n, container := l.Node("router"), l.Node("container")
	echo(t, l.Node("client"), 7)
	r := begin(t, n)
	k := dial(t, container, "udp", "10.0.1.2:7")
	k.fast(r)
	mac := macIn(t, container, "eth0").String()
	command(t, n, "", "ip", "link", "add", "port2", "master", "docker0", "type", "veth", "peer", "name", "moved")
	command(t, n, "", "ip", "link", "set", "moved", "netns", container.Name())
	command(t, n, "", "ip", "link", "set", "port2", "up")
	for _, words := range []string{
		"ip link del eth0",
		"ip link set moved address " + mac,
		"ip addr add 172.17.0.2/16 dev moved",
		"ip link set moved up",
		"ip route add default via 172.17.0.1",
	} {
		command(t, container, "", strings.Fields(words)...)
	}
	labtest.Eventually(t, patience, "an answer at the new port", func() error { return k.exchange() })
	k.fast(r)
}

// TestPortRules: rules that see the ports of a bridge exclude its flows while they exist, and so does a port that does
// not forward the packets of unknown stations.
func TestPortRules(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("iptables-nft-restore"), labtest.Tool("bridge"))
	l := docker(t, "iptables-nft-restore")
	n := l.Node("router")
	echo(t, l.Node("client"), 7)
	r := begin(t, n)
	k := dial(t, l.Node("container"), "udp", "10.0.1.2:7")
	for _, c := range []struct{ add, remove, why string }{
		{"nft add table bridge f { chain c { type filter hook prerouting priority 0; iifname port1 ip saddr 172.17.0.2 drop; }; }", "nft delete table bridge f", "families bridge or netdev"},
		{"nft add table netdev f { chain c { type filter hook ingress device port1 priority 0; ip saddr 172.17.0.2 drop; }; }", "nft delete table netdev f", "families bridge or netdev"},
		{"bridge link set dev port0 locked on learning off", "bridge link set dev port0 locked off learning on", "a locked port"},
	} {
		k.fast(r)
		command(t, n, "", strings.Fields(c.add)...)
		labtest.Eventually(t, patience, "the exclusion by "+c.add, func() error {
			for _, i := range r.status().Interfaces {
				if i.Name == "port0" && len(i.Hooks) == 0 && strings.Contains(i.Why, c.why) {
					return nil
				}
			}
			return fmt.Errorf("%+v", r.status().Interfaces)
		})
		before := r.status()
		for range 40 {
			if err := k.exchange(); err != nil {
				t.Fatal(err)
			}
		}
		if s := r.status(); s.XDP+s.TC != before.XDP+before.TC {
			t.Errorf("%d packets took the fast path in spite of %s", s.XDP+s.TC-before.XDP-before.TC, c.add)
		}
		command(t, n, "", strings.Fields(c.remove)...)
	}
	k.fast(r)
}

// TestVLANExcludesXDP: the tags of frames are not visible in XDP, so an interface with a VLAN has TC alone.
func TestVLANExcludesXDP(t *testing.T) {
	l, r, k := accelerated(t, "udp", "nft")
	n := l.Node("router")
	if out, err := n.Command(t.Context(), "ip", "link", "add", "link", "lan0", "name", "lan0.10", "type", "vlan", "id", "10").CombinedOutput(); err != nil {
		if !strings.Contains(string(out), "Unknown device type") {
			t.Fatalf("VLAN: %v: %s", err, out)
		}
		t.Skip("this kernel has no VLANs")
	}
	labtest.Eventually(t, patience, "the end of XDP", func() error {
		for _, i := range r.status().Interfaces {
			if i.Name == "lan0" && slices.Equal(i.Hooks, []string{hookTC}) {
				return nil
			}
		}
		return fmt.Errorf("%+v", r.status().Interfaces)
	})
	k.fast(r)
}

// TestClocks writes times that are ahead of the coarse clock of the programs, as every write of the process may be.
func TestClocks(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	t.Parallel()
	l := labtest.New(t, router())
	n := l.Node("router")
	rules["nft"](t, n)
	echo(t, l.Node("server"), 7)
	k := dial(t, l.Node("client"), "udp", "10.0.2.2:7")
	var a *Accelerator
	err := n.Do(func() (err error) {
		a, err = Open(context.WithoutCancel(t.Context()), Options{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Do(a.Close) })
	exchange := func() [programsCounterCOUNTERS]uint64 {
		t.Helper()
		for range 200 {
			if err := k.exchange(); err != nil {
				t.Fatal(err)
			}
		}
		c, err := a.counters()
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	const hour = uint64(time.Hour)
	if err := a.objects.Changed.Set(now() + hour); err != nil {
		t.Fatal(err)
	}
	exchange()
	time.Sleep(2200 * time.Millisecond) // the kernel calls UDP assured after two seconds
	if c := exchange(); c[programsCounterCOUNT_LEARNED] != 0 {
		t.Errorf("flows were learned before the end of the settling time: %v", c)
	}
	for _, set := range []func() error{
		func() error { return a.objects.Changed.Set(now() - hour) },
		func() error { return a.objects.Heartbeat.Set(now() + hour) },
	} {
		if err := set(); err != nil {
			t.Fatal(err)
		}
	}
	if c := exchange(); c[programsCounterCOUNT_XDP]+c[programsCounterCOUNT_TC] == 0 {
		t.Errorf("no packet took the fast path: %v", c)
	}
}

// TestQueues gives an interface queueing disciplines. One that shapes excludes the interface, so that no program sends
// packets past it.
func TestQueues(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("tc"))
	n := labtest.New(t, router()).Node("router")
	missing := 0
	for queue, why := range map[string]string{
		"pfifo": "", "bfifo": "", "fq": "", "fq_codel": "", "sfq": "",
		"tbf rate 1mbit burst 10k limit 10k": "tbf",
		"htb default 1":                      "htb",
		"fq maxrate 10mbit":                  "fq maxrate",
		"cake bandwidth 10mbit":              "cake",
		"netem delay 1ms":                    "netem",
		"prio":                               "prio",
	} {
		out, err := n.Command(t.Context(), "tc", append(strings.Fields("qdisc replace dev wan0 root"), strings.Fields(queue)...)...).CombinedOutput()
		if strings.Contains(string(out), "qdisc kind is unknown") {
			missing++
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v\n%s", queue, err, out)
		}
		err = n.Do(func() error {
			list, err := choose(nil, func(ebpf.ProgramID) bool { return false })
			for _, i := range list {
				if want := "it has the queueing discipline " + why; i.Name == "wan0" && ((len(i.Hooks) == 0) != (why != "") || why != "" && i.Why != want) {
					t.Errorf("%s: %s", queue, i)
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if missing > 8 {
		t.Errorf("this kernel has no queueing disciplines")
	}
}

// TestExcludedFlows adds a rule that depends on single packets of some flows. They stay slow and name the rule; the
// others are accelerated.
func TestExcludedFlows(t *testing.T) {
	for _, c := range []struct{ by, add, remove, flow string }{
		{"nft", "nft insert rule ip filter forward ip daddr 10.0.2.2 udp dport 7 quota over 100 mbytes drop", "nft flush chain ip filter forward", "udp 10.0.2.2:7"},
		{"nft", "nft insert rule ip filter forward iifname wan0 oifname lan0 tcp sport 7 limit rate 1/second counter", "nft flush chain ip filter forward", "tcp 10.0.2.2:7"},
		{"nft", "nft insert rule ip6 nat early ip6 saddr fd00:1::/64 meta length > 500 counter", "nft flush chain ip6 nat early", "udp [fd00:2::2]:7"},
		{"iptables-nft", "iptables-nft -I FORWARD -i lan0 -p tcp --dport 7 -m length --length 500:600 -j DROP", "iptables-nft -D FORWARD 1", "tcp 10.0.2.2:7"},
		{"iptables-legacy", "iptables-legacy -t mangle -A PREROUTING -s 10.0.1.0/24 -p udp --dport 7 -j DSCP --set-dscp 9", "iptables-legacy -t mangle -D PREROUTING 1", "udp 10.0.2.2:7"},
	} {
		t.Run(c.by+" "+c.flow, func(t *testing.T) {
			labtest.Require(t, labtest.Root, labtest.Tool("nft"), labtest.Tool("iptables-nft-restore"), labtest.Tool("iptables-legacy-restore"))
			t.Parallel()
			l := labtest.New(t, router())
			n := l.Node("router")
			rules[c.by](t, n)
			if c.by == "nft" {
				command(t, n, "", "nft", "add", "chain", "ip6", "nat", "early", "{ type filter hook prerouting priority -150; }")
			}
			echo(t, l.Node("server"), 7)
			r := begin(t, n)
			network, server, _ := strings.Cut(c.flow, " ")
			excluded := dial(t, l.Node("client"), network, server)
			excluded.fast(r)
			other := dial(t, l.Node("client"), map[string]string{"udp": "tcp", "tcp": "udp"}[network], "10.0.2.2:7")
			other.fast(r)
			command(t, n, "", strings.Fields(c.add)...)
			labtest.Eventually(t, patience, "the reason of the slow flow", func() error {
				if err := excluded.exchange(); err != nil {
					t.Fatal(err)
				}
				s := r.status()
				slow := 0
				for _, f := range s.Flows {
					if f.Protocol == network && f.Hook == "" && len(s.Excluding) == 1 && f.Why == s.Excluding[0] {
						slow++
					}
				}
				if slow != 2 || len(s.Refused)+len(s.RefusedIPv6) > 0 {
					return fmt.Errorf("%d directions are excluded by the rule: %+v", slow, s)
				}
				return nil
			})
			client := excluded.conn.LocalAddr().(interface{ AddrPort() netip.AddrPort }).AddrPort()
			for range 100 {
				if err := excluded.exchange(); err != nil {
					t.Fatal(err)
				}
			}
			if by := r.packets(client); by != [2]uint64{} {
				t.Errorf("%v packets took the fast path in spite of the rule", by)
			}
			other.fast(r)
			command(t, n, "", strings.Fields(c.remove)...)
			if c.by == "nft" {
				command(t, n, "", "nft", "add", "rule", "ip", "filter", "forward", "accept")
			}
			excluded.fast(r)
		})
	}
}

// TestRenamedInterface gives another interface the name in a rule.
func TestRenamedInterface(t *testing.T) {
	l, r, k := accelerated(t, "udp", "nft")
	n := l.Node("router")
	excluded := func() error {
		_, _ = k.conn.Write([]byte("message"))
		for _, f := range r.status().Flows {
			if strings.Contains(f.Why, "quota") && f.Protocol == "udp" {
				return nil
			}
		}
		return fmt.Errorf("%+v", r.status())
	}
	command(t, n, "", "nft", "insert", "rule", "ip", "filter", "forward", "iifname", "lan1", "udp", "dport", "7", "quota", "over", "100", "mbytes", "drop")
	labtest.Eventually(t, patience, "the exclusion of all flows to the port, while no interface has the name", excluded)
	command(t, n, "", "ip", "link", "add", "lan1", "type", "veth", "peer", "name", "lan2")
	k.fast(r)
	command(t, n, "", "ip", "link", "set", "lan1", "name", "lan3")
	command(t, n, "", "ip", "link", "set", "lan0", "down")
	command(t, n, "", "ip", "link", "set", "lan0", "name", "lan1", "up")
	command(t, n, "", "nft", "add", "rule", "ip", "filter", "forward", "accept")
	labtest.Eventually(t, patience, "the exclusion", excluded)
}
