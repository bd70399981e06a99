// SPDX-License-Identifier: Apache-2.0

// Package trace explains kernel events: dropped packets with place, reason and rule, and the CPU
// time of the network stack. It needs only tracepoints and perf events: no kprobes, no compiler and
// no debug symbols on the host.
package trace
