// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// putRules writes NAT rules field by field to preserve their counters. If an id of a masquerade
// part is reused, the part's counts are added to its masquerade rule.
func (d *Datapath) putRules(want *compile.Desired) {
	for id, r := range want.Rules {
		v := &d.t.Rules.Values[id]
		r.Packets, r.Bytes, r.Flows = v.Packets, v.Bytes, v.Flows
		if v.Active == 0 && !(v.Group != 0 && v.Group == r.Group) {
			if v.Group != 0 {
				whole := &d.t.Rules.Values[v.Group-1]
				whole.Packets, whole.Bytes = whole.Packets+v.Packets, whole.Bytes+v.Bytes
			}
			r.Packets, r.Bytes, r.Flows = 0, 0, 0
		}
		*v = r
	}
}

// putOrder replaces the order of the rules atomically. It runs after the rules and before their
// source lists, so that every source belongs to a rule with a position. Rules to retire are last,
// because the old source lists still refer to them.
func (d *Datapath) putOrder(want *compile.Desired) {
	all := slices.Clone(want.Order)
	for id := range d.t.Rules.Values {
		if d.t.Rules.Values[id].Active != 0 && !slices.Contains(all, uint32(id)) {
			all = append(all, uint32(id))
		}
	}
	var order wire.NatOrder
	for i, id := range all {
		order.Rules[i] = uint8(id) + 1
	}
	now := &d.t.Control.Values[0].NatOrder
	next := 1 - *now&1
	d.t.Orders.Values[next] = order
	atomic.StoreUint32(now, next)
}

// putFirewall writes the firewall rules, after the sets that they use and shortly before the
// programs. The programs contain the number of rules, so the old programs read only the old number.
// An unchanged rule keeps its rate limiter state.
func putFirewall(m *ebpf.Map, rules []wire.FirewallRule) error {
	for i, r := range rules {
		var was wire.FirewallRule
		if err := m.Lookup(uint32(i), &was); err != nil {
			return fmt.Errorf("firewall rule %d: %w", i+1, err)
		}
		if was.Tat = 0; was == r {
			continue
		}
		if err := m.Put(uint32(i), &r); err != nil {
			return fmt.Errorf("firewall rule %d: %w", i+1, err)
		}
	}
	return nil
}

func keepPrefixCounts(old wire.Prefix, v *wire.Prefix) {
	v.Packets, v.Bytes = v.Packets+old.Packets, v.Bytes+old.Bytes
}

// countedPrefixes returns the desired prefixes with their counters. Counts of a removed prefix are
// added to another prefix of the same rule.
func (d *Datapath) countedPrefixes(want *compile.Desired) (map[wire.PrefixKey]wire.Prefix, error) {
	have, err := table.Content[wire.PrefixKey, wire.Prefix](d.t.Maps["prefixes"])
	if err != nil {
		return nil, err
	}
	prefixes, of := maps.Clone(want.Prefixes), map[uint16]wire.PrefixKey{}
	for k, v := range prefixes {
		if v.Kind != wire.PrefixNAT64 { // nat64 prefixes belong to no single rule
			of[v.Rule] = k
		}
	}
	for k, v := range have {
		other, ok := of[v.Rule]
		if _, stays := prefixes[k]; stays || !ok || v.Kind == wire.PrefixNAT64 {
			continue
		}
		to := prefixes[other]
		keepPrefixCounts(v, &to)
		prefixes[other] = to
	}
	return prefixes, nil
}
