// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

const explainYAML = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: "fd00:2::2", port: 8080}]}
  - {name: full, listen: [{address: 192.0.2.20, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.3, port: 8080}]}
  - {name: cross, listen: [{address: "2001:db8::20", ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.101], backends: [{name: a, address: 10.0.2.3, port: 8080}]}
  - {name: direct, listen: [{address: 192.0.2.30, ports: [53]}], protocol: udp, mode: dsr, scheduler: maglev, backends: [{name: a, address: 10.0.2.4}]}
  - {name: tunnel, listen: [{address: 192.0.2.40, ports: [53]}], protocol: udp, mode: tunnel, scheduler: maglev, backends: [{name: a, address: 10.0.2.5}]}
  - {name: syslog, listen: [{address: 192.0.2.50, ports: [514]}], protocol: udp, mode: stateless, scheduler: source-hash, backends: [{name: a, address: 10.0.2.6, port: 5140}]}
  - {name: drained, listen: [{address: 192.0.2.60, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.7, drain: true}]}
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}
  - {name: forward, type: port-forward, listen: {address: 203.0.113.1, ports: [8443]}, protocol: tcp, to: {address: 10.0.2.8, port: 443}}
  - {name: one, type: static, external: 203.0.113.64/26, internal: 10.1.7.64/26}
  - {name: six, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/65"], pool: [203.0.113.2]}
  - {name: many, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2:0:0:8000::/65"], pool: [203.0.113.4-203.0.113.5]}
firewall:
  sets: {banned: [192.0.2.200/32]}
  rules: [{action: drop, source: "@banned"}]
`

// explained is a datapath with all of explainYAML in force.
func explained(t *testing.T) *subject {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF)
	c, err := config.Decode("test.yaml", []byte(explainYAML))
	if err != nil {
		t.Fatal(err)
	}
	s := newSubject(t, "xdp")
	if err := s.Reset(c, golden.StandardHost()); err != nil {
		t.Fatal(err)
	}
	return s
}

// TestExplain explains packets of every mode, rule and refusal, and changes no state.
func TestExplain(t *testing.T) {
	s := explained(t)
	at := netip.MustParseAddrPort
	tcp, udp := flow.TCP, flow.UDP
	for _, c := range []struct {
		name           string
		protocol       flow.Protocol
		in, src, dst   string
		owner, backend string
		after          string // "SOURCE -> DESTINATION"; * is any port
		out, hop       string
		verdict        string
		size           int
	}{
		{"dnat", tcp, "wan0", "198.18.0.9:4000", "192.0.2.10:80", "web", "a", "198.18.0.9:4000 -> 10.0.2.2:8080", "lan0", "10.0.2.2", "forward new-flow", 0},
		{"dnat, no state for a SYN", tcp, "wan0", "[2001:db8:9::9]:4000", "[2001:db8::10]:80", "web6", "a", "[2001:db8:9::9]:4000 -> [fd00:2::2]:8080", "lan0", "fd00:2::2", "forward syn", 0},
		{"fullnat", tcp, "wan0", "198.18.0.9:4000", "192.0.2.20:80", "full", "a", "10.0.2.100:* -> 10.0.2.3:8080", "lan0", "10.0.2.3", "forward new-flow", 0},
		{"fullnat between families", tcp, "wan0", "[2001:db8:9::9]:4000", "[2001:db8::20]:80", "cross", "a", "10.0.2.101:* -> 10.0.2.3:8080", "lan0", "10.0.2.3", "forward new-flow", 0},
		{"dsr", udp, "wan0", "198.18.0.9:4000", "192.0.2.30:53", "direct", "a", "198.18.0.9:4000 -> 192.0.2.30:53", "lan0", "10.0.2.4", "forward stateless", 0},
		{"tunnel", udp, "wan0", "198.18.0.9:4000", "192.0.2.40:53", "tunnel", "a", "198.18.0.9:4000 -> 192.0.2.40:53", "lan0", "10.0.2.5", "forward stateless", 0},
		{"stateless", udp, "wan0", "198.18.0.9:4000", "192.0.2.50:514", "syslog", "a", "198.18.0.9:4000 -> 10.0.2.6:5140", "lan0", "10.0.2.6", "forward stateless", 0},
		{"snat", tcp, "lan0", "10.0.2.3:4000", "198.18.0.9:443", "office", "", "203.0.113.1:* -> 198.18.0.9:443", "wan0", "198.51.100.2", "forward new-flow", 0},
		{"port-forward", tcp, "wan0", "198.18.0.9:4000", "203.0.113.1:8443", "forward", "", "198.18.0.9:4000 -> 10.0.2.8:443", "lan0", "10.0.2.8", "forward new-flow", 0},
		{"static", tcp, "wan0", "198.18.0.9:4000", "203.0.113.70:22", "one", "", "198.18.0.9:4000 -> 10.1.7.70:22", "lan0", "10.0.2.9", "forward static", 0},
		{"nat64", tcp, "lan0", "[fd00:2::5]:4000", "[64:ff9b::c612:9]:443", "six", "", "203.0.113.2:* -> 198.18.0.9:443", "wan0", "198.51.100.2", "forward new-flow", 0},
		{"a pool of several", tcp, "lan0", "[fd00:2::8000:0:0:5]:4000", "[64:ff9b::c612:9]:443", "many", "", "0.0.0.0:0 -> 198.18.0.9:443", "wan0", "198.51.100.2", "forward new-flow", 0},
		{"a protocol without ports", flow.ESP, "lan0", "10.0.2.3:0", "198.18.0.9:0", "office", "", "203.0.113.1:0 -> 198.18.0.9:0", "wan0", "198.51.100.2", "forward new-flow", 0},
		{"one that cannot be translated", flow.UDPLite, "lan0", "10.0.2.3:4000", "198.18.0.9:443", "", "", "", "", "", "drop unsupported-protocol", 0},
		{"denied", tcp, "wan0", "192.0.2.200:4000", "192.0.2.10:80", "", "", "", "", "", "drop denied", 0},
		{"no backend", tcp, "wan0", "198.18.0.9:4000", "192.0.2.60:80", "drained", "", "", "", "", "drop no-backend", 0},
		{"no binding", tcp, "wan0", "198.18.0.9:4000", "203.0.113.1:9999", "", "", "", "", "", "drop no-binding", 0},
		{"not ours", tcp, "wan0", "198.18.0.9:4000", "192.0.2.99:80", "", "", "", "wan0", "198.51.100.2", "pass not-ours", 0},
		{"unserved port", tcp, "wan0", "198.18.0.9:4000", "192.0.2.60:81", "", "", "", "", "", "drop unserved", 0},
		{"larger than the MTU", udp, "wan0", "198.18.0.9:4000", "192.0.2.40:53", "tunnel", "a", "198.18.0.9:4000 -> 192.0.2.40:53", "lan0", "10.0.2.5", "drop to-fragment6", 1490},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, err := s.d.Explain(context.Background(), datapath.Question{Interface: c.in, Size: c.size,
				Tuple: flow.Tuple{Protocol: c.protocol, Source: at(c.src), Dest: at(c.dst)}})
			if err != nil {
				t.Fatal(err)
			}
			if e.Owner != c.owner || e.Backend != c.backend || e.Action+" "+e.Reason != c.verdict {
				t.Errorf("owner %q, backend %q, verdict %s %s; want %q, %q, %s", e.Owner, e.Backend, e.Action, e.Reason, c.owner, c.backend, c.verdict)
			}
			hop := ""
			if e.NextHop.IsValid() {
				hop = e.NextHop.String()
			}
			if e.Out != c.out || hop != c.hop {
				t.Errorf("leaves by %q to %q, want %q to %q", e.Out, hop, c.out, c.hop)
			}
			after := c.after
			if after == "" {
				after = c.src + " -> " + c.dst
			}
			before, rest, any := strings.Cut(c.protocol.String()+" "+after, "*")
			if got := e.After.String(); got != before && (!any || !strings.HasPrefix(got, before) || !strings.HasSuffix(got, rest)) {
				t.Errorf("becomes %s, want %s", got, after)
			}
			if notes := strings.Join(e.Notes, "\n"); (e.After.Source.Port() == 0 && c.protocol != flow.ESP) != (notes != "") || c.owner == "many" && !strings.Contains(notes, "an address of 203.0.113.4/31") {
				t.Errorf("notes %q", e.Notes)
			}
			if last := e.Steps[len(e.Steps)-1]; last != e.Action+": "+e.Reason {
				t.Errorf("the last step is %q", last)
			}
		})
	}
	if flows, _ := s.Flows(); len(flows) != 0 {
		t.Errorf("explaining made %d flows", len(flows))
	}
	counters, err := s.Counters()
	if err != nil {
		t.Fatal(err)
	}
	if len(counters.Reasons) > 0 {
		t.Errorf("explaining was counted: %+v", counters.Reasons)
	}
	for _, one := range counters.Tables {
		if one.Name == "ports" && one.Used > 0 {
			t.Errorf("explaining took %d ports", one.Used)
		}
	}
}

// TestExplainForwardingOff: if the kernel does not forward, the explanation names the remedy, but only if
// forwarding is the cause.
func TestExplainForwardingOff(t *testing.T) {
	s := explained(t)
	err := s.d.inNamespace(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0o644) })
	if err != nil {
		t.Fatal(err)
	}
	const off = "net.ipv4.ip_forward is 0: the kernel forwards no IPv4 packets that arrive on %s; write 1 with \"sysctl -w net.ipv4.ip_forward=1\""
	for _, c := range []struct{ name, in, from, to, verdict, says string }{
		{"source NAT", "lan0", "10.0.2.3:4000", "198.18.0.9:443", "pass not-ours", "office would translate it, but " + fmt.Sprintf(off, "lan0")},
		{"service", "wan0", "198.18.0.9:4000", "192.0.2.10:80", "pass forwarding-off", fmt.Sprintf(off, "wan0")},
		{"another source", "lan0", "10.77.2.3:4000", "198.18.0.9:443", "pass not-ours", ""},
		{"to the host", "lan0", "10.0.2.3:4000", "10.0.2.1:443", "pass not-ours", ""},
		{"IPv6", "wan0", "[2001:db8:9::9]:4000", "[2001:db8::10]:80", "forward syn", ""},
	} {
		e, err := s.d.Explain(context.Background(), datapath.Question{Interface: c.in,
			Tuple: flow.Tuple{Protocol: flow.TCP, Source: netip.MustParseAddrPort(c.from), Dest: netip.MustParseAddrPort(c.to)}})
		if err != nil {
			t.Fatal(err)
		}
		steps := strings.Join(e.Steps, "\n")
		if e.Action+" "+e.Reason != c.verdict || !strings.Contains(steps, c.says) || c.says == "" && strings.Contains(steps, "sysctl") {
			t.Errorf("%s: %s %s\n%s\nwant %s, %s", c.name, e.Action, e.Reason, steps, c.verdict, c.says)
		}
	}
}

// TestExplainFlows explains packets of existing flows. The result equals the earlier translation of the same
// packet.
func TestExplainFlows(t *testing.T) {
	s := explained(t)
	host := golden.StandardHost()
	for _, in := range []struct{ iface, source, dest, owner string }{
		{"wan0", "198.18.0.9:4000", "192.0.2.10:80", "web"},
		{"wan0", "198.18.0.9:4000", "192.0.2.20:80", "full"},
		{"wan0", "[2001:db8:9::9]:4000", "[2001:db8::20]:80", "cross"},
		{"lan0", "10.0.2.3:4000", "198.18.0.9:443", "office"},
		{"wan0", "198.18.0.9:4000", "203.0.113.1:8443", "forward"},
		{"lan0", "[fd00:2::5]:4000", "[64:ff9b::c612:9]:443", "six"},
	} {
		q := datapath.Question{Interface: in.iface, Tuple: flow.Tuple{Protocol: flow.TCP, Source: netip.MustParseAddrPort(in.source), Dest: netip.MustParseAddrPort(in.dest)}}
		back := datapath.Question{Interface: map[string]string{"wan0": "lan0", "lan0": "wan0"}[in.iface]}
		for _, q := range []*datapath.Question{&q, &back} {
			p, err := q.Packet(packet.SYN)
			if err != nil {
				t.Fatal(err)
			}
			at, _ := host.Interface(q.Interface)
			out, err := s.Step(model.Arrival{Interface: q.Interface, Frame: append(packet.Packet{&packet.Ethernet{Src: packet.MAC{2}, Dst: at.MAC}}, p...).Build()})
			if err != nil || len(out.Out) != 1 {
				t.Fatalf("%s: %v: %+v", q.Tuple, err, out)
			}
			sent := tupleIn(t, out.Out[0].Frame)
			e, err := s.d.Explain(context.Background(), *q)
			if err != nil {
				t.Fatal(err)
			}
			if !e.Existing || e.Owner != in.owner || e.Before != q.Tuple || e.After != sent || e.Out != out.Out[0].Interface {
				t.Errorf("%s left by %s as %s; explained as %+v", q.Tuple, out.Out[0].Interface, sent, e)
			}
			back.Tuple = flow.Tuple{Protocol: flow.TCP, Source: sent.Dest, Dest: sent.Source}
		}
	}
}

// tupleIn reads the endpoints of a TCP segment.
func tupleIn(t *testing.T, frame []byte) flow.Tuple {
	t.Helper()
	p := packet.Parse(frame)
	segment, ok := packet.Find[*packet.TCP](p)
	if !ok {
		t.Fatalf("no TCP: %s", p)
	}
	tuple := flow.Tuple{Protocol: flow.TCP}
	var src, dst netip.Addr
	if ip, ok := packet.Find[*packet.IPv4](p); ok {
		src, dst = ip.Src, ip.Dst
	} else if ip, ok := packet.Find[*packet.IPv6](p); ok {
		src, dst = ip.Src, ip.Dst
	}
	tuple.Source, tuple.Dest = netip.AddrPortFrom(src, segment.SrcPort), netip.AddrPortFrom(dst, segment.DstPort)
	return tuple
}
