// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"maps"
	"slices"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// denyFirst returns an intermediate state if sources leave the list of rules for the table of denied
// sources. It denies them in both ways, so that no packet of theirs passes while programs and maps
// change. Otherwise, it returns nil.
func (d *Datapath) denyFirst(want *compile.Desired) *compile.Desired {
	had := d.inForce
	if had == nil || d.programs == nil || len(want.Denied) == 0 || slices.Equal(had.Firewall, want.Firewall) || !slices.ContainsFunc(had.Firewall, dropsSources) {
		return nil
	}
	first := *want
	first.Firewall, first.Hosts, first.Members = had.Firewall, withSets(want.Hosts, had.Hosts, hostList), withSets(want.Members, had.Members, memberList)
	if len(first.Hosts) > int(d.t.Hosts) {
		return nil
	}
	s := &first.Switches
	s.Rules, s.RuleCount = had.Switches.Rules, had.Switches.RuleCount
	s.HostLists |= had.Switches.HostLists & (1 << wire.ListSets)
	s.TrieLists |= had.Switches.TrieLists & (1 << wire.ListSets)
	return &first
}

// dropsSources reports whether a rule drops sources without another condition.
func dropsSources(r wire.FirewallRule) bool {
	return r == (wire.FirewallRule{Action: wire.ActionDrop, Sources: r.Sources}) && r.Sources != 0
}

func hostList(k wire.HostKey) uint32     { return k.List }
func memberList(k wire.MemberKey) uint32 { return k.List }

// withSets returns the entries with the memberships in sets that both states have.
func withSets[K comparable](want, had map[K]uint64, list func(K) uint32) map[K]uint64 {
	both := maps.Clone(want)
	for k, bits := range had {
		if list(k)&0xff == wire.ListSets {
			both[k] |= bits
		}
	}
	return both
}

// deniedDuring returns the sources to deny while programs and rules change. They include those that
// become subject to a list of rules that is not in force yet.
func deniedDuring(want, had *compile.Desired) map[wire.DeniedGroup][]wire.DeniedPrefix {
	if len(had.Denied) == 0 || slices.Equal(had.Firewall, want.Firewall) {
		return want.Denied
	}
	both := maps.Clone(want.Denied)
	for g, prefixes := range had.Denied {
		all := slices.Concat(both[g], prefixes)
		slices.SortFunc(all, wire.DeniedPrefix.Compare)
		both[g] = slices.Compact(all)
	}
	return both
}
