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
		{"--reps 0", "at least 1"},
		{"--reps -1", "at least 1"},
		{"--seconds -1", "more than 0"},
		{"--cpu 100000", "CPU 100000"},
		{"--rows nobody", `"nft DNAT"`},
		{"--points nowhere", `"50 %"`},
		{"--rows (", "--rows"},
	} {
		args := append([]string{"bench", "latency"}, strings.Fields(c.args)...)
		if code, out, stderr := sluiceCommand("", args...); code != exitUsage || out != "" || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: exit %d, %q, %q", c.args, code, out, stderr)
		}
	}
}
