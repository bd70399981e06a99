// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestProgramsLoad loads both hooks with every switch on and off, on the running kernel. The number of verified
// instructions shows the distance to the limit of a million.
func TestProgramsLoad(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	small := &table.Tables{HZ: 250, HashMultiplier: 1, Sizes: table.Sizes{Entries4: 512, Entries6: 512, Clients: 64, Slots: 64, Pool: 2, Hosts: 8}}
	ticks := wire.Switches{Established: 1000, Transitory: 1000, UDP: 1000, ICMP: 1000, Other: 1000, HalfOpen: 8, XDP: true, TC: true}
	all := ticks
	all.Services, all.Reverse, all.NAT, all.ByEgress, all.Prefixes, all.Pools, all.Rules, all.RuleCount = true, true, true, true, true, true, true, 3
	all.Crossing, all.Blocks, all.Mappings, all.HostLists, all.TrieLists, all.LowestIPv6MTU = true, true, true, 0xff, 0xff, 1280
	all.Ranges, all.Any, all.Edits, all.Cookies, all.Resets, all.MACKeys, all.Forwards = true, true, true, true, true, true, true
	all.CrossByEgress, all.FamilyChange = true, true
	services := ticks
	services.Services, services.Reverse, services.Direct, services.Ranges, services.Any, services.Edits, services.Cookies, services.Resets, services.MACKeys =
		true, true, true, true, true, true, true, true, true
	pair := all
	pair.Rules, pair.RuleCount, pair.Direct, pair.Paired = false, 0, true, true
	all.Bare = true
	for _, c := range []struct {
		name string
		wire.Switches
		dry  bool
		only []string
	}{{"everything", all, false, nil}, {"services", services, false, nil}, {"explain", all, true, nil}, {"nothing", ticks, false, nil}, {"pair", pair, false, nil},
		{"mappings", all, false, []string{"map_open", "map_close"}}, {"ends", all, false, []string{"sweep_end"}}, {"moves", all, false, []string{"flow_take"}}} {
		t.Run(c.name, func(t *testing.T) {
			programs, err := small.Program(c.Switches, c.dry, c.only...)
			var refused *ebpf.VerifierError
			if errors.As(err, &refused) {
				for _, line := range refused.Log[max(0, len(refused.Log)-25):] {
					t.Log(line)
				}
			}
			if err != nil {
				t.Fatal(err)
			}
			defer programs.Close()
			if len(c.only) == 0 && (programs.Programs["sluice_xdp"] == nil || programs.Programs["sluice_tc"] == nil) {
				t.Error("not loaded: the programs of the hooks")
			}
			for name, p := range programs.Programs {
				info, err := p.Info()
				if err != nil {
					t.Fatal(err)
				}
				n, _ := info.VerifiedInstructions()
				size, _ := info.JitedSize()
				t.Logf("%s: %d instructions verified, %d bytes of machine code", name, n, size)
			}
		})
	}
}
