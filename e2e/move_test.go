// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// moving has objects with flows on either datapath, in both families. Another backend than the flow's would
// answer with a reset, or with another name.
const moving = `
services:
  - {name: dnat4, listen: [{address: 192.0.2.10, ports: [7]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: dnat6, listen: [{address: 'fd00:c::10', ports: [7]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 'fd00:2::2'}, {name: b, address: 'fd00:2::3'}]}
  - {name: full4, listen: [{address: 192.0.2.11, ports: [7]}], protocol: tcp, mode: fullnat, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: full6, listen: [{address: 'fd00:c::11', ports: [7]}], protocol: tcp, mode: fullnat, source-pool: ['fd00:2::100'], backends: [{name: a, address: 'fd00:2::2'}, {name: b, address: 'fd00:2::3'}]}
  - {name: udp4, listen: [{address: 192.0.2.10, ports: [9]}], protocol: udp, mode: dnat, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
nat:
  - {name: in, type: port-forward, protocol: tcp, listen: {address: 192.0.2.12, ports: [1007-1008]}, to: {address: 10.0.2.2, port: 7}}
`

// TestFlowsMove moves services and a port-forward from one datapath to the other and back, with open connections
// and datagrams in transit. Each flow keeps its backend.
func TestFlowsMove(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		var collectors []*host.Collector
		for i, node := range []string{"s1", "s2"} {
			addresses := []string{fmt.Sprintf("10.0.2.%d", i+2), fmt.Sprintf("fd00:2::%d", i+2)}
			for _, address := range addresses {
				lines, err := host.ServeLines(l.Node(node), node, netip.AddrPortFrom(netip.MustParseAddr(address), 7).String())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = lines.Stop() })
			}
			collectors = append(collectors, collect(t, l.Node(node), addresses[0]+":9"))
		}
		d := start(t, l.Node("gateway"), force+moving)
		type held struct {
			to     string
			line   *host.Line
			server string
		}
		var all []held
		open := func() {
			t.Helper()
			for _, to := range []string{"192.0.2.10:7", "192.0.2.10:7", "[fd00:c::10]:7", "192.0.2.11:7", "192.0.2.11:7", "[fd00:c::11]:7", "192.0.2.12:1007"} {
				line, err := host.DialLine(t.Context(), l.Node("client"), netip.AddrPort{}, netip.MustParseAddrPort(to))
				if err != nil {
					t.Fatalf("%s: %v", to, err)
				}
				t.Cleanup(func() { _ = line.Close() })
				all = append(all, held{to: to, line: line})
			}
		}
		ask := func(when string) {
			t.Helper()
			for i := range all {
				h := &all[i]
				answer, err := h.line.Ask(patience)
				if err != nil {
					t.Fatalf("connection %d, to %s, %s: %v", i, h.to, when, err)
				}
				if h.server == "" {
					h.server = answer.String()
				} else if h.server != answer.String() {
					t.Fatalf("connection %d, to %s, %s: answered by %s, was %s", i, h.to, when, answer.String(), h.server)
				}
			}
		}
		stream := &host.Stream{From: l.Node("client"), Target: netip.MustParseAddrPort("192.0.2.10:9"), Rate: 500}
		if err := stream.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		open()
		ask("at the start")
		names := []string{"services/dnat4", "services/dnat6", "services/full4", "services/full6", "services/udp4", "nat/in"}
		for _, to := range []any{other(force), nil} {
			for _, name := range names {
				for _, dry := range []bool{true, false} {
					done, err := d.PatchObject(t.Context(), name, map[string]any{"datapath": to}, api.ChangeOptions{DryRun: dry})
					if err != nil {
						t.Fatalf("%s to datapath %v: %v", name, to, err)
					}
					ended := done.FlowsMoved
					for _, change := range done.Changes {
						ended += change.Ended
					}
					if ended > 0 {
						t.Errorf("%s to datapath %v, dry run %v: ends %d flows", name, to, dry, ended)
					}
				}
				ask(fmt.Sprintf("when %s was on datapath %v", name, to))
			}
			open()
		}
		ask("at the end")
		if err := stream.Stop(); err != nil {
			t.Error(err)
		}
		met := map[uint32]host.Arrival{}
		for _, c := range collectors {
			for _, a := range c.Arrivals() {
				if was, ok := met[a.Flow]; ok && was.Server != a.Server {
					t.Fatalf("datagrams of flow %d went to %s, then to %s", a.Flow, was.Server, a.Server)
				}
				met[a.Flow] = a
			}
		}
		if len(met) != 16 {
			t.Errorf("datagrams of %d flows arrived, want 16", len(met))
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}
