// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// follows returns a follower of a datapath with one rule on a host between two networks.
func follows(t *testing.T, seed uint64, r config.NATRule) *choiceFollower {
	t.Helper()
	c := &config.Config{NAT: []config.NATRule{r}}
	c.SetDefaults()
	h := model.Host{
		Interfaces: []model.Interface{
			{Name: "wan0", MAC: packet.MAC{2, 1}, MTU: 1500, Addresses: []netip.Prefix{netip.MustParsePrefix("198.51.100.1/24")}},
			{Name: "lan0", MAC: packet.MAC{2, 2}, MTU: 1500, Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}}},
		Routes:     []model.Route{{To: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("198.51.100.2"), Interface: "wan0"}},
		Neighbours: []model.Neighbour{{Interface: "wan0", Address: netip.MustParseAddr("198.51.100.2"), MAC: packet.MAC{2, 3}}},
	}
	m, err := model.New(c, h, seed)
	if err != nil {
		t.Fatal(err)
	}
	return newFollower(m)
}

// snatRule returns a rule with those ports of 203.0.113.1.
func snatRule(first, last uint16) config.NATRule {
	pool := netip.MustParseAddr("203.0.113.1")
	return config.NATRule{Name: "office", Type: config.NATSNAT, Out: "wan0", Ports: config.PortSet{{First: first, Last: last}},
		To: config.Target{Addresses: []config.AddressRange{{First: pool, Last: pool}}}}
}

func udp(src string, port uint16) model.Arrival {
	p := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 9}, Dst: packet.MAC{2, 2}},
		&packet.IPv4{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr("192.0.2.9"), TTL: 64},
		&packet.UDP{SrcPort: port, DstPort: 53}}
	return model.Arrival{Interface: "lan0", Frame: p.Build()}
}

// shown returns the outcome of a datapath that translates a packet to that source.
func shown(t *testing.T, in model.Arrival, reason model.Reason, source string) model.Outcome {
	t.Helper()
	ap := netip.MustParseAddrPort(source)
	q, err := packet.Parse(in.Frame).Edit(fmt.Sprintf("ip4(src=%s,ttl=63)/udp(sport=%d)", ap.Addr(), ap.Port()))
	if err != nil {
		t.Fatal(err)
	}
	q[0].(*packet.Ethernet).Src, q[0].(*packet.Ethernet).Dst = packet.MAC{2, 1}, packet.MAC{2, 3}
	return model.Outcome{Action: model.Forward, Reason: reason, Out: []model.Departure{{Interface: "wan0", Frame: q.Build()}}}
}

// TestFollowConfirms checks the replacement of a provisional endpoint with the observed one. The
// observed endpoint may be the provisional endpoint of another binding.
func TestFollowConfirms(t *testing.T) {
	for i, port := range []int{2000, 2002, 2000, 2002} {
		r := snatRule(2000, 2003)
		r.PortBlock = i / 2 * 2 // the block is provisional too
		f := follows(t, 1, r)
		for _, src := range []string{"10.0.0.9", "10.0.0.2"} {
			in := udp(src, 4000)
			in.Frame[22] = 1 // TTL
			if o := f.expectedOutcome(in, model.Outcome{Action: model.Drop, Reason: model.ReasonTTLExceeded}); o.Reason != model.ReasonTTLExceeded {
				t.Fatal(o.Reason)
			}
		}
		for src, port := range map[string]int{"10.0.0.9": port, "10.0.0.2": 4002 - port} {
			in := udp(src, 4000)
			actual := shown(t, in, model.ReasonFlow, fmt.Sprintf("203.0.113.1:%d", port))
			if d := packet.Diff(f.expectedOutcome(in, actual).Out[0].Frame, actual.Out[0].Frame); d != "" {
				t.Errorf("%s has %d: %s", src, port, d)
			}
		}
	}
}

// TestFollowConfirmsInbound checks that a packet from outside confirms an endpoint of the rule
// only. The host of the test has no inside neighbour.
func TestFollowConfirmsInbound(t *testing.T) {
	for port, want := range map[uint16]model.Reason{2000: model.ReasonUnresolved, 2001: model.ReasonUnresolved, 2002: model.ReasonUnresolved, 2003: model.ReasonUnresolved, 2004: model.ReasonNoBinding} {
		f := follows(t, 1, snatRule(2000, 2003))
		in := udp("10.0.0.9", 4000)
		in.Frame[22] = 1 // TTL
		f.expectedOutcome(in, model.Outcome{Action: model.Drop, Reason: model.ReasonTTLExceeded})
		answer := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 3}, Dst: packet.MAC{2, 1}},
			&packet.IPv4{Src: netip.MustParseAddr("192.0.2.9"), Dst: netip.MustParseAddr("203.0.113.1"), TTL: 64},
			&packet.UDP{SrcPort: 53, DstPort: port}}
		out, err := answer.Edit("ip4(dst=10.0.0.9,ttl=63)/udp(dport=4000)")
		if err != nil {
			t.Fatal(err)
		}
		o := f.expectedOutcome(model.Arrival{Interface: "wan0", Frame: answer.Build()}, model.Outcome{Action: model.Forward, Reason: model.ReasonFlow, Out: []model.Departure{{Interface: "lan0", Frame: out.Build()}}})
		if o.Reason != want {
			t.Errorf("port %d: %s, want %s", port, o.Reason, want)
		}
	}
}

// TestFollowClash checks that a new binding may get the port of an expired remote endpoint while
// its host still sends to that endpoint.
func TestFollowClash(t *testing.T) {
	clashes := 0
	for seed := range 40 {
		r := snatRule(2000, 2005)
		r.Source = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}
		f := follows(t, uint64(seed), r)
		send := func(src, dst string, port uint16) model.Outcome {
			p := packet.Parse(udp(src, 4000).Frame)
			p[1].(*packet.IPv4).Dst, p[2].(*packet.UDP).DstPort = netip.MustParseAddr(dst), port
			in := model.Arrival{Interface: "lan0", Frame: p.Build()}
			if src == "10.0.0.4" {
				return f.expectedOutcome(in, model.Outcome{Action: model.Drop, Reason: model.ReasonClash})
			}
			return f.model.Receive(in)
		}
		port := func(o model.Outcome) uint16 {
			if o.Planned.Gateway.IsValid() {
				return o.Planned.Tuple.Source.Port()
			}
			t, _ := model.TupleOf(o.Out[0].Frame)
			return t.Source.Port()
		}
		gone := port(send("10.0.0.3", "192.0.2.9", 53))
		host := port(send("10.0.0.2", "203.0.113.1", gone))
		for range 20 {
			f.model.Advance(time.Minute)
			send("10.0.0.2", "203.0.113.1", gone)
		}
		if o := send("10.0.0.4", "203.0.113.1", host); o.Reason == model.ReasonClash {
			clashes++
		}
	}
	if clashes != 40 {
		t.Errorf("%d of 40 clashes are legal", clashes)
	}
}

// TestFollowTakesWhatIsLegal checks that the model accepts a free port. It rejects a port that is
// in use, outside the rule's range, or of the wrong parity.
func TestFollowTakesWhatIsLegal(t *testing.T) {
	for _, tc := range []struct {
		source string
		legal  bool
	}{{"203.0.113.1:2002", true}, {"203.0.113.1:2004", true}, {"203.0.113.1:2000", false}, {"203.0.113.1:2003", false},
		{"203.0.113.1:3000", false}, {"203.0.113.2:2002", false}} {
		f := follows(t, 1, snatRule(2000, 2009))
		f.expectedOutcome(udp("10.0.0.9", 4000), shown(t, udp("10.0.0.9", 4000), model.ReasonNewFlow, "203.0.113.1:2000"))
		in := udp("10.0.0.2", 4000)
		actual := shown(t, in, model.ReasonNewFlow, tc.source)
		want := f.expectedOutcome(in, actual)
		if same := packet.Diff(want.Out[0].Frame, actual.Out[0].Frame) == ""; same != tc.legal {
			t.Errorf("%s: legal %v, want %v: %s", tc.source, same, tc.legal, packet.Diff(want.Out[0].Frame, actual.Out[0].Frame))
		}
	}
}

// TestForgottenSYNs checks that a datapath may evict some SYNs, but not all.
func TestForgottenSYNs(t *testing.T) {
	f := &choiceFollower{got: model.Outcome{Action: model.Pass, Reason: model.ReasonNotOurs}}
	for i := 1; i < 10; i++ {
		if forgets := f.ForgetsSYN(10); forgets != (i <= 5) {
			t.Errorf("after %d evicted SYNs: forgets %t", i-1, forgets)
		}
	}
	f = &choiceFollower{got: model.Outcome{Action: model.Forward, Reason: model.ReasonSYNACK}}
	if f.ForgetsSYN(10) {
		t.Error("an answered SYN is evicted")
	}
}

// wan and lan are the interfaces of the standard host.
var wan, lan = Scenario{}.Host().Interfaces[0], Scenario{}.Host().Interfaces[1]

// hidesBackend returns a follower of a datapath that chose a backend for a dropped packet, and that
// packet.
func hidesBackend(t *testing.T, c *config.Config, seed uint64) (*choiceFollower, packet.Packet) {
	t.Helper()
	m, err := model.New(c, golden.StandardHost(), seed)
	if err != nil {
		t.Fatal(err)
	}
	f := newFollower(m)
	p := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 9}, Dst: wan.MAC},
		&packet.IPv4{Src: netip.MustParseAddr("203.0.113.5"), Dst: netip.MustParseAddr("192.0.2.10"), TTL: 1}, &packet.UDP{SrcPort: 4000, DstPort: 53}}
	f.expectedOutcome(model.Arrival{Interface: wan.Name, Frame: p.Build()}, model.Outcome{Action: model.Drop, Reason: model.ReasonTTLExceeded})
	return f, p
}

// forwards makes the datapath forward a packet by lan with a change, and requires the same outcome
// of the model.
func (f *choiceFollower) forwards(t *testing.T, came model.Interface, p packet.Packet, reason model.Reason, changes string) {
	t.Helper()
	out, err := packet.Parse(p.Build()).Edit(changes)
	if err != nil {
		t.Fatal(err)
	}
	got := model.Outcome{Action: model.Forward, Reason: reason, Out: []model.Departure{{Interface: lan.Name, Frame: out.Build()}}}
	want := f.expectedOutcome(model.Arrival{Interface: came.Name, Frame: p.Build()}, got)
	if d := describe(want, got); d != "" {
		t.Error(d)
	}
}

// TestFollowCounts checks that the counts of a provisional backend move to the observed backend.
func TestFollowCounts(t *testing.T) {
	c, err := config.Decode("test", []byte(`
services:
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: fullnat, scheduler: random, source-pool: [10.0.2.100],
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(8) { // the first choice is random
		f, p := hidesBackend(t, c, seed)
		p[1].(*packet.IPv4).TTL = 64
		out, err := packet.Parse(p.Build()).Edit("ip4(src=10.0.2.100,dst=10.0.2.3,ttl=63)/udp(sport=5000)")
		if err != nil {
			t.Fatal(err)
		}
		f.expectedOutcome(model.Arrival{Interface: wan.Name, Frame: p.Build()},
			model.Outcome{Action: model.Forward, Reason: model.ReasonFlow, Out: []model.Departure{{Interface: lan.Name, Frame: out.Build()}}})
		for _, b := range f.model.Counters().Services[0].Backends {
			if want := map[string]uint64{"a": 0, "b": 2}[b.Name]; b.Packets != want || b.Bytes != 28*want {
				t.Errorf("seed %d: %s has %d packets of %d bytes, want %d", seed, b.Name, b.Packets, b.Bytes, want)
			}
		}
	}
}

// TestFollowConfirmsByAnswer checks that a packet of a server shows the backend of a dropped
// packet: the datapath forwards it to the client or does not recognize it.
func TestFollowConfirmsByAnswer(t *testing.T) {
	c, err := config.Decode("test", []byte(`
services:
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: random,
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(8) { // the model's choice is random
		f, _ := hidesBackend(t, c, seed)
		for _, server := range []string{"10.0.2.2", "10.0.2.3"}[seed%2:] { // the datapath chose the second one
			answer := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 9}, Dst: lan.MAC},
				&packet.IPv4{Src: netip.MustParseAddr(server), Dst: netip.MustParseAddr("203.0.113.5"), TTL: 64}, &packet.UDP{SrcPort: 53, DstPort: 4000}}
			got := model.Outcome{Action: model.Pass, Reason: model.ReasonNotOurs}
			if server == "10.0.2.3" {
				out, err := packet.Parse(answer.Build()).Edit("ip4(src=192.0.2.10,ttl=63)")
				if err != nil {
					t.Fatal(err)
				}
				got = model.Outcome{Action: model.Forward, Reason: model.ReasonFlow, Out: []model.Departure{{Interface: wan.Name, Frame: out.Build()}}}
			}
			if want := f.expectedOutcome(model.Arrival{Interface: lan.Name, Frame: answer.Build()}, got); want.Reason != got.Reason {
				t.Errorf("seed %d, %s: want %s, got %s", seed, server, want.Reason, got.Reason)
			}
		}
	}
}

// TestFollowFiltered checks that a filtered packet shows the endpoint of a binding, but not its
// host. A packet without a binding shows a free endpoint.
func TestFollowFiltered(t *testing.T) {
	for i := range 4 {
		port := uint16(1000 + i%2)
		order := []uint16{port, 2001 - port}
		if i > 1 {
			slices.Reverse(order)
		}
		r := snatRule(1000, 1001)
		r.Filtering = config.AddressDependent
		f := follows(t, uint64(port), r)
		hidden, err := packet.Parse(udp("10.0.0.2", 4000).Frame).Edit("ip4(dst=192.0.2.99,ttl=1)")
		if err != nil {
			t.Fatal(err)
		}
		if want := f.expectedOutcome(model.Arrival{Interface: "lan0", Frame: hidden.Build()}, model.Outcome{Action: model.Drop, Reason: model.ReasonTTLExceeded}); want.Reason != model.ReasonTTLExceeded {
			t.Fatalf("a packet without hops left: %v", want.Reason)
		}
		for _, to := range order {
			p := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 3}, Dst: packet.MAC{2, 1}},
				&packet.IPv4{Src: netip.MustParseAddr("192.0.2.9"), Dst: netip.MustParseAddr("203.0.113.1"), TTL: 64}, &packet.UDP{SrcPort: 53, DstPort: to}}
			got := model.ReasonNoBinding
			if to == port {
				got = model.ReasonFiltered
			}
			if want := f.expectedOutcome(model.Arrival{Interface: "wan0", Frame: p.Build()}, model.Outcome{Action: model.Drop, Reason: got}); want.Reason != got {
				t.Errorf("the binding is at port %d: a stranger's packet to port %d: %v, want %v", port, to, want.Reason, got)
			}
		}
	}
}

// TestFollowReset checks that a reset to the endpoint of a binding shows the binding.
func TestFollowReset(t *testing.T) {
	for _, port := range []uint16{1000, 1001} {
		f := follows(t, uint64(port), snatRule(1000, 1001))
		hidden := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 9}, Dst: packet.MAC{2, 2}},
			&packet.IPv4{Src: netip.MustParseAddr("10.0.0.2"), Dst: netip.MustParseAddr("192.0.2.99"), TTL: 1}, &packet.TCP{SrcPort: 4000, DstPort: 53, Flags: packet.SYN}}
		f.expectedOutcome(model.Arrival{Interface: "lan0", Frame: hidden.Build()}, model.Outcome{Action: model.Drop, Reason: model.ReasonTTLExceeded})
		for _, to := range []uint16{port, 2001 - port} {
			p := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 3}, Dst: packet.MAC{2, 1}},
				&packet.IPv4{Src: netip.MustParseAddr("192.0.2.9"), Dst: netip.MustParseAddr("203.0.113.1"), TTL: 64}, &packet.TCP{SrcPort: 53, DstPort: to, Flags: packet.RST}}
			got := model.ReasonNoBinding
			if to == port {
				got = model.ReasonNoFlow
			}
			if want := f.expectedOutcome(model.Arrival{Interface: "wan0", Frame: p.Build()}, model.Outcome{Action: model.Drop, Reason: got}); want.Reason != got {
				t.Errorf("the binding is at port %d: a reset to port %d: %v, want %v", port, to, want.Reason, got)
			}
		}
	}
}

// TestFollowAnswerMTU checks that the MTU in an ICMP error shows the address family of the backend.
func TestFollowAnswerMTU(t *testing.T) {
	c, err := config.Decode("test", []byte(`
services:
  - {name: web, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: wlc, source-pool: [10.0.2.100, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: "fd00:2::3"}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	in := packet.MustText("eth(src=02:00:00:00:01:02,dst=02:00:00:00:01:01)/ip6(src=2001:db8:5::1,dst=2001:db8::10)/tcp(sport=4000,dport=80,flags=S)/data(1500)")
	for seed := range uint64(4) {
		for _, mtu := range []uint32{1500, 1520} {
			m, err := model.New(c, golden.StandardHost(), seed)
			if err != nil {
				t.Fatal(err)
			}
			answer := packet.Packet{&packet.Ethernet{}, &packet.IPv6{}, &packet.ICMP{V6: true, Type: 2, Rest: mtu}}
			got := model.Outcome{Action: model.Drop, Reason: model.ReasonTooBig, Out: []model.Departure{{Interface: wan.Name, Frame: answer.Build()}}}
			want := newFollower(m).expectedOutcome(model.Arrival{Interface: wan.Name, Frame: in.Build()}, got)
			if len(want.Out) != 1 {
				t.Fatalf("%v %v", want.Action, want.Reason)
			}
			if told, ok := packet.Find[*packet.ICMP](packet.Parse(want.Out[0].Frame)); !ok || told.MTU() != mtu {
				t.Errorf("seed %d: the datapath told %d, and %s is wanted", seed, mtu, packet.Parse(want.Out[0].Frame))
			}
		}
	}
}

// TestFollowYieldsPort checks that a hidden service session yields its provisional port to another
// session.
func TestFollowYieldsPort(t *testing.T) {
	c, err := config.Decode("test", []byte(`
services:
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: fullnat, scheduler: random, source-pool: [10.0.2.100],
     backends: [{name: a, address: 10.0.2.2}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	f, p := hidesBackend(t, c, 1)
	guess := f.model.Flows()[0].Reply.Dest.Port()
	p[1].(*packet.IPv4).TTL, p[1].(*packet.IPv4).Src = 64, netip.MustParseAddr("203.0.113.6")
	p[2].(*packet.UDP).SrcPort = 4000 + guess&1 // same parity
	f.forwards(t, wan, p, model.ReasonNewFlow, fmt.Sprintf("eth(src=02:00:00:00:02:01,dst=02:00:00:00:02:02)/ip4(src=10.0.2.100,dst=10.0.2.2,ttl=63)/udp(sport=%d)", guess))
	flows := f.model.Flows()
	if len(flows) != 2 || flows[0].Reply.Dest == flows[1].Reply.Dest {
		t.Errorf("two clients have %v", flows)
	}
}

// TestFollowHairpin checks that a packet shows the port of a port-forward client at the masquerade
// address. Its egress interface differs from the interface of that address.
func TestFollowHairpin(t *testing.T) {
	c, err := config.Decode("test", []byte(`
nat:
  - {name: dns, type: port-forward, listen: {interface: wan0, ports: [53]}, protocol: udp, to: {address: 10.0.2.9}}
  - {name: home, type: masquerade, source: [10.0.2.0/24], out: wan0}
`))
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.New(c, golden.StandardHost(), 1)
	if err != nil {
		t.Fatal(err)
	}
	f, ip := newFollower(m), &packet.IPv4{Src: netip.MustParseAddr("10.0.2.6"), Dst: netip.MustParseAddr("198.51.100.1"), TTL: 1}
	p := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 9}, Dst: lan.MAC}, ip, &packet.UDP{SrcPort: 4003, DstPort: 53}}
	f.expectedOutcome(model.Arrival{Interface: lan.Name, Frame: p.Build()}, model.Outcome{Action: model.Drop, Reason: model.ReasonTTLExceeded})
	ip.TTL = 64
	f.forwards(t, lan, p, model.ReasonFlow, "eth(src=02:00:00:00:02:01,dst=02:00:00:00:02:09)/ip4(src=198.51.100.1,dst=10.0.2.9,ttl=63)/udp(sport=23289)")
}

// TestFollowUntranslatable checks that an untranslatable packet shows the address family of a
// hidden backend.
func TestFollowUntranslatable(t *testing.T) {
	c, err := config.Decode("test", []byte(`
services:
  - {name: web, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: random, source-pool: [10.0.2.100, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: "fd00:2::3"}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	arrives := func(text string) model.Arrival {
		return model.Arrival{Interface: wan.Name, Frame: packet.MustText("eth(src=02:00:00:00:01:02,dst=02:00:00:00:01:01)/" + text).Build()}
	}
	for seed := range uint64(8) { // the first choice is random
		m, err := model.New(c, golden.StandardHost(), seed)
		if err != nil {
			t.Fatal(err)
		}
		f := newFollower(m)
		f.expectedOutcome(arrives("ip6(src=2001:db8:5::1,dst=2001:db8::10,hl=1)/tcp(sport=4000,dport=80,flags=S)"), model.Outcome{Action: model.Drop, Reason: model.ReasonTTLExceeded})
		got := model.Outcome{Action: model.Drop, Reason: model.ReasonUntranslatable}
		want := f.expectedOutcome(arrives("ip6(src=2001:db8:5::1,dst=2001:db8::10)/frag(more,id=7)/dstopts()/tcp(sport=4000,dport=80,flags=A)/data(64)"), got)
		if want.Action != got.Action || want.Reason != got.Reason {
			t.Errorf("seed %d: %v %v, and %v %v is wanted", seed, got.Action, got.Reason, want.Action, want.Reason)
		}
	}
}

// TestFollowFormerSource checks that a packet shows the source address of a session from before a
// route change. The client is on its backend's host.
func TestFollowFormerSource(t *testing.T) {
	c, err := config.Decode("test", []byte(`
services:
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, backends: [{name: a, address: 10.1.0.3}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	before, err := golden.HostWith("unroute 10.1.0.0/16")
	if err != nil {
		t.Fatal(err)
	}
	m, err := model.New(c, before, 1)
	if err != nil {
		t.Fatal(err)
	}
	f, ip := newFollower(m), &packet.IPv4{Src: netip.MustParseAddr("10.1.0.3"), Dst: netip.MustParseAddr("192.0.2.10"), TTL: 1}
	p := packet.Packet{&packet.Ethernet{Src: packet.MAC{2, 9}, Dst: lan.MAC}, ip, &packet.UDP{SrcPort: 4003, DstPort: 53}}
	f.expectedOutcome(model.Arrival{Interface: lan.Name, Frame: p.Build()}, model.Outcome{Action: model.Drop, Reason: model.ReasonTTLExceeded})
	m.SetHost(golden.StandardHost())
	ip.TTL = 64
	f.forwards(t, lan, p, model.ReasonFlow, "eth(src=02:00:00:00:02:01,dst=02:00:00:00:02:09)/ip4(src=198.51.100.1,dst=10.1.0.3,ttl=63)/udp(sport=20025)")
}
