// SPDX-License-Identifier: Apache-2.0

package ebpf

// state is what the compiler has to know of the tables in force.
type state struct {
	ids *ids
	// referred lists, for all kinds but sets, the ids that something in the tables refers to.
	referred func() (map[idKind]map[uint32]bool, error)
	hz       uint32 // ticks of the kernel in a second
	// pool is how many pool addresses the tables have room for, hosts how many single addresses of lists.
	pool, hosts uint32
	halfOpen    uint32 // quota of handshakes in progress
	spliced     uint32 // SPLICED_*: kinds of flows that live
	allOn       bool   // for tests: every feature is on, whether the configuration needs it or not
	// serviceFlows and backendFlows are how many flows one has.
	serviceFlows, backendFlows func(id uint32) int64
	// runs returns a copy of the map of runs, and which of its places the rules and backends in force use.
	runs func() (places []uint64, held []bool)
}
