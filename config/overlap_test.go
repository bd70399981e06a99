// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/sluice-lb/sluice/flow"
)

// overlap is the definition that collisions implements by a sweep.
func overlap(a, b claim) bool {
	return a.address == b.address && a.ports.First <= b.ports.Last && b.ports.First <= a.ports.Last &&
		(a.protocol == b.protocol || a.protocol == flow.Any || b.protocol == flow.Any) &&
		a.iface.Overlaps(b.iface)
}

// TestCollisionsAgreeWithComparingAll: the sweep reports only overlapping claims, and reports none only if no
// two overlap.
func TestCollisionsAgreeWithComparingAll(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		claims := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) claim {
			first := rapid.Uint16Range(1, 20).Draw(t, "first")
			return claim{
				address:  netip.AddrFrom4([4]byte{192, 0, 2, rapid.Uint8Range(1, 2).Draw(t, "address")}),
				protocol: rapid.SampledFrom([]flow.Protocol{flow.Any, flow.TCP, flow.UDP}).Draw(t, "protocol"),
				iface:    rapid.SampledFrom([]Interfaces{"", "wan0", "lan0", "wan*,ppp0", "ppp*"}).Draw(t, "interface"),
				ports:    flow.Ports{First: first, Last: first + rapid.Uint16Range(0, 5).Draw(t, "more")},
			}
		}), 0, 12).Draw(t, "claims")
		found := collisions(claims)
		for _, c := range found {
			if !overlap(c.earlier, c.later) {
				t.Errorf("%s and %s do not overlap", c.earlier, c.later)
			}
		}
		for i := range claims {
			for j := range claims[:i] {
				if overlap(claims[i], claims[j]) && len(found) == 0 {
					t.Errorf("%s and %s overlap", claims[j], claims[i])
				}
			}
		}
	})
}

// TestSpansAgreeWithComparingAll: a range matches a list if it overlaps an element. A list has overlaps if two
// elements overlap.
func TestSpansAgreeWithComparingAll(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := rapid.Custom(func(t *rapid.T) AddressRange {
			first := netip.AddrFrom4([4]byte{192, 0, 2, rapid.Uint8Range(0, 250).Draw(t, "first")})
			if rapid.Bool().Draw(t, "IPv6") {
				first = netip.AddrFrom16([16]byte{0x20, 15: first.As4()[3]})
			}
			last := first
			for range rapid.IntRange(0, 60).Draw(t, "more") {
				last = last.Next()
			}
			if last.BitLen() == 32 && last.Less(first) || !last.IsValid() {
				last = first
			}
			return AddressRange{first, last}
		})
		list, r := rapid.SliceOfN(draw, 0, 8).Draw(t, "list"), draw.Draw(t, "range")
		all := spansOf(list)
		met := slices.ContainsFunc(list, r.overlaps)
		if n := all.indexOverlapping(r); n >= 0 != met || met && !list[n].overlaps(r) {
			t.Errorf("%s is said to meet %d of %s", r, n, list)
		}
		found, twice := all.overlaps(), false
		for i := range list {
			for j := range list[:i] {
				twice = twice || list[i].overlaps(list[j])
			}
		}
		for i, j := range found {
			if j >= i || !list[i].overlaps(list[j]) {
				t.Errorf("%s and %s do not overlap", list[j], list[i])
			}
		}
		if len(found) > 0 != twice {
			t.Errorf("overlaps of %s: %v", list, found)
		}
	})
}
