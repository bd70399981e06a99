// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// A datapath under judgement may make a flow for a packet that goes no further,
// for example because its hop limit is used up. Which port or backend it chose
// shows only with the next packet that does: until then the model's choice is
// unseen, and is then exchanged for the datapath's if that one is legal.

// endpointHidden reports whether the actual outcome does not show the endpoint.
func (m *Model) endpointHidden(key outsideKey) bool {
	if m.actual == nil {
		return false
	}
	a, ok := m.actualSource()
	return !ok || a != key.endpoint
}

// choiceHidden reports whether the actual outcome does not show what a new session of
// a service was given.
func (m *Model) choiceHidden(s *service, n *session, v *view) bool {
	if m.actual == nil {
		return false
	}
	if n.port != nil && m.endpointHidden(*n.port) {
		return true
	}
	if s.hashes() || v.goesOn() {
		return false
	}
	_, ok := s.actualBackend(m, v)
	return !ok || s.Mode == config.ModeDSR && m.actual.Reason == ReasonNoNeighbour && s.unreachable(m) > 1
}

// unreachable counts the backends whose hardware addresses are not known: packets to them look alike.
func (s *service) unreachable(m *Model) (n int) {
	for _, b := range s.backends {
		if _, _, known := m.host.NextHop(b.Address); !known {
			n++
		}
	}
	return n
}

// learn exchanges a binding's unseen endpoint.
func (m *Model) learn(b *binding, v *view, to netip.AddrPort) {
	a, ok := m.actualSource()
	if !b.unseen || !ok {
		return
	}
	was := b.outside
	delete(m.outside, was)
	if b.client.ports == 1 || b.client.guessed { // nothing else ties the client to the address
		b.client.address = netip.Addr{}
	}
	key, ok := m.outsideFor(b.rule, b.client, v, to)
	if !ok || key.endpoint != a {
		key = was
	}
	m.reveal(b, key)
}

// reveal gives a binding the endpoint that the datapath has shown.
func (m *Model) reveal(b *binding, key outsideKey) {
	was := b.outside
	delete(m.outside, was)
	b.outside, b.unseen, b.client.guessed = key, false, false
	m.take(key, b)
	for _, h := range m.sessionsOf(b) {
		m.rename(h, was.endpoint, key.endpoint)
	}
}

// learnInbound exchanges the unseen endpoint of the binding that a packet from outside has
// reached by the datapath's, where the model knows nobody.
func (m *Model) learnInbound(v *view) {
	m.learnPortlessInbound(v)
	key := outsideKey{portClass(v.protocol), v.dst}
	if m.actual == nil || m.actual.Action != Forward || len(m.actual.Out) != 1 || !m.pooled(v.dst.Addr()) || !m.free(key) {
		return
	}
	out, _, _ := read(m.actual.Out[0].Frame)
	if out == nil {
		return
	}
	for _, b := range m.bindings {
		if b.unseen && b.protocol == out.protocol && b.inside == out.dst && b.outside.endpoint.Addr() == v.dst.Addr() && b.rule.gives(v.protocol, v.dst.Port()) {
			m.reveal(b, key)
			return
		}
	}
}

// learnBlock sets a block right that the model has guessed for a client, now that the
// datapath shows a port of its block.
func (m *Model) learnBlock(c *client) {
	a, ok := m.actualSource()
	if !ok {
		return
	}
	at := slices.IndexFunc(c.blocks, func(b portBlock) bool { return b.has(a) })
	if at >= 0 {
		c.blocks[at].guessed = false
		return
	}
	if at = slices.IndexFunc(c.blocks, func(b portBlock) bool { return b.guessed }); at >= 0 {
		c.blocks = slices.Delete(c.blocks, at, at+1)
	}
}

// releasedUnseenPort is a port of a binding that has ended before any packet showed it: the datapath
// under judgement still holds it, and which one it is nobody knows.
type releasedUnseenPort struct {
	protocol flow.Protocol
	address  netip.Addr
	until    time.Duration
}

// heldUnseen reports whether the datapath may hold all the ports that suit, of which key is
// one, without having shown it: it has taken another one, or has found none.
func (m *Model) heldUnseen(key outsideKey, suits func(uint16) bool, spans []flow.Ports) bool {
	m.releasedUnseen = slices.DeleteFunc(m.releasedUnseen, func(g releasedUnseenPort) bool { return g.until < m.now })
	released := 0
	for _, g := range m.releasedUnseen {
		if g.protocol == key.protocol && g.address == key.endpoint.Addr() {
			released++
		}
	}
	a, ok := m.actualSource()
	other := ok && a.Addr() == key.endpoint.Addr() && within(spans, a.Port()) && !suits(a.Port())
	if released == 0 || m.actual == nil || !other && m.actual.Reason != ReasonNoPort {
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

// Guesses reports whether what stands in the way of a mapping is known by a guess alone: an
// endpoint of its outside address, or of its host.
func (m *Model) Guesses(w datapath.Mapping) bool {
	for _, b := range m.bindings {
		if b.unseen && (b.outside.endpoint.Addr() == w.Outside.Addr() || b.inside.Addr() == w.Inside.Addr()) {
			return true
		}
	}
	return slices.ContainsFunc(m.releasedUnseen, func(g releasedUnseenPort) bool { return g.address == w.Outside.Addr() && g.until >= m.now })
}

// guessedFor reports whether the endpoint that the model has guessed for a binding shows
// now as another's.
func (m *Model) guessedFor(b *binding) bool {
	a, ok := m.actualSource()
	return ok && b.unseen && a == b.outside.endpoint
}

// take gives an endpoint to a binding; the one that it was guessed for gets another.
func (m *Model) take(key outsideKey, b *binding) {
	was := m.outside[key]
	m.outside[key] = b
	if was == nil || was == b {
		return
	}
	actual := m.actual
	m.actual = nil // it is not what that binding has
	defer func() { m.actual = actual }()
	sessions := m.sessionsOf(was)
	if len(sessions) == 0 {
		return
	}
	other, ok := m.outsideFor(was.rule, was.client, &view{v6: was.inside.Addr().Is6(), protocol: was.protocol, src: was.inside}, sessions[0].tuple[1].Source)
	if !ok {
		return
	}
	was.outside, m.outside[other] = other, was
	for _, s := range sessions {
		m.rename(s, key.endpoint, other.endpoint)
	}
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

// learnSession brings a session up to what the datapath shows with this packet.
func (m *Model) learnSession(v *view, h *half) *half {
	if b := h.binding; b != nil && b.unseen && b.inside == v.src {
		m.learn(b, v, h.tuple[1].Source)
	}
	a, ok := m.actualSource()
	if h.unshown && ok {
		m.learnPortless(h.session, a)
	}
	if !h.unseen || !ok {
		return h
	}
	was, guessed := h.session, h.service.guessed
	m.removeSession(was)
	h.service.guessed = guessed // it is known now
	if was.port != nil {
		delete(m.ports, *was.port)
	}
	b, ok := was.service.actualBackend(m, v)
	if !ok || was.service.hashes() {
		b = was.backend
	}
	was.service.connections--
	was.backend.connections--
	m.openService(Arrival{}, v, was.service, b)
	now := m.sessions[v.tuple()]
	if now == nil {
		m.addSession(was)
		if was.guess() {
			h.service.guesses++
		}
		return h
	}
	now.heard, now.settled, now.seen, now.packets, now.bytes = was.heard, was.settled, was.seen, was.packets, was.bytes
	now.spliced, now.halfOpen = was.spliced, was.halfOpen
	if now.closed = was.closed; now.closed {
		now.count(-1)
	}
	return now
}

// maybeFiltered reports whether the target's filter may have refused the address
// that the datapath took for the sender of a hairpin but has not shown.
func (m *Model) maybeFiltered(b, target *binding) bool {
	return m.actual != nil && b.unseen && m.actual.Reason == ReasonFiltered && target.rule.Filtering == config.AddressDependent
}

// answersSYN reports whether a backend's packet answers a SYN that left without a session.
// A datapath under judgement may have forgotten that one for a later one, which has its place in
// a table of synPlaces by chance: the answer is nobody's then.
func (m *Model) answersSYN(answer flow.Tuple) bool {
	syn := answer.Reverse()
	nth := m.synsSent[syn]
	if nth > 0 && nth < m.syns && m.actual != nil && m.actual.Reason == ReasonNotOurs && m.forgotten < 5+m.syns*m.syns/synPlaces {
		m.forgotten++
		delete(m.synsSent, syn)
	}
	return m.synsSent[syn] > 0
}

// synPlaces is how many SYNs without a session a datapath remembers at least.
const synPlaces = 1 << 20
