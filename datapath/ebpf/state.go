// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"slices"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// stateOf returns the compiler's view of the tables for a snapshot.
func stateOf(t *table.Tables, s *datapath.Snapshot) *compile.State {
	st := &compile.State{IDs: t.IDs, Referred: t.Referred, HZ: t.HZ, Pool: t.Pool, Hosts: t.Hosts, HalfOpen: table.HalfOpenFor(s.Config.Tables), AllOn: t.AllOn,
		ServiceFlows: func(id uint32) int64 { return t.ServiceLoads.Values[id].Active },
		BackendFlows: func(id uint32) int64 { return t.BackendLoads.Values[id].Active },
		Runs:         func() ([]uint64, []bool) { return slices.Clone(t.Runs.Values), t.RunsHeld() }}
	if t.Control != nil {
		st.Spliced = t.Control.Values[0].Spliced
	}
	return st
}

// emptyState returns the state of tables that do not exist yet.
func emptyState(hz uint32, s *datapath.Snapshot) *compile.State {
	none := func(uint32) int64 { return 0 }
	places := (&table.Tables{Sizes: table.Sizes{Pool: wire.MaxPool}}).Places()
	return &compile.State{IDs: ids.New(), Referred: func() (map[ids.Kind]map[uint32]bool, error) { return nil, nil },
		HZ: hz, Pool: wire.MaxPool, Hosts: 1 << 21, HalfOpen: table.HalfOpenFor(s.Config.Tables), ServiceFlows: none, BackendFlows: none,
		Runs: func() ([]uint64, []bool) { return make([]uint64, places), make([]bool, places) }}
}
