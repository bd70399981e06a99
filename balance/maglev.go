// SPDX-License-Identifier: Apache-2.0

package balance

import (
	"cmp"
	"hash/fnv"
	"slices"
)

// Seed is the seed of every consistent hash. It is constant, so that nodes, datapaths and reloads select the same
// backend for a tuple.
const Seed uint32 = 0x51c0ffee

// groups is the number of groups of slots, a prime. It is the same in every table, so that tables of different sizes
// nest. With fewer groups, more than 1/n + 2 % of the clients move (2,039 groups: 2.1 %).
const groups = 4093

// MaxTable is the largest table.
const MaxTable = 16 * groups

// TableSize returns the number of slots of a table for n configured backends. Each backend gets at least 128 slots up
// to 511 backends, and 65 up to 1,000, so shares are equal within 1 % and 2 %. A hash selects the same group in
// tables of every size (Slot multiplies). So a service that outgrows its table moves only the clients of the new
// backend.
func TableSize(n int) int {
	switch {
	case n <= groups/128:
		return groups
	case n <= 4*groups/128:
		return 4 * groups
	}
	return MaxTable
}

// Maglev fills a table of size slots with indices of members, or returns nil without members. As in Maglev (NSDI
// 2016, §3.4), every member has a preference list: a permutation of the groups of slots that depends on its key
// alone. Members take turns by weight.
//
// Unlike in that paper, a turn inspects one group; a full group is skipped and uses up the turn. So the first member
// to inspect a slot does not depend on the number of full groups that other members found. A member with its exact
// share stops.
//
// Removing one of n members moves its own slots and less than 2 % of the others (TestMaglevMovesLittle). That is
// about half of Maglev's moves in tables of this size. If size is not a multiple of the number of groups, it must be
// a prime and each group has one slot.
func Maglev(members []Member, size int) []uint16 {
	if len(members) == 0 {
		return nil
	}
	count := groups
	if size%groups != 0 {
		count = size
	}
	each := size / count
	order := make([]int, len(members)) // by key: the position in the file does not matter
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(members[a].Key, members[b].Key) })
	room := shares(members, order, size)
	table := make([]uint16, size)
	taken := make([]int, count) // per group of members
	next := make([]int, len(members))
	skip := make([]int, len(members))
	looked := make([]int, len(members))
	credit := make([]int, len(members))
	for i, m := range members {
		next[i], skip[i] = preference(m.Key, count)
	}
	for len(order) > 0 {
		heaviest := 0
		for _, i := range order {
			heaviest = max(heaviest, members[i].Weight)
		}
		for _, i := range order {
			// A member with fewer untried groups gets less credit, but at least 1/16. So slots follow the weights,
			// and few members have tried all groups before the end.
			if credit[i] += members[i].Weight * max(count-looked[i], count/16); credit[i] < heaviest*count {
				continue
			}
			credit[i] -= heaviest * count
			looked[i]++
			group := next[i]
			if next[i] += skip[i]; next[i] >= count {
				next[i] -= count
			}
			for ; taken[group] < each && room[i] > 0; taken[group]++ {
				table[group*each+taken[group]] = uint16(i)
				room[i]--
			}
		}
		order = slices.DeleteFunc(order, func(i int) bool { return room[i] == 0 })
	}
	return table
}

// shares returns the number of slots of each member by its weight. The first members in order get one more slot each
// until no slot is left.
func shares(members []Member, order []int, size int) []int {
	total, left := 0, size
	for _, m := range members {
		total += m.Weight
	}
	share := make([]int, len(members))
	for i, m := range members {
		share[i] = size * m.Weight / total
		left -= share[i]
	}
	for _, i := range order[:left] {
		share[i]++
	}
	return share
}

// preference derives offset and skip of a member's permutation from its key.
func preference(key string, count int) (offset, skip int) {
	h := fnv.New64a()
	h.Write([]byte(key))
	x := mix(h.Sum64() ^ uint64(Seed))
	return int(x % uint64(count)), int(mix(x)%uint64(count-1)) + 1
}

// mix is the finaliser of SplitMix64. FNV alone correlates keys that differ in the last digit.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
