// SPDX-License-Identifier: Apache-2.0

// Package compile turns a snapshot into what the maps of the eBPF datapath are to hold (Desired). It
// makes no system call: what it has to know of the tables in force comes as a State, what it has to
// know of the machine as a Host.
package compile
