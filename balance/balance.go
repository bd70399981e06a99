// SPDX-License-Identifier: Apache-2.0

// Package balance holds the schedulers as pure functions. They turn weighted backends into tables that both datapaths
// index alike, so every node and datapath selects the same backend for a tuple.
package balance

// Member is one backend that accepts new flows. Key identifies it across reloads and nodes (its address and port, not
// its position). Weight is at least 1.
type Member struct {
	Key    string
	Weight int
}

// Smooth returns the smooth weighted round-robin sequence of the members as indices. Every member appears weight/gcd
// times, spread as evenly as possible.
func Smooth(members []Member) []int {
	if len(members) == 0 {
		return nil
	}
	divisor, total := 0, 0
	for _, m := range members {
		divisor = gcd(divisor, m.Weight)
	}
	for _, m := range members {
		total += m.Weight / divisor
	}
	sequence := make([]int, 0, total)
	credit := make([]int, len(members))
	for range total {
		best := 0
		for i, m := range members {
			credit[i] += m.Weight / divisor
			if credit[i] > credit[best] {
				best = i
			}
		}
		credit[best] -= total
		sequence = append(sequence, best)
	}
	return sequence
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Moved counts the slots with different owners in two tables. If only one table exists, all its slots count. Tables
// of different TableSize are compared by groups of slots, because a hash selects the same group in both. Tables of
// other lengths differ in every slot.
func Moved(before, after []string) int {
	fine := max(len(before), len(after))
	if len(before) == len(after) || len(before)*len(after) != 0 && len(before)%groups+len(after)%groups == 0 {
		moved := 0
		for i := range fine {
			if before[i*len(before)/fine] != after[i*len(after)/fine] {
				moved++
			}
		}
		return (moved*len(after) + fine - 1) / max(fine, 1)
	}
	return fine
}
