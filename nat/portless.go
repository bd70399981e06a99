// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/flow"
)

// portless reports whether a NAT rule translates the address of the packet alone: its protocol
// has no ports (ESP, GRE, tunnels), or keeps them (SCTP). Of DCCP and UDP-Lite a checksum covers
// the addresses; ICMP has a session by its identifier, or none.
func (v *view) portless() bool {
	switch v.protocol {
	case flow.TCP, flow.UDP, flow.UDPLite, flow.ICMP, flow.ICMPv6, 33:
		return false
	}
	return true
}

// openPortless makes a session of a protocol without ports. There is no binding: of each
// address of the pool one inside host may talk to a peer, as with connection tracking.
func (m *Model) openPortless(r *rule, v *view) plan {
	c := m.client(clientKey{rule: r, address: v.src.Addr()})
	s := &session{rule: r, client: c}
	s.tuple[0] = v.tuple()
	if reason := m.portlessSource(r, v, s, v.dst); reason != "" {
		return r.refuse(reason)
	}
	if r.ConnectionsPerClient > 0 && c.flows >= r.ConnectionsPerClient {
		return r.refuse(ReasonClientFlows)
	}
	m.addSession(s)
	return m.first(v, s)
}

// portlessSource gives a session an address of the rule's pool that has no other session
// with the peer; or tells why it gets none.
func (m *Model) portlessSource(r *rule, v *view, s *session, peer netip.AddrPort) Reason {
	if !r.credit.conforms(m.now, v.src.Addr(), r.NewConnectionsPerClient) {
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
	provisional := false // another session of the peer's
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
	case pinned && !provisional: // ESP goes with its key exchange (RFC 4787 REQ-2)
		chosen = c.address
	case shown && slices.Contains(free, source.Addr()):
		chosen = source.Addr()
	default:
		s.provisionalAddress = m.choices.Provisional() && len(free) > 1
	}
	if h := m.sessions[with(chosen)]; h != nil { // it is only provisionally there
		i := slices.IndexFunc(addresses, func(a netip.Addr) bool { return m.sessions[with(a)] == nil })
		if i < 0 {
			return ReasonClash
		}
		m.rename(h.session, h.tuple[1].Dest, netip.AddrPortFrom(addresses[i], v.src.Port()))
	}
	s.tuple[1] = with(chosen)
	return ""
}

// portlessHairpin gives an inside client of a port-forward an outside source when the inside
// server would otherwise answer it directly.
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

// confirmPortless exchanges the provisional address of a session without ports for the one that a
// packet shows.
func (m *Model) confirmPortless(s *session, a netip.AddrPort) {
	t := s.tuple[1]
	t.Dest = a
	if a != s.tuple[1].Dest && m.sessions[t] == nil {
		m.rename(s, s.tuple[1].Dest, a)
	}
	s.provisionalAddress = false
}

// confirmPortlessInbound does so by a packet from the peer, where the model knows no session.
func (m *Model) confirmPortlessInbound(v *view) {
	if !m.choices.Ends(ReasonFlow) || !v.portless() || m.session(v) != nil {
		return
	}
	for _, h := range m.sessions {
		if h.provisionalAddress && h.tuple[1].Protocol == v.protocol && h.tuple[1].Source == v.src && h.tuple[1].Dest.Port() == v.dst.Port() {
			m.confirmPortless(h.session, v.dst)
			return
		}
	}
}
