// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

// Embed returns an IPv4 address embedded in an RFC 6052 prefix (§2.2). Bits 64 to 71 stay zero.
func Embed(prefix netip.Prefix, a netip.Addr) netip.Addr {
	b := prefix.Masked().Addr().As16()
	at := prefix.Bits() / 8
	for _, octet := range a.As4() {
		if at == 8 {
			at++
		}
		b[at] = octet
		at++
	}
	return netip.AddrFrom16(b)
}

// Outside returns the pool endpoint of a sender. A hairpin of nat64 carries it embedded in the
// rule's prefix.
func (m *Model) Outside(sender netip.AddrPort) (netip.AddrPort, bool) {
	for _, r := range m.rules {
		if r.Type.CrossesStateful() && r.Prefix.Contains(sender.Addr()) {
			a, ok := extract(r.Prefix, sender.Addr())
			return netip.AddrPortFrom(a, sender.Port()), ok
		}
	}
	return sender, true
}

// extract returns the IPv4 address in an address with an RFC 6052 prefix (§2.3).
func extract(prefix netip.Prefix, a netip.Addr) (netip.Addr, bool) {
	if !prefix.Contains(a) {
		return netip.Addr{}, false
	}
	b := a.As16()
	var v [4]byte
	at := prefix.Bits() / 8
	for i := range v {
		if at == 8 {
			at++
		}
		v[i] = b[at]
		at++
	}
	return netip.AddrFrom4(v), true
}

// prefix is one direction of a stateless rule: it maps addresses in from to addresses in to.
type prefix struct {
	rule     *rule
	from, to netip.Prefix
	source   bool // matches sources (outbound), otherwise destinations (inbound)
	eam      bool
}

// addPrefixes adds a static, npt66 or siit rule to the prefix table.
func (m *Model) addPrefixes(r *rule) {
	if r.Type.CrossesStateless() {
		for _, e := range r.EAM {
			m.prefixes = append(m.prefixes, &prefix{rule: r, from: e.IPv4.Masked(), to: e.IPv6.Masked(), eam: true},
				&prefix{rule: r, from: e.IPv6.Masked(), to: e.IPv4.Masked(), eam: true})
		}
		return
	}
	m.prefixes = append(m.prefixes, &prefix{rule: r, from: r.Internal.Masked(), to: r.External.Masked(), source: true},
		&prefix{rule: r, from: r.External.Masked(), to: r.Internal.Masked()})
}

// stateless handles packets of static, npt66 and siit rules.
func (m *Model) stateless(in Arrival, v *view) (plan, bool) {
	if p, ok := m.siit(in, v); ok {
		return p, true
	}
	src, dst := v.src.Addr(), v.dst.Addr()
	from, to := m.translate(src, true), m.translate(dst, false)
	if from != nil && !from.rule.interfacesMatch(m, in, v, dst, true) {
		from = nil
	}
	if to != nil && !to.rule.interfacesMatch(m, in, v, src, false) {
		to = nil
	}
	if from != nil && to == nil && contains(from.rule.Except, dst) {
		return passPlan(ReasonExcepted), true
	}
	if from == nil && to == nil {
		return plan{}, false
	}
	p := plan{action: Forward, reason: ReasonStatic, neutral: true}
	for _, half := range []struct {
		p *prefix
		a *netip.Addr
	}{{from, &src}, {to, &dst}} {
		if half.p == nil {
			continue
		}
		a, ok := half.p.apply(*half.a)
		if !ok {
			return drop(ReasonUntranslatable), true
		}
		*half.a = a
		p.neutral = p.neutral && half.p.rule.Type.ChecksumNeutral()
		p.clamp = p.clamp || half.p.rule.MSSClamp
		p.count = append(p.count, &half.p.rule.tally)
	}
	p.to = flow.Tuple{Protocol: v.protocol, Source: netip.AddrPortFrom(src, v.src.Port()), Dest: netip.AddrPortFrom(dst, v.dst.Port())}
	return p, true
}

// interfacesMatch checks the interfaces of a prefix rule, where out is the outside. An outbound packet
// leaves there, except for a hairpin. An inbound packet arrives there.
func (r *rule) interfacesMatch(m *Model, in Arrival, v *view, other netip.Addr, leaving bool) bool {
	switch {
	case leaving && !r.In.Has(in.Interface):
		return false
	case leaving && r.Out != "":
		next, ok := m.host.route(other)
		return ok && (r.Out.Has(next.Name) && !m.host.Owns(other) || m.translate(other, false) != nil)
	}
	return true
}

// translate returns the longest prefix that contains a source or a destination address.
func (m *Model) translate(a netip.Addr, source bool) *prefix {
	var best *prefix
	for _, p := range m.prefixes {
		if !p.eam && p.source == source && p.from.Contains(a) && (best == nil || p.from.Bits() > best.from.Bits()) {
			best = p
		}
	}
	return best
}

// apply translates one address.
func (p *prefix) apply(a netip.Addr) (netip.Addr, bool) {
	if p.rule.Type.ChecksumNeutral() {
		return npt66(p.from, p.to, a)
	}
	return swap(p.from, p.to, a), true
}

// swap returns an address with prefix to and the suffix of a after prefix from.
func swap(from, to netip.Prefix, a netip.Addr) netip.Addr {
	suffix := a.AsSlice()
	out := to.Addr().AsSlice()
	n, k := from.Bits(), to.Bits()
	for i := 0; n+i < len(suffix)*8 && k+i < len(out)*8; i++ {
		if suffix[(n+i)/8]&(0x80>>((n+i)%8)) != 0 {
			out[(k+i)/8] |= 0x80 >> ((k + i) % 8)
		}
	}
	r, _ := netip.AddrFromSlice(out)
	return r
}

// npt66 translates a prefix and adjusts another word of the address to keep the checksum (RFC 6296
// §3). For prefixes of /48 and shorter it adjusts the subnet word (§3.4). Otherwise it adjusts the
// first word of the interface identifier that differs from 0xffff (§3.5). An address without such a
// word has no translation.
func npt66(from, to netip.Prefix, a netip.Addr) (netip.Addr, bool) {
	b := swap(from, to, a).As16()
	was := a.As16()
	word := 3
	if from.Bits() > 48 {
		for word = 4; word < 8 && binary.BigEndian.Uint16(was[2*word:]) == 0xffff; word++ {
		}
		if word == 8 {
			return netip.Addr{}, false
		}
	}
	x, y := from.Addr().As16(), to.Addr().As16()
	adjustment := onesAdd(onesSum(x[:]), ^onesSum(y[:]))
	if word == 3 && binary.BigEndian.Uint16(was[6:]) == 0xffff {
		return netip.Addr{}, false // §3.4: a subnet of 0xffff cannot be mapped
	}
	v := onesAdd(binary.BigEndian.Uint16(was[2*word:]), adjustment)
	if v == 0xffff {
		v = 0
	}
	binary.BigEndian.PutUint16(b[2*word:], v)
	return netip.AddrFrom16(b), true
}

func onesAdd(a, b uint16) uint16 {
	s := uint32(a) + uint32(b)
	return uint16(s + s>>16)
}

func onesSum(b []byte) uint16 {
	var s uint16
	for ; len(b) > 0; b = b[2:] {
		s = onesAdd(s, binary.BigEndian.Uint16(b))
	}
	return s
}
