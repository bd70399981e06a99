// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"reflect"
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// Uplink is an uplink of the configuration with its current state.
type Uplink struct {
	Name      string
	Interface string
	// Mark selects the routing table of the uplink. It lies in the bits config.UplinkMarks.
	Mark   uint32
	Weight int
	// Prefixes are the source addresses that the provider accepts: the networks or addresses of the interface, and the
	// prefixes of the configuration. No two uplinks share an address.
	Prefixes []netip.Prefix
	// Usable by family, IPv4 first: the connections of the uplink continue.
	Usable [2]bool
	// Carries by family: the uplink gets new connections.
	Carries [2]bool
}

// FamilyIndex is the index of an address's family in the arrays of Uplink.
func FamilyIndex(a netip.Addr) int {
	if a.Is6() {
		return 1
	}
	return 0
}

// SameUplinks reports whether two lists of uplinks are equal.
func SameUplinks(a, b []Uplink) bool {
	return slices.EqualFunc(a, b, func(x, y Uplink) bool { return reflect.DeepEqual(x, y) })
}

// LostPrefixes returns the source addresses that have no usable uplink in a snapshot, but had one in the snapshot
// before. Their connections must end: no reply reaches such an address. Without a snapshot before, they are the
// addresses of all unusable uplinks, because their connections may be from an earlier process.
func LostPrefixes(before, after *Snapshot) (lost []netip.Prefix) {
	alive := map[netip.Prefix]bool{}
	for _, u := range after.Uplinks {
		for _, p := range u.Prefixes {
			alive[p] = u.Usable[FamilyIndex(p.Addr())]
		}
	}
	was := after.Uplinks
	if before != nil {
		was = before.Uplinks
	}
	for _, u := range was {
		for _, p := range u.Prefixes {
			if !alive[p] && (before == nil || u.Usable[FamilyIndex(p.Addr())]) {
				lost = append(lost, p)
			}
		}
	}
	return lost
}

// NeedsNftables returns why a configuration must be on nftables as a whole, or "".
func NeedsNftables(c *config.Config) string {
	if len(c.Uplinks) > 0 {
		return "uplinks are selected by rules of nftables and connection tracking"
	}
	return ""
}
