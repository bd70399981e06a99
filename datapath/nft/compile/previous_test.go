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

// TestPreviousResultChangesNothing changes services at random. A compilation with the previous result equals one
// without it, and the reported difference leads from the previous result to the new one.
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
	c.NAT = []config.NATRule{{
		Name: "forward", Type: config.NATPortForward, Protocol: flow.TCP, To: config.Target{Address: address(3), Port: 80},
		Listen: &config.Listen{Address: netip.MustParseAddr("192.0.2.5"), Ports: []flow.Ports{{First: 22, Last: 22}}},
	}}
	banned := func() map[string][]netip.Prefix {
		return map[string][]netip.Prefix{"banned": {netip.PrefixFrom(address(9), 32)}}
	}
	c.Firewall.Sets, c.Services[11].Deny = banned(), []string{"banned"}
	c.SetDefaults()
	held := netip.MustParseAddr("192.0.2.3")
	env := compile.Env{FIB: true}
	networks := []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24"), netip.MustParsePrefix("10.0.3.0/28")}
	env.Address = func(_ string, v6 bool) (netip.Addr, bool) { return held, !v6 }
	var previous *compile.Result
	refused := 0
	for step := range 700 {
		next := *c
		next.Services = slices.Clone(c.Services)
		s := &next.Services[r.IntN(len(next.Services))]
		s.Backends = slices.Clone(s.Backends)
		switch r.IntN(13) {
		case 0:
			s.Backends[r.IntN(len(s.Backends))].Weight = 1 + r.IntN(256)
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
			s.Listen = []config.Listen{{Address: s.Listen[0].Address, Interface: s.Listen[0].Interface, Ports: []flow.Ports{{First: s.Listen[0].Ports[0].First, Last: s.Listen[0].Ports[0].First + uint16(100*r.IntN(2))}}}}
			s.Backends = []config.Backend{{Name: "a", Address: address(2), Weight: 1, Priority: 1}}
		case 6:
			s.Mark = uint32(r.IntN(3))
		case 7:
			s.Backends[0].Mark = uint32(4 + r.IntN(2))
		case 8:
			s.Mode = []config.Mode{config.ModeDNAT, config.ModeFullNAT}[r.IntN(2)]
			s.Hairpin = []config.Switch{config.SwitchOn, config.SwitchOff}[r.IntN(2)]
		case 9:
			s.Listen = slices.Clone(s.Listen)
			switch l := &s.Listen[0]; {
			case l.Follows():
				l.Address, l.Interface = held, ""
			case l.Address == held:
				l.Address, l.Interface = netip.Addr{}, "eth0"
			default:
				l.Interface = []string{"", "eth0"}[r.IntN(2)]
			}
		case 10:
			s.Limits.Connections = 10 * r.IntN(2)
		case 11:
			next.NAT = slices.Clone(c.NAT)
			next.NAT[0].To.Address = address(3)
		case 12:
			next.Firewall.Sets = banned()
		}
		if r.IntN(40) == 0 {
			env.Networks = networks[:r.IntN(3)]
		}
		snapshot := &datapath.Snapshot{Config: &next}
		for i := range next.NAT {
			if step%70 > 60 {
				continue // on another datapath
			}
			snapshot.NAT = append(snapshot.NAT, &next.NAT[i])
		}
		for i := range next.Services {
			if i == 0 && step%50 > 40 {
				continue // it is on another datapath meanwhile
			}
			state := make([]datapath.State, len(next.Services[i].Backends))
			for k := range state {
				if r.IntN(20) == 0 {
					state[k] = datapath.State(r.IntN(3))
				}
			}
			snapshot.Services = append(snapshot.Services, datapath.Service{Service: &next.Services[i], State: state})
		}
		got, err := compile.Compile(snapshot, env, previous)
		want, wantErr := compile.Compile(snapshot, env, nil)
		if fmt.Sprint(err) != fmt.Sprint(wantErr) {
			t.Fatalf("step %d: %v, without the result before it %v", step, err, wantErr)
		}
		if err != nil {
			refused++
			continue
		}
		c = &next
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
	if refused > 350 {
		t.Errorf("%d of 700 steps were refused", refused)
	}
}
