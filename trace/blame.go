// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
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

// suspectRules returns the rules that may have dropped the samples between two listings: rules whose
// counters increased, otherwise rules whose conditions match. Without an earlier listing no
// increase is known. A single result is certain as far as visible; several are candidates.
func suspectRules(before, after []firewall.Rule, hooks map[Hook]bool, samples []*DropSample) []firewall.Rule {
	old := map[string]uint64{}
	for _, r := range before {
		old[r.ID()] = r.Packets
	}
	var moved, visible []firewall.Rule
	for _, r := range after {
		if r.Counted {
			if r.Packets -= min(old[r.ID()], r.Packets); r.Packets == 0 {
				continue
			}
			if before != nil {
				moved = append(moved, r)
			}
		}
		visible = append(visible, r)
	}
	fitting := map[string]bool{}
	for _, s := range distinctPackets(samples) {
		p, of := s.asRulesSee(), hooks
		if s.Hook != HookNone {
			of = map[Hook]bool{s.Hook: true}
		}
		for _, r := range ofSample(visible, of, p) {
			s.Blamed = append(s.Blamed, r.ID())
			fitting[r.ID()] = true
		}
	}
	candidates := slices.DeleteFunc(visible, func(r firewall.Rule) bool {
		return slices.ContainsFunc(moved, func(m firewall.Rule) bool { return m.ID() == r.ID() }) || len(samples) > 0 && !fitting[r.ID()] || len(samples) == 0 && !hookFits(r.Hook, hooks)
	})
	return append(moved, withoutPolicies(candidates, len(samples) == 0)...)
}

// ofSample returns the rules that may have dropped a packet. A chain's policy applies only where no rule matches.
func ofSample(rules []firewall.Rule, hooks map[Hook]bool, p *firewall.Packet) (fitting []firewall.Rule) {
	for _, r := range rules {
		if hookFits(r.Hook, hooks) && r.Fits(p) {
			fitting = append(fitting, r)
		}
	}
	return withoutPolicies(fitting, true)
}

// withoutPolicies leaves out policies where a rule is a candidate, too.
func withoutPolicies(candidates []firewall.Rule, apply bool) []firewall.Rule {
	rules := slices.DeleteFunc(slices.Clone(candidates), func(r firewall.Rule) bool { return r.Policy() })
	if !apply || len(rules) == 0 {
		return candidates
	}
	return rules
}

// mostBlamed bounds the samples of a group that rules are evaluated for.
const mostBlamed = 64

// distinctPackets returns samples of different packets.
func distinctPackets(samples []*DropSample) (list []*DropSample) {
	type shape struct {
		tuple flow.Tuple
		hook  Hook
		in    string
	}
	seen := map[shape]bool{}
	for _, s := range samples {
		id := shape{s.Packet, s.Hook, s.Interface}
		if id.tuple.IsValid() { // the client's port changes with each connection
			id.tuple.Source = netip.AddrPortFrom(id.tuple.Source.Addr(), 0)
		}
		if !seen[id] && len(list) < mostBlamed {
			seen[id] = true
			list = append(list, s)
		}
	}
	return list
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
