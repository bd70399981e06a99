// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/flow"
)

// checkShadowed refuses rules that no packet can reach because earlier rules match all their packets. The
// first matching rule decides, even if it has no free port.
func (v *validator) checkShadowed() {
	for i := range v.c.NAT {
		r := &v.c.NAT[i]
		if by := v.shadowedNAT(r, v.c.NAT[:i]); by != nil {
			hint := "remove one of them, write it before " + by.Name + ", or give it other sources or interfaces"
			if by.Type == NATSNAT && slices.Equal(by.To.Addresses, r.To.Addresses) && len(by.Ports) > 0 && !slices.EqualFunc(by.Ports, r.Ports, func(a, b flow.Ports) bool { return a == b }) {
				hint = fmt.Sprintf("write one rule with ports: [%s, %s]", by.Ports, r.Ports)
			}
			v.errorf(path{{key: "nat"}, {index: i}}, hint, "it never matches: NAT rule %s, which comes before it, takes all of its packets", by.Name).depends =
				[]path{at("nat")}
		}
	}
	rules := v.c.Firewall.Rules
	for i := range rules {
		for j := range rules[:i] {
			if e := &rules[j]; e.takesAll(&rules[i]) {
				v.errorf(path{{key: "firewall"}, {key: "rules"}, {index: i}}, "remove it, or write it before "+e.Name,
					"it never matches: firewall rule %s, which comes before it, decides about all of its packets", e.Name).depends =
					[]path{{{key: "firewall"}}}
				break
			}
		}
	}
}

// shadowedNAT returns an earlier rule that matches packets of a rule, if earlier rules match all of
// its packets; else nil.
func (v *validator) shadowedNAT(r *NATRule, earlier []NATRule) (by *NATRule) {
	all := r.sourcePrefixes()
	if len(all) == 0 {
		return nil
	}
	for _, p := range all {
		found := slices.IndexFunc(earlier, func(e NATRule) bool { return e.takesFrom(p, r) })
		if found < 0 {
			return nil
		}
		if by == nil {
			by = &earlier[found]
		}
	}
	return by
}

// sourcePrefixes returns the source prefixes of a rule. Without sources, it returns all addresses of
// the families that the rule is known to have addresses for.
func (r *NATRule) sourcePrefixes() []netip.Prefix {
	four, six := netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	switch {
	case !r.Type.HasBindings():
		return nil
	case len(r.Source) > 0:
		return r.Source
	case r.Type.UsesInterfaceAddress():
		return []netip.Prefix{four}
	case r.Type.CrossesStateful():
		return []netip.Prefix{six}
	}
	var all []netip.Prefix
	if slices.ContainsFunc(r.To.Addresses, AddressRange.Is4) {
		all = append(all, four)
	}
	if slices.ContainsFunc(r.To.Addresses, func(a AddressRange) bool { return !a.Is4() }) {
		all = append(all, six)
	}
	return all
}

// takesFrom reports whether a rule matches every packet from a source prefix that a later rule
// would match. Rules that may be on different datapaths are not compared, because the file's order
// has no effect between datapaths.
func (r *NATRule) takesFrom(p netip.Prefix, other *NATRule) bool {
	if r.Type.CrossesStateful() != other.Type.CrossesStateful() || r.Prefix != other.Prefix || r.Datapath != other.Datapath ||
		(r.Helper == "") != (other.Helper == "") || r.Hairpin == SwitchOff && other.Hairpin != SwitchOff || (r.Mark == 0) != (other.Mark == 0) ||
		!r.In.Covers(other.In) || !r.Out.Covers(other.Out) {
		return false
	}
	return slices.ContainsFunc(r.sourcePrefixes(), func(q netip.Prefix) bool {
		return q.Addr().Is4() == p.Addr().Is4() && q.Bits() <= p.Bits() && q.Contains(p.Addr())
	})
}

// takesAll reports whether a firewall rule matches every packet that another rule of its hook
// matches.
func (r *FirewallRule) takesAll(other *FirewallRule) bool {
	switch r.Action {
	case ActionDrop, ActionAccept, ActionReject:
	default:
		return false // evaluation continues after these actions
	}
	ports := len(r.Ports) == 0 || len(other.Ports) > 0 && !slices.ContainsFunc(other.Ports, func(o flow.Ports) bool {
		return !slices.ContainsFunc(r.Ports, func(p flow.Ports) bool { return p.First <= o.First && o.Last <= p.Last })
	})
	return r.Hook == other.Hook && r.Rate.IsZero() && ports && (r.Protocol == flow.Any || r.Protocol == other.Protocol) &&
		(r.In == "" || r.In == other.In) && (r.Out == "" || r.Out == other.Out) &&
		r.Source.includes(other.Source) && r.Destination.includes(other.Destination)
}

// includes reports whether m matches everything that another one matches, without reading the
// contents of sets.
func (m Match) includes(other Match) bool {
	if m.IsZero() || m == other {
		return true
	}
	return m.Prefix.IsValid() && other.Prefix.IsValid() && m.Prefix.Bits() <= other.Prefix.Bits() && m.Prefix.Contains(other.Prefix.Addr())
}
