// SPDX-License-Identifier: Apache-2.0

// Package ebpf is the datapath of XDP and TC programs (bpf/datapath.bpf.c). It applies what package
// compile makes of a snapshot to the maps of package table, attaches the programs, follows the network
// and the events of the programs, and answers for flows and counts.
//
// It has more than 3,000 lines. What needs no lock is in compile, table, ids and wire; what is here shares
// the tables in force, the programs and the lock over both, and a package of its own would get all three.
// Each concern has its file: attach.go and pins.go, apply.go and amend.go, stale.go and move.go, hold.go
// and unresolved.go, mappings.go, explain.go.
package ebpf
