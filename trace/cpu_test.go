// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"slices"
	"testing"
)

// TestCPUs expects CPUs by their numbers, including offline ones. A clock that was set back and a new CPU have
// no time.
func TestCPUs(t *testing.T) {
	before := ParseCPUs("cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 10 0 10 80 5 0 0 0 0 0\ncpu2 10 0 10 80 0 0 0 0 0 0\ncpu3 10 0 0 0 0 0 0 0\nintr 5\n")
	after := ParseCPUs("cpu  1 1 1 1 1 1 1 1 0 0\ncpu0 10 0 10 180 4 0 0 0 0 0\ncpu1 900 0 0 0 0 0 900 0\ncpu2 10 0 10 120 0 0 60 0 7 0\ncpu3 10 0 0 0 0 0 0 0\n")
	want := []CPUTime{{0, 99, 0, 99}, {2, 100, 60, 40}}
	if got := CPUsBetween(before, after); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	p := Profile{}
	if p.setBusiestCPU(CPUsBetween(before, after)); p.Busiest != 2 || p.BusiestShare != 0.6 {
		t.Errorf("CPU %d is the busiest, with %g", p.Busiest, p.BusiestShare)
	}
}

func TestParseSoftnet(t *testing.T) {
	got := ParseSoftnet("00000010 00000002 00000003\n" + // nine and fewer columns: old kernels
		"0000000a 00000000 00000001 0 0 0 0 0 0 00000007 00000000 00000000 00000001 00000000 00000000\n")
	want := []SoftnetCPU{{Processed: 16, Dropped: 2, Squeezed: 3}, {Processed: 10, Squeezed: 1, RPS: 7}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
