// SPDX-License-Identifier: Apache-2.0

// Package table has the maps of the eBPF datapath: it makes or adopts them, maps their memory, loads
// the programs on them, and reads flows and counts. Applying a configuration is in package ebpf.
package table
