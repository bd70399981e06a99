// SPDX-License-Identifier: Apache-2.0

// Package ebpf implements the datapath of XDP and TC programs (bpf/datapath/datapath.bpf.c). It writes the
// output of package compile to the maps of package table and attaches the programs. It follows
// changes of the network, handles events of the programs, and reports flows and counters.
//
// The package has more than 3,000 lines, because all files share the tables in force, the programs
// and their lock. Code without the lock is in compile, table, ids and wire. The files by concern
// are attach.go and pins.go, apply.go and amend.go, stale.go and move.go, hold.go and
// unresolved.go, mappings.go, explain.go.
package ebpf
