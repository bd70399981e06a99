// SPDX-License-Identifier: Apache-2.0

// Package balance holds the schedulers as pure functions: they turn backends
// with weights into tables that both datapaths index in the same way, so that
// every node and every datapath agrees on the backend of a tuple.
package balance

// Member is one backend that takes new flows. Key is what identifies it across
// reloads and nodes (its address and port, not its position); Weight is at
// least 1.
type Member struct {
	Key    string
	Weight int
}

// Smooth returns the smooth weighted round-robin sequence of the members as
// indices: every member appears weight/gcd times, spread as evenly as possible
// rather than in bursts.
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

// Moved counts the slots of the table after, or before if that is the only one, whose
// owner differs. Tables of different TableSize are compared by groups of slots, as a hash
// finds the same group in both; others of different lengths differ everywhere.
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
