// SPDX-License-Identifier: Apache-2.0

// Package ebpf is the datapath of XDP and TC programs (bpf/datapath.bpf.c). It applies what package
// compile makes of a snapshot to the maps of package table, attaches the programs, follows the network
// and the events of the programs, and answers for flows and counts.
package ebpf
