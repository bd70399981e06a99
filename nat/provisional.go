// SPDX-License-Identifier: Apache-2.0

package nat

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

// What the model does while its choices are those of a datapath that it follows.
//
// A datapath may make a flow for a packet that goes no further, for example because its hop limit
// is used up. Which port or backend it chose shows only with the next packet that goes on. Until
// then the model's choice is provisional; it is then exchanged for the one that is shown, if that
// is legal. None of this happens while the model predicts: nothing is provisional then.
//
// This is here and not in package judge, because to exchange a choice is to write bindings,
// sessions, ports and counts anew, and because what is legal depends on which of them are
// provisional.

// observedSource returns the outside endpoint that the packet is known to get.
func (m *Model) observedSource() (netip.AddrPort, bool) {
	t, ok := m.choices.ObservedTuple()
	return t.Source, ok
}

// endpointProvisional reports whether it is not shown that a packet gets the endpoint.
func (m *Model) endpointProvisional(key outsideKey) bool {
	a, ok := m.observedSource()
	return m.choices.Provisional() && (!ok || a != key.endpoint)
}

// choiceProvisional reports whether it is not shown what a new session of a service gets.
func (m *Model) choiceProvisional(s *service, n *session, v *view) bool {
	if n.port != nil && m.endpointProvisional(*n.port) {
		return true
	}
	if !m.choices.Provisional() || s.Scheduler.Hashes() || len(s.backends) == 1 || v.midConnection() {
		return false
	}
	alike := s.Mode.OneWay() && m.choices.Ends(ReasonNoNeighbour) || m.choices.Ends(ReasonUnresolved)
	return s.chosen(m, v) == nil || alike && s.unreachable(m) > 1
}

// backendProvisional reports whether the session's backend is provisional.
func (s *session) backendProvisional() bool { return s.provisional && !s.service.Scheduler.Hashes() }

// unreachable counts the backends whose hardware addresses are not known: packets to them look alike.
func (s *service) unreachable(m *Model) (n int) {
	for _, b := range s.backends {
		if !m.resolved(b) {
			n++
		}
	}
	return n
}

// confirm exchanges a binding's provisional endpoint for the one that a packet of its inside host
// shows.
func (m *Model) confirm(b *binding, v *view) {
	a, ok := m.observedSource()
	if !b.provisional || !ok {
		return
	}
	was := b.outside
	delete(m.outside, was)
	if b.client.ports == 1 || b.client.provisional { // nothing else ties the client to the address
		b.client.address = netip.Addr{}
	}
	key, ok := m.outsideFor(b.rule, b.client, v, b.alternatives())
	if !ok || key.endpoint != a {
		key = was
	}
	m.fixEndpoint(b, key)
}

// fixEndpoint gives a binding its endpoint for good.
func (m *Model) fixEndpoint(b *binding, key outsideKey) {
	was := b.outside
	delete(m.outside, was)
	b.outside, b.provisional, b.client.provisional = key, false, false
	m.assignEndpoint(key, b)
	for _, h := range m.sessionsOf(b) {
		m.rename(h, was.endpoint, key.endpoint)
	}
}

// confirmInbound exchanges the provisional endpoint of the binding that a packet from outside has
// reached for the one that this packet was sent to, where the model knows nobody. What a binding refuses shows that
// there is one, not whose.
func (m *Model) confirmInbound(v *view) {
	m.confirmPortlessInbound(v)
	key := outsideKey{portClass(v.protocol), v.dst}
	m.denyInbound(key)
	out, shown := m.choices.ObservedTuple()
	filtered := m.choices.Ends(ReasonFiltered)
	reset := v.protocol == flow.TCP && v.flags&packet.RST != 0 && m.choices.Ends(ReasonNoFlow)
	if !shown && !filtered && !reset || !m.pooled(v.dst.Addr()) && !m.masquerades(v.dst.Addr()) || !m.free(key) {
		return
	}
	for _, b := range m.bindings {
		near := b.outside.endpoint.Addr() == v.dst.Addr()
		if !b.provisional || b.outside.protocol != key.protocol || !near && !(b.client.provisional && b.rule.holds(v.dst.Addr())) || !b.rule.gives(v.protocol, v.dst.Port()) {
			continue
		}
		if filtered && !b.admits(v.src) || reset || shown && b.protocol == out.Protocol && b.inside == out.Dest {
			if !near {
				b.client.address = v.dst.Addr()
			}
			m.fixEndpoint(b, key)
			return
		}
	}
}

// denyInbound gives a binding another provisional endpoint, where a packet to the one that it has finds none.
func (m *Model) denyInbound(key outsideKey) {
	b := m.outside[key]
	if b != nil && b.provisional && (m.choices.Ends(ReasonNoBinding) || m.choices.Ends(ReasonNotOurs)) && m.relocate(b) {
		delete(m.outside, key)
	}
}

// confirmBlock exchanges a provisional block of a client, now that a port of its block is shown.
func (m *Model) confirmBlock(c *client) {
	a, ok := m.observedSource()
	if !ok {
		return
	}
	at := slices.IndexFunc(c.blocks, func(b portBlock) bool { return b.has(a) })
	if at >= 0 {
		c.blocks[at].provisional = false
		return
	}
	if at = slices.IndexFunc(c.blocks, func(b portBlock) bool { return b.provisional }); at >= 0 {
		c.blocks = slices.Delete(c.blocks, at, at+1)
	}
}

// releasedPort is a port of a binding that ended before any packet showed it: it is held as every
// freed one is, but which one it is is not known.
type releasedPort struct {
	protocol flow.Protocol
	address  netip.Addr
	until    time.Duration
}

// heldProvisionally reports whether all the ports that suit, of which key is one, may be held
// without having been shown: another one was taken, or none was found.
func (m *Model) heldProvisionally(key outsideKey, suits func(uint16) bool, spans []flow.Ports) bool {
	m.releasedProvisional = slices.DeleteFunc(m.releasedProvisional, func(g releasedPort) bool { return g.until < m.now })
	released := 0
	for _, g := range m.releasedProvisional {
		if g.protocol == key.protocol && g.address == key.endpoint.Addr() {
			released++
		}
	}
	a, ok := m.observedSource()
	other := ok && a.Addr() == key.endpoint.Addr() && within(spans, a.Port()) && !suits(a.Port())
	if released == 0 || !other && !m.choices.Ends(ReasonNoPort) {
		return false
	}
	for _, span := range spans {
		for n := range span.Len() {
			port := span.First + uint16(n)
			if k := (outsideKey{key.protocol, netip.AddrPortFrom(key.endpoint.Addr(), port)}); suits(port) && m.free(k) {
				released--
			}
		}
	}
	return released >= 0
}

func within(spans []flow.Ports, port uint16) bool {
	return slices.ContainsFunc(spans, func(s flow.Ports) bool { return s.Contains(port) })
}

// MappingUndecidable reports whether what stands in the way of a mapping is provisional: an endpoint of
// its outside address, or of its host, or the address at which its host's ports rest.
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

// mustYield reports whether the provisional endpoint of a binding is shown to be another's.
func (m *Model) mustYield(b *binding) bool {
	a, ok := m.observedSource()
	return ok && b.provisional && a == b.outside.endpoint
}

// yieldingSession returns the session of a service that has an endpoint provisionally, where that is shown to be another's.
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

// reallocatePort gives such a session another one.
func (m *Model) reallocatePort(s *session, ports config.PortSet) {
	choices := m.choices
	m.choices = m.chance // what is shown is not what that session has
	defer func() { m.choices = choices }()
	other, ok := m.allocate(request{addresses: []netip.Addr{s.port.endpoint.Addr()}, protocol: s.tuple[0].Protocol, wanted: s.tuple[0].Source.Port(), ports: ports})
	if !ok {
		return
	}
	m.ports[other] = forever
	m.rename(s, s.port.endpoint, other.endpoint)
	s.port = &other
}

// take gives an endpoint to a binding; one that has it provisionally gets another.
func (m *Model) assignEndpoint(key outsideKey, b *binding) {
	was := m.outside[key]
	m.outside[key] = b
	if was != nil && was != b {
		m.relocate(was)
	}
}

// relocate gives a binding another endpoint than the one that it has provisionally, while that is taken.
func (m *Model) relocate(b *binding) bool {
	choices := m.choices
	m.choices = m.chance // what is shown is not what that binding has
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

// rename puts another outside endpoint into a session's reply tuple.
func (m *Model) rename(s *session, was, now netip.AddrPort) {
	delete(m.sessions, s.tuple[1])
	t := &s.tuple[1]
	if r := s.rule; t.Dest.Addr().Is6() && now.Addr().Is4() && r != nil && r.Type == config.NATNAT64 {
		now = netip.AddrPortFrom(Embed(r.Prefix, now.Addr()), now.Port())
	}
	t.Dest = now
	if portClass(t.Protocol) == flow.ICMP {
		t.Source = netip.AddrPortFrom(t.Source.Addr(), now.Port())
	}
	m.index(s)
}

// confirmSession exchanges what is provisional of a session for what this packet of its opener shows.
func (m *Model) confirmSession(v *view, h *half) *half {
	if b := h.binding; b != nil && b.provisional && b.inside == v.src {
		m.confirm(b, v)
	}
	a, ok := m.observedSource()
	if h.provisionalAddress && ok {
		m.confirmPortless(h.session, a)
	}
	refused := m.choices.Ends(ReasonUntranslatable) || m.choices.Ends(ReasonTooBig) || m.choices.Ends(ReasonToFragment6)
	switch {
	case h.provisional && (ok || refused):
		return m.exchange(h, v, nil)
	case h.exchangeable() && m.choices.Ends(ReasonUnresolved) && m.resolved(h.backend):
		for _, b := range h.service.backends {
			if !m.resolved(b) && b.Address.Is4() {
				now := m.exchange(h, v, b)
				now.markProvisional(h.service.unreachable(m) > 1)
				return now
			}
		}
	}
	return h
}

// markProvisional makes the backend of a session provisional, if it may be another.
func (s *session) markProvisional(may bool) {
	if may && !s.provisional {
		s.provisional = true
		s.service.provisional++
	}
}

// confirmAnswer exchanges the provisional backend of a session for the one whose packet goes on to the client.
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
		if h.direction != flow.Original || !h.exchangeable() || out != t.Reverse() || v.dst != t.Source {
			continue
		}
		for _, b := range h.service.backends {
			if h.service.endpoint(b, t.Dest.Port()) == v.src {
				m.exchange(h, opener(t), b)
				return
			}
		}
	}
}

// denyAnswer exchanges the provisional backend of a session for any other, where its packet to the client is that
// of a stranger.
func (m *Model) denyAnswer(v *view, h *half) {
	if h.direction != flow.Reply || !h.exchangeable() || !m.choices.Ends(ReasonNotOurs) {
		return
	}
	t, s := h.tuple[0], h.service
	for _, b := range s.backends {
		if s.endpoint(b, t.Dest.Port()) == v.src {
			continue
		}
		m.exchange(h, opener(t), b).markProvisional(true)
		return
	}
}

// exchangeable reports whether the session's backend is provisional and nothing else of it.
func (s *session) exchangeable() bool {
	return s.provisional && !s.service.Scheduler.Hashes() && s.port == nil
}

// opener is a packet of the tuple.
func opener(t flow.Tuple) *view {
	return &view{v6: t.Source.Addr().Is6(), protocol: t.Protocol, src: t.Source, dst: t.Dest}
}

// exchange gives a provisional session the backend b, nil for the one that a packet of its opener shows, and what
// else that shows.
func (m *Model) exchange(h *half, v *view, b *backend) *half {
	was, miscounted := h.session, h.service.miscounted
	m.removeSession(was)
	h.service.miscounted = miscounted // it is known now
	if was.port != nil {
		delete(m.ports, *was.port)
	}
	if b == nil {
		was.service.provisional++ // who had how many when it was opened is not known any more
		b = was.service.chosen(m, v)
		fits := was.service.fitting(m, v)
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

// withFormerAddress adds the address of a session that is exchanged, if any, to those that the host has for it now: the
// route may have been another one when it was opened.
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

// maybeFiltered reports whether the target's filter may have refused the provisional address of the
// sender of a hairpin.
func (m *Model) maybeFiltered(b, target *binding) bool {
	return b.provisional && target.rule.Filtering == config.AddressDependent && m.choices.Ends(ReasonFiltered)
}

// mayClash tells whether the answers of a session would look like packets of another with another
// endpoint of the pool than the provisional one: the packet was dropped for it.
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

// Undecidable reports whether the model cannot tell what another configuration would end, because a
// backend or outside endpoint is provisional, or which of two bindings would be gone on with.
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
		if !b.joinable() && b.rule.poolChanges(next) && m.bindings[key] != b {
			return true
		}
	}
	return false
}

// Miscounted reports whether sessions of a service may have been counted for other backends than the
// model has: their backends are provisional, or were when they ended.
func (m *Model) Miscounted(service string) bool {
	for _, s := range m.services {
		if s.Name == service && (s.miscounted || s.provisional > 0) {
			return true
		}
	}
	return false
}

// Uncountable reports whether even the sum over the backends of such a service may be another, because
// some backends have left.
func (m *Model) Uncountable(service string) bool {
	s := m.allServices["service "+service]
	return m.Miscounted(service) && len(s.known) > len(s.backends)
}
