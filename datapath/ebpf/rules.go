// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/cilium/ebpf"
)

// putRules writes NAT rules field by field: their counts go on. What a part of a masquerade rule has
// counted is that rule's, when another rule gets its number.
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

// putOrder switches to the order of the configuration, all rules at once. It comes between
// the rules and the lists of their sources: no source is of a rule that has no place. What
// is to be retired stands behind, because those lists still name it for a moment.
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

// putFirewall writes the firewall rules, behind the sets that they name and shortly before
// the programs that know how many there are: until then those in force look at as many as
// there were. A rule that stays as it is keeps what its rate has let through.
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

// countedPrefixes are those that are wanted. What those have counted that leave a rule goes on in
// another one of it.
func (d *Datapath) countedPrefixes(want *compile.Desired) (map[wire.PrefixKey]wire.Prefix, error) {
	have, err := table.Content[wire.PrefixKey, wire.Prefix](d.t.Maps["prefixes"])
	if err != nil {
		return nil, err
	}
	prefixes, of := maps.Clone(want.Prefixes), map[uint16]wire.PrefixKey{}
	for k, v := range prefixes {
		if v.Kind != wire.PrefixNAT64 { // those are no rule's
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
