// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
	"github.com/sluice-lb/sluice/packet"
)

// send passes a packet to the gateway.
func send(t testing.TB, s *subject, iface, text string) model.Outcome {
	t.Helper()
	out, err := s.Step(model.Arrival{Interface: iface, Frame: s.frame(iface, text)})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// office is a gateway with a snat rule from 10.0.2.0/24 to 203.0.113.1.
func office(t *testing.T, options string) *subject {
	t.Helper()
	return changing(t, "nat:\n  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]"+options+"}\n")
}

// TestReturningEntry leaves a free entry outside the stock, as a program does under contention. The sweeper
// returns it to the stock.
func TestReturningEntry(t *testing.T) {
	s := office(t, "")
	const loose = 3
	stock := &s.d.t.Stock6.Values[0]
	stock.Fresh = loose + 1 // the last entry is outside the stock
	e := &s.d.t.Flows6.Values[loose]
	e.Key.State = wire.EntryReturning
	if err := s.sweep(); err != nil {
		t.Fatal(err)
	}
	if uint32(stock.Top) != loose+1 || e.Key.State != wire.EntryFree {
		t.Errorf("top of the stock %d, state %d; want entry %d + 1, free", uint32(stock.Top), e.Key.State, loose)
	}
}

// count returns the number of entries of a kind and state in the IPv4 table.
func count(s *subject, kind, state uint8) (n int) {
	for i := range s.d.t.Flows4.Values {
		if k := s.d.t.Flows4.Values[i].Key; k.Kind == uint8(kind) && k.State == uint8(state) {
			n++
		}
	}
	return n
}

// want compares the content of the tables with the expected content.
func (w held) want(t *testing.T, s *subject, when string) {
	t.Helper()
	have := held{flows: count(s, wire.KindFlow, wire.EntryLive), bindings: count(s, wire.KindBinding, wire.EntryLive),
		resting: count(s, wire.KindFlow, wire.EntryHold) + count(s, wire.KindBinding, wire.EntryHold),
		slots:   slots(s), ports: ports(s)}
	for i := range s.d.t.Owners.Values {
		for _, entry := range s.d.t.Owners.Values[i].Owner {
			have.owned += int(min(entry, 1))
		}
	}
	if have != w {
		t.Errorf("%s: %+v, want %+v", when, have, w)
	}
}

// held counts the resources of flows: live directions, entries of bindings, entries that reserve a resting port,
// slots of the index, ports, and ports with an owner.
type held struct{ flows, bindings, resting, slots, ports, owned int }

func slots(s *subject) (n int) {
	for _, b := range s.d.t.Index4.Values {
		for _, slot := range b.Slots {
			if slot != 0 {
				n++
			}
		}
	}
	return n
}

func ports(s *subject) (n int) {
	for i := range s.d.t.Ports.Values {
		n += int(s.d.t.Ports.Values[i].Used)
	}
	return n
}

// sentFrom returns the source of a translated packet.
func sentFrom(t *testing.T, out model.Outcome) (source string) {
	t.Helper()
	if len(out.Out) != 1 {
		t.Fatalf("%s %s: nothing was sent", out.Action, out.Reason)
	}
	p := packet.Parse(out.Out[0].Frame)
	ip, _ := packet.Find[*packet.IPv4](p)
	if udp, ok := packet.Find[*packet.UDP](p); ok {
		return fmt.Sprintf("%s:%d", ip.Src, udp.SrcPort)
	}
	tcp, ok := packet.Find[*packet.TCP](p)
	if !ok {
		t.Fatalf("sent %s", p)
	}
	return fmt.Sprintf("%s:%d", ip.Src, tcp.SrcPort)
}

// question returns a packet from the inside to one of many servers.
func question(client, server int) string {
	return fmt.Sprintf("ip4(src=10.0.2.%d,dst=198.18.0.%d)/udp(sport=4000,dport=53)", client, server)
}

// TestHolder follows a binding: the flow that holds it, other flows that share it, the end of the first flow and
// of the last one, and the end of the port's hold-down.
func TestHolder(t *testing.T) {
	const rest = 121 * time.Second
	s := office(t, "")
	advance := func(d time.Duration) {
		t.Helper()
		if err := s.Advance(d); err != nil {
			t.Fatal(err)
		}
	}
	first := sentFrom(t, send(t, s, "lan0", question(2, 1)))
	held{flows: 2, slots: 3, ports: 1, owned: 1}.want(t, s, "one flow")
	other := sentFrom(t, send(t, s, "lan0", question(3, 1)))
	if other == first {
		t.Errorf("two inside endpoints have %s", first)
	}
	held{flows: 4, slots: 6, ports: 2, owned: 2}.want(t, s, "two inside endpoints")
	advance(200 * time.Second)
	if again := sentFrom(t, send(t, s, "lan0", question(2, 2))); again != first {
		t.Errorf("the second flow leaves by %s, the first by %s", again, first)
	}
	held{flows: 6, bindings: 1, slots: 9, ports: 2, owned: 2}.want(t, s, "a second flow")
	advance(101 * time.Second) // the first flows of both have ended
	held{flows: 2, bindings: 1, resting: 1, slots: 5, ports: 2, owned: 1}.want(t, s, "the first flow ended")
	if again := sentFrom(t, send(t, s, "lan0", question(2, 1))); again != first {
		t.Errorf("the third flow leaves by %s, the first by %s", again, first)
	}
	if unrelated := send(t, s, "wan0", fmt.Sprintf("ip4(src=198.18.7.7,dst=203.0.113.1)/udp(sport=9,dport=%s)", first[len("203.0.113.1:"):])); unrelated.Action != model.Forward {
		t.Errorf("a packet of an unrelated host to the binding: %s", unrelated.Reason)
	}
	held{flows: 6, bindings: 1, resting: 1, slots: 9, ports: 2, owned: 1}.want(t, s, "a third flow, and an unrelated host's")
	advance(rest)
	held{flows: 6, bindings: 1, slots: 7, ports: 1, owned: 1}.want(t, s, "the other endpoint's port has rested")
	advance(301 * time.Second)
	held{resting: 1, slots: 1, ports: 1}.want(t, s, "all flows ended")
	advance(rest)
	held{}.want(t, s, "all ports have rested")
}

// TestStrangersShareNoBinding: a packet that the filter drops uses no entry.
func TestStrangersShareNoBinding(t *testing.T) {
	s := office(t, ", filtering: address-dependent")
	first := sentFrom(t, send(t, s, "lan0", question(2, 1)))
	one := held{flows: 2, slots: 4, ports: 1, owned: 1} // one slot belongs to the permit
	one.want(t, s, "one flow")
	for _, c := range []struct {
		from string
		want model.Reason
	}{{"198.18.7.7", model.ReasonFiltered}, {"198.18.0.1", model.ReasonNewFlow}} {
		out := send(t, s, "wan0", fmt.Sprintf("ip4(src=%s,dst=203.0.113.1)/udp(sport=9,dport=%s)", c.from, first[len("203.0.113.1:"):]))
		if out.Reason != c.want {
			t.Errorf("from %s: %s, want %s", c.from, out.Reason, c.want)
		}
		if c.want == model.ReasonFiltered {
			one.want(t, s, "an unrelated host was dropped")
		}
	}
	held{flows: 4, bindings: 1, slots: 7, ports: 1, owned: 1}.want(t, s, "who was asked came from another port")
	if err := s.Advance(301 * time.Second); err != nil {
		t.Fatal(err)
	}
	if n := count(s, wire.KindPermit, wire.EntryLive); n != 0 {
		t.Errorf("%d permits outlive their binding", n)
	}
}

// TestHairpinBetweenFamilies ends a flow of an IPv4 host to an IPv6 host by the outside endpoint of nat64. The
// end releases the IPv4 host's binding and count, and must not touch the entry with the same number in the IPv6
// table.
func TestHairpinBetweenFamilies(t *testing.T) {
	s := changing(t, `
nat:
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.1]}
  - {name: v4, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1], connections-per-client: 9}
`)
	six := sentFrom(t, send(t, s, "lan0", "ip6(src=fd00:2::3,dst=64:ff9b::c612:1)/udp(sport=5000,dport=53)"))
	out := send(t, s, "lan0", fmt.Sprintf("ip4(src=10.0.2.2,dst=203.0.113.1)/udp(sport=4000,dport=%s)", six[len("203.0.113.1:"):]))
	if out.Action != model.Forward || out.Reason != model.ReasonNewFlow {
		t.Fatalf("from IPv4: %s %s", out.Action, out.Reason)
	}
	binding := slices.IndexFunc(s.d.t.Flows4.Values, func(e wire.Flow4) bool { return e.Key.Kind == wire.KindBinding })
	if binding < 0 {
		t.Fatal("the IPv4 host has no binding")
	}
	namesake := &s.d.t.Flows6.Values[binding].Meta
	owner, backend := namesake.Owner, namesake.Backend
	if err := s.Advance(301 * time.Second); err != nil {
		t.Fatal(err)
	}
	if namesake.Owner != owner || namesake.Backend != backend {
		t.Errorf("entry %d of IPv6 has %d and %d, was %d and %d", binding, namesake.Owner, namesake.Backend, owner, backend)
	}
	if err := s.Advance(121 * time.Second); err != nil {
		t.Fatal(err)
	}
	held{}.want(t, s, "all flows ended, all ports have rested")
	each[wire.ClientKey](s.d.t.Maps["clients"], func(c *wire.Client) { t.Errorf("a client that has nothing is counted: %+v", *c) })
}

// TestReopened closes a connection and opens it again. The service and its client count it while it is open, and
// not afterwards.
func TestReopened(t *testing.T) {
	s := changing(t, `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, limits: {connections-per-client: 2},
     backends: [{name: a, address: 10.0.2.2}]}
`)
	const there, back = "ip4(src=198.18.0.1,dst=192.0.2.10)/tcp(sport=4000,dport=80,flags=%s,seq=1,ack=1)",
		"ip4(src=10.0.2.2,dst=198.18.0.1)/tcp(sport=80,dport=4000,flags=%s,seq=1,ack=1)"
	counted := func(want int64, when string) {
		t.Helper()
		clients := int64(0)
		each[wire.ClientKey](s.d.t.Maps["clients"], func(c *wire.Client) { clients += int64(c.Flows & wire.ClientCount) })
		if n, b := s.d.t.ServiceLoads.Values[0].Active, s.d.t.BackendLoads.Values[0].Active; n != want || b != want || clients != want {
			t.Errorf("%s: %d connections of the service, %d of the backend, %d of clients; want %d", when, n, b, clients, want)
		}
	}
	for range 2 {
		send(t, s, "wan0", fmt.Sprintf(there, "S"))
		counted(1, "opened")
		send(t, s, "lan0", fmt.Sprintf(back, "SA"))
		send(t, s, "wan0", fmt.Sprintf(there, "FA"))
		counted(1, "half closed")
		send(t, s, "lan0", fmt.Sprintf(back, "FA"))
		counted(0, "closed")
	}
	send(t, s, "wan0", fmt.Sprintf(there, "S"))
	send(t, s, "wan0", fmt.Sprintf(there, "S"))
	counted(1, "opened by two SYNs")
	if err := s.Advance(241 * time.Second); err != nil {
		t.Fatal(err)
	}
	counted(0, "expired")
	held{}.want(t, s, "expired")
}

// TestLongTimes has a flow with one side silent for more than half of the clock's range, and the longest
// timeout, which is longer than this at 1000 ticks a second.
func TestLongTimes(t *testing.T) {
	s := changing(t, `
nat: [{name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}]
timeouts: {tcp-established: 720h}
`)
	send(t, s, "lan0", question(2, 1))
	syn := "ip4(src=10.0.2.2,dst=198.18.0.1)/tcp(sport=4000,dport=80,flags=%s,seq=1,ack=%d)"
	out := send(t, s, "lan0", fmt.Sprintf(syn, "S", 0))
	tcp, _ := packet.Find[*packet.TCP](packet.Parse(out.Out[0].Frame))
	send(t, s, "wan0", fmt.Sprintf("ip4(src=198.18.0.1,dst=203.0.113.1)/tcp(sport=80,dport=%d,flags=SA,seq=1,ack=2)", tcp.SrcPort))
	send(t, s, "lan0", fmt.Sprintf(syn, "A", 2))
	held{flows: 4, slots: 6, ports: 2, owned: 2}.want(t, s, "two flows")
	now, err := s.clock()
	if err != nil {
		t.Fatal(err)
	}
	for i := range s.d.t.Flows4.Values {
		e := &s.d.t.Flows4.Values[i]
		switch {
		case e.Key.State == 0:
		case e.Key.L4Proto == 6:
			e.Meta.Seen = now - 719*3600*s.d.hz
		case e.Meta.Flags&wire.EntryPrimary == 0:
			e.Meta.Seen = now - 1<<31 - 5*s.d.hz
		default:
			e.Meta.Seen = now
		}
	}
	if err := s.sweep(); err != nil {
		t.Fatal(err)
	}
	held{flows: 4, slots: 6, ports: 2, owned: 2}.want(t, s, "one way for long, and long idle")
}

// TestRemovedRule ends the flows of a removed rule at once, including flows that hold bindings.
func TestRemovedRule(t *testing.T) {
	s := office(t, "")
	send(t, s, "lan0", question(2, 1))
	send(t, s, "lan0", question(3, 1))
	send(t, s, "lan0", question(3, 2))
	s.d.t.Rules.Values[0].Active = 0
	for range 2 {
		if err := s.Advance(121 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
	held{}.want(t, s, "the rule is gone")
}

// TestServiceThatLeft removes a UDP service of mode fullnat with its pool. Its flows end at once, do not count
// when the service is back, and their ports are free.
func TestServiceThatLeft(t *testing.T) {
	s := office(t, "")
	with, err := config.Decode("fullnat", []byte(`
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: udp, mode: fullnat, scheduler: rr, source-pool: [10.0.2.100],
     backends: [{name: a, address: 10.0.2.2, port: 8080}]}
tables: {flows: 4096, flows6: 4096, clients: 1024}
`))
	if err != nil {
		t.Fatal(err)
	}
	without := s.snapshot
	with.Attach = without.Config.Attach
	apply := func(snapshot *datapath.Snapshot) {
		s.snapshot = snapshot
		if err := s.inside(s.apply); err != nil {
			t.Fatal(err)
		}
	}
	used := func() (n uint32) {
		for i := range s.d.t.Ports.Values {
			n += s.d.t.Ports.Values[i].Used
		}
		return n
	}
	apply(golden.Snapshot(with))
	for i := range 10 {
		send(t, s, "wan0", fmt.Sprintf("ip4(src=198.18.0.%d,dst=192.0.2.10)/udp(sport=4000,dport=80)", i+1))
	}
	if n := used(); n != 10 {
		t.Fatalf("10 flows have %d ports", n)
	}
	apply(without)
	apply(golden.Snapshot(with)) // before a sweep
	if c, err := s.Counters(); err != nil || c.Services[0].Active != 0 {
		t.Errorf("counters of a service that came back: %v, %v; want no connections: those of UDP ended with it", c, err)
	}
	for i := range 10 {
		send(t, s, "wan0", fmt.Sprintf("ip4(src=198.18.0.%d,dst=192.0.2.10)/udp(sport=4001,dport=80)", i+1))
	}
	apply(without)
	if err := s.Advance(time.Second); err != nil {
		t.Fatal(err)
	}
	if flows, err := s.Flows(); err != nil || len(flows) != 0 {
		t.Fatalf("flows of a service that left: %v, %v", flows, err)
	}
	if n := used(); n != 0 {
		t.Errorf("%d ports are taken by nobody", n)
	}
}

// TestRuleOrder reloads rules in other orders. The first matching rule of the configuration translates new
// flows, independent of the order of creation.
func TestRuleOrder(t *testing.T) {
	s := office(t, "")
	const wide, one, more = "office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]",
		"one, type: snat, source: [10.0.2.3/32, 10.9.0.0/24], out: wan0, to: [203.0.113.2]",
		"more, type: snat, source: [10.0.2.0/29, 10.8.0.0/24], out: wan0, to: [203.0.113.3]"
	for i, c := range []struct {
		rules    []string
		from     string // translated source of 10.0.2.3
		reorders bool
	}{
		{[]string{wide, one}, "203.0.113.1", false},
		{[]string{one, wide}, "203.0.113.2", true},
		{[]string{more, one, wide}, "203.0.113.3", false},
		{[]string{one, wide, more}, "203.0.113.2", true},
		{[]string{wide, more}, "203.0.113.1", false},
		{[]string{more}, "203.0.113.3", false},
	} {
		conf, err := config.Decode("rules", []byte("nat:\n  - {name: "+strings.Join(c.rules, "}\n  - {name: ")+"}\ntables: {flows: 4096, flows6: 4096, clients: 1024}\n"))
		if err != nil {
			t.Fatal(err)
		}
		conf.Attach = s.snapshot.Config.Attach
		s.snapshot = golden.Snapshot(conf)
		err = s.inside(func() error {
			change, err := s.d.Plan(t.Context(), s.snapshot)
			if err == nil && slices.Contains(change.Lines, "change the order of nat rules") != c.reorders {
				t.Errorf("%d: the order changes: %v, but the change is %q", i, c.reorders, change.Lines)
			}
			return errors.Join(err, s.apply())
		})
		if err != nil {
			t.Fatal(err)
		}
		out := send(t, s, "lan0", question(3, i+1))
		if len(out.Out) != 1 || !strings.Contains(packet.Parse(out.Out[0].Frame).String(), "ip4(src="+c.from+",") {
			t.Errorf("%d: %s, want a packet from %s", i, out.Reason, c.from)
		}
	}
}

// TestFlowBytes computes the memory of a flow of a snat rule in tables that are full of such flows: entries,
// index, and the port of the pool.
func TestFlowBytes(t *testing.T) {
	const flows = 1 << 16
	s := office(t, "}\ntables: {flows: 65536, flows6: 4096")
	one := float64(s.d.t.Use(0)[0].Bytes)
	m := s.d.t.Maps["port_maps"]
	port := (float64((m.ValueSize()+7)&^7) + float64(s.d.t.Owners.Bytes())/wire.PortClasses) / (1 << 16) // as the kernel rounds elements up
	each := one/flows + port
	t.Logf("%.1f bytes in the tables, %.2f of the port", one/flows, port)
	if each > 188 || one/flows < 2*64+3*4 {
		t.Errorf("a flow takes %.1f bytes, more than 188 or less than it has", each)
	}
}

// TestPoolFills opens a flow for each port of a pool, in tables with room for just these flows. Refused packets
// are sent again, as clients do. Nearly all ports must be allocated. The hash key is random, and sometimes both
// buckets of a flow are full when few entries are left; such a port is offered again later.
func TestPoolFills(t *testing.T) {
	const ports, each, sent = 8192, 64, 8 // flows of a client, times that a packet is sent
	labtest.Require(t, labtest.Root, labtest.BPF)
	c, err := config.Decode("pool", []byte(fmt.Sprintf("tables: {flows: %d, flows6: 4096}\n"+
		"nat:\n  - {name: office, type: snat, source: [10.0.0.0/8], out: wan0, to: [203.0.113.1], ports: 1024-%d}\n", ports, 1023+ports)))
	if err != nil {
		t.Fatal(err)
	}
	s := newSubject(t, "xdp")
	if err := s.Reset(c, golden.StandardHost()); err != nil {
		t.Fatal(err)
	}
	reasons, refused := map[model.Reason]int{}, 0
	for i := range ports {
		for n := 0; ; n++ {
			out := send(t, s, "lan0", fmt.Sprintf("ip4(src=10.1.%d.%d,dst=198.18.0.1)/udp(sport=%d,dport=53)", i/each>>8, i/each&0xff, 1024+i%each))
			if reasons[out.Reason]++; out.Action != model.Drop {
				break
			}
			if n == sent {
				refused++
				break
			}
			if err := s.Advance(2 * time.Second); err != nil { // the hold-down of the tried port is over
				t.Fatal(err)
			}
		}
	}
	t.Logf("%v", reasons)
	if refused > 2 {
		t.Errorf("%d flows of %d are refused: %v", refused, ports, reasons)
	}
}
