// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// Provisional choices: the model follows the choices of a datapath.
//
// A datapath may create a session for a packet that it drops, for example because of the hop limit.
// Only the next forwarded packet shows the port or the backend. Until then the choice of the model
// is provisional. The model then replaces it with the observed choice, if that is legal. In a
// prediction no choice is provisional.
//
// This code is not in package judge, because a replacement changes bindings, sessions, ports and
// counts. Provisional choices also change the set of legal choices.

// observedSource returns the observed outside endpoint of the packet.
func (m *Model) observedSource() (netip.AddrPort, bool) {
	t, ok := m.choices.ObservedTuple()
	return t.Source, ok
}

// endpointProvisional reports whether no packet has confirmed the endpoint.
func (m *Model) endpointProvisional(key outsideKey) bool {
	a, ok := m.observedSource()
	return m.choices.Provisional() && (!ok || a != key.endpoint)
}

// choiceProvisional reports whether the choices for a new service session are unconfirmed.
func (m *Model) choiceProvisional(s *service, n *session, v *view) bool {
	if n.port != nil && m.endpointProvisional(*n.port) {
		return true
	}
	if !m.choices.Provisional() || s.Scheduler.Hashes() || len(s.backends) == 1 || v.midConnection() {
		return false
	}
	return s.chosenBackend(m, v) == nil
}

// backendProvisional reports whether the backend of the session is provisional.
func (s *session) backendProvisional() bool { return s.provisional && !s.service.Scheduler.Hashes() }

// confirm replaces the provisional endpoint of a binding with the observed one of a packet from its
// inside host.
func (m *Model) confirm(b *binding, v *view) {
	a, ok := m.observedSource()
	if !b.provisional || !ok {
		return
	}
	was := b.outside
	delete(m.outside, was)
	if b.client.ports == 1 || b.client.provisional { // no other state depends on the address
		b.client.address = netip.Addr{}
	}
	key, ok := m.outsideFor(b.rule, b.client, v, b.alternatives())
	if !ok || key.endpoint != a {
		key = was
	}
	m.fixEndpoint(b, key)
}

// fixEndpoint sets the final endpoint of a binding.
func (m *Model) fixEndpoint(b *binding, key outsideKey) {
	was := b.outside
	delete(m.outside, was)
	b.outside, b.provisional, b.client.provisional = key, false, false
	m.assignEndpoint(key, b)
	for _, h := range m.sessionsOf(b) {
		m.rename(h, was.endpoint, key.endpoint)
	}
}

// confirmInbound replaces the provisional endpoint of a binding with the destination of a packet
// from outside. It applies if no binding in the model has that endpoint. A packet that the filter
// drops shows the existence of a binding, but not its inside host.
func (m *Model) confirmInbound(v *view) {
	m.confirmPortlessInbound(v)
	key := outsideKey{portClass(v.protocol), v.dst}
	m.denyInbound(key)
	out, shown := m.choices.ObservedTuple()
	filtered := m.choices.Ends(ReasonFiltered)
	reset := v.protocol == flow.TCP && v.flags&packet.RST != 0 && m.choices.Ends(ReasonNoFlow)
	if !shown && !filtered && !reset || !m.inAnyPool(v.dst.Addr()) && !m.isMasqueradeAddress(v.dst.Addr()) || !m.isFree(key) {
		return
	}
	for _, b := range m.bindings {
		sameAddress := b.outside.endpoint.Addr() == v.dst.Addr()
		if !b.provisional || b.outside.protocol != key.protocol || !sameAddress && !(b.client.provisional && b.rule.poolContains(v.dst.Addr())) || !b.rule.mayAllocate(v.protocol, v.dst.Port()) {
			continue
		}
		if filtered && !b.passesFilter(v.src) || reset || shown && b.protocol == out.Protocol && b.inside == out.Dest {
			if !sameAddress {
				b.client.address = v.dst.Addr()
			}
			m.fixEndpoint(b, key)
			return
		}
	}
}

// denyInbound assigns another provisional endpoint to a binding, if the datapath found no binding
// at the present one.
func (m *Model) denyInbound(key outsideKey) {
	b := m.outside[key]
	if b != nil && b.provisional && (m.choices.Ends(ReasonNoBinding) || m.choices.Ends(ReasonNotOurs)) && m.moveBinding(b) {
		delete(m.outside, key)
	}
}

// confirmBlock replaces a provisional block of a client after a packet has shown a port of its
// block.
func (m *Model) confirmBlock(c *client) {
	a, ok := m.observedSource()
	if !ok {
		return
	}
	at := slices.IndexFunc(c.blocks, func(b portBlock) bool { return b.containsPort(a) })
	if at >= 0 {
		c.blocks[at].provisional = false
		return
	}
	if at = slices.IndexFunc(c.blocks, func(b portBlock) bool { return b.provisional }); at >= 0 {
		c.blocks = slices.Delete(c.blocks, at, at+1)
	}
}

// releasedPort is a port of a binding that ended before a packet showed its port. The port is in
// hold-down, but its number is unknown.
type releasedPort struct {
	protocol flow.Protocol
	address  netip.Addr
	until    time.Duration
}

// heldProvisionally reports whether unknown released ports may hold all suitable ports, key
// included. Evidence is that the datapath took an unsuitable port or found none.
func (m *Model) heldProvisionally(key outsideKey, suits func(uint16) bool, spans []flow.Ports) bool {
	m.releasedProvisional = slices.DeleteFunc(m.releasedProvisional, func(g releasedPort) bool { return g.until < m.now })
	released := 0
	for _, g := range m.releasedProvisional {
		if g.protocol == key.protocol && g.address == key.endpoint.Addr() {
			released++
		}
	}
	a, ok := m.observedSource()
	other := ok && a.Addr() == key.endpoint.Addr() && inSpans(spans, a.Port()) && !suits(a.Port())
	if released == 0 || !other && !m.choices.Ends(ReasonNoPort) {
		return false
	}
	for _, span := range spans {
		for n := range span.Len() {
			port := span.First + uint16(n)
			if k := (outsideKey{key.protocol, netip.AddrPortFrom(key.endpoint.Addr(), port)}); suits(port) && m.isFree(k) {
				released--
			}
		}
	}
	return released >= 0
}

func inSpans(spans []flow.Ports, port uint16) bool {
	return slices.ContainsFunc(spans, func(s flow.Ports) bool { return s.Contains(port) })
}

// MappingUndecidable reports whether provisional state conflicts with a mapping: an endpoint with
// its outside address or its host, or the address of the host's ports in hold-down.
func (m *Model) MappingUndecidable(w datapath.Mapping) bool {
	for key, c := range m.clients {
		if key.rule != nil && key.rule.Name == w.Rule && key.address == w.Inside.Addr() && c.provisional && m.portsOf(c) > 0 {
			return true
		}
	}
	for _, b := range m.bindings {
		if b.provisional && (b.outside.endpoint.Addr() == w.Outside.Addr() || b.inside.Addr() == w.Inside.Addr()) {
			return true
		}
	}
	return slices.ContainsFunc(m.releasedProvisional, func(g releasedPort) bool { return g.address == w.Outside.Addr() && g.until >= m.now })
}

// mustYield reports whether another binding owns the provisional endpoint of b according to the
// packet.
func (m *Model) mustYield(b *binding) bool {
	a, ok := m.observedSource()
	return ok && b.provisional && a == b.outside.endpoint
}

// yieldingSession returns the service session with the provisional endpoint key, if a packet shows
// that endpoint for another session.
func (m *Model) yieldingSession(key outsideKey) *session {
	if a, ok := m.observedSource(); !ok || a != key.endpoint {
		return nil
	}
	for _, h := range m.sessions {
		if s := h.session; s.provisional && s.port != nil && *s.port == key {
			return s
		}
	}
	return nil
}

// reallocatePort assigns another endpoint to a yielding session.
func (m *Model) reallocatePort(s *session, ports config.PortSet) {
	choices := m.choices
	m.choices = m.chance // the observed endpoint is not the session's
	defer func() { m.choices = choices }()
	other, ok := m.allocate(portRequest{addresses: []netip.Addr{s.port.endpoint.Addr()}, protocol: s.tuple[0].Protocol, wanted: s.tuple[0].Source.Port(), ports: ports})
	if !ok {
		return
	}
	m.ports[other] = forever
	m.rename(s, s.port.endpoint, other.endpoint)
	s.port = &other
}

// assignEndpoint assigns an endpoint to a binding. A binding with the same provisional endpoint
// gets another one.
func (m *Model) assignEndpoint(key outsideKey, b *binding) {
	was := m.outside[key]
	m.outside[key] = b
	if was != nil && was != b {
		m.moveBinding(was)
	}
}

// moveBinding assigns another endpoint to a binding, because its provisional endpoint has another
// owner.
func (m *Model) moveBinding(b *binding) bool {
	choices := m.choices
	m.choices = m.chance // the observed endpoint is not the binding's
	defer func() { m.choices = choices }()
	sessions := m.sessionsOf(b)
	if len(sessions) == 0 {
		return false
	}
	was := b.outside
	other, ok := m.outsideFor(b.rule, b.client, &view{v6: b.inside.Addr().Is6(), protocol: b.protocol, src: b.inside}, b.alternatives())
	if !ok {
		return false
	}
	b.outside, m.outside[other] = other, b
	for _, s := range sessions {
		m.rename(s, was.endpoint, other.endpoint)
	}
	return true
}

func (m *Model) sessionsOf(b *binding) []*session {
	var out []*session
	for _, h := range m.sessions {
		if h.binding == b && h.direction == flow.Original {
			out = append(out, h.session)
		}
	}
	return out
}

// rename replaces the outside endpoint in the reply tuple of a session.
func (m *Model) rename(s *session, was, now netip.AddrPort) {
	delete(m.sessions, s.tuple[1])
	t := &s.tuple[1]
	if r := s.rule; t.Dest.Addr().Is6() && now.Addr().Is4() && r != nil && r.Type.CrossesStateful() {
		now = netip.AddrPortFrom(Embed(r.Prefix, now.Addr()), now.Port())
	}
	t.Dest = now
	if portClass(t.Protocol) == flow.ICMP {
		t.Source = netip.AddrPortFrom(t.Source.Addr(), now.Port())
	}
	m.index(s)
}

// confirmSession replaces the provisional choices of a session with the observed ones of a packet
// from its opener.
func (m *Model) confirmSession(v *view, h *sessionHalf) *sessionHalf {
	if b := h.binding; b != nil && b.provisional && b.inside == v.src {
		m.confirm(b, v)
	}
	a, ok := m.observedSource()
	if h.provisionalAddress && ok {
		m.confirmPortless(h.session, a)
	}
	refused := m.choices.Ends(ReasonUntranslatable) || m.choices.Ends(ReasonTooBig) || m.choices.Ends(ReasonToFragment6)
	if h.provisional && (ok || refused) {
		return m.exchange(h, v, nil)
	}
	return h
}

// markProvisional makes the backend of a session provisional if other backends are possible.
func (s *session) markProvisional(may bool) {
	if may && !s.provisional {
		s.provisional = true
		s.service.provisional++
	}
}

// confirmAnswer replaces the provisional backend of a session with the sender of a packet to its
// client.
func (m *Model) confirmAnswer(v *view) {
	if h := m.sessions[v.tuple()]; h != nil {
		m.denyAnswer(v, h)
		return
	}
	out, shown := m.choices.ObservedTuple()
	if !shown || !m.choices.Ends(ReasonFlow) {
		return
	}
	for _, h := range m.sessions {
		t := h.tuple[0]
		if h.direction != flow.Original || !h.isExchangeable() || out != t.Reverse() || v.dst != t.Source {
			continue
		}
		for _, b := range h.service.backends {
			if h.service.endpoint(b, t.Dest.Port()) == v.src {
				m.exchange(h, openingPacket(t), b)
				return
			}
		}
	}
}

// denyAnswer replaces the provisional backend of a session with another one, if the datapath does
// not recognize a packet from that backend to the client.
func (m *Model) denyAnswer(v *view, h *sessionHalf) {
	if h.direction != flow.Reply || !h.isExchangeable() || !m.choices.Ends(ReasonNotOurs) {
		return
	}
	t, s := h.tuple[0], h.service
	for _, b := range s.backends {
		if s.endpoint(b, t.Dest.Port()) == v.src {
			continue
		}
		m.exchange(h, openingPacket(t), b).markProvisional(true)
		return
	}
}

// isExchangeable reports whether the backend is the only provisional choice of a session.
func (s *session) isExchangeable() bool {
	return s.provisional && !s.service.Scheduler.Hashes() && s.port == nil
}

// openingPacket returns a packet with the tuple.
func openingPacket(t flow.Tuple) *view {
	return &view{v6: t.Source.Addr().Is6(), protocol: t.Protocol, src: t.Source, dst: t.Dest}
}

// exchange replaces the provisional choices of a session. Backend b replaces the present one; nil
// selects the backend by the observed packet.
func (m *Model) exchange(h *sessionHalf, v *view, b *backend) *sessionHalf {
	was, miscounted := h.session, h.service.miscounted
	m.removeSession(was)
	h.service.miscounted = miscounted // the backend is now confirmed; restore the flag
	if was.port != nil {
		delete(m.ports, *was.port)
	}
	if b == nil {
		was.service.provisional++ // the connection counts at opening time are unknown
		b = was.service.chosenBackend(m, v)
		fits := was.service.possibleBackends(m, v)
		if at := slices.IndexFunc(was.service.table, fits); b == nil && !fits(was.backend) && at >= 0 {
			b = was.service.table[at]
		}
		was.service.provisional--
	}
	if b == nil {
		b = was.backend
	}
	was.service.connections--
	was.backend.connections--
	m.openService(Arrival{}, v, was.service, b, was)
	now := m.sessions[v.tuple()]
	if now == nil {
		m.addSession(was)
		if was.backendProvisional() {
			h.service.provisional++
		}
		return h
	}
	now.flagsSeen, now.assured, now.seen, now.packets, now.bytes = was.flagsSeen, was.assured, was.seen, was.packets, was.bytes
	now.splice, now.halfOpen = was.splice, was.halfOpen
	now.counted = was.counted
	was.backend.packets -= was.counted.packets
	was.backend.bytes -= was.counted.bytes
	now.backend.packets += was.counted.packets
	now.backend.bytes += was.counted.bytes
	if now.closed = was.closed; now.closed {
		now.count(-1)
	}
	return now
}

// withFormerAddress adds the former source address of a replaced session to the host's present
// addresses. The route may have changed since the session was opened.
func (m *Model) withFormerAddress(was *session, now []netip.Addr, v6 bool) []netip.Addr {
	if was == nil || was.port == nil || was.port.endpoint.Addr().Is6() != v6 {
		return now
	}
	before := was.port.endpoint.Addr()
	if _, shown := m.observedSource(); !shown {
		return []netip.Addr{before}
	}
	return append(now, before)
}

// maybeFiltered reports whether the target's filter may have dropped a hairpin packet because of
// the sender's provisional address.
func (m *Model) maybeFiltered(b, target *binding) bool {
	return b.provisional && target.rule.Filtering == config.AddressDependent && m.choices.Ends(ReasonFiltered)
}

// mayClash reports whether the reply tuple may be ambiguous with another possible outside endpoint
// of the session. The datapath dropped the packet for that reason.
func (m *Model) mayClash(s *session) bool {
	if s.binding == nil || !s.binding.provisional || !m.choices.Ends(ReasonClash) {
		return false
	}
	for t := range m.sessions {
		_, taken := m.outside[outsideKey{portClass(t.Protocol), t.Dest}]
		if t.Protocol == s.tuple[1].Protocol && t.Source == s.tuple[1].Source && t.Dest.Addr() == s.tuple[1].Dest.Addr() && !taken {
			return true
		}
	}
	return false
}

// Undecidable reports whether the model cannot compute the sessions that another configuration
// ends. A backend or outside endpoint is provisional, or either of two bindings may continue.
func (m *Model) Undecidable(c *config.Config) bool {
	services, rules := map[string]*config.Service{}, map[string]*config.NATRule{}
	for i := range c.Services {
		services[c.Services[i].Name] = &c.Services[i]
	}
	for i := range c.NAT {
		rules[c.NAT[i].Name] = &c.NAT[i]
	}
	for _, h := range m.sessions {
		if s := h.service; h.provisional && s.rule == nil {
			next := services[s.Name]
			if next != nil && (!reflect.DeepEqual(next.Backends, s.Backends) || !reflect.DeepEqual(next.SourcePool, s.SourcePool)) {
				return true
			}
		}
		if h.provisionalAddress && h.rule.poolChanges(rules[h.rule.Name]) {
			return true
		}
	}
	for _, b := range m.outside {
		next := rules[b.rule.Name]
		if b.provisional && b.rule.poolChanges(next) {
			return true
		}
		key := bindingKey{rule: b.rule, protocol: b.protocol, inside: b.inside}
		if !b.acceptsSessions() && b.rule.poolChanges(next) && m.bindings[key] != b {
			return true
		}
	}
	return false
}

// Miscounted reports whether the datapath may count sessions of a service for other backends. A
// live session has a provisional backend, or a session ended with one.
func (m *Model) Miscounted(service string) bool {
	for _, s := range m.services {
		if s.Name == service && (s.miscounted || s.provisional > 0) {
			return true
		}
	}
	return false
}

// Uncountable reports whether even the sum over the backends of such a service is uncertain,
// because the configuration has removed some backends.
func (m *Model) Uncountable(service string) bool {
	s := m.allServices["service "+service]
	return m.Miscounted(service) && len(s.known) > len(s.backends)
}
