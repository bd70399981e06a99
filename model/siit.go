// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

const igmp flow.Protocol = 2

// siit translates packets between the families without state. Each address uses the explicit
// mapping with the longest prefix, or else the RFC 6052 prefix (RFC 7757 §3.2, RFC 7915).
func (m *Model) siit(in Arrival, v *view) (plan, bool) {
	x, ok := m.siitRule(in, v)
	if !ok {
		return plan{}, false
	}
	r, src, dst := x.rule, x.src, x.dst
	switch {
	case x.local:
		return passPlan(ReasonNotRouted), true
	case x.excepted:
		return passPlan(ReasonExcepted), true
	case x.unroutable:
		return drop(ReasonUntranslatable), true // RFC 7915 §5.1, RFC 1812 §5.3.7
	}
	protocol := v.protocol
	switch {
	case src.Is6() == v.v6:
	case v.v6 && protocol == flow.ICMPv6:
		protocol = flow.ICMP
	case !v.v6 && protocol == flow.ICMP:
		protocol = flow.ICMPv6
	}
	p := plan{action: Forward, reason: ReasonStatic, clamp: r.MSSClamp, count: []*tally{&r.tally}, class: r.TrafficClass, requireChecksum: r.UDPZeroChecksum == "drop"}
	p.to = flow.Tuple{Protocol: protocol, Source: netip.AddrPortFrom(src, v.src.Port()), Dest: netip.AddrPortFrom(dst, v.dst.Port())}
	if v.kind == icmpOther && protocol != v.protocol { // no counterpart exists (RFC 7915 §4.2, §5.2)
		p.action, p.reason = Drop, ReasonUntranslatable
	}
	if !v.v6 && protocol == igmp && src.Is6() { // IGMP is for one link or for routers (RFC 7915 §4.2)
		p.action, p.reason = Drop, ReasonUntranslatable
	}
	return p, true
}

// siitResult is the result of a siit rule for the addresses of a packet.
type siitResult struct {
	rule       *rule
	src, dst   netip.Addr
	local      bool // destination is this host
	excepted   bool
	unroutable bool // an address is not routable
}

// siitRule returns the rule for a packet with its result.
func (m *Model) siitRule(in Arrival, v *view) (siitResult, bool) {
	for _, named := range []func(*rule) bool{
		func(r *rule) bool { return v.v6 || m.explicitMapping(r, v.dst.Addr()) != nil },
		func(r *rule) bool { return !v.v6 && r.Prefix.IsValid() && m.explicitMapping(r, v.src.Addr()) != nil },
		func(r *rule) bool { return !v.v6 && r.Default4() },
	} {
		for _, r := range m.rules {
			if !r.Type.CrossesStateless() || !named(r) {
				continue
			}
			if x, ok := m.applySIIT(r, in, v); ok {
				return x, true
			}
		}
		if !v.v6 && m.anyNamed(named) { // the first class with a matching rule decides
			return siitResult{}, false
		}
	}
	return siitResult{}, false
}

func (m *Model) anyNamed(named func(*rule) bool) bool {
	for _, r := range m.rules {
		if r.Type.CrossesStateless() && named(r) {
			return true
		}
	}
	return false
}

// applySIIT applies a rule to a packet. The rule must map both addresses and match the interfaces, and
// no more specific route to the destination may exist (RFC 7915 §4.6, §5.6).
func (m *Model) applySIIT(r *rule, in Arrival, v *view) (x siitResult, ok bool) {
	x.rule = r
	if x.src, ok = m.siitAddress(r, v.src.Addr()); !ok {
		return x, false
	}
	if x.dst, ok = m.siitAddress(r, v.dst.Addr()); !ok {
		return x, false
	}
	if !v.v6 && m.explicitMapping(r, v.dst.Addr()) == nil && isUnroutable(v.dst.Addr()) {
		return x, false
	}
	if m.host.Owns(v.dst.Addr()) {
		x.local = true
		return x, true
	}
	if m.host.routeLength(v.dst.Addr()) > m.mappedBits(r, v.dst.Addr()) {
		return x, false
	}
	dst := x.dst
	x.excepted = contains(r.Except, v.dst.Addr()) || contains(r.Except, x.dst) || contains(r.Except, v.src.Addr()) || contains(r.Except, x.src)
	x.unroutable = v.v6 && (isUnroutable(x.src) || isUnroutable(x.dst))
	hairpin := false
	if !x.excepted && !x.unroutable {
		hairpin = m.siitHairpin(r, v, &x)
	}
	return x, m.ofInterfaces(r, in, dst, hairpin)
}

// mappedBits returns the prefix length of the mapping for a destination.
func (m *Model) mappedBits(r *rule, a netip.Addr) int {
	if p := m.explicitMapping(r, a); p != nil {
		return p.from.Bits()
	}
	if a.Is6() {
		return r.Prefix.Bits()
	}
	return 0
}

// ofInterfaces reports whether a packet matches the interfaces of the rule, in either direction. A
// hairpin packet leaves by the inside.
func (m *Model) ofInterfaces(r *rule, in Arrival, dst netip.Addr, hairpin bool) bool {
	leaves := ""
	if next, ok := m.host.route(dst); ok && !m.host.Owns(dst) {
		leaves = next.Name
	}
	if r.In.Has(in.Interface) && (hairpin || r.Out.Has(leaves)) {
		return true
	}
	return r.Out.Has(in.Interface) && r.In.Has(leaves)
}

// siitHairpin maps a packet from an IPv6 host to the embedded address of a host with an explicit
// mapping. The packet stays in IPv6, and its source is embedded in the prefix too (RFC 7757
// §4.2.2).
func (m *Model) siitHairpin(r *rule, v *view, x *siitResult) bool {
	if !v.v6 || m.explicitMapping(r, v.dst.Addr()) != nil {
		return false
	}
	back := m.explicitMapping(r, x.dst)
	if back == nil {
		return false
	}
	x.dst, x.src = swap(back.from, back.to, x.dst), Embed(r.Prefix, x.src)
	return true
}

// siitSource maps the sender of an error by the rule for the quoted packet. An IPv6 router without
// an IPv4 address gets an address of the rule's pool (RFC 6791 §3.2).
func (m *Model) siitSource(in Arrival, v *view, a netip.Addr) (netip.Addr, bool) {
	x, ok := m.siitRule(in, v)
	if !ok {
		return a, false
	}
	own, ok := m.siitAddress(x.rule, a)
	if pool := x.rule.Pool; a.Is6() && len(pool) > 0 && (!ok || isUnroutable(own)) {
		b, place := a.As16(), uint32(0)
		for i := 0; i < 16; i += 4 {
			place += binary.BigEndian.Uint32(b[i:])
		}
		list := expand(pool, false)
		return list[place%uint32(len(list))], true
	}
	return own, ok
}

func (m *Model) explicitMapping(r *rule, a netip.Addr) *prefix {
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
	if p := m.explicitMapping(r, a); p != nil {
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
