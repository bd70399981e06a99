// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

func TestSourceNAT(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "outside")
	inside := []prefixT{prefix("10.1.10.0/24")}
	for _, c := range []struct {
		name string
		rule config.NATRule
		want func(answer) bool
	}{
		{"masquerade", config.NATRule{Type: config.NATMasquerade, Source: inside, Out: "wan0"}, nil},
		{"masquerade from anywhere", config.NATRule{Type: config.NATMasquerade, Out: "wan0", FullyRandom: true}, nil},
		{"snat", config.NATRule{Type: config.NATSNAT, Source: inside, Out: "wan0", To: snatTo("211.155.226.121")}, nil},
		{
			"snat with ports", config.NATRule{Type: config.NATSNAT, Source: inside, Out: "wan0", To: snatTo("211.155.226.121"), Ports: config.PortSet{{First: 50000, Last: 50010}}, FullyRandom: true},
			func(a answer) bool { return a.client.Port() >= 50000 && a.client.Port() <= 50010 },
		},
		{"two sources", config.NATRule{Type: config.NATSNAT, Source: append(inside, prefix("10.1.20.0/24")), Out: "wan0", To: snatTo("211.155.226.121")}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.rule.Name = "office"
			b.apply(&config.Config{NAT: []config.NATRule{c.rule}})
			for range 3 {
				a, err := b.tcp("pc", "", "203.0.113.1:80")
				if err != nil {
					t.Fatalf("%v\n%s", err, b.ruleset())
				}
				if a.client.Addr() != addr("211.155.226.121") || c.want != nil && !c.want(a) {
					t.Errorf("the server saw %s", a.client)
				}
			}
		})
	}
	t.Run("except", func(t *testing.T) {
		b.apply(&config.Config{NAT: []config.NATRule{{
			Name: "office", Type: config.NATSNAT, Source: inside, Out: "wan0", To: snatTo("211.155.226.121"),
			Except: []prefixT{prefix("203.0.113.9/32")},
		}}})
		a, err := b.tcp("pc", "", "203.0.113.1:80")
		if err != nil || a.client.Addr() != addr("211.155.226.121") {
			t.Errorf("server saw %v, %v", a.client, err)
		}
		if c, err := b.dial("udp", "pc", "", "203.0.113.9:53"); err == nil {
			_, _ = c.Write([]byte("x"))
			c.Close()
		}
		var seen []*netlink.ConntrackFlow
		b.eventually("the flow to the exception", func() bool {
			seen = slices.DeleteFunc(b.tracked(), func(f *netlink.ConntrackFlow) bool { return f.Forward.DstIP.String() != "203.0.113.9" })
			return len(seen) > 0
		})
		if len(seen) != 1 || !seen[0].Reverse.DstIP.Equal(seen[0].Forward.SrcIP) {
			t.Errorf("flows to the exception: %v, want one that is not translated", seen)
		}
	})
}

// TestSourceNATPairs: a client has one address of a pool for all destinations (RFC 4787 REQ-2), also if the pool
// is one range.
func TestSourceNATPairs(t *testing.T) {
	b := newBench(t, lab.Office())
	b.apply(&config.Config{NAT: []config.NATRule{{
		Name: "office", Type: config.NATSNAT, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0",
		To: config.Target{Addresses: []config.AddressRange{pool("211.155.226.121", "211.155.226.152")}},
	}}})
	for i := range 16 {
		c, err := b.dial("udp", "pc", "", fmt.Sprintf("203.0.113.%d:53", i+1))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte("x"))
		c.Close()
	}
	seen := map[string]bool{}
	b.eventually("16 flows", func() bool {
		flows := 0
		for _, f := range b.tracked() {
			if strings.HasPrefix(f.Forward.DstIP.String(), "203.0.113.") {
				seen[f.Reverse.DstIP.String()] = true
				flows++
			}
		}
		return flows == 16
	})
	if len(seen) != 1 {
		t.Errorf("the client has the addresses %v", slices.Collect(maps.Keys(seen)))
	}
}

func snatTo(addresses ...string) (to config.Target) {
	for _, a := range addresses {
		to.Addresses = append(to.Addresses, pool(a, a))
	}
	return to
}

func TestPortForwardWithHairpin(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "web")
	office := config.NATRule{Name: "office", Type: config.NATSNAT, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0", To: snatTo("211.155.226.121")}
	l := listen("211.155.226.121", "8080")
	forward := config.NATRule{
		Name: "http", Type: config.NATPortForward, Listen: &l, Protocol: flow.TCP, To: config.Target{Address: addr("10.1.10.2"), Port: 80},
	}
	b.apply(&config.Config{NAT: []config.NATRule{office, forward}})
	a, err := b.tcp("outside", "203.0.113.1", "211.155.226.121:8080")
	if err != nil || a.client.Addr() != addr("203.0.113.1") {
		t.Errorf("from outside: server saw %v, %v\n%s", a.client, err, b.ruleset())
	}
	a, err = b.tcp("pc", "", "211.155.226.121:8080")
	if err != nil || a.client.Addr() != addr("10.1.10.1") {
		t.Errorf("from inside: server saw %v, %v\n%s", a.client, err, b.ruleset())
	}
	forward.Hairpin = config.SwitchOff
	b.apply(&config.Config{NAT: []config.NATRule{office, forward}})
	if _, err := b.dialFor(silence, "tcp", "pc", "", "211.155.226.121:8080"); err == nil {
		t.Error("hairpin is off, but a connection was opened")
	}
}

func TestStaticAndPrefixTranslation(t *testing.T) {
	b := newBench(t, lab.IPv6Only())
	b.tcpServers(80, "outside", "dmz", "old")
	b.udpServers(53, "outside", "dmz", "old")
	b.apply(&config.Config{NAT: []config.NATRule{
		{Name: "dmz", Type: config.NATStatic, External: prefix("198.51.100.0/24"), Internal: prefix("10.9.0.0/24")},
		{Name: "renumber", Type: config.NATNPT66, External: prefix("2001:db8:a::/48"), Internal: prefix("fd00:a::/48")},
	}})
	for _, c := range []struct{ from, to, server, seen string }{
		{"outside", "198.51.100.2", "dmz", "192.0.2.2"},
		{"dmz", "192.0.2.2", "outside", "198.51.100.2"},
	} {
		for _, ask := range []func() (answer, error){
			func() (answer, error) { return b.tcp(c.from, "", c.to+":80") },
			func() (answer, error) { return b.udp(c.from, "", c.to+":53") },
		} {
			a, err := ask()
			if err != nil || a.server != c.server || a.client.Addr() != addr(c.seen) {
				t.Errorf("%s to %s: answered by %q, who saw %v, %v", c.from, c.to, a.server, a.client, err)
			}
		}
	}
	mapped := npt66(addr("fd00:a::2"), prefix("fd00:a::/48"), prefix("2001:db8:a::/48"))
	for range 2 {
		a, err := b.tcp("old", "", "[2001:db8:f::2]:80")
		if err != nil || a.server != "outside" || a.client.Addr() != mapped {
			t.Errorf("out: answered by %q, who saw %v, want %v, %v\n%s", a.server, a.client, mapped, err, b.ruleset())
		}
		a, err = b.udp("outside", "", fmt.Sprintf("[%s]:53", mapped))
		if err != nil || a.server != "old" || a.client.Addr() != addr("2001:db8:f::2") {
			t.Errorf("in: answered by %q, who saw %v, %v", a.server, a.client, err)
		}
	}
}

// TestStaticByInterfaces: in and out name the ingress and egress interfaces of inside packets. Outside packets
// may arrive on any interface, and two inside hosts reach each other by their outside addresses.
func TestStaticByInterfaces(t *testing.T) {
	b := newBench(t, lab.IPv6Only())
	b.tcpServers(80, "outside", "dmz", "old")
	if out, err := b.lab.Node("outside").Command(t.Context(), "ip", "route", "add", "10.9.0.0/24", "via", "192.0.2.1").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	dmz := config.NATRule{Name: "dmz", Type: config.NATStatic, External: prefix("198.51.100.0/24"), Internal: prefix("10.9.0.0/24"), In: "lan0", Out: "wan0"}
	six := config.NATRule{Name: "renumber", Type: config.NATNPT66, External: prefix("2001:db8:a::/48"), Internal: prefix("fd00:a::/48"), In: "lan0", Out: "wan0"}
	mapped := npt66(addr("fd00:a::2"), six.Internal, six.External).String()
	type ask struct{ from, to, server, seen string }
	check := func(list ...ask) {
		t.Helper()
		b.apply(&config.Config{NAT: []config.NATRule{dmz, six}})
		for _, c := range list {
			a, err := b.tcp(c.from, "", c.to)
			if err != nil || a.server != c.server || a.client.Addr() != addr(c.seen) {
				t.Errorf("%s to %s: answered by %q, who saw %v, want %s, %v\n%s", c.from, c.to, a.server, a.client, c.seen, err, b.ruleset())
			}
		}
	}
	check(ask{"outside", "198.51.100.2:80", "dmz", "192.0.2.2"}, ask{"dmz", "192.0.2.2:80", "outside", "198.51.100.2"},
		ask{"dmz", "198.51.100.2:80", "dmz", "198.51.100.2"},
		ask{"old", "[2001:db8:f::2]:80", "outside", mapped}, ask{"outside", "[" + mapped + "]:80", "old", "2001:db8:f::2"})
	dmz.Except, six.Except = []prefixT{prefix("192.0.2.0/24")}, []prefixT{prefix("2001:db8:f::/64")}
	if out, err := b.lab.Node("outside").Command(t.Context(), "ip", "route", "add", "fd00:a::/48", "via", "2001:db8:f::1").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	check(ask{"dmz", "192.0.2.2:80", "outside", "10.9.0.2"}, ask{"dmz", "198.51.100.2:80", "dmz", "198.51.100.2"},
		ask{"old", "[2001:db8:f::2]:80", "outside", "fd00:a::2"})
}

// TestStaticBeforeSourceNAT: a host with a static mapping leaves with its own outside address, although a rule
// for its network precedes.
func TestStaticBeforeSourceNAT(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "outside")
	b.apply(&config.Config{NAT: []config.NATRule{
		{Name: "office", Type: config.NATSNAT, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0", To: snatTo("211.155.226.122")},
		{Name: "pc", Type: config.NATStatic, External: prefix("211.155.226.121/32"), Internal: prefix("10.1.10.20/32")},
	}})
	a, err := b.tcp("pc", "", "203.0.113.1:80")
	if err != nil || a.client.Addr() != addr("211.155.226.121") {
		t.Errorf("the server saw %s, %v\n%s", a.client, err, b.ruleset())
	}
}

// TestPrefixTranslationBesideAService: the server of a service is behind a stateless prefix translation, and
// answers with the service's address.
func TestPrefixTranslationBesideAService(t *testing.T) {
	b := newBench(t, lab.IPv6Only())
	b.tcpServers(80, "outside", "old")
	b.nft("table inet other { chain forward { type filter hook forward priority 10; ct state invalid drop; }\n}\n") // as firewalls contain
	b.apply(&config.Config{
		Services: []config.Service{{
			Name: "web", Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
			Listen: []config.Listen{listen("2001:db8:f::1", "8080"), listen("2001:db8:a::80", "8080")}, Backends: []config.Backend{backend("old", "fd00:a::2", 80)},
		}},
		NAT: []config.NATRule{{Name: "renumber", Type: config.NATNPT66, External: prefix("2001:db8:a::/48"), Internal: prefix("fd00:a::/48")}},
	})
	mapped := npt66(addr("fd00:a::2"), prefix("fd00:a::/48"), prefix("2001:db8:a::/48"))
	for _, c := range []struct {
		from, to, server string
		seen             netip.Addr
	}{
		{"outside", "[2001:db8:f::1]:8080", "old", addr("2001:db8:f::2")},
		{"outside", "[2001:db8:a::80]:8080", "old", addr("2001:db8:f::2")},
		{"client", "[2001:db8:f::1]:8080", "old", addr("2001:db8:1::2")},
		{"old", "[2001:db8:f::2]:80", "outside", mapped},
		{"outside", fmt.Sprintf("[%s]:80", mapped), "old", addr("2001:db8:f::2")},
	} {
		a, err := b.tcp(c.from, "", c.to)
		if err != nil || a.server != c.server || a.client.Addr() != c.seen {
			t.Errorf("%s to %s: answered by %q, who saw %v, want %s, %v\n%s", c.from, c.to, a.server, a.client, c.seen, err, b.ruleset())
		}
	}
}

// opened opens n TCP connections and returns the number of successes. The first few are expected to open. They
// stay open until the test ends.
func (b *bench) opened(n, opens int, node, from, to string) (open int) {
	b.Helper()
	for i := range n {
		if _, err := b.dialIf(i < opens, "tcp", node, from, to); err == nil {
			open++
		}
	}
	return open
}

func TestNATConnectionsPerClient(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "outside")
	b.apply(&config.Config{NAT: []config.NATRule{{
		Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0", ConnectionsPerClient: 3,
	}}})
	for _, node := range []string{"pc", "web"} { // each client has its own count
		if n := b.opened(5, 3, node, "", "203.0.113.1:80"); n != 3 {
			t.Errorf("%s opened %d connections of 5, want 3\n%s", node, n, b.ruleset())
		}
	}
}

// TestNATMarks checks the mark of a rule on its connections. With another program's counter, it checks the mark
// on later packets in both directions.
func TestNATMarks(t *testing.T) {
	labtest.Require(t, labtest.Tool("nft"))
	b := newBench(t, lab.Office())
	b.tcpServers(80, "outside", "web")
	inside := []prefixT{prefix("10.1.10.0/24")}
	l := listen("211.155.226.121", "8080")
	for _, c := range []struct {
		rule           config.NATRule
		node, from, to string
	}{
		{config.NATRule{Type: config.NATMasquerade, Source: inside, Out: "wan0"}, "pc", "", "203.0.113.1:80"},
		{config.NATRule{Type: config.NATSNAT, Source: inside, Out: "wan0", To: snatTo("211.155.226.121")}, "pc", "", "203.0.113.2:80"},
		{config.NATRule{Type: config.NATPortForward, Listen: &l, Protocol: flow.TCP, To: config.Target{Address: addr("10.1.10.2"), Port: 80}}, "outside", "203.0.113.1", "211.155.226.121:8080"},
		{config.NATRule{Type: config.NATStatic, External: prefix("211.155.226.121/32"), Internal: prefix("10.1.10.2/32")}, "outside", "203.0.113.1", "211.155.226.121:80"},
	} {
		t.Run(string(c.rule.Type), func(t *testing.T) {
			c.rule.Name, c.rule.Mark = "marked", 0x17
			b.apply(&config.Config{NAT: []config.NATRule{c.rule}})
			b.nft(`table inet watch { chain forward { type filter hook forward priority 0;
				ct state established ct direction original meta mark 0x17 counter; ct state established ct direction reply meta mark 0x17 counter;
				ct state established meta mark != 0x17 counter comment "unmarked"; }; }`)
			defer b.nft("delete table inet watch")
			if _, err := b.tcp(c.node, c.from, c.to); err != nil {
				t.Fatal(err)
			}
			marked := 0
			for _, f := range b.tracked() {
				if f.Mark == 0x17 {
					marked++
				}
			}
			if marked == 0 {
				t.Error("no connection has the mark")
			}
			var counts []string
			for line := range strings.Lines(b.ruleset()) {
				if strings.Contains(line, "ct state established") && strings.Contains(line, "counter packets") {
					_, rest, _ := strings.Cut(line, "packets ")
					counts = append(counts, strings.Fields(rest)[0])
				}
			}
			if len(counts) != 3 || counts[0] == "0" || counts[1] == "0" || counts[2] != "0" {
				t.Errorf("packets with the mark in either direction, and without: %q", counts)
			}
		})
	}
}

// segments opens a connection and returns the largest segments, in bytes, that
// the client and the server will send.
func (b *bench) segments(t *testing.T, node, from, to, server, at string) (client, answer uint32) {
	t.Helper()
	l, err := b.lab.Node(server).Listen(at)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ask, err := b.dial("tcp", node, from, to)
	if err != nil {
		t.Fatalf("%v\n%s", err, b.ruleset())
	}
	defer ask.Close()
	got, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	size := func(c net.Conn) uint32 {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var info *unix.TCPInfo
		if ctl := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO) }); ctl != nil || err != nil {
			t.Fatal(ctl, err)
		}
		return info.Snd_mss
	}
	return size(ask), size(got)
}

// TestMSSClamp gives the link outside the gateway an MTU of 1300, unknown to both ends. Without the clamp their
// segments would not fit.
func TestMSSClamp(t *testing.T) {
	const mtu, headers4, headers6 = 1300, 20 + 20, 40 + 20
	b := newBench(t, lab.Office())
	h, err := b.gateway.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	wan, err := h.LinkByName("wan0")
	if err == nil {
		err = h.LinkSetMTU(wan, mtu)
	}
	if err != nil {
		t.Fatal(err)
	}
	l := listen("211.155.226.121", "8080")
	six := config.Service{
		Name: "six", Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
		Listen: []config.Listen{listen("2001:db8:e::2", "8080")}, Backends: []config.Backend{backend("web", "2001:db8:10::2", 8080)},
	}
	for _, clamp := range []bool{false, true} {
		six.MSSClamp = clamp
		b.apply(&config.Config{Services: []config.Service{six}, NAT: []config.NATRule{
			{Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0", MSSClamp: clamp},
			{Name: "http", Type: config.NATPortForward, Listen: &l, Protocol: flow.TCP, To: config.Target{Address: addr("10.1.10.2"), Port: 8080}, MSSClamp: clamp},
		}})
		for _, c := range []struct {
			name, node, from, to, server, at string
			headers                          uint32
		}{
			{"masquerade", "pc", "", "203.0.113.1:8080", "outside", "203.0.113.1:8080", headers4},
			{"port-forward", "outside", "203.0.113.1", "211.155.226.121:8080", "web", "10.1.10.2:8080", headers4},
			{"service", "outside", "2001:db8:f::10", "[2001:db8:e::2]:8080", "web", "[2001:db8:10::2]:8080", headers6},
		} {
			client, server := b.segments(t, c.node, c.from, c.to, c.server, c.at)
			if fits := max(client, server)+c.headers <= mtu; fits != clamp || !clamp && min(client, server)+c.headers <= mtu {
				t.Errorf("%s, clamp %v: the client sends segments of %d, the server of %d", c.name, clamp, client, server)
			}
		}
	}
}

// TestMasqueradeWithoutAddress: a packet is dropped if its egress interface has no address of its family. The
// kernel would use an address of another interface.
func TestMasqueradeWithoutAddress(t *testing.T) {
	b := newBench(t, lab.Office())
	c := &config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0"}}}
	b.apply(c)
	if e := b.explain(flow.UDP, "lan0", "10.1.10.20:4000", "203.0.113.1:53"); e.Action != "forward" {
		t.Errorf("with an address: %s %s", e.Action, e.Reason)
	}
	if err := b.gateway.Do(func() error {
		wan, err := netlink.LinkByName("wan0")
		if err != nil {
			return err
		}
		list, err := netlink.AddrList(wan, netlink.FAMILY_V4)
		for _, a := range list {
			err = errors.Join(err, netlink.AddrDel(wan, &a))
		}
		to := net.IPNet{IP: net.IP{203, 0, 113, 0}, Mask: net.CIDRMask(24, 32)}
		return errors.Join(err, netlink.RouteReplace(&netlink.Route{LinkIndex: wan.Attrs().Index, Dst: &to, Scope: netlink.SCOPE_LINK}))
	}); err != nil {
		t.Fatal(err)
	}
	b.apply(c)
	if e := b.explain(flow.UDP, "lan0", "10.1.10.20:4001", "203.0.113.1:53"); e.Action+" "+e.Reason != "drop no-address" {
		t.Errorf("without an address: %s %s: %s", e.Action, e.Reason, e.After)
	}
	if told := strings.Join(b.d.Warnings(), "\n"); !strings.Contains(told, "nat office: interface wan0 has no") {
		t.Errorf("the warnings do not tell of it: %s", told)
	}
}
