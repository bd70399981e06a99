// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// explain explains a packet that arrives at the gateway.
func (b *bench) explain(protocol flow.Protocol, in, from, to string) *datapath.Explanation {
	b.Helper()
	e, err := b.d.Explain(context.Background(), datapath.Question{Interface: in,
		Tuple: flow.Tuple{Protocol: protocol, Source: netip.MustParseAddrPort(from), Dest: netip.MustParseAddrPort(to)}})
	if err != nil {
		b.Fatalf("explain %s %s %s: %v", protocol, from, to, err)
	}
	return e
}

// entry returns the gateway's conntrack entry of a packet.
func (b *bench) entry(protocol flow.Protocol, from, to string) *conntrack.Entry {
	b.Helper()
	var e *conntrack.Entry
	err := b.gateway.Do(func() error {
		c, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer c.Close()
		e, err = c.Get(b.Context(), flow.Tuple{Protocol: protocol, Source: netip.MustParseAddrPort(from), Dest: netip.MustParseAddrPort(to)})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	return e
}

// explained is a question, the expected explanation, and the fate of a real packet.
type explained struct {
	name           string
	protocol       flow.Protocol
	node           string // sender of the real packet
	in, from, to   string
	owner, backend string // "*": any
	after          string // "SOURCE -> DESTINATION"; "": as before; "*": as the real packet
	verdict        string
	out, hop       string
	rule           string // contained in the text of one of the rules
	note           string
}

func (b *bench) check(t *testing.T, c explained) {
	e := b.explain(c.protocol, c.in, c.from, c.to)
	if e.Owner != c.owner || c.backend != "*" && e.Backend != c.backend || e.Action+" "+e.Reason != c.verdict {
		t.Errorf("owner %q, backend %q, verdict %s %s; want %q, %q, %s", e.Owner, e.Backend, e.Action, e.Reason, c.owner, c.backend, c.verdict)
	}
	hop := ""
	if e.NextHop.IsValid() {
		hop = e.NextHop.String()
	}
	if c.hop != "*" && (e.Out != c.out || hop != c.hop) {
		t.Errorf("leaves by %q to %q, want %q to %q", e.Out, hop, c.out, c.hop)
	}
	after := c.after
	if after == "" {
		after = c.from + " -> " + c.to
	}
	if got := e.After.Source.String() + " -> " + e.After.Dest.String(); after != "*" && got != after {
		t.Errorf("becomes %s, want %s", got, after)
	}
	if !slices.ContainsFunc(e.Rules, func(m datapath.Met) bool { return strings.Contains(m.Rule, c.rule) }) && c.rule != "" {
		t.Errorf("no rule with %q was met: %+v", c.rule, e.Rules)
	}
	if !slices.ContainsFunc(e.Notes, func(n string) bool { return strings.Contains(n, c.note) }) && c.note != "" {
		t.Errorf("no note says %q: %q", c.note, e.Notes)
	}
	if b.entry(c.protocol, c.from, c.to) != nil {
		t.Error("the question made a connection in the gateway's table")
	}
	b.really(t, c, e)
	if t.Failed() {
		t.Logf("%s\n%s\n%+v", strings.Join(e.Steps, "\n"), strings.Join(e.Notes, "\n"), e.Rules)
	}
}

// really sends the packet and compares its fate with the explanation.
func (b *bench) really(t *testing.T, c explained, e *datapath.Explanation) {
	t.Helper()
	network, timeout := c.protocol.String(), silence
	if e.Action == "forward" {
		timeout = trafficTimeout
	}
	conn, err := b.dialWithin(timeout, network, c.node, c.from, c.to)
	if err == nil {
		defer conn.Close()
		if network == "udp" {
			_, _ = conn.Write([]byte("hello"))
		}
		_, err = conn.Read(make([]byte, 100))
	}
	if answered := err == nil; answered != (e.Action == "forward") {
		t.Errorf("a real packet: %v, foretold: %s", err, e.Action)
	}
	entry := b.entry(c.protocol, c.from, c.to)
	if e.Action != "forward" || e.Reason == "stateless" {
		return
	}
	if entry == nil {
		t.Error("the real connection is not tracked")
		return
	}
	f := entry.Flow()
	got, want := e.After, flow.Tuple{Protocol: c.protocol, Source: f.Reply.Dest, Dest: f.Reply.Source}
	if got.Source.Port() == 0 {
		want.Source = netip.AddrPortFrom(want.Source.Addr(), 0)
	}
	if got != want && c.backend != "*" {
		t.Errorf("foretold %s, the real packet became %s", got, want)
	}
}

func TestExplainServices(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2")
	b.udpServersAt("192.0.2.30:53", "s1", "s2")
	b.udpServers(5140, "s1")
	service := func(name string, p flow.Protocol, mode config.Mode, scheduler config.Scheduler, at string, port string, backends ...config.Backend) config.Service {
		return config.Service{Name: name, Protocol: p, Mode: mode, Scheduler: scheduler, Listen: []config.Listen{listen(at, port)}, Backends: backends}
	}
	s1, s2 := backend("a", "10.0.2.2", 8080), backend("b", "10.0.2.3", 8080)
	full := service("full", flow.TCP, config.ModeFullNAT, config.SchedulerMaglev, "192.0.2.20", "80", s1)
	full.SourcePool = []config.AddressRange{pool("10.0.2.100", "10.0.2.100")}
	closed := service("closed", flow.TCP, config.ModeDNAT, config.SchedulerRR, "192.0.2.70", "80", s1)
	closed.Deny = []string{"banned"}
	limited := service("limited", flow.TCP, config.ModeDNAT, config.SchedulerMaglev, "192.0.2.80", "80", s1)
	limited.Limits.Connections = 100
	drained := service("drained", flow.TCP, config.ModeDNAT, config.SchedulerRR, "192.0.2.60", "80", s1)
	six := service("web6", flow.TCP, config.ModeDNAT, config.SchedulerMaglev, "2001:db8::10", "80", backend("a", "fd00:2::2", 8080))
	c := &config.Config{
		Services: []config.Service{
			service("web", flow.TCP, config.ModeDNAT, config.SchedulerSourceHash, "192.0.2.10", "80", s1, s2),
			service("turns", flow.TCP, config.ModeDNAT, config.SchedulerRR, "192.0.2.11", "80", s1, s2),
			full, closed, limited, drained, six,
			service("direct", flow.UDP, config.ModeDSR, config.SchedulerMaglev, "192.0.2.30", "53", backend("a", "10.0.2.2", 0), backend("b", "10.0.2.3", 0)),
			service("syslog", flow.UDP, config.ModeStateless, config.SchedulerMaglev, "192.0.2.50", "514", backend("a", "10.0.2.2", 5140)),
		},
		Firewall: config.Firewall{
			Sets: map[string][]netip.Prefix{"banned": {prefix("10.64.9.0/24")}},
			Rules: []config.FirewallRule{
				{Name: "no-nine", Action: config.ActionDrop, Destination: config.Match{Prefix: prefix("10.0.2.9/32")}},
				{Name: "banned", Action: config.ActionDrop, Source: config.Match{Set: "banned"}, Destination: config.Match{Prefix: prefix("192.0.2.10/32")}},
			},
		},
	}
	s := b.snapshot(c)
	s.Services[5].State[0] = datapath.Drain
	b.applySnapshot(s)
	_ = b.explain(flow.TCP, "wan0", "10.0.1.2:1", "192.0.2.10:80") // opens a descriptor that stays open
	before, files := namespaces(t), descriptors(t)
	tcp, udp := flow.TCP, flow.UDP
	for _, c := range []explained{
		{name: "dnat", protocol: tcp, node: "client", from: "10.64.0.7:4000", to: "192.0.2.10:80", owner: "web", backend: "*", after: "*", verdict: "forward new-flow", out: "lan0", hop: "*", rule: "vmap @services"},
		{name: "dnat in turns", protocol: tcp, node: "client", from: "10.64.0.7:4001", to: "192.0.2.11:80", owner: "turns", backend: "*", after: "*", verdict: "forward new-flow", hop: "*", note: "may get another backend"},
		{name: "dnat, IPv6", protocol: tcp, node: "client", in: "wan0", from: "[fd00:1::2]:4000", to: "[2001:db8::10]:80", owner: "web6", backend: "a", after: "[fd00:1::2]:4000 -> [fd00:2::2]:8080", verdict: "forward new-flow", out: "lan0", hop: "fd00:2::2"},
		{name: "fullnat", protocol: tcp, node: "client", from: "10.0.1.2:4002", to: "192.0.2.20:80", owner: "full", backend: "a", after: "10.0.2.100:4002 -> 10.0.2.2:8080", verdict: "forward new-flow", out: "lan0", hop: "10.0.2.2", rule: "snat", note: "another source port"},
		{name: "limited", protocol: tcp, node: "client", from: "10.0.1.2:4003", to: "192.0.2.80:80", owner: "limited", backend: "a", after: "10.0.1.2:4003 -> 10.0.2.2:8080", verdict: "forward new-flow", out: "lan0", hop: "10.0.2.2"},
		{name: "dsr", protocol: udp, node: "client", from: "10.64.0.7:4004", to: "192.0.2.30:53", owner: "direct", backend: "*", verdict: "forward stateless", out: "lan0", hop: "*", rule: "fwd"},
		{name: "stateless", protocol: udp, node: "client", from: "10.64.0.7:4005", to: "192.0.2.50:514", owner: "syslog", backend: "a", after: "10.64.0.7:4005 -> 10.0.2.2:5140", verdict: "forward stateless", out: "lan0", hop: "10.0.2.2"},
		{name: "deny list", protocol: tcp, node: "client", from: "10.64.9.7:4006", to: "192.0.2.70:80", owner: "closed", verdict: "drop denied", rule: "@"},
		{name: "firewall at ingress", protocol: tcp, node: "client", from: "10.64.9.7:4007", to: "192.0.2.10:80", verdict: "drop denied", rule: "drop"},
		{name: "firewall", protocol: tcp, node: "client", from: "10.64.0.7:4008", to: "10.0.2.9:8080", verdict: "drop denied", rule: "ip daddr 10.0.2.9"},
		{name: "no backend", protocol: tcp, node: "client", from: "10.64.0.7:4009", to: "192.0.2.60:80", owner: "drained", verdict: "drop no-backend", rule: "reject with tcp reset"},
		{name: "no match", protocol: tcp, node: "client", from: "10.64.0.7:4010", to: "10.0.2.3:8080", verdict: "forward not-ours", out: "lan0", hop: "10.0.2.3"},
		{name: "this host", protocol: tcp, node: "client", from: "10.64.0.7:4011", to: "10.0.1.1:22", verdict: "pass not-routed"},
		{name: "no route", protocol: tcp, node: "client", from: "10.64.0.7:4012", to: "203.0.113.9:80", verdict: "drop no-route"},
	} {
		t.Run(c.name, func(t *testing.T) { b.check(t, c) })
	}
	t.Run("reverse path", func(t *testing.T) {
		if err := b.gateway.Sysctl("net.ipv4.conf.all.rp_filter", "1"); err != nil {
			t.Fatal(err)
		}
		e := b.explain(tcp, "lan0", "10.64.0.7:4013", "192.0.2.11:80")
		if e.Owner != "turns" || e.Action+" "+e.Reason != "drop rp-filter" {
			t.Errorf("from the wrong side: %q, %s %s\n%s", e.Owner, e.Action, e.Reason, strings.Join(e.Steps, "\n"))
		}
	})
	t.Run("existing", func(t *testing.T) { b.existing(t, c) })
	if _, err := b.d.Explain(t.Context(), datapath.Question{Interface: "nosuch", Tuple: flow.Tuple{Protocol: tcp,
		Source: netip.MustParseAddrPort("10.64.0.7:1"), Dest: netip.MustParseAddrPort("192.0.2.10:80")}}); err == nil || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("an interface that is not there: %v", err)
	}
	if after := namespaces(t); after > before {
		t.Errorf("threads are in %d network namespaces, before the replays in %d", after, before)
	}
	if after := descriptors(t); after > files { // a namespace lives as long as one of its descriptors
		t.Errorf("%d descriptors are open, before the replays %d", after, files)
	}
}

// descriptors counts open descriptors, except connections.
func descriptors(t *testing.T) (n int) {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range fds {
		if at, err := os.Readlink(p); err == nil && (strings.HasPrefix(at, "net:") || strings.HasPrefix(at, "/proc/")) {
			n++
		}
	}
	return n
}

// existing explains both directions of an existing connection, and again after a firewall rule stops it.
func (b *bench) existing(t *testing.T, cfg *config.Config) {
	c, err := b.dial("tcp", "client", "10.0.1.2:4020", "192.0.2.20:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f := b.entry(flow.TCP, "10.0.1.2:4020", "192.0.2.20:80").Flow()
	for _, c := range []struct{ in, from, to, after, out string }{
		{"wan0", "10.0.1.2:4020", "192.0.2.20:80", f.Reply.Dest.String() + " -> " + f.Reply.Source.String(), "lan0"},
		{"lan0", f.Reply.Source.String(), f.Reply.Dest.String(), "192.0.2.20:80 -> 10.0.1.2:4020", "wan0"},
	} {
		e := b.explain(flow.TCP, c.in, c.from, c.to)
		if got := e.After.Source.String() + " -> " + e.After.Dest.String(); got != c.after || e.Out != c.out {
			t.Errorf("%s -> %s becomes %s by %s, want %s by %s", c.from, c.to, got, e.Out, c.after, c.out)
		}
		if !e.Existing || e.Owner != "full" || e.Backend != "a" || e.Action+" "+e.Reason != "forward flow" {
			t.Errorf("existing %v, owner %q, backend %q, %s %s\n%s", e.Existing, e.Owner, e.Backend, e.Action, e.Reason, strings.Join(e.Steps, "\n"))
		}
	}
	stopped := *cfg
	stopped.Firewall.Rules = append(slices.Clone(cfg.Firewall.Rules), config.FirewallRule{Name: "late", Action: config.ActionDrop, Source: config.Match{Prefix: prefix("10.0.1.2/32")}})
	b.apply(&stopped)
	e := b.explain(flow.TCP, "wan0", "10.0.1.2:4020", "192.0.2.20:80")
	if !e.Existing || e.Action+" "+e.Reason != "drop denied" || e.Rules[len(e.Rules)-1].Owner != "late" {
		t.Errorf("with a rule against it: existing %v, %s %s, rules %+v", e.Existing, e.Action, e.Reason, e.Rules)
	}
}

// namespaces counts the network namespaces in which this process has a thread.
func namespaces(t *testing.T) int {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, p := range tasks {
		if at, err := os.Readlink(p); err == nil {
			seen[at] = true
		}
	}
	return len(seen)
}

func TestExplainNAT(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "outside", "web", "pc")
	inside := []prefixT{prefix("10.1.10.0/24")}
	l := listen("211.155.226.121", "8080")
	for _, c := range []struct {
		rule config.NATRule
		explained
	}{
		{config.NATRule{Type: config.NATMasquerade, Source: inside, Out: "wan0"},
			explained{node: "pc", from: "10.1.10.20:4000", to: "203.0.113.1:80", after: "211.155.226.121:4000 -> 203.0.113.1:80", verdict: "forward new-flow", out: "wan0", hop: "211.155.226.1", rule: "masquerade"}},
		{config.NATRule{Type: config.NATSNAT, Source: inside, Out: "wan0", To: snatTo("211.155.226.121"), Ports: config.PortSet{{First: 50000, Last: 50010}}},
			explained{node: "pc", from: "10.1.10.20:4001", to: "203.0.113.1:80", after: "211.155.226.121:0 -> 203.0.113.1:80", verdict: "forward new-flow", out: "wan0", hop: "211.155.226.1", rule: "snat", note: "the source port is chosen"}},
		{config.NATRule{Type: config.NATPortForward, Listen: &l, Protocol: flow.TCP, To: config.Target{Address: addr("10.1.10.2"), Port: 80}},
			explained{node: "outside", from: "203.0.113.1:4002", to: "211.155.226.121:8080", after: "203.0.113.1:4002 -> 10.1.10.2:80", verdict: "forward new-flow", out: "lan0", hop: "10.1.10.2", rule: "dnat"}},
		{config.NATRule{Type: config.NATStatic, External: prefix("211.155.226.121/32"), Internal: prefix("10.1.10.20/32")},
			explained{node: "outside", from: "203.0.113.1:4003", to: "211.155.226.121:80", after: "203.0.113.1:4003 -> 10.1.10.20:80", verdict: "forward static", out: "lan0", hop: "10.1.10.20"}},
	} {
		t.Run(string(c.rule.Type), func(t *testing.T) {
			c.rule.Name, c.owner, c.protocol = "office", "office", flow.TCP
			b.apply(&config.Config{NAT: []config.NATRule{c.rule}})
			b.check(t, c.explained)
		})
	}
	b.apply(&config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: inside, Out: "wan0"}}})
	e := b.explain(flow.ICMP, "", "10.1.10.20:77", "203.0.113.1:0")
	if e.Interface != "lan0" || e.After.Source.Addr() != addr("211.155.226.121") || e.Owner != "office" || e.Action+" "+e.Reason != "forward new-flow" {
		t.Errorf("a ping on %s becomes %s of %q: %s %s", e.Interface, e.After, e.Owner, e.Action, e.Reason)
	}
	if err := b.ping("pc", "203.0.113.1"); err != nil {
		t.Error(err)
	}
	for _, p := range []flow.Protocol{flow.ESP, flow.GRE, flow.IPv6, 253} {
		e := b.explain(p, "lan0", "10.1.10.20:0", "203.0.113.1:0")
		if e.After.Source.Addr() != addr("211.155.226.121") || e.Owner != "office" || e.Action+" "+e.Reason != "forward new-flow" {
			t.Errorf("%s becomes %s of %q: %s %s", p, e.After, e.Owner, e.Action, e.Reason)
		}
	}
}

// TestExplainRoutes: explain works with routes that the host has but nobody could add now.
func TestExplainRoutes(t *testing.T) {
	b := newBench(t, lab.Office())
	err := b.gateway.Do(func() error {
		spare := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "spare0", MTU: 1500}, PeerName: "spare1"}
		if err := netlink.LinkAdd(spare); err != nil {
			return err
		}
		lan, err := netlink.LinkByName("lan0")
		if err != nil {
			return err
		}
		wan, err := netlink.LinkByName("wan0")
		if err != nil {
			return err
		}
		on := func(l netlink.Link, to string) error {
			a, err := netlink.ParseAddr(to)
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetUp(l), netlink.AddrAdd(l, a))
		}
		gone, err := netlink.ParseAddr("192.0.2.1/24")
		if err != nil {
			return err
		}
		if err := errors.Join(on(spare, "198.51.100.1/24"), on(lan, gone.String())); err != nil {
			return err
		}
		return errors.Join(
			netlink.RouteAdd(&netlink.Route{Dst: subnet("198.18.0.0/15"), MultiPath: []*netlink.NexthopInfo{
				{LinkIndex: wan.Attrs().Index, Gw: net.IPv4(211, 155, 226, 1)}, {LinkIndex: spare.Index, Gw: net.IPv4(198, 51, 100, 2)}}}),
			netlink.RouteAdd(&netlink.Route{Dst: subnet("100.64.0.0/10"), LinkIndex: lan.Attrs().Index, Gw: net.IPv4(192, 0, 2, 2)}),
			netlink.LinkSetDown(spare), netlink.AddrDel(lan, gone))
	})
	if err != nil {
		t.Fatal(err)
	}
	b.apply(&config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0"}}})
	e := b.explain(flow.TCP, "lan0", "10.1.10.20:4000", "198.18.0.1:80")
	if e.Out != "wan0" || e.NextHop != addr("211.155.226.1") || e.Action+" "+e.Reason != "forward new-flow" {
		t.Errorf("with one of two hops dead: by %s to %s, %s %s", e.Out, e.NextHop, e.Action, e.Reason)
	}
	if !slices.ContainsFunc(e.Notes, func(n string) bool {
		return strings.HasPrefix(n, "left out: 1 of ") && strings.Contains(n, "100.64.0.0/10")
	}) {
		t.Errorf("the notes are silent about the route that was not copied: %q", e.Notes)
	}
}

// TestExplainForwardingOff: if the kernel does not forward, the explanation names the remedy.
func TestExplainForwardingOff(t *testing.T) {
	b := newBench(t, lab.Office())
	b.apply(&config.Config{NAT: []config.NATRule{{Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0"}}})
	for _, off := range []string{"net.ipv4.conf.lan0.forwarding", "net.ipv4.ip_forward"} {
		err := b.gateway.Do(func() error {
			return os.WriteFile("/proc/sys/"+strings.ReplaceAll(off, ".", "/"), []byte("0"), 0o644)
		})
		if err != nil {
			t.Fatal(err)
		}
		e := b.explain(flow.TCP, "lan0", "10.1.10.20:4000", "211.155.226.1:80")
		want := off + " is 0: the kernel forwards no IPv4 packets that arrive on lan0; write 1 with \"sysctl -w " + off + "=1\""
		if e.Action+" "+e.Reason != "drop forwarding-off" || !slices.Contains(e.Steps, want) {
			t.Errorf("%s %s, %q, want %s", e.Action, e.Reason, e.Steps, want)
		}
	}
}

func subnet(s string) *net.IPNet {
	p := netip.MustParsePrefix(s)
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// TestCancelled: a cancelled request, or a reader that stops early, does not affect the next request.
func TestCancelled(t *testing.T) {
	b := newBench(t, lab.Topology{Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	const n = 400 // needs more than one datagram of a dump
	entries := make([]conntrack.Entry, n)
	for i := range entries {
		from, to := conntrack.AddrOf(addr("10.0.0.1")), conntrack.AddrOf(addr("198.51.100.1"))
		entries[i] = conntrack.Entry{Family: unix.AF_INET, Protocol: flow.UDP, Timeout: 600,
			Original: conntrack.Tuple{Source: from, Dest: to, SourcePort: uint16(2000 + i), DestPort: 53},
			Reply:    conntrack.Tuple{Source: to, Dest: from, SourcePort: 53, DestPort: uint16(2000 + i)}}
	}
	c, err := b.d.tracking.Sibling()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Insert(t.Context(), entries); err != nil {
		t.Fatal(err)
	}
	given, cancel := context.WithCancel(t.Context())
	cancel()
	q := entries[0].Flow().Original
	for name, disturb := range map[string]func() error{
		"get":  func() error { _, err := b.d.entry(given, q); return err },
		"dump": func() error { return b.d.Flows(given, func(flow.Flow) bool { return true }) },
		"enough": func() error {
			return errors.Join(b.d.Flows(t.Context(), func(flow.Flow) bool { return false }), context.Canceled)
		},
	} {
		if err := disturb(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if e, err := b.d.entry(t.Context(), q); err != nil || e == nil {
			t.Errorf("after a cancelled %s the entry is %v: %v", name, e, err)
		}
		seen := 0
		if err := b.d.Flows(t.Context(), func(flow.Flow) bool { seen++; return true }); err != nil || seen != n {
			t.Errorf("after a cancelled %s there are %d flows of %d: %v", name, seen, n, err)
		}
	}
}

// TestExplainIdle: a datapath without objects explains nothing.
func TestExplainIdle(t *testing.T) {
	b := newBench(t, lab.Topology{Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	q := datapath.Question{Tuple: flow.Tuple{Protocol: flow.TCP, Source: netip.MustParseAddrPort("192.0.2.1:1"), Dest: netip.MustParseAddrPort("192.0.2.2:2")}}
	if _, err := b.d.Explain(t.Context(), q); !errors.Is(err, datapath.ErrIdle) {
		t.Errorf("before anything was applied: %v", err)
	}
}
