// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/flow"
)

// translatesAddressOnly reports whether a NAT rule translates only the address of the packet. Such a protocol
// has no ports (ESP, GRE, tunnels) or keeps them (SCTP). DCCP and UDP-Lite are excluded, because
// their checksums cover the addresses. ICMP sessions use the identifier.
func (v *view) translatesAddressOnly() bool {
	switch v.protocol {
	case flow.TCP, flow.UDP, flow.UDPLite, flow.ICMP, flow.ICMPv6, 33:
		return false
	}
	return true
}

// openPortless creates a session of a protocol without ports. The session has no binding. As in
// conntrack, one inside host for each pool address may talk to a peer.
func (m *Model) openPortless(r *rule, v *view) plan {
	c := m.client(clientKey{rule: r, address: v.src.Addr()})
	s := &session{rule: r, client: c}
	s.tuple[0] = v.tuple()
	if reason := m.portlessSource(r, v, s, v.dst); reason != "" {
		return r.refusePacket(reason)
	}
	if r.ConnectionsPerClient > 0 && c.flows >= r.ConnectionsPerClient {
		return r.refusePacket(ReasonClientFlows)
	}
	m.addSession(s)
	return m.firstPacket(v, s)
}

// portlessSource assigns an address of the pool without another session to the peer. If none
// exists, it returns the reason.
func (m *Model) portlessSource(r *rule, v *view, s *session, peer netip.AddrPort) Reason {
	if !r.credit.withinRate(m.now, v.src.Addr(), r.NewConnectionsPerClient) {
		return ReasonLimitClientRate
	}
	next, _ := m.host.route(peer.Addr())
	addresses, c := r.pool(next, v.v6), m.client(clientKey{rule: r, address: v.src.Addr()})
	if r.Deterministic {
		block, ok := deterministicBlock(r.Source, addresses, r.Ports.Span(), r.PortBlock, v.src.Addr())
		if !ok {
			return ReasonNoPort
		}
		addresses = []netip.Addr{block.address}
	}
	if len(addresses) == 0 {
		return ReasonNoPort
	}
	s.tuple[1] = flow.Tuple{Protocol: v.protocol, Source: peer}
	with := func(a netip.Addr) flow.Tuple {
		t := s.tuple[1]
		t.Dest = netip.AddrPortFrom(a, v.src.Port())
		return t
	}
	source, shown := m.observedSource()
	provisional := false // another session to the peer has a provisional address
	free := slices.DeleteFunc(slices.Clone(addresses), func(a netip.Addr) bool {
		h := m.sessions[with(a)]
		provisional = provisional || h != nil && h.provisionalAddress
		return h != nil && !(h.provisionalAddress && shown && a == source.Addr())
	})
	if len(free) == 0 {
		return ReasonClash
	}
	chosen := free[0]
	switch pinned := c.address.IsValid() && c.ports > 0 && !c.provisional && slices.Contains(free, c.address); {
	case pinned && !provisional: // ESP keeps the address of its key exchange (RFC 4787 REQ-2)
		chosen = c.address
	case shown && slices.Contains(free, source.Addr()):
		chosen = source.Addr()
	default:
		s.provisionalAddress = m.choices.Provisional() && len(free) > 1
	}
	if h := m.sessions[with(chosen)]; h != nil { // that session has its address provisionally
		i := slices.IndexFunc(addresses, func(a netip.Addr) bool { return m.sessions[with(a)] == nil })
		if i < 0 {
			return ReasonClash
		}
		m.rename(h.session, h.tuple[1].Dest, netip.AddrPortFrom(addresses[i], v.src.Port()))
	}
	s.tuple[1] = with(chosen)
	return ""
}

// portlessHairpin assigns an outside source to an inside client of a port-forward rule, if the
// inside server would otherwise answer the client directly.
func (m *Model) portlessHairpin(in Arrival, v *view, s *session, forward *rule, to netip.AddrPort) Reason {
	next, ok := m.host.route(to.Addr())
	if !ok || next.Name != in.Interface || forward.Hairpin == "off" {
		return ""
	}
	if r := m.hairpinRule(nil, in, v); r != nil {
		return m.portlessSource(r, v, s, to)
	}
	return ""
}

// confirmPortless replaces the provisional address of a session without ports with the observed
// one.
func (m *Model) confirmPortless(s *session, a netip.AddrPort) {
	t := s.tuple[1]
	t.Dest = a
	if a != s.tuple[1].Dest && m.sessions[t] == nil {
		m.rename(s, s.tuple[1].Dest, a)
	}
	s.provisionalAddress = false
}

// confirmPortlessInbound replaces such an address for a packet from the peer without a matching
// session.
func (m *Model) confirmPortlessInbound(v *view) {
	if !m.choices.Ends(ReasonFlow) || !v.translatesAddressOnly() || m.session(v) != nil {
		return
	}
	for _, h := range m.sessions {
		if h.provisionalAddress && h.tuple[1].Protocol == v.protocol && h.tuple[1].Source == v.src && h.tuple[1].Dest.Port() == v.dst.Port() {
			m.confirmPortless(h.session, v.dst)
			return
		}
	}
}
