// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"
)

// TestBenchRefusesNonsense: what cannot be measured, or selects nothing, is a mistake on the
// command line and not an empty table.
func TestBenchRefusesNonsense(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"nosuch", `no suite "nosuch"`},
		{"latency --reps 0", "at least 1"},
		{"latency --reps -1", "at least 1"},
		{"latency --seconds -1", "more than 0"},
		{"latency --cpu 100000", "CPU 100000"},
		{"latency --rows nobody", "\n  nft DNAT\n"},
		{"latency --points nowhere", "\n  50 %\n"},
		{"latency --rows (", "--rows"},
		{"peers --cpu 0", "share all CPUs"},
	} {
		args := append([]string{"bench"}, strings.Fields(c.args)...)
		if code, out, stderr := sluiceCommand("", args...); code != exitUsage || out != "" || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: exit %d, %q, %q", c.args, code, out, stderr)
		} else if lines := strings.Split(stderr, "\n"); len(lines) > 2 && slices.ContainsFunc(lines, func(l string) bool { return len(l) > 80 }) {
			t.Errorf("%s: more than 80 columns: %s", c.args, stderr)
		}
	}
}
