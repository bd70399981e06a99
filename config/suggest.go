// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"
	"strings"
)

// elsewhere maps terms of iptables, nftables and others to the terms used here.
var elsewhere = map[string]string{
	"dnat": "port-forward", "redirect": "port-forward", "netmap": "static", "nptv6": "npt66", "deny": "drop", "round-robin": "rr",
}

// hintOneOf lists the known words, and suggests those that s may have meant.
func hintOneOf(s string, known []string) string {
	if near := Nearest(s, known); near != "" {
		return "write " + near + "; known are " + strings.Join(known, ", ")
	}
	return "write one of " + strings.Join(known, ", ")
}

// Nearest returns the known word with the smallest edit distance from s, or "" if none is close.
func Nearest(s string, known []string) string {
	const longest = 64
	s = strings.ToLower(strings.NewReplacer("_", "-", " ", "-").Replace(s))
	if len(s) == 0 || len(s) > longest {
		return ""
	}
	if word := elsewhere[s]; slices.Contains(known, word) {
		return word
	}
	best, bestDistance := "", max(1, len(s)/3)+1
	for _, k := range known {
		if len(k) > longest {
			continue
		}
		if d := distance(s, strings.ToLower(k)); d < bestDistance {
			best, bestDistance = k, d
		}
	}
	return best
}

// distance is the number of insertions, deletions, substitutions and swaps of
// neighbours that make b out of a (optimal string alignment).
func distance(a, b string) int {
	prev2, prev, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(prev[j]+1, row[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], prev2[j-2]+1)
			}
		}
		prev2, prev, row = prev, row, prev2
	}
	return prev[len(b)]
}
