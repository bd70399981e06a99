// SPDX-License-Identifier: Apache-2.0

package trace

import "testing"

// TestSparse distinguishes a pool without a free port from two packets that selected the same port.
func TestSparse(t *testing.T) {
	for _, c := range []struct {
		used, first, last uint64
		want              bool
	}{
		{0, 0, 0, false},
		{20, 2000, 2019, false},
		{1, 2000, 2000, false}, // one port, named by a rule
		{940, 1024, 2023, false},
		{64_000, 1024, 65_535, false},
		{3_000, 1_100, 65_000, true},
		{2, 20_000, 40_000, true},
	} {
		if got := mostlyFree(c.used, c.first, c.last); got != c.want {
			t.Errorf("%d ports from %d to %d: sparse %v, want %v", c.used, c.first, c.last, got, c.want)
		}
	}
}
