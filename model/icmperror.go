// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// icmpError handles an ICMP error by the session of the quoted packet. The error never creates,
// refreshes or ends a session (RFC 4787 REQ-12, RFC 5382 REQ-10, RFC 5508 REQ-4 to REQ-6).
func (m *Model) icmpError(in Arrival, v *view) plan {
	q := v.quoted
	if q == nil {
		return m.errorWithoutFlow(in, v)
	}
	p, ok := m.errorOf(in, v)
	if !ok {
		return m.errorWithoutFlow(in, v)
	}
	if !validError(v) {
		return drop(ReasonBadChecksum)
	}
	return p
}

// errorOf returns the plan for an error by its quoted packet. The error takes the path of an answer
// to the quoted packet.
func (m *Model) errorOf(in Arrival, v *view) (plan, bool) {
	answering := v.quoted.tuple().Reverse()
	p, ok := m.errorOfSession(v, answering)
	if !ok {
		p, ok = m.errorOfService(in, v, answering)
	}
	if !ok {
		p, ok = m.errorOfPrefix(in, v)
	}
	return p, ok
}

// errorWithoutFlow drops an error about a missing session of the gateway (RFC 5508 REQ-4, REQ-5):
// an error to a pool address, and an error with a source that a rule translates. The latter would
// show an inside address outside. All other errors pass.
func (m *Model) errorWithoutFlow(in Arrival, v *view) plan {
	if m.inAnyPool(v.dst.Addr()) && !m.host.Owns(v.dst.Addr()) {
		return drop(ReasonErrorWithoutFlow)
	}
	if m.wouldTranslate(in, v) {
		return drop(ReasonErrorWithoutFlow)
	}
	return passPlan(ReasonNotOurs)
}

// validError reports whether the checksums of the error and of the quoted IP header are correct
// (RFC 5508 REQ-3 and 3a). It ignores the quoted transport checksum (3c). It refuses a fragmented
// error, because the checksum covers the other fragments. Hosts send smaller errors (RFC 1812
// §4.3.2.3, RFC 4443 §2.4 (c)).
func validError(v *view) bool {
	if v.first || v.v6 && packet.TransportChecksum(v.src.Addr(), v.dst.Addr(), uint8(flow.ICMPv6), v.payload()) != 0 ||
		!v.v6 && packet.Checksum(v.payload()) != 0 {
		return false
	}
	return v.quoted.v6 || packet.Checksum(v.quoted.ip[:v.quoted.header]) == 0
}

func (m *Model) errorOfSession(v *view, answering flow.Tuple) (plan, bool) {
	h := m.sessions[answering]
	if h == nil || v.quoted.kind > icmpReply {
		return plan{}, false
	}
	if b := h.binding; b != nil && b.provisional && b.inside == answering.Source {
		m.confirm(b, openingPacket(answering))
	}
	if h.service != nil && h.direction == flow.Original {
		h = m.confirmSession(openingPacket(answering), h)
	}
	out := h.out()
	quote := h.tuple[1-h.direction]
	p := plan{action: Forward, reason: ReasonICMPError, quote: &quote}
	if h.service != nil && h.direction == flow.Original {
		h.service.routeTo(&p, v, h.backend)
		if h.service.answersDirectly() {
			p.quote = nil
			p.to = v.tuple()
			return p, true
		}
	}
	p.to = flow.Tuple{Protocol: quote.Protocol, Source: netip.AddrPortFrom(m.errorSource(v, h, out), 0),
		Dest: netip.AddrPortFrom(out.Dest.Addr(), 0)}
	p.to.Protocol = v.protocol
	if h.splice != nil && h.splice.answered && h.direction == flow.Original {
		p.replacement = v.withoutSplice(h.splice.ahead)
	}
	return p, true
}

// withoutSplice returns the error with the backend's sequence number in the quoted packet.
func (v *view) withoutSplice(ahead uint32) *view {
	b := slices.Clone(v.ip)
	t := b[v.header+8+v.quoted.header:]
	if len(t) >= 18 {
		setNumber(t, 4, binary.BigEndian.Uint32(t[4:])-ahead)
	} else {
		binary.BigEndian.PutUint32(t[4:], binary.BigEndian.Uint32(t[4:])-ahead)
	}
	even := func(b []byte) []byte { return append(slices.Clone(b[v.header+8:]), make([]byte, len(b)%2)...) }
	sum := packet.UpdateChecksum(binary.BigEndian.Uint16(b[v.header+2:]), even(v.ip), even(b))
	binary.BigEndian.PutUint16(b[v.header+2:], sum)
	is, _ := readIP(b)
	is.macs, is.trailer = v.macs, v.trailer
	return is
}

// errorSource returns the source address of the translated error. A router on a translated side
// must stay hidden: the error gets the translated address of the session (RFC 5508 REQ-5c). A
// router on the IPv4 side of nat64 keeps its address, embedded in the prefix.
func (m *Model) errorSource(v *view, h *sessionHalf, out flow.Tuple) netip.Addr {
	switch {
	case h.rule != nil && h.rule.Type.CrossesStateful() && !v.v6:
		return Embed(h.rule.Prefix, v.src.Addr())
	case h.rule != nil && h.rule.Crosses() && !v.v6:
		return Embed(m.translator(h.rule).Prefix, v.src.Addr())
	case out.Source.Addr() != h.tuple[h.direction].Source.Addr():
		return out.Source.Addr()
	}
	return v.src.Addr()
}

// errorOfService handles errors about packets of services without a session.
func (m *Model) errorOfService(in Arrival, v *view, answering flow.Tuple) (plan, bool) {
	about := &view{v6: v.v6, protocol: answering.Protocol, src: answering.Source, dst: answering.Dest}
	if s, _ := m.serviceOf(about, in.Interface); s != nil && len(s.table) > 0 && s.Scheduler.Hashes() && s.Mode != config.ModeFullNAT {
		b := s.pinnedBackend(about)
		if b == nil {
			b = s.byHash(about)
		}
		to := s.endpoint(b, about.dst.Port())
		p := plan{action: Forward, reason: ReasonICMPError, to: v.tuple()}
		if s.answersDirectly() {
			s.routeTo(&p, v, b)
			return p, true
		}
		quote := flow.Tuple{Protocol: answering.Protocol, Source: to, Dest: about.src}
		p.quote = &quote
		p.to.Dest = netip.AddrPortFrom(to.Addr(), 0)
		return p, true
	}
	for _, s := range m.services {
		if s.Mode != config.ModeStateless && !s.endpointSuffices(m) && !s.sharesReplies(m) {
			continue
		}
		from, b, ok := s.virtual(about.protocol, about.src)
		if !ok || s.Mode != config.ModeStateless && !(s.endpointSuffices(m) && m.answersSYN(answering)) && !s.answersOtherNode(m, answering, from, b) {
			continue // about a connection that the backend opened
		}
		quote := flow.Tuple{Protocol: about.protocol, Source: about.dst, Dest: from}
		p := plan{action: Forward, reason: ReasonICMPError, to: v.tuple(), quote: &quote}
		p.to.Source = netip.AddrPortFrom(from.Addr(), 0)
		p.to.Dest = netip.AddrPortFrom(about.dst.Addr(), 0) // whatever the destination of the ICMP error is
		p.local = m.host.Owns(about.dst.Addr())
		return p, true
	}
	return plan{}, false
}

// errorOfPrefix handles errors about packets of stateless rules. It translates the quoted packet in
// the opposite direction. Between the families a router keeps its own translated address, if one
// exists (RFC 7915 §4.1, §5.1). Other IPv6 routers get the gateway's own address (RFC 6791 §3).
// Within a family the host's address hides an inside router (RFC 5508 REQ-5c).
func (m *Model) errorOfPrefix(in Arrival, v *view) (plan, bool) {
	q := v.quoted
	about := *q // an answer to the quoted packet
	about.src, about.dst, about.ttl = q.dst, q.src, v.ttl
	p, ok := m.stateless(in, &about)
	if ok && p.reason == ReasonUntranslatable {
		return drop(ReasonUntranslatable), true
	}
	if !ok || p.action != Forward {
		return plan{}, false
	}
	quote := flow.Tuple{Protocol: p.to.Protocol, Source: p.to.Dest, Dest: p.to.Source}
	p.quote, p.reason, p.count = &quote, ReasonICMPError, nil
	src := p.to.Source.Addr()
	crossing := src.Is4() != q.dst.Addr().Is4()
	switch {
	case crossing:
		if own, ok := m.siitSource(in, &about, v.src.Addr()); ok && !(v.v6 && isUnroutable(own)) {
			src = own
		} else if next, ok := m.host.route(p.to.Dest.Addr()); ok && v.v6 {
			if own, ok := m.address(next.Interface, false); ok {
				src = own
			}
		}
	case src == q.dst.Addr(): // without translation the router needs no hiding
		src = v.src.Addr()
	}
	p.to = flow.Tuple{Protocol: v.protocol, Source: netip.AddrPortFrom(src, 0), Dest: netip.AddrPortFrom(p.to.Dest.Addr(), 0)}
	return p, true
}
