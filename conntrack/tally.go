// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"cmp"
	"hash/maphash"
	"slices"
)

// tally counts entries by key. It is an open-addressed hash of 32-bit positions over two dense arrays. One lookup
// finds or creates the record (a Go map needs two), and growth moves four bytes per key.
type tally[K comparable] struct {
	slots  []uint32 // position in keys and counts, plus one; 0 is empty
	keys   []K
	counts []Count
	seed   maphash.Seed
}

// record returns the record of k and creates it if it is new. The pointer is valid until the next call.
func (t *tally[K]) record(k K) *Count { return &t.counts[t.position(k)] }

// position returns the position of the record of k and creates it if it is new.
func (t *tally[K]) position(k K) int {
	if 4*len(t.keys) >= 3*len(t.slots) {
		t.grow()
	}
	mask := uint64(len(t.slots) - 1)
	for i := maphash.Comparable(t.seed, k) & mask; ; i = (i + 1) & mask {
		switch p := t.slots[i]; {
		case p == 0:
			t.keys = append(t.keys, k)
			t.counts = append(t.counts, Count{})
			t.slots[i] = uint32(len(t.keys))
			return len(t.counts) - 1
		case t.keys[p-1] == k:
			return int(p - 1)
		}
	}
}

func (t *tally[K]) grow() {
	if t.slots == nil {
		t.seed = maphash.MakeSeed()
	}
	t.slots = make([]uint32, max(64, 2*len(t.slots)))
	mask := uint64(len(t.slots) - 1)
	for p, k := range t.keys {
		i := maphash.Comparable(t.seed, k) & mask
		for t.slots[i] != 0 {
			i = (i + 1) & mask
		}
		t.slots[i] = uint32(p + 1)
	}
}

// insertionLimit is the maximum n for an insertion sort during the scan. For larger n a full sort is cheaper.
const insertionLimit = 2048

// largestPositions returns the positions of the n largest records, largest first; n <= 0 returns all.
func (t *tally[K]) largestPositions(n int) []int {
	if n <= 0 || n > len(t.keys) {
		n = len(t.keys)
	}
	larger := func(a, b int) int {
		return cmp.Or(cmp.Compare(t.counts[b].Entries, t.counts[a].Entries), cmp.Compare(a, b))
	}
	if n > insertionLimit || n == len(t.keys) {
		all := make([]int, len(t.keys))
		for i := range all {
			all[i] = i
		}
		slices.SortFunc(all, larger)
		return all[:n]
	}
	best := make([]int, 0, n+1)
	for i := range t.counts {
		if len(best) == n && larger(i, best[n-1]) > 0 {
			continue
		}
		at, _ := slices.BinarySearchFunc(best, i, larger)
		best = slices.Insert(best, at, i)
		if len(best) > n {
			best = best[:n]
		}
	}
	return best
}

func (t *tally[K]) top(n int, name func(K) string) []Row {
	rows := make([]Row, 0, max(n, 0))
	for _, i := range t.largestPositions(n) {
		rows = append(rows, Row{name(t.keys[i]), t.counts[i]})
	}
	rank(rows)
	return rows
}
