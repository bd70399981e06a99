// SPDX-License-Identifier: Apache-2.0

// Package trace turns kernel events into plain words: which packets were
// dropped, where, why and by which rule; and where the CPU time of the network
// stack goes. It needs tracepoints and perf events only: no kprobes, no
// compiler and no debug symbols on the host.
package trace
