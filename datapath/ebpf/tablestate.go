// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"slices"

	"github.com/sluice-lb/sluice/datapath"
)

// stateOf returns the state of the tables for a snapshot.
func stateOf(t *tables, s *datapath.Snapshot) *state {
	st := &state{ids: t.ids, referred: t.referred, hz: t.hz, pool: t.pool, hosts: t.hosts, halfOpen: halfOpenFor(s.Config.Tables), allOn: t.allOn,
		serviceFlows: func(id uint32) int64 { return t.loads.values[id].Active },
		backendFlows: func(id uint32) int64 { return t.loadsB.values[id].Active },
		runs:         func() ([]uint64, []bool) { return slices.Clone(t.runs.values), t.runsHeld() }}
	if t.control != nil {
		st.spliced = t.control.values[0].Spliced
	}
	return st
}

// emptyState is the state of tables that are not made yet.
func emptyState(hz uint32, s *datapath.Snapshot) *state {
	none := func(uint32) int64 { return 0 }
	places := (&tables{sizes: sizes{pool: maxPool}}).places()
	return &state{ids: newIDs(), referred: func() (map[idKind]map[uint32]bool, error) { return nil, nil },
		hz: hz, pool: maxPool, hosts: 1 << 21, halfOpen: halfOpenFor(s.Config.Tables), serviceFlows: none, backendFlows: none,
		runs: func() ([]uint64, []bool) { return make([]uint64, places), make([]bool, places) }}
}
