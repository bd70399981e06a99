// SPDX-License-Identifier: Apache-2.0

package compile_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/compile"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// TestPreviousResultChangesNothing changes services at random. What is compiled with the help of the
// result before is each time what is compiled without, and the difference to before leads there.
func TestPreviousResultChangesNothing(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	address := func(net byte) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, net, byte(1 + r.IntN(30))}) }
	c := &config.Config{}
	for i := range 12 {
		c.Services = append(c.Services, config.Service{
			Name: fmt.Sprintf("s%d", i), Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerWRR,
			Listen:   []config.Listen{{Address: netip.AddrFrom4([4]byte{192, 0, 2, byte(i / 2)}), Ports: []flow.Ports{{First: uint16(80 + i), Last: uint16(80 + i)}}}},
			Backends: []config.Backend{{Name: "a", Address: address(2), Port: 80, Weight: 1, Priority: 1}, {Name: "b", Address: address(3), Port: 80, Weight: 1, Priority: 1}},
		})
	}
	c.SetDefaults()
	env := compile.Env{FIB: true}
	var previous *compile.Result
	for step := range 500 {
		next := *c
		next.Services = slices.Clone(c.Services)
		s := &next.Services[r.IntN(len(next.Services))]
		s.Backends = slices.Clone(s.Backends)
		switch r.IntN(6) {
		case 0:
			s.Backends[r.IntN(len(s.Backends))].Weight = 1 + r.IntN(5)
		case 1:
			s.Backends[0].Address = address(2)
		case 2:
			if len(s.Backends) < 6 {
				s.Backends = append(s.Backends, config.Backend{Name: fmt.Sprintf("n%d", step), Address: address(byte(10 + r.IntN(200))), Port: 80, Weight: 1, Priority: 1})
			}
		case 3:
			if len(s.Backends) > 1 {
				s.Backends = s.Backends[:len(s.Backends)-1]
			}
		case 4:
			s.WhenDown = []config.WhenDown{config.WhenDownDrop, config.WhenDownReset, config.WhenDownReject}[r.IntN(3)]
		case 5:
			s.Listen = []config.Listen{{Address: s.Listen[0].Address, Ports: []flow.Ports{{First: s.Listen[0].Ports[0].First, Last: s.Listen[0].Ports[0].First + uint16(100*r.IntN(2))}}}}
			s.Backends = []config.Backend{{Name: "a", Address: address(2), Weight: 1, Priority: 1}}
		}
		c = &next
		snapshot := &datapath.Snapshot{Config: c}
		for i := range c.Services {
			state := make([]datapath.State, len(c.Services[i].Backends))
			for k := range state {
				if r.IntN(20) == 0 {
					state[k] = datapath.State(r.IntN(3))
				}
			}
			snapshot.Services = append(snapshot.Services, datapath.Service{Service: &c.Services[i], State: state})
		}
		got, err := compile.Compile(snapshot, env, previous)
		if err != nil {
			t.Fatal(err)
		}
		want, err := compile.Compile(snapshot, env, nil)
		if err != nil {
			t.Fatal(err)
		}
		if d := ruleset.Diff(got.Ruleset, want.Ruleset); !d.Empty() {
			t.Fatalf("step %d: without the result before it is another one: %+v", step, d)
		}
		if previous != nil {
			a, b := ruleset.Diff(previous.Ruleset, got.Ruleset), ruleset.Diff(previous.Ruleset, want.Ruleset)
			if len(a.AddElements) != len(b.AddElements) || len(a.DelElements) != len(b.DelElements) || len(a.AddRules) != len(b.AddRules) || len(a.FlushChains) != len(b.FlushChains) {
				t.Fatalf("step %d: another way leads there:\n%+v\n%+v", step, a, b)
			}
		}
		previous = got
	}
}
