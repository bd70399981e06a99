// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
)

// TestServiceMoves moves a service with its flows from another datapath and back. While it arrives, the kernel
// gets packets without a flow here. While it leaves, the kernel gets packets that open flows.
func TestServiceMoves(t *testing.T) {
	for _, hook := range []string{"xdp", "tc"} {
		t.Run(hook, func(t *testing.T) { serviceMoves(t, hook) })
	}
}

func serviceMoves(t *testing.T, hook string) {
	s := changingAt(t, hook, "services: [{name: other, listen: [{address: 192.0.2.50, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}]\n")
	c := *s.snapshot.Config
	parsed, err := config.Decode("moving", []byte(`
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: web6, listen: [{address: 'fd00:c::10', ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: c, address: 'fd00:2::2', port: 8080}]}
  - {name: full, listen: [{address: 192.0.2.11, ports: [80]}], protocol: tcp, mode: fullnat, scheduler: rr, source-pool: [10.0.2.100],
     backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: time, listen: [{address: 192.0.2.10, ports: [123]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
`))
	if err != nil {
		t.Fatal(err)
	}
	c.Services = parsed.Services
	names := map[string]bool{"service web": true, "service web6": true, "service full": true, "service time": true}
	put := func(of *config.Config, arriving map[string]bool) {
		t.Helper()
		s.snapshot = golden.Snapshot(of)
		s.snapshot.Arriving = arriving
		if err := s.inside(s.apply); err != nil {
			t.Fatal(err)
		}
	}
	put(&c, names)
	tcp := func(client, to, flags string) string {
		return fmt.Sprintf("ip4(src=198.18.0.%s,dst=192.0.2.%s)/tcp(sport=4000,dport=80,flags=%s,seq=1,ack=1)", client, to, flags)
	}
	want := func(what string, out model.Outcome, reason model.Reason) {
		t.Helper()
		if out.Reason != reason {
			t.Errorf("%s: %s (%s), want %s", what, out.Reason, out.Action, reason)
		}
	}
	const ntp = "ip4(src=198.18.0.1,dst=192.0.2.10)/udp(sport=4000,dport=123)"
	want("an open connection of the other datapath", send(t, s, "wan0", tcp("1", "10", "A")), "moving")
	want("one to fullnat", send(t, s, "wan0", tcp("1", "11", "A")), "moving")
	want("a datagram", send(t, s, "wan0", ntp), "moving")
	want("a SYN", send(t, s, "wan0", tcp("2", "10", "S")), model.ReasonSYN)
	want("what acknowledges its answer", send(t, s, "wan0", tcp("2", "10", "A")), model.ReasonNewFlow)

	at := netip.MustParseAddrPort
	kept := func(protocol flow.Protocol, client, to, server, seen, state string) flow.Flow {
		return flow.Flow{Original: flow.Tuple{Protocol: protocol, Source: at(client), Dest: at(to)},
			Reply: flow.Tuple{Protocol: protocol, Source: at(server), Dest: at(seen)}, State: state, Replied: true}
	}
	flows := []flow.Flow{
		kept(flow.TCP, "198.18.0.1:4000", "192.0.2.10:80", "10.0.2.3:8080", "198.18.0.1:4000", "ESTABLISHED"),
		kept(flow.TCP, "198.18.0.3:4000", "192.0.2.10:80", "10.0.2.2:8080", "198.18.0.3:4000", "SYN_RECV"),
		kept(flow.TCP, "198.18.0.4:4000", "192.0.2.10:80", "10.0.2.3:8080", "198.18.0.4:4000", "FIN_WAIT"),
		kept(flow.TCP, "[2001:db8::1]:4000", "[fd00:c::10]:80", "[fd00:2::2]:8080", "[2001:db8::1]:4000", "ESTABLISHED"),
		kept(flow.TCP, "198.18.0.1:4000", "192.0.2.11:80", "10.0.2.2:8080", "10.0.2.100:2000", "ESTABLISHED"),
		kept(flow.UDP, "198.18.0.1:4000", "192.0.2.10:123", "10.0.2.3:123", "198.18.0.1:4000", ""),
	}
	none := []flow.Flow{ // flows that the datapath does not create
		kept(flow.TCP, "198.18.0.5:4000", "192.0.2.10:80", "10.0.2.9:8080", "198.18.0.5:4000", "ESTABLISHED"),
		kept(flow.TCP, "198.18.0.6:4000", "192.0.2.10:80", "10.0.2.3:8080", "198.18.0.6:4000", "TIME_WAIT"),
		kept(flow.TCP, "198.18.0.2:4000", "192.0.2.10:80", "10.0.2.3:8080", "198.18.0.2:4000", "ESTABLISHED"), // opened on this datapath
		kept(flow.TCP, "198.18.0.7:4000", "192.0.2.99:80", "10.0.2.3:8080", "198.18.0.7:4000", "ESTABLISHED"),
	}
	made, err := s.d.Take(context.Background(), append(slices.Clone(flows), none...))
	if err != nil || made != len(flows) {
		t.Fatalf("%d flows made, %v; want %d", made, err, len(flows))
	}
	have, err := s.Flows()
	if err != nil || len(have) != len(flows)+1 {
		t.Errorf("%d flows, %v; want %d", len(have), err, len(flows)+1)
	}
	for _, f := range flows {
		i := slices.IndexFunc(have, func(h flow.Flow) bool { return h.Original == f.Original })
		if i < 0 || have[i].Reply != f.Reply {
			t.Errorf("%s: not there, or to another server", f.Original)
			continue
		}
		if state := map[string]string{"FIN_WAIT": "TIME_WAIT"}[f.State]; have[i].State != f.State && have[i].State != state {
			t.Errorf("%s: state %s, was %s", f.Original, have[i].State, f.State)
		}
	}
	want("what goes on", send(t, s, "wan0", tcp("1", "10", "A")), model.ReasonFlow)
	want("what answers", send(t, s, "lan0", "ip4(src=10.0.2.3,dst=198.18.0.1)/tcp(sport=8080,dport=4000,flags=A,seq=1,ack=1)"), model.ReasonFlow)
	want("a handshake goes on", send(t, s, "wan0", tcp("3", "10", "A")), model.ReasonFlow)
	want("a datagram goes on", send(t, s, "wan0", ntp), model.ReasonFlow)
	want("fullnat goes on", send(t, s, "wan0", tcp("1", "11", "A")), model.ReasonFlow)
	want("its answer", send(t, s, "lan0", "ip4(src=10.0.2.2,dst=10.0.2.100)/tcp(sport=8080,dport=2000,flags=A,seq=1,ack=1)"), model.ReasonFlow)
	want("a connection that nobody has told of", send(t, s, "wan0", tcp("8", "10", "A")), model.ReasonNewFlow)

	want("a SYN before", send(t, s, "wan0", tcp("9", "10", "S")), model.ReasonSYN)
	given, err := s.d.Give(context.Background(), map[string]bool{"service web": true})
	if err != nil {
		t.Fatal(err)
	}
	if len(given) != 5 { // three imported flows, and two that opened here
		t.Errorf("%d flows given, want 5", len(given))
	}
	want("a SYN to what goes", send(t, s, "wan0", tcp("10", "10", "S")), "moving")
	want("an acknowledgement from before", send(t, s, "wan0", tcp("9", "10", "A")), model.ReasonNewFlow)
	want("a connection that goes on", send(t, s, "wan0", tcp("1", "10", "A")), model.ReasonFlow)
	want("a SYN to what stays", send(t, s, "wan0", tcp("10", "11", "S")), model.ReasonNewFlow)
	put(&c, nil)
	want("a SYN to what comes back at once", send(t, s, "wan0", tcp("11", "10", "S")), model.ReasonSYN)
}
