// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
)

// State is what the compiler has to know of the tables in force.
type State struct {
	IDs *ids.IDs
	// Referred lists, for all kinds but sets, the ids that something in the tables refers to.
	Referred func() (map[ids.Kind]map[uint32]bool, error)
	HZ       uint32 // ticks of the kernel in a second
	// Pool is how many pool addresses the tables have room for, hosts how many single addresses of lists.
	Pool, Hosts uint32
	HalfOpen    uint32 // quota of handshakes in progress
	Spliced     uint32 // SPLICED_*: kinds of flows that live
	AllOn       bool   // for tests: every feature is on, whether the configuration needs it or not
	// ServiceFlows and backendFlows are how many flows one has.
	ServiceFlows, BackendFlows func(id uint32) int64
	// Runs returns a copy of the map of runs, and which of its places the rules and backends in force use.
	Runs func() (places []uint64, held []bool)
}
