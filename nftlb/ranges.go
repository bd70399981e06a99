// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// ranges is an ordered set of addresses. Overlapping or adjacent parts are merged, as in a set of nftables with
// auto-merge.
type ranges []config.AddressRange

// rangeOf parses an address, a prefix or a range of one family.
func rangeOf(text, family string) (config.AddressRange, bool) {
	var r config.AddressRange
	if err := r.UnmarshalText([]byte(text)); err != nil {
		return r, false
	}
	return r, r.Is4() == (family == "ipv4")
}

// isAdjacent reports whether b begins within a or directly after it. a must begin first.
func isAdjacent(a, b config.AddressRange) bool {
	next := a.Last.Next()
	return a.First.BitLen() == b.First.BitLen() && (!next.IsValid() || b.First.Compare(next) <= 0)
}

// add returns the union of the set and more.
func (s ranges) add(more ...config.AddressRange) ranges {
	all := append(slices.Clone(s), more...)
	slices.SortFunc(all, func(a, b config.AddressRange) int { return a.First.Compare(b.First) })
	var merged ranges
	for _, r := range all {
		if n := len(merged); n > 0 && isAdjacent(merged[n-1], r) {
			if r.Last.Compare(merged[n-1].Last) > 0 {
				merged[n-1].Last = r.Last
			}
			continue
		}
		merged = append(merged, r)
	}
	return merged
}

// remove returns the set without the addresses in less.
func (s ranges) remove(less ...config.AddressRange) ranges {
	for _, cut := range less {
		var rest ranges
		for _, r := range s {
			if r.First.BitLen() != cut.First.BitLen() || r.Last.Less(cut.First) || cut.Last.Less(r.First) {
				rest = append(rest, r)
				continue
			}
			if r.First.Less(cut.First) {
				rest = append(rest, config.AddressRange{First: r.First, Last: cut.First.Prev()})
			}
			if cut.Last.Less(r.Last) {
				rest = append(rest, config.AddressRange{First: cut.Last.Next(), Last: r.Last})
			}
		}
		s = rest
	}
	return s
}
