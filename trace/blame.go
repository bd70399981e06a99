// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"slices"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/netdev"
)

// dropRules lists the dropping rules of a namespace, see firewall.DropRules.
func dropRules(ctx context.Context, ns netdev.Namespace) (rules []firewall.Rule, err error) {
	err = ns.Do(func() (err error) {
		rules, err = firewall.DropRules(ctx)
		return err
	})
	return rules, err
}

// blame returns the rules that may have dropped the samples between two listings: rules whose
// counters increased, otherwise rules whose conditions match. Without an earlier listing no
// increase is known. A single result is certain as far as visible; several are candidates.
func blame(before, after []firewall.Rule, hooks map[Hook]bool, samples []*DropSample) []firewall.Rule {
	old := map[string]uint64{}
	for _, r := range before {
		old[r.ID()] = r.Packets
	}
	packets := make([]*firewall.Packet, len(samples))
	for i, s := range samples {
		packets[i] = s.asRulesSee()
	}
	var moved, candidates []firewall.Rule
	for _, r := range after {
		if r.Counted {
			if r.Packets -= min(old[r.ID()], r.Packets); r.Packets == 0 {
				continue
			}
			if before != nil {
				moved = append(moved, r)
				continue
			}
		}
		if !hookFits(r.Hook, hooks) || len(packets) > 0 && !slices.ContainsFunc(packets, r.Fits) {
			continue
		}
		candidates = append(candidates, r)
	}
	if exact := slices.DeleteFunc(slices.Clone(candidates), func(r firewall.Rule) bool { return r.Policy() }); len(exact) > 0 {
		candidates = exact
	}
	return append(moved, candidates...)
}

func hookFits(hook string, seen map[Hook]bool) bool {
	if hook == "" || hook == "ingress" || hook == "egress" || seen[HookHairpin] || len(seen) == 0 {
		return true
	}
	for h := range seen {
		if h.String() == hook {
			return true
		}
	}
	return false
}

// asRulesSee is what rules could see of the packet.
func (s *DropSample) asRulesSee() *firewall.Packet {
	p := &firewall.Packet{Tuple: s.Packet, Mark: s.Mark, InIndex: s.InIfIndex}
	if len(s.Data) > s.L3Offset {
		p.Header = s.Data[s.L3Offset:]
	}
	if s.Hook == HookPrerouting || s.Hook == HookInput || s.Hook == HookForward {
		p.In = s.Interface
	}
	switch s.Tracked {
	case TrackedNone:
		p.States = []uint32{firewall.StateInvalid}
	case TrackedNot:
		p.States = []uint32{firewall.StateUntracked}
	case TrackedNew:
		p.States = []uint32{firewall.StateNew, firewall.StateRelated}
	case TrackedConfirmed: // new until a reply arrives
		p.States = []uint32{firewall.StateEstablished, firewall.StateRelated, firewall.StateNew}
	}
	return p
}
