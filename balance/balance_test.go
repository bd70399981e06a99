// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"fmt"
	"slices"
	"testing"
)

func backends(n int) []Member {
	m := make([]Member, n)
	for i := range m {
		m[i] = Member{Key: fmt.Sprintf("10.0.%d.%d:8080", i/250, i%250+2), Weight: 1}
	}
	return m
}

func TestSmoothSpreadsInsteadOfBursting(t *testing.T) {
	got := Smooth([]Member{{"a", 5}, {"b", 1}, {"c", 1}})
	if want := []int{0, 0, 1, 0, 2, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("sequence %v, want %v", got, want)
	}
	if got := Smooth([]Member{{"a", 10}, {"b", 20}}); len(got) != 3 {
		t.Errorf("sequence of weights 10 and 20 has %d entries, want 3", len(got))
	}
}

func owners(table []uint16, m []Member) []string {
	o := make([]string, len(table))
	for i, b := range table {
		o[i] = m[b].Key
	}
	return o
}

func TestMaglevMovesLittleWhenOneBackendLeaves(t *testing.T) {
	for _, n := range []int{2, 3, 4, 5, 8, 10, 12, 13, 20, 40, 60, 61, 100} {
		size := TableSize(n)
		m := backends(n)
		before := owners(Maglev(m, size), m)
		for _, gone := range []int{0, n / 3, n / 2, n - 1} {
			rest := slices.Delete(slices.Clone(m), gone, gone+1)
			moved := Moved(before, owners(Maglev(rest, size), rest))
			if limit := 1/float64(n) + 0.02; float64(moved)/float64(size) > limit {
				t.Errorf("%d backends, one removed: %.4f of the slots moved, limit %.4f", n, float64(moved)/float64(size), limit)
			}
		}
	}
}

func TestMaglevSharesFollowWeights(t *testing.T) {
	m := backends(5)
	total := 0
	for i := range m {
		m[i].Weight = i + 1
		total += i + 1
	}
	size := TableSize(5)
	count := make([]int, 5)
	for _, b := range Maglev(m, size) {
		count[b]++
	}
	for i := range m {
		want := float64(size) * float64(m[i].Weight) / float64(total)
		if d := float64(count[i])/want - 1; d > 0.02 || d < -0.02 {
			t.Errorf("member %d has %d slots, want %.0f within 2 %%", i, count[i], want)
		}
	}
}

func TestMaglevIgnoresTheOrderInTheFile(t *testing.T) {
	m := backends(7)
	r := slices.Clone(m)
	slices.Reverse(r)
	if Moved(owners(Maglev(m, 1021), m), owners(Maglev(r, 1021), r)) != 0 {
		t.Error("reordering the backends moved slots")
	}
}

func FuzzMaglevIsComplete(f *testing.F) {
	f.Add(3, 7)
	f.Fuzz(func(t *testing.T, n, weight int) {
		n, weight = n&63+1, weight&255+1
		m := backends(n)
		m[0].Weight = weight
		for _, b := range Maglev(m, 1021) {
			if int(b) >= n {
				t.Fatalf("slot owned by member %d of %d", b, n)
			}
		}
	})
}
