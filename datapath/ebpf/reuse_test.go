// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// reused is a service with clients that reuse their tuples.
type reused struct {
	name, service string
	vip           string
	backend       string
	crosses       bool // translated to the other family
	replies       bool // replies pass the gateway
}

var reusedServices = []reused{
	{"dnat", "mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 8080}]", "192.0.2.10", "10.0.2.2", false, true},
	{"dnat without state", "mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.2, port: 8080}]", "192.0.2.10", "10.0.2.2", false, true},
	{"dnat6", `mode: dnat, scheduler: maglev, backends: [{name: a, address: "fd00:2::2", port: 8080}]`, "2001:db8::10", "fd00:2::2", false, true},
	{"fullnat", "mode: fullnat, scheduler: rr, source-pool: [10.0.2.100-10.0.2.103], backends: [{name: a, address: 10.0.2.2, port: 8080}]", "192.0.2.10", "10.0.2.2", false, true},
	{"fullnat6", `mode: fullnat, scheduler: maglev, source-pool: ["fd00:2::100-fd00:2::103"], backends: [{name: a, address: "fd00:2::2", port: 8080}]`, "2001:db8::10", "fd00:2::2", false, true},
	{"client option", "mode: fullnat, scheduler: rr, client-address: toa, source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.2, port: 8080}]", "192.0.2.10", "10.0.2.2", false, true},
	{"fnat46", `mode: fullnat, scheduler: rr, source-pool: ["fd00:2::100-fd00:2::103"], backends: [{name: a, address: "fd00:2::2", port: 8080}]`, "192.0.2.10", "fd00:2::2", true, true},
	{"fnat64", `mode: fullnat, scheduler: maglev, source-pool: [10.0.2.100-10.0.2.103], backends: [{name: a, address: 10.0.2.2, port: 8080}]`, "2001:db8::10", "10.0.2.2", true, true},
	{"dsr", "mode: dsr, scheduler: rr, backends: [{name: a, address: 10.0.2.2}]", "192.0.2.10", "10.0.2.2", false, false},
}

func (r reused) yaml() string {
	return fmt.Sprintf("services:\n  - {name: web, listen: [{address: \"%s\", ports: [80]}], protocol: tcp, %s}\n", r.vip, r.service)
}

// segment returns a packet of the client with a source port. Its source address has the family of the service.
func (r reused) segment(port int, flags string) string {
	if netip.MustParseAddr(r.vip).Is6() {
		return fmt.Sprintf("ip6(src=2001:db8:5::5,dst=%s)/tcp(sport=%d,dport=80,flags=%s,seq=100,ack=901)", r.vip, port, flags)
	}
	return fmt.Sprintf("ip4(src=203.0.113.5,dst=%s,df)/tcp(sport=%d,dport=80,flags=%s,seq=100,ack=901)", r.vip, port, flags)
}

// answer returns a packet of the backend to the client's translated endpoint.
func (r reused) answer(to netip.AddrPort, flags string) string {
	head := fmt.Sprintf("ip4(src=%s,dst=%s,df)", r.backend, to.Addr())
	if to.Addr().Is6() {
		head = fmt.Sprintf("ip6(src=%s,dst=%s)", r.backend, to.Addr())
	}
	return fmt.Sprintf("%s/tcp(sport=8080,dport=%d,flags=%s,seq=900,ack=101)", head, to.Port(), flags)
}

// source returns the translated source endpoint of a TCP segment.
func source(t *testing.T, out model.Outcome) netip.AddrPort {
	t.Helper()
	if len(out.Out) != 1 {
		t.Fatalf("%s %s: %d packets were sent", out.Action, out.Reason, len(out.Out))
	}
	p := packet.Parse(out.Out[0].Frame)
	tcp, _ := packet.Find[*packet.TCP](p)
	if ip, ok := packet.Find[*packet.IPv6](p); ok {
		return netip.AddrPortFrom(ip.Src, tcp.SrcPort)
	}
	ip, _ := packet.Find[*packet.IPv4](p)
	return netip.AddrPortFrom(ip.Src, tcp.SrcPort)
}

// connect opens and closes a connection, and returns the source that the backend saw.
func (r reused) connect(t *testing.T, s *subject, port int) netip.AddrPort {
	t.Helper()
	from := source(t, send(t, s, "wan0", r.segment(port, "S")))
	pass := func(iface, text string) {
		t.Helper()
		if out := send(t, s, iface, text); out.Action != model.Forward {
			t.Fatalf("port %d: %s: %s %s", port, text, out.Action, out.Reason)
		}
	}
	if r.replies {
		pass("lan0", r.answer(from, "SA"))
	}
	pass("wan0", r.segment(port, "A"))
	if r.replies {
		pass("lan0", r.answer(from, "FA"))
	}
	pass("wan0", r.segment(port, "FA"))
	return from
}

// free returns the number of free entries of both tables.
func free(s *subject) (n [2]int) {
	n[0] = int(s.d.t.Stock4.Values[0].Room - min(s.d.t.Stock4.Values[0].Fresh, s.d.t.Stock4.Values[0].Room))
	n[1] = int(s.d.t.Stock6.Values[0].Room - min(s.d.t.Stock6.Values[0].Fresh, s.d.t.Stock6.Values[0].Room))
	return n
}

// TestTuplesAgain opens and closes connections in nearly full tables, and reuses their tuples at once. Reuse
// needs no entry, no port and no other source, however often it happens.
func TestTuplesAgain(t *testing.T) {
	const tuples, spare, rounds = 20, 4, 5
	for _, hook := range []string{"xdp", "tc", "pair"} {
		for _, r := range reusedServices {
			t.Run(hook+" "+r.name, func(t *testing.T) {
				s := changingAt(t, hook, r.yaml())
				sources := map[int]netip.AddrPort{}
				for i := range tuples {
					sources[i] = r.connect(t, s, 4000+i)
				}
				held := ports(s)
				shrink(t, s, spare)
				before := free(s)
				for round := range rounds {
					for i := range tuples {
						if from := r.connect(t, s, 4000+i); from != sources[i] {
							t.Fatalf("round %d: the connection from port %d leaves by %s, the one before it by %s", round, 4000+i, from, sources[i])
						}
					}
				}
				if after := free(s); after != before {
					t.Errorf("entries that were never used: %d before tuples were used again, %d after it", before, after)
				}
				if now := ports(s); now != held {
					t.Errorf("%d ports are taken, %d before tuples were used again", now, held)
				}
				l := s.d.t.ServiceLoads.Values[s.d.t.IDs.Known[ids.KeyOf(ids.Service, "web")]]
				if want := uint64(tuples * (rounds + 1)); l.Flows != want || l.Active != 0 {
					t.Errorf("%d connections counted, %d of them open; want %d, and none", l.Flows, l.Active, want)
				}
			})
		}
	}
}

// TestReuseNeedsNoRoom opens and closes connections from half as many tuples as the table has room for flows, and uses
// each tuple five times again at once. No connection is refused, and the table needs two entries for each tuple and a
// few more.
func TestReuseNeedsNoRoom(t *testing.T) {
	const flows, times, few = 128, 5, 4
	for _, hook := range []string{"xdp", "tc", "pair"} {
		for _, r := range reusedServices {
			t.Run(hook+" "+r.name, func(t *testing.T) {
				s := changingAt(t, hook, r.yaml())
				shrink(t, s, 2*flows)
				left := free(s)
				for range 1 + times {
					for i := range flows / 2 {
						r.connect(t, s, 4000+i)
					}
				}
				after := free(s)
				for i, family := range []string{"IPv4", "IPv6"} {
					if used := left[i] - after[i]; used > flows+few {
						t.Errorf("%d entries of the %s table are in use, want at most %d", used, family, flows+few)
					}
				}
			})
		}
	}
}

// shrink leaves the given number of free entries in each table until the test ends.
func shrink(t *testing.T, s *subject, spare uint32) {
	for _, stock := range []*wire.Stock{&s.d.t.Stock4.Values[0], &s.d.t.Stock6.Values[0]} {
		room := stock.Room
		t.Cleanup(func() { stock.Room = room })
		stock.Room = min(room, stock.Fresh+spare)
	}
}

// TestServiceKeepsTraffic reassigns the number of a backend after connections with reused tuples. The counters of its
// service do not decrease.
func TestServiceKeepsTraffic(t *testing.T) {
	r := reusedServices[0]
	s := changingAt(t, "xdp", r.yaml())
	for range 3 {
		r.connect(t, s, 4000)
	}
	traffic := func() table.Traffic {
		t.Helper()
		c, err := s.d.Counters(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		return table.Traffic{Packets: c.Services[0].Packets, Bytes: c.Services[0].Bytes}
	}
	before := traffic()
	if before.Packets != 15 {
		t.Errorf("%d packets are counted, want 15", before.Packets)
	}
	draft := s.d.t.IDs.Draft()
	draft.Fresh[ids.KeyOf(ids.Backend, "other")] = s.d.inForce.Names.Backends[s.d.t.IDs.Known[ids.KeyOf(ids.Service, "web")]][0]
	if err := s.d.t.ForgetOthers(draft); err != nil {
		t.Fatal(err)
	}
	if after := traffic(); after != before {
		t.Errorf("%+v are counted after the number of the backend was reassigned, %+v before", after, before)
	}
}
