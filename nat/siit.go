// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// siit handles packets between the families without state: each address by the
// explicit mapping with the longest prefix, else by the RFC 6052 prefix (RFC 7757
// §3.2, RFC 7915).
func (m *Model) siit(in Arrival, v *view) (plan, bool) {
	r, src, dst := m.siitRule(in, v)
	if r == nil {
		return plan{}, false
	}
	if contains(r.Except, v.dst.Addr()) || contains(r.Except, dst) {
		return pass(ReasonExcepted), true
	}
	if v.v6 && (nowhere(src) || nowhere(dst)) {
		return drop(ReasonUntranslatable), true // RFC 7915 §5.1, RFC 1812 §5.3.7
	}
	dst, src = m.siitHairpin(r, v, dst, src)
	protocol := v.protocol
	switch {
	case src.Is6() == v.v6:
	case v.v6 && protocol == flow.ICMPv6:
		protocol = flow.ICMP
	case !v.v6 && protocol == flow.ICMP:
		protocol = flow.ICMPv6
	}
	p := plan{action: Forward, reason: ReasonStatic, clamp: r.MSSClamp, count: []*tally{&r.tally}}
	p.to = flow.Tuple{Protocol: protocol, Source: netip.AddrPortFrom(src, v.src.Port()), Dest: netip.AddrPortFrom(dst, v.dst.Port())}
	if v.kind == icmpOther && protocol != v.protocol { // it has no counterpart (RFC 7915 §4.2, §5.2)
		p.action, p.reason = Drop, ReasonUntranslatable
	}
	return p, true
}

// siitRule returns the rule that handles a packet and what its two ends become, or nil.
func (m *Model) siitRule(in Arrival, v *view) (r *rule, src, dst netip.Addr) {
	for _, r := range m.rules {
		if r.Type != config.NATSIIT || v.v6 && !r.In.Has(in.Interface) {
			continue
		}
		if src, dst, ok := m.siitAddresses(r, v); ok {
			return r, src, dst
		}
	}
	return nil, src, dst
}

// siitAddresses returns what the two ends become, if the rule knows both.
func (m *Model) siitAddresses(r *rule, v *view) (src, dst netip.Addr, ok bool) {
	src, ok = m.siitAddress(r, v.src.Addr())
	if !ok {
		return
	}
	dst, ok = m.siitAddress(r, v.dst.Addr())
	// An IPv4 packet is for us only when its destination stands for an IPv6 host;
	// every IPv4 address has a place in the prefix.
	if ok && !v.v6 && r.Prefix.IsValid() && m.explicit(r, v.dst.Addr()) == nil {
		ok = false
	}
	return
}

// siitHairpin turns a packet of an IPv6 host round that it sent to the place in the
// prefix of a host with an explicit mapping: it stays in IPv6, and its source is
// seen in the prefix too (RFC 7757 §4.2.2).
func (m *Model) siitHairpin(r *rule, v *view, dst, src netip.Addr) (netip.Addr, netip.Addr) {
	if !v.v6 || m.explicit(r, v.dst.Addr()) != nil {
		return dst, src
	}
	if back := m.explicit(r, dst); back != nil {
		return swap(back.from, back.to, dst), Embed(r.Prefix, src)
	}
	return dst, src
}

// siitSource maps another address by the rule that handles a packet.
func (m *Model) siitSource(in Arrival, v *view, a netip.Addr) (netip.Addr, bool) {
	if r, _, _ := m.siitRule(in, v); r != nil {
		return m.siitAddress(r, a)
	}
	return a, false
}

func (m *Model) explicit(r *rule, a netip.Addr) *prefix {
	var best *prefix
	for _, p := range m.prefixes {
		if p.eam && p.rule == r && p.from.Contains(a) && (best == nil || p.from.Bits() > best.from.Bits()) {
			best = p
		}
	}
	return best
}

// siitAddress maps one address.
func (m *Model) siitAddress(r *rule, a netip.Addr) (netip.Addr, bool) {
	if p := m.explicit(r, a); p != nil {
		return swap(p.from, p.to, a), true
	}
	switch {
	case !r.Prefix.IsValid():
		return a, false
	case a.Is4():
		return Embed(r.Prefix, a), true
	}
	return extract(r.Prefix, a)
}
