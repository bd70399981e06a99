// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// uplinkOffice is the network with two providers, and a daemon on its gateway.
type uplinkOffice struct {
	*lab.Lab
	t *testing.T
	d *daemon.Daemon
}

const (
	fiber4, radio4   = "198.51.100.2", "192.0.2.2"
	server4, server6 = "203.0.113.10", "2001:db8:f::10"
)

// watchSources counts the packets of the office with the address of the other provider, or with none of a provider.
// A DHCP client without an address sends from 0.0.0.0.
const watchSources = `
table inet watch {
	chain arriving {
		type filter hook prerouting priority -400
		iifname office meta nfproto ipv4 ip saddr != { %s, 0.0.0.0 } counter name foreign
		iifname office meta nfproto ipv6 ip6 saddr != { %s, fe80::/10 } counter name foreign
		iifname office counter name seen
	}
	counter foreign {}
	counter seen {}
}
`

func newUplinkOffice(t *testing.T, config string) *uplinkOffice {
	t.Helper()
	return uplinkOfficeOf(t, labtest.New(t, lab.TwoUplinks()), config)
}

func uplinkOfficeOf(t *testing.T, l *lab.Lab, config string) *uplinkOffice {
	t.Helper()
	o := &uplinkOffice{l, t, nil}
	nft(t, o.Node("fiber"), fmt.Sprintf(watchSources, "198.51.100.0/24", "2001:db8:a::/64"), "-f", "-")
	nft(t, o.Node("radio"), fmt.Sprintf(watchSources, "192.0.2.0/24", "2001:db8:b::/64"), "-f", "-")
	for _, at := range []string{server4 + ":7", "[" + server6 + "]:7"} {
		s, err := host.ServeLines(o.Node("internet"), "internet", at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Stop() })
	}
	servers := []string{"internet internet " + server4 + ":5060"}
	for n := range 12 {
		servers = append(servers, fmt.Sprintf("internet internet 203.0.113.%d:5060", 20+n))
	}
	serveDatagrams(t, o.Lab, servers...)
	o.d = start(t, o.Node("gateway"), config)
	return o
}

// dial opens a TCP connection from the pc.
func (o *uplinkOffice) dial(from, to string) *host.Line {
	o.t.Helper()
	var line *host.Line
	labtest.Eventually(o.t, patience, "a connection to "+to, func() (err error) {
		ctx, cancel := context.WithTimeout(o.t.Context(), 2*time.Second)
		defer cancel()
		line, err = host.DialLine(ctx, o.Node("pc"), netip.MustParseAddrPort(from), netip.MustParseAddrPort(to))
		return err
	})
	o.t.Cleanup(func() { _ = line.Close() })
	return line
}

// asks requires an answer on a connection, and the address of the client at the server.
func (o *uplinkOffice) asks(line *host.Line, source, when string) {
	o.t.Helper()
	a, err := line.Ask(patience)
	if err != nil {
		o.t.Fatalf("a connection %s: %v", when, err)
	}
	if at := netip.MustParseAddrPort(a.Client).Addr().String(); at != source {
		o.t.Fatalf("a connection %s: the server sees %s, want %s", when, at, source)
	}
}

// datagrams sends from one port without a pause, until the server sees the source.
func (o *uplinkOffice) datagrams(source, when string) {
	o.t.Helper()
	o.datagramsTo(server4+":5060", source, when)
}

func (o *uplinkOffice) datagramsTo(server, source, when string) {
	o.t.Helper()
	o.datagramsFrom("10.1.10.20:5060", server, source, when)
}

func (o *uplinkOffice) datagramsFrom(client, server, source, when string) {
	o.t.Helper()
	labtest.Eventually(o.t, patience, when+": datagrams from "+source, func() error {
		ctx, cancel := context.WithTimeout(o.t.Context(), 300*time.Millisecond)
		defer cancel()
		a, err := host.AskDatagram(ctx, o.Node("pc"), netip.MustParseAddrPort(client), netip.MustParseAddrPort(server))
		if err == nil && !strings.HasPrefix(a.Client, source+":") {
			err = fmt.Errorf("the server sees %s", a.Client)
		}
		return err
	})
}

// newFlow opens flows from different ports until one has the source. Earlier ones may stay on another uplink.
func (o *uplinkOffice) newFlow(server, source, when string) {
	o.t.Helper()
	o.datagramsFrom("10.1.10.20:0", server, source, when)
}

// switched opens new flows until one of them has the source, and returns the time that this took.
func (o *uplinkOffice) switched(source string) time.Duration {
	o.t.Helper()
	start := time.Now()
	for time.Since(start) < patience {
		ctx, cancel := context.WithTimeout(o.t.Context(), 20*time.Millisecond)
		a, err := host.AskDatagram(ctx, o.Node("pc"), netip.MustParseAddrPort("10.1.10.20:0"), netip.MustParseAddrPort(server4+":5060"))
		cancel()
		if err == nil && strings.HasPrefix(a.Client, source+":") {
			return time.Since(start)
		}
	}
	o.t.Fatalf("no new flow from %s", source)
	return 0
}

// becomes waits for the states of the uplinks, such as "down carrying", and for the rules of a single carrying one.
func (o *uplinkOffice) becomes(states string) {
	o.t.Helper()
	labtest.Eventually(o.t, patience, "uplinks "+states, func() error {
		var got, carrying []string
		for i, line := range strings.Split(output(o.t, o.d, "show uplinks"), "\n") {
			if f := strings.Fields(line); i > 0 && len(f) > 6 && !strings.HasSuffix(f[0], ":") {
				got = append(got, f[2])
				if f[2] == "carrying" {
					carrying = append(carrying, f[0])
				}
			}
		}
		if strings.Join(got, " ") != states {
			return fmt.Errorf("%s", output(o.t, o.d, "show uplinks"))
		}
		if len(carrying) != 1 {
			return nil
		}
		rules := strings.TrimRight(nft(o.t, o.Node("gateway"), "", "list", "chain", "ip", "sluice", "uplink-choice"), "} \t\n")
		if !strings.HasSuffix(strings.ReplaceAll(rules, "\"", ""), "goto uplink/"+carrying[0]+" comment only this uplink carries new connections") { // the last rule is for new connections
			return fmt.Errorf("%s", rules)
		}
		return nil
	})
}

// noForeign requires that no packet has left with the address of another uplink, and that each provider saw packets.
func (o *uplinkOffice) noForeign() {
	o.t.Helper()
	for _, provider := range []string{"fiber", "radio"} {
		if got := nft(o.t, o.Node(provider), "", "list", "counter", "inet", "watch", "foreign"); !strings.Contains(got, "packets 0 ") {
			o.t.Errorf("packets with a foreign source at %s:\n%s", provider, got)
		}
		if got := nft(o.t, o.Node(provider), "", "list", "counter", "inet", "watch", "seen"); strings.Contains(got, "packets 0 ") {
			o.t.Errorf("no packet at %s", provider)
		}
	}
}

// cut drops all packets of the office at a provider, or some of them, and returns the repair.
func (o *uplinkOffice) cut(provider, when string) (repair func()) {
	o.t.Helper()
	nft(o.t, o.Node(provider), "table inet cut { chain arriving { type filter hook prerouting priority -350; iifname office meta l4proto { tcp, udp, icmp } "+when+" drop; }; }", "-f", "-")
	return func() { nft(o.t, o.Node(provider), "", "delete", "table", "inet", "cut") }
}

// explains requires an uplink and its reason in the explanation of a packet of the pc.
func (o *uplinkOffice) explains(uplink, from string) {
	o.t.Helper()
	if got := output(o.t, o.d, "explain tcp "+from+" "+server4+":7"); !strings.Contains(got, "uplink     "+uplink+"\n") {
		o.t.Errorf("no uplink %q in\n%s", uplink, got)
	}
}

const probes = "probe: {type: icmp, targets: [203.0.113.10, 203.0.113.20], interval: 200ms, fall: 2, rise: 2}"

const twoUplinks = `
uplinks:
  - {name: fiber, interface: wan0, ` + probes + `}
  - {name: radio, interface: wan1, gateway: 192.0.2.1, priority: 2, ` + probes + `}
nat:
  - {name: office, type: masquerade, source: [10.1.10.0/24]}
`

// TestUplinks cuts the first uplink at its provider, so that only probes detect it, and repairs it. New connections
// move, connections on the other uplink continue during the cut and after the repair, and no packet leaves an uplink
// with the address of the other one.
func TestUplinks(t *testing.T) {
	o := newUplinkOffice(t, twoUplinks)
	o.becomes("carrying standby")
	before := o.dial("10.1.10.20:7001", server4+":7")
	o.asks(before, fiber4, "before the cut")
	o.datagrams(fiber4, "before the cut")
	o.explains("fiber: only this uplink carries new connections", "10.1.10.20:40000")
	o.explains("fiber: its connection has an address of this uplink", "10.1.10.20:7001")

	repair := o.cut("fiber", "")
	t.Logf("the first new flow used the other uplink %v after the cut", o.switched(radio4).Round(time.Millisecond))
	o.becomes("down carrying")
	if all, list := output(t, o.d, "show"), output(t, o.d, "show uplinks"); !strings.HasSuffix(all, list) {
		t.Errorf("the overview does not end with the list of uplinks:\n%s\n%s", all, list)
	}
	o.datagrams(radio4, "after the cut")
	if _, err := before.Ask(patience); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("the connection of the uplink that was cut: %v, want a reset", err)
	}
	_ = before.Close()
	moved := o.dial("10.1.10.20:7001", server4+":7") // the same port
	o.asks(moved, radio4, "after the cut")

	repair()
	o.becomes("carrying standby")
	o.asks(moved, radio4, "on the other uplink after the repair")
	o.explains("radio: its connection has an address of this uplink", "10.1.10.20:7001")
	after := o.dial("10.1.10.20:7002", server4+":7")
	o.asks(after, fiber4, "after the repair")
	o.asks(moved, radio4, "on the other uplink, beside new ones")

	repair = o.cut("fiber", "numgen random mod 100 < 40")
	for range 10 {
		o.asks(moved, radio4, "on the other uplink, during losses of the first")
		time.Sleep(200 * time.Millisecond) // some rounds of probes
	}
	repair()
	o.becomes("carrying standby")
	o.asks(o.dial("10.1.10.20:7003", server4+":7"), fiber4, "after the losses")

	ip(t, o.Node("fiber"), "link set office down") // the gateway loses the carrier
	o.becomes("down carrying")
	o.asks(moved, radio4, "on the other uplink, without the first interface")
	o.asks(o.dial("10.1.10.20:7004", server4+":7"), radio4, "without the first interface")
	o.noForeign()
	for _, want := range []string{"uplink fiber is down: ", "uplink radio is carrying", "uplink fiber is carrying", "uplink radio is standby"} {
		if got := output(t, o.d, "events --kind uplink"); !strings.Contains(got, want) {
			t.Errorf("no event %q in\n%s", want, got)
		}
	}
}

const sharedUplinks = `
uplinks:
  - {name: fiber, interface: wan0}
  - {name: radio, interface: wan1}
nat:
  - {name: office, type: masquerade, source: [10.1.10.0/24, "fd00:10::/64"], out: [wan0, wan1]}
  - {name: line, type: port-forward, listen: {interface: wan1, ports: [7]}, protocol: tcp, to: {address: 10.1.10.20, port: 7}}
`

// TestUplinksShareAndFollow uses two uplinks of one class, whose addresses and routes change as by DHCP.
func TestUplinksShareAndFollow(t *testing.T) {
	l := labtest.New(t, lab.TwoUplinks())
	gateway := l.Node("gateway")
	ip(t, gateway, "route add default via 192.0.2.1 dev wan1 metric 200")
	ip(t, gateway, "-6 route add default via 2001:db8:b::1 dev wan1 metric 2048")
	o := uplinkOfficeOf(t, l, sharedUplinks)
	o.becomes("carrying carrying")

	sources := map[string]string{} // by server
	for range 2 {
		for n := range 12 {
			server := fmt.Sprintf("203.0.113.%d:5060", 20+n)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			a, err := host.AskDatagram(ctx, o.Node("pc"), netip.MustParseAddrPort("10.1.10.20:0"), netip.MustParseAddrPort(server))
			cancel()
			if err != nil {
				t.Fatalf("%s: %v", server, err)
			}
			source := netip.MustParseAddrPort(a.Client).Addr().String()
			if was := sources[server]; was != "" && was != source {
				t.Errorf("%s sees %s, and before %s", server, source, was)
			}
			sources[server] = source
		}
	}
	for server, source := range sources {
		got := output(t, o.d, "explain udp 10.1.10.20:40000 "+server)
		if name := map[string]string{fiber4: "fiber", radio4: "radio"}[source]; !strings.Contains(got, "uplink     "+name+": source and destination share new connections by weight\n") {
			t.Errorf("packets to %s have %s, explained:\n%s", server, source, got)
		}
	}
	if got := output(t, o.d, "show uplinks"); strings.Count(got, "carrying   50%   50%") != 2 {
		t.Errorf("shares:\n%s", got)
	}
	used := map[string]bool{}
	for _, source := range sources {
		used[source] = true
	}
	if len(used) != 2 || !used[fiber4] || !used[radio4] {
		t.Errorf("sources %v", sources)
	}

	lines, err := host.ServeLines(o.Node("pc"), "pc", "10.1.10.20:7")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lines.Stop() })
	inward, err := host.DialLine(t.Context(), o.Node("internet"), netip.MustParseAddrPort("203.0.113.200:9000"), netip.MustParseAddrPort(radio4+":7"))
	if err != nil {
		t.Fatalf("a published port of the second uplink: %v", err)
	}
	t.Cleanup(func() { _ = inward.Close() })
	o.asks(inward, "203.0.113.200", "from outside by the second uplink")
	inside := netip.MustParseAddrPort("[fd00:10::20]:7100").String()
	six := o.dial(inside, "["+server6+"]:7")
	a, err := six.Ask(patience)
	if source := netip.MustParseAddrPort(a.Client).Addr().String(); err != nil || source != "2001:db8:a::2" && source != "2001:db8:b::2" {
		t.Errorf("IPv6: %v, %v", a, err)
	}

	// The lease of the first uplink changes.
	ip(t, gateway, "addr add 198.51.100.77/24 dev wan0")
	ip(t, gateway, "addr del 198.51.100.2/24 dev wan0") // the kernel promotes no address and removes the routes
	ip(t, gateway, "addr replace 198.51.100.77/24 dev wan0")
	ip(t, gateway, "route replace default via 198.51.100.1 dev wan0")
	for server, source := range sources {
		if source == fiber4 {
			o.newFlow(server, "198.51.100.77", "after a new lease")
		}
	}
	o.asks(inward, "203.0.113.200", "from outside after the lease of the other uplink")

	kept := ownRules(t, gateway)
	if err := o.d.Kill(); err != nil {
		t.Fatal(err)
	}
	if got := ownRules(t, gateway); got != kept {
		t.Errorf("after kill -9:\n%s\nbefore:\n%s", got, kept)
	}
	o.asks(inward, "203.0.113.200", "from outside without a daemon")
	if err := o.d.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := ownRules(t, gateway); got != kept {
		t.Errorf("after the restart:\n%s\nbefore:\n%s", got, kept)
	}
	o.asks(inward, "203.0.113.200", "from outside after the restart")
	o.noForeign()
	output(t, o.d, "stop")
	if got := ownRules(t, gateway); strings.TrimSpace(got) != "" {
		t.Errorf("after stop:\n%s", got)
	}
}

// ownRules returns the rules and routes of Sluice.
func ownRules(t *testing.T, n *lab.Node) (text string) {
	t.Helper()
	for _, args := range []string{"rule", "-6 rule", "route show table all proto 77", "-6 route show table all proto 77"} {
		out, err := n.Command(t.Context(), "ip", strings.Fields(args)...).CombinedOutput()
		if err != nil {
			t.Fatalf("ip %s: %v: %s", args, err, out)
		}
		for line := range strings.Lines(string(out)) {
			if !strings.HasSuffix(args, "rule") || strings.HasPrefix(line, "325") {
				text += line
			}
		}
	}
	return text
}
