// SPDX-License-Identifier: Apache-2.0

// Package compile converts a snapshot into the content of the eBPF maps (Desired). It makes no
// system call: State describes the tables in force and Host describes the machine.
package compile
