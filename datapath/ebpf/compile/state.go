// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
)

// State describes the tables in force for the compiler.
type State struct {
	IDs *ids.IDs
	// Referred lists the ids that table entries refer to, for all kinds except sets.
	Referred func() (map[ids.Kind]map[uint32]bool, error)
	HZ       uint32 // kernel ticks per second
	// Pool and Hosts are the capacities of the tables for pool addresses and for single addresses
	// of lists.
	Pool, Hosts uint32
	HalfOpen    uint32 // Limit of half-open connections.
	Spliced     uint32 // SPLICED_*: kinds of live flows.
	AllOn       bool   // for tests: enables every feature
	// ServiceFlows and BackendFlows return the number of flows of a service or backend.
	ServiceFlows, BackendFlows func(id uint32) int64
	// Runs returns a copy of the map of runs, and the places used by rules and backends in force.
	Runs func() (places []uint64, used []bool)
}
