// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"hash/fnv"
	"slices"
)

// Seed is the seed of every consistent hash, fixed so that nodes, datapaths and
// reloads agree on the backend of a tuple.
const Seed uint32 = 0x51c0ffee

// MaxTable is the largest Maglev table (a prime; Maglev paper, NSDI 2016, §3.4).
const MaxTable = 65537

// TableSize returns the number of slots of a Maglev table for n configured
// backends, a prime. The steps are the smallest sizes at which taking any one of
// n backends away moves at most 1/n + 2 % of the slots (TestMaglevMovesLittle
// holds it). It must be computed from the configured backends, not from those
// that are up: a table that changes its size moves every client.
func TableSize(n int) int {
	switch {
	case n <= 3:
		return 1021
	case n <= 12:
		return 4093
	case n <= 60:
		return 16381
	}
	return MaxTable
}

// Maglev fills a table of size slots (a prime) with indices of members by
// weighted Maglev hashing. Every member's preference list depends on its key
// alone. Nil when there are no members.
func Maglev(members []Member, size int) []uint16 {
	if len(members) == 0 {
		return nil
	}
	order := make([]int, len(members)) // fill in the order of keys: position in the file has no say
	heaviest := 0
	for i, m := range members {
		order[i] = i
		heaviest = max(heaviest, m.Weight)
	}
	slices.SortFunc(order, func(a, b int) int {
		if members[a].Key < members[b].Key {
			return -1
		}
		return 1
	})
	const free = ^uint16(0)
	table := slices.Repeat([]uint16{free}, size)
	next := make([]uint64, len(members)) // position in the member's permutation
	skip := make([]uint64, len(members))
	credit := make([]int, len(members))
	for i, m := range members {
		next[i], skip[i] = preference(m.Key, size)
	}
	for filled := 0; ; {
		for _, i := range order {
			if credit[i] += members[i].Weight; credit[i] < heaviest {
				continue
			}
			credit[i] -= heaviest
			for table[next[i]] != free {
				next[i] = (next[i] + skip[i]) % uint64(size)
			}
			table[next[i]] = uint16(i)
			if filled++; filled == size {
				return table
			}
		}
	}
}

// preference derives offset and skip of a member's permutation from its key.
func preference(key string, size int) (offset, skip uint64) {
	h := fnv.New64a()
	h.Write([]byte(key))
	x := mix(h.Sum64() ^ uint64(Seed))
	return x % uint64(size), mix(x)%uint64(size-1) + 1
}

// mix is the finaliser of SplitMix64: FNV alone leaves keys that differ in the
// last digit correlated.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
