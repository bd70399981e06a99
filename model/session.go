// SPDX-License-Identifier: Apache-2.0

package model

import (
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// session is one tracked connection (RFC 4787 §4). A received packet with tuple[d] leaves with the
// reverse of tuple[1-d].
type session struct {
	tuple     [2]flow.Tuple
	service   *service
	backend   *backend
	rule      *rule
	binding   *binding
	client    *client
	flagsSeen [2]flagsSeen
	// assured sessions have completed the handshake, and the transitory timeout does not apply.
	assured bool
	closed  bool             // Closed by both sides or a reset: no longer an active connection of its service.
	seen    [2]time.Duration // Time of the last packet in each direction.
	packets [2]uint64
	bytes   [2]uint64
	// Field provisional covers the backend and the port. Field provisionalAddress covers the
	// outside address of a session without ports.
	provisional, provisionalAddress bool
	counted                         tally // counters of the session's backend

	proxyState *proxyState     // PROXY header state, set by the SYN.
	splice     *sequenceSplice // Set if a SYN cookie opened the session.
	// halfOpen means that the session counts against the half-open quota, until it is assured.
	halfOpen bool
	// port is the outside endpoint of a fullnat session, or nil.
	port *outsideKey
}

// flagsSeen contains the TCP flags seen in one direction.
type flagsSeen struct{ syn, fin, rst, ack bool }

// sessionHalf is one direction of a session.
type sessionHalf struct {
	*session
	direction flow.Direction
}

// session returns the session half for a packet, or nil. Only ICMP queries and replies have
// sessions.
func (m *Model) session(v *view) *sessionHalf {
	if v.kind > icmpReply {
		return nil
	}
	return m.sessions[v.tuple()]
}

// out returns the tuple after translation.
func (h *sessionHalf) out() flow.Tuple { return h.tuple[1-h.direction].Reverse() }

// hasReplyClash reports whether another session has the same reply tuple.
func (m *Model) hasReplyClash(s *session) bool { return m.sessions[s.tuple[1]] != nil || m.mayClash(s) }

func (m *Model) addSession(s *session) {
	s.seen = [2]time.Duration{m.now, m.now}
	s.halfOpen = s.tuple[0].Protocol == flow.TCP && s.splice == nil
	m.index(s)
	if s.binding != nil {
		s.binding.sessions++
	}
	s.count(1)
}

// count adds n to the active connections of the session's client, service and backend.
func (s *session) count(n int) {
	if s.client != nil {
		s.client.flows += n
	}
	if s.service != nil {
		s.service.active += n
		s.backend.active += n
	}
}

// checkClosed ends the active count of a session that the packet has closed. The session's other
// resources remain until it expires (RFC 5382 REQ-5).
func (s *session) checkClosed(d flow.Direction) {
	over := s.flagsSeen[d].fin && (s.flagsSeen[1-d].fin || s.oneWay())
	if s.service == nil || s.binding != nil || s.closed || !over && !s.flagsSeen[d].rst {
		return
	}
	s.closed = true
	s.count(-1)
}

// index adds both directions to the table. A hairpin to the own endpoint has only one direction,
// and so has a session without replies through the gateway.
func (m *Model) index(s *session) {
	if !s.oneWay() {
		m.sessions[s.tuple[1]] = &sessionHalf{s, flow.Reply}
	}
	m.sessions[s.tuple[0]] = &sessionHalf{s, flow.Original}
}

func (m *Model) removeSession(s *session) {
	delete(m.sessions, s.tuple[0])
	if !s.oneWay() {
		delete(m.sessions, s.tuple[1])
	}
	if s.cutOff() {
		m.ended[s.tuple[0]], m.ended[s.tuple[1]] = s, s
	}
	if !s.closed {
		s.count(-1)
	}
	if s.service != nil && s.backendProvisional() {
		s.service.provisional--
		s.service.miscounted = true
	}
	if s.port != nil { // a pool for backends needs no hold-down (RFC 6888 REQ-8)
		delete(m.ports, *s.port)
	}
	if s.binding != nil {
		if s.binding.sessions--; s.binding.sessions == 0 {
			m.removeBinding(s.binding)
		}
	}
}

// cutOff reports whether a connection was open when its backend became down, and both directions
// use the gateway.
func (s *session) cutOff() bool {
	if s.service == nil || s.backend.state != datapath.Down || s.tuple[0].Protocol != flow.TCP || s.oneWay() {
		return false
	}
	state := s.State()
	return state != "TIME_WAIT" && state != "CLOSE" && (s.flagsSeen[0].ack || s.flagsSeen[1] != flagsSeen{})
}

// wasCutOff reports whether a segment belongs to a cut-off connection with its backend still down.
// Neither side knows the end of the connection. A SYN opens another connection.
func (m *Model) wasCutOff(v *view) bool {
	s := m.ended[v.tuple()]
	if s == nil || v.protocol != flow.TCP || v.kind == icmpError || v.flags&packet.RST != 0 {
		return false
	}
	if v.flags&packet.SYN != 0 {
		delete(m.ended, v.tuple())
		return false
	}
	return s.service.inForce && s.backend.state == datapath.Down
}

// endDown removes the sessions of down backends.
func (m *Model) endDown() {
	for _, h := range m.sessions {
		if h.direction == flow.Original && h.service != nil && h.backend.state == datapath.Down {
			m.removeSession(h.session)
		}
	}
}

// expire removes idle sessions after their timeout, and sessions of down backends. A binding ends
// with its last session.
func (m *Model) expire() {
	m.endDown()
	for _, h := range m.sessions {
		if h.direction != flow.Original || m.now-max(h.seen[0], h.seen[1]) <= m.timeout(h.session) {
			continue
		}
		if h.rule != nil && h.rule.Type.CrossesStateful() && h.State() == "ESTABLISHED" {
			h.assured, h.seen[0] = false, m.now // its IPv6 host gets a probe (RFC 6146 §3.5.2.2)
			continue
		}
		m.removeSession(h.session)
	}
	for key, f := range m.fragments {
		if m.now-f.seen > FragmentLife {
			delete(m.fragments, key)
		}
	}
	for key, until := range m.ports {
		if until != forever && m.now > until {
			delete(m.ports, key)
		}
	}
}

// timeout returns the idle timeout of the session in its present state (RFC 4787 REQ-5, RFC 5382
// REQ-5, RFC 5508 REQ-2, RFC 6146 §4).
func (m *Model) timeout(s *session) time.Duration {
	t := m.config.Timeouts
	switch s.tuple[0].Protocol {
	case flow.TCP:
		if s.State() == "ESTABLISHED" || s.State() == "FIN_WAIT" {
			return t.TCPEstablished.D()
		}
		return t.TCPTransitory.D()
	case flow.UDP:
		return t.UDP.D()
	case flow.ICMP, flow.ICMPv6:
		return t.ICMP.D()
	}
	return t.Other.D()
}

// resetWindow is the period after a reset for packets of the other side still in flight. Later
// packets show that the other side ignored the reset. The session then keeps its state (RFC 6146
// §3.5.2.2, TRANS).
const resetWindow = time.Second

// State returns the state of RFC 6146 §3.5.2 by its conntrack name: INIT is SYN_SENT or SYN_RECV,
// V4 FIN and V6 FIN are FIN_WAIT, V4 FIN + V6 FIN is TIME_WAIT, TRANS is CLOSE.
func (s *session) State() string {
	if s.tuple[0].Protocol != flow.TCP {
		return ""
	}
	a, b := s.flagsSeen[0], s.flagsSeen[1]
	if s.oneWay() {
		b.fin = a.fin
	}
	switch {
	case a.rst && s.seen[1] <= s.seen[0]+resetWindow, b.rst && s.seen[0] <= s.seen[1]+resetWindow:
		return "CLOSE"
	case a.fin && b.fin:
		return "TIME_WAIT"
	case s.assured && (a.fin || b.fin):
		return "FIN_WAIT"
	case s.assured:
		return "ESTABLISHED"
	case b.syn:
		return "SYN_RECV"
	}
	return "SYN_SENT"
}

// oneWay reports whether replies bypass the gateway. The client's flags then count for both
// directions.
func (s *session) oneWay() bool { return s.service != nil && s.service.answersDirectly() }

// updateState updates the state of the session for a packet. A TCP session is assured when one side
// acknowledges a packet of the other side. This is the third packet of the handshake, or the first
// answer in a connection that began before the session.
func (s *session) updateState(d flow.Direction, flags packet.TCPFlags) {
	if s.tuple[0].Protocol != flow.TCP {
		s.assured = s.assured || d == flow.Reply
		return
	}
	h, other := &s.flagsSeen[d], s.flagsSeen[1-d]
	if s.oneWay() {
		other = *h // flags of previous packets
	}
	switch {
	case flags&packet.RST != 0:
		h.rst = true
		return
	case flags&packet.SYN != 0:
		h.syn = true
	default:
		h.ack = true
	}
	h.rst = false // data after a reset: the receiver ignored the reset
	if flags&packet.FIN != 0 {
		h.fin = true
	}
	s.assured = s.assured || h.ack && (other.syn || other.ack)
	s.halfOpen = s.halfOpen && !s.assured
}

// handleSession handles a packet of an existing session.
func (m *Model) handleSession(v *view, h *sessionHalf) plan {
	if isReopening(h.session, h.direction, v) {
		// A new SYN in the tuple of a closed connection (RFC 9293 §3.6.1) restarts the same
		// session.
		h.flagsSeen, h.assured = [2]flagsSeen{}, false
	}
	if h.direction == flow.Original {
		h = m.confirmSession(v, h)
	}
	if h.service != nil && h.direction == flow.Original && h.service.resets(m, v) {
		return m.countRefused(h.service, v, ReasonLimitResets)
	}
	if s := h.splice; s != nil && !s.answered && h.direction == flow.Reply && v.flags&(packet.SYN|packet.RST) == 0 {
		p := drop(ReasonNoFlow) // belongs to an older connection of the backend
		p.answer = reset
		return p
	}
	h.seen[h.direction] = m.now
	h.updateState(h.direction, v.flags)
	h.checkClosed(h.direction)
	h.packets[h.direction]++
	h.bytes[h.direction] += uint64(len(v.ip))
	return h.planFor(v, ReasonFlow)
}

// endReused ends a service session when a SYN reuses its tuple for a new connection. The session is
// closed, its backend is down, or its backend never answered and takes no new connections. The
// scheduler then selects a backend for the new connection.
func (m *Model) endReused(v *view, h *sessionHalf) bool {
	opens := v.protocol == flow.TCP && v.flags&(packet.SYN|packet.ACK|packet.RST) == packet.SYN && h.direction == flow.Original
	if !opens || h.service == nil {
		return false
	}
	answered := h.flagsSeen[1] != flagsSeen{}
	if h.oneWay() {
		answered = h.flagsSeen[0].ack
	}
	state := h.backend.state
	if !isReopening(h.session, h.direction, v) && state != datapath.Down && (answered || state == datapath.Up) {
		return false
	}
	m.removeSession(h.session)
	m.replaced = h.session
	return true
}

// reusesTuple reports whether a new connection to backend b has both tuples of the session that its
// SYN ended. Such a connection needs no free entry and always has a session.
func (m *Model) reusesTuple(v *view, s *service, b *backend) bool {
	was := m.replaced
	return was != nil && was.service == s && was.backend == b &&
		was.tuple[1] == flow.Tuple{Protocol: v.protocol, Source: s.endpoint(b, v.dst.Port()), Dest: v.src}
}

func isReopening(s *session, d flow.Direction, v *view) bool {
	state := s.State()
	return v.protocol == flow.TCP && v.flags&(packet.SYN|packet.ACK|packet.RST) == packet.SYN && d == flow.Original &&
		(state == "TIME_WAIT" || state == "CLOSE")
}

// planFor returns the plan for a packet in this direction of the session.
func (h *sessionHalf) planFor(v *view, reason Reason) plan {
	p := plan{action: Forward, reason: reason, to: h.out(), half: h}
	if h.rule != nil {
		p.count = append(p.count, &h.rule.tally)
		p.clamp = h.rule.MSSClamp
	}
	if s := h.service; s != nil {
		p.count = append(p.count, &s.tally, &h.backend.tally, &h.session.counted)
		p.clamp = s.MSSClamp
		if h.direction == flow.Original {
			s.routeTo(&p, v, h.backend)
		}
		h.addEdit(&p, v)
	}
	return p
}

// leftRule reports whether a route change moved an inside host's session to an interface outside
// the rule. The outside source is not valid there.
func (h *sessionHalf) leftRule(m *Model, v *view) bool {
	if h == nil || h.rule == nil || h.service != nil || h.direction != flow.Original || v.kind == icmpError {
		return false
	}
	to := h.out().Dest.Addr()
	if crosses := to.Is6() != v.v6; crosses && !v.v6 || !crosses && to != v.dst.Addr() { // session from outside, or a hairpin
		return false
	}
	next, routed := m.host.route(to)
	return routed && !m.host.Owns(to) && !h.rule.Out.Has(next.Name)
}

// Flows returns the sessions.
func (m *Model) Flows() []flow.Flow {
	var out []flow.Flow
	for _, h := range m.sessions {
		if h.direction != flow.Original {
			continue
		}
		f := flow.Flow{Original: h.tuple[0], Reply: h.tuple[1], State: h.State(), Replied: h.packets[1] > 0,
			Assured: h.assured, Timeout: m.timeout(h.session) - (m.now - max(h.seen[0], h.seen[1])), Counted: true, Packets: h.packets, Bytes: h.bytes,
			Datapath: "model"}
		if h.service != nil {
			f.Owner, f.Backend = h.service.Name, h.backend.Name
		} else if h.rule != nil {
			f.Owner = h.rule.Name
		}
		out = append(out, f)
	}
	return out
}
