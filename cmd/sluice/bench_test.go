// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// TestBenchRefusesNonsense: what cannot be measured, or selects nothing, is a mistake on the
// command line and not an empty table.
func TestBenchRefusesNonsense(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"latency --reps 0", "at least 1"},
		{"latency --reps -1", "at least 1"},
		{"latency --seconds -1", "more than 0"},
		{"latency --cpu 100000", "CPU 100000"},
		{"latency --rows nobody", `"nft DNAT"`},
		{"latency --points nowhere", `"50 %"`},
		{"latency --rows (", "--rows"},
		{"peers --cpu 0", "share all CPUs"},
	} {
		args := append([]string{"bench"}, strings.Fields(c.args)...)
		if code, out, stderr := sluiceCommand("", args...); code != exitUsage || out != "" || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: exit %d, %q, %q", c.args, code, out, stderr)
		}
	}
}
