// SPDX-License-Identifier: Apache-2.0

// Package table owns the maps of the eBPF datapath. It creates or adopts them, maps their memory, loads the programs
// with them, and reads flows and counts. Package ebpf applies the configuration.
package table
