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

// moved returns the share of clients that two tables give to different backends; of after,
// the backend gone of before is missing.
func moved(before, after []uint16, gone int) float64 {
	fine, n := max(len(before), len(after)), 0
	for i := range fine {
		b := int(after[i*len(after)/fine])
		if b >= gone {
			b++
		}
		if b != int(before[i*len(before)/fine]) {
			n++
		}
	}
	return float64(n) / float64(fine)
}

// TestMaglevMovesLittle adds a backend to each number of backends up to 1,000, across table sizes, and removes
// others. At most 1/n + 2 % of the clients move.
func TestMaglevMovesLittle(t *testing.T) {
	all := backends(1001)
	last := Maglev(all[:1], TableSize(1))
	for n := 1; n <= 1000; n++ {
		limit := 1/float64(n) + 0.02
		before := last
		last = Maglev(all[:n+1], TableSize(n+1))
		if got := moved(last, before, n); got > limit {
			t.Errorf("%d backends, one added: %.4f of the clients moved, limit %.4f", n, got, limit)
		}
		step := 1
		if n > 20 {
			step = n / 2
		}
		for gone := 0; gone < n && n > 1; gone += step {
			rest := slices.Delete(slices.Clone(all[:n]), gone, gone+1)
			for _, configured := range slices.Compact([]int{TableSize(n), TableSize(n - 1)}) { // down, removed
				if got := moved(before, Maglev(rest, configured), gone); got > limit {
					t.Errorf("%d backends without number %d: %.4f of the clients moved, limit %.4f", n, gone, got, limit)
				}
			}
		}
	}
}

// TestMaglevSharesAreEqual: no backend has more than a slot more than another one.
func TestMaglevSharesAreEqual(t *testing.T) {
	for _, n := range []int{1, 3, 4, 12, 31, 32, 127, 128, 500, 1000} {
		m := backends(n)
		count := make([]int, n)
		for _, b := range Maglev(m, TableSize(n)) {
			count[b]++
		}
		if slices.Max(count)-slices.Min(count) > 1 {
			t.Errorf("%d backends: from %d to %d slots each", n, slices.Min(count), slices.Max(count))
		}
	}
}

// TestSmallTables bounds the memory of many services: 4,093 slots up to 31 backends, two
// bytes each on eBPF.
func TestSmallTables(t *testing.T) {
	if got := TableSize(31); got > 4093 {
		t.Errorf("%d slots for 31 backends", got)
	}
	for n := 1; n < 1000; n++ {
		if a, b := TableSize(n), TableSize(n+1); b%a != 0 {
			t.Errorf("%d slots for %d backends, %d for one more: they do not nest", a, n, b)
		}
	}
}

// TestMaglevWeights: the end of a backend of any weight moves its share and little else.
func TestMaglevWeights(t *testing.T) {
	for _, n := range []int{2, 3, 5, 10, 30, 100} {
		m := backends(n)
		total := 0
		for i := range m {
			m[i].Weight = 1 + i*7%13
			total += m[i].Weight
		}
		before := Maglev(m, TableSize(n))
		for gone := range m {
			rest := slices.Delete(slices.Clone(m), gone, gone+1)
			got, limit := moved(before, Maglev(rest, TableSize(n-1)), gone), float64(m[gone].Weight)/float64(total)+0.02
			if got > limit {
				t.Errorf("%d backends, one of weight %d of %d removed: %.4f moved, limit %.4f", n, m[gone].Weight, total, got, limit)
			}
		}
	}
}

func TestMovedComparesTablesOfDifferentSizes(t *testing.T) {
	m := backends(31)
	small, large := owners(Maglev(m, TableSize(31)), m), owners(Maglev(m, TableSize(32)), m)
	if n := Moved(small, large); n > len(large)/50 {
		t.Errorf("%d of %d slots moved when the table grew", n, len(large))
	}
	if n := Moved(large, small); n > len(small)/50 {
		t.Errorf("%d of %d slots moved when the table shrank", n, len(small))
	}
	if n := Moved([]string{"a", "b"}, []string{"a", "b", "c"}); n != 3 {
		t.Errorf("%d slots of sequences of different lengths moved, want 3", n)
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
