// SPDX-License-Identifier: Apache-2.0

// Package ebpf is the datapath of XDP and TC programs (bpf/datapath.bpf.c). It
// turns snapshots into map contents, attaches the programs, and reads flows and
// counts back from the mapped tables.
package ebpf
