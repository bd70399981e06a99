// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// service is a configured service, or a port-forward rule, with its state.
type service struct {
	*config.Service
	tally
	rule            *rule                   // for a port-forward rule
	backends        []*backend              // in configuration order
	known           map[backendKey]*backend // All present and former backends.
	inForce         bool
	table           []*backend // slots of the scheduler's table
	sequence        int
	active          int
	provisional     int  // Live sessions with a provisional backend.
	miscounted      bool // Such a session has ended.
	connections     uint64
	refused         uint64
	retransmissions uint64 // retransmitted SYNs of refused connections
	synsRefused     map[flow.Tuple]uint32
	sticky          map[string]stickyEntry
	cookieAt        time.Duration // Time of the last cookie plus 1; 0 for none.
	reset           time.Duration // Time of the next conforming reset.
	credit          rateCredits   // Key allClients is the whole service.
}

// backend is a backend of a service. It stays after its removal from the configuration, as long as
// sessions use it.
type backend struct {
	config.Backend
	tally
	state       datapath.State
	active      int
	connections uint64
}

// backendKey identifies a backend in its service. Another address or port means another backend.
type backendKey struct {
	name string
	to   netip.AddrPort
}

type stickyEntry struct {
	backend *backend
	seen    time.Duration
}

func newService() *service {
	return &service{known: map[backendKey]*backend{}, sticky: map[string]stickyEntry{}, credit: rateCredits{}, synsRefused: map[flow.Tuple]uint32{}}
}

// configure sets the configuration of a service.
func (s *service) configure(c *config.Service) {
	s.Service = c
	was := s.backends
	s.backends = nil
	for _, b := range c.Backends {
		key := backendKey{b.Name, netip.AddrPortFrom(b.Address, b.Port)}
		known := s.known[key]
		if known == nil {
			known = &backend{}
			s.known[key] = known
		}
		known.Backend, known.state = b, datapath.Up
		if b.Drain {
			known.state = datapath.Drain
		}
		s.backends = append(s.backends, known)
	}
	s.drainRemoved(was)
	s.schedule()
}

// drainRemoved drains the backends that are no longer configured.
func (s *service) drainRemoved(was []*backend) {
	for _, b := range was {
		if !slices.Contains(s.backends, b) {
			b.state = datapath.Drain
		}
	}
}

// schedule recomputes the slots after a change of a backend's state.
func (s *service) schedule() {
	states := make([]datapath.State, len(s.backends))
	for i, b := range s.backends {
		states[i] = b.state
	}
	s.table = nil
	now := datapath.Service{Service: s.Service, State: states}
	for _, i := range now.Slots(now.Active()) {
		s.table = append(s.table, s.backends[i])
	}
}

// answersDirectly reports whether the backends answer the clients without the gateway (dsr,
// tunnel).
func (s *service) answersDirectly() bool {
	return s.Mode.OneWay()
}

// findListener returns the listener for an endpoint. An empty interface matches every listener.
func (s *service) findListener(p flow.Protocol, to netip.AddrPort, iface string) (config.Listen, bool) {
	if s.Protocol != flow.Any && s.Protocol != p {
		return config.Listen{}, false
	}
	for _, l := range s.Listen {
		if l.Address == to.Addr() && inPorts(l.Ports, to.Port()) && (l.Interface == "" || iface == "" || l.Interface == iface) {
			return l, true
		}
	}
	return config.Listen{}, false
}

// serviceOf returns the service for a packet. A listener with ports has priority over a listener
// for all ports.
func (m *Model) serviceOf(v *view, iface string) (*service, config.Listen) {
	var wildcard *service
	var listen config.Listen
	for _, s := range m.services {
		if s.rule != nil && !s.rule.In.Has(iface) {
			continue
		}
		if (v.protocol == flow.ICMP || v.protocol == flow.ICMPv6) && v.kind != icmpQuery {
			continue
		}
		l, ok := s.findListener(v.protocol, v.dst, iface)
		switch {
		case !ok:
		case len(l.Ports) > 0:
			return s, l
		case wildcard == nil:
			wildcard, listen = s, l
		}
	}
	return wildcard, listen
}

const (
	tcpOpening = packet.SYN | packet.ACK | packet.RST
	tcpSYN     = packet.SYN
)

// newService handles a packet to a service without a session.
func (m *Model) newService(in Arrival, v *view, s *service, l config.Listen) plan {
	if p, done := m.cookies(in, v, s); done {
		return p
	}
	opens := v.protocol == flow.TCP && v.flags&tcpOpening == tcpSYN
	handshake := s.Mode == config.ModeDNAT && v.flags&packet.SYN == 0 && m.synsCame[v.tuple()].service != nil // the service admitted its SYN
	refuse := func(reason Reason) plan { return m.countRefused(s, v, reason) }
	stateless := s.isStateless()
	if reason := s.checkSets(m, v); reason != "" {
		return refuse(reason)
	}
	if s.checksumsAddresses(v) {
		return drop(ReasonUnsupportedProtocol)
	}
	if stateless && s.resets(m, v) {
		return refuse(ReasonLimitResets)
	}
	if v.protocol == flow.TCP && v.flags&packet.RST != 0 && !stateless {
		return drop(ReasonNoFlow)
	}
	unopened := !opens && !handshake && !stateless || opens && v.flags&packet.FIN != 0
	proxy := s.ClientAddress == config.ClientAddressProxyV2
	if v.protocol == flow.TCP && (unopened && (s.Limits.StrictTCP || proxy) || opens && v.first && proxy) { // later fragments may contain data
		return refuse(ReasonStrictTCP)
	}
	if len(s.table) == 0 {
		p := refuse(ReasonNoBackend)
		p.answer = map[config.WhenDown]errorReply{config.WhenDownReset: reset, config.WhenDownReject: portUnreachable}[s.WhenDown]
		return p
	}
	if !stateless || opens {
		if reason := s.checkLimits(m, v, handshake); reason != "" {
			return refuse(reason)
		}
	}
	b, reason := s.chooseBackend(m, v, !stateless, handshake || v.cookie != nil)
	if reason != "" {
		return refuse(reason)
	}
	if stateless || s.statelessSYN(m) && opens && !s.translatesSource(m, v, b.Address) && !m.reusesTuple(v, s, b) {
		reason := ReasonStateless
		if opens && !stateless {
			reason = ReasonSYN
		}
		p := s.withoutSession(v, b, reason)
		if reason == ReasonSYN {
			m.rememberSYN(v.tuple(), syn{s, b, p.to})
		}
		return p
	}
	return m.openService(in, v, s, b, nil)
}

// isStateless reports whether the service keeps no session state. Either the mode is stateless, or
// the replies bypass the gateway and a hash selects the backend without persistence or limits.
func (s *service) isStateless() bool {
	if s.Mode == config.ModeStateless {
		return true
	}
	l := &s.Limits
	counts := l.Connections+l.ConnectionsPerClient+l.ConnectionsPerBackend > 0 ||
		slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return b.MaxConnections > 0 })
	return s.answersDirectly() && s.Scheduler.Hashes() && s.Persistence == nil && !counts
}

// checksumsAddresses reports whether the addresses of the service would make an untouched transport
// checksum wrong. The SCTP checksum does not cover the addresses.
func (s *service) checksumsAddresses(v *view) bool {
	if s.answersDirectly() || v.protocol == flow.TCP || v.protocol == flow.UDP {
		return false
	}
	const dccp, udplite = 33, 136
	return s.Mode == config.ModeFullNAT || v.protocol == dccp || v.protocol == udplite
}

// endpoint returns the backend endpoint for a port of the service.
func (s *service) endpoint(b *backend, port uint16) netip.AddrPort {
	if s.rule != nil {
		return s.rule.Target(port)
	}
	if b.Port != 0 {
		port = b.Port
	}
	return netip.AddrPortFrom(b.Address, port)
}

// routeTo completes the plan for modes that keep the destination address.
func (s *service) routeTo(p *plan, v *view, b *backend) {
	switch s.Mode {
	case config.ModeDSR:
		p.to, p.via, p.mac = v.tuple(), b.Address, packet.MAC(b.MAC)
	case config.ModeTunnel:
		p.to, p.via, p.encap = v.tuple(), b.Address, &encapsulation{Tunnel: s.Tunnel, to: b.Address}
	}
}

// withoutSession returns the plan to forward a packet without a session.
func (s *service) withoutSession(v *view, b *backend, reason Reason) plan {
	p := plan{action: Forward, reason: reason, to: v.tuple(), count: []*tally{&s.tally, &b.tally}, clamp: s.MSSClamp}
	p.to.Dest = s.endpoint(b, v.dst.Port())
	s.routeTo(&p, v, b)
	return p
}

// openService creates the session of a packet to a backend. If was is not nil, the new session
// replaces that provisional session.
func (m *Model) openService(in Arrival, v *view, s *service, chosen *backend, was *session) plan {
	to := s.endpoint(chosen, v.dst.Port())
	n := &session{service: s, backend: chosen, rule: s.rule}
	n.tuple[0] = v.tuple()
	reply := flow.Tuple{Protocol: v.protocol, Source: to, Dest: v.src}
	switch {
	case s.answersDirectly():
		reply = v.tuple().Reverse()
	case s.Mode == config.ModeFullNAT:
		key, reason := m.fullnatSource(s, v, to, was)
		if reason != "" {
			return m.countRefused(s, v, reason)
		}
		reply.Dest, n.port = key.endpoint, &key
	case s.rule == nil && s.translatesSource(m, v, to.Addr()):
		key, reason := m.fullnatSource(s, v, to, was)
		if reason != "" {
			return m.countRefused(s, v, reason)
		}
		reply.Dest, n.port = key.endpoint, &key
	case s.rule != nil && s.rule.Crosses():
		reply = m.replyTuple64(s.rule, v, to)
	case s.rule != nil && v.translatesAddressOnly():
		n.tuple[1] = reply
		if reason := m.portlessHairpin(in, v, n, s.rule, to); reason != "" {
			s.refused++
			return drop(reason)
		}
		reply = n.tuple[1]
	case s.rule != nil:
		b, refusal, hairpin := m.forwardHairpin(in, v, s.rule, to)
		if hairpin && b == nil {
			return refusal
		}
		if hairpin {
			n.binding, n.client, reply.Dest = b, b.client, b.outside.endpoint
		} else if s.translatesSource(m, v, to.Addr()) {
			key, reason := m.fullnatSource(s, v, to, was)
			if reason != "" {
				return m.countRefused(s, v, reason)
			}
			reply.Dest, n.port = key.endpoint, &key
		}
	}
	n.tuple[1] = reply
	if !s.answersDirectly() && m.hasReplyClash(n) && !m.moveSource(n) {
		if n.port != nil {
			delete(m.ports, *n.port) // no packet has used the port
		}
		if n.binding != nil {
			m.dropUnused(n.binding)
		}
		return m.countRefused(s, v, ReasonClash)
	}
	n.provisional = m.choiceProvisional(s, n, v)
	if n.backendProvisional() {
		s.provisional++
	}
	n.splice = v.cookie
	n.client = m.countClient(s, n.client, v.src.Addr())
	s.connections++
	chosen.connections++
	m.addSession(n)
	return m.firstPacket(v, n)
}

// countClient returns the quota entry of a client of the service. IPv6 clients share one entry for
// each /64.
func (m *Model) countClient(s *service, c *client, a netip.Addr) *client {
	if c != nil || s.Limits.ConnectionsPerClient == 0 {
		return c
	}
	return m.client(clientKey{service: s, address: clientAddress(a)})
}

func clientAddress(a netip.Addr) netip.Addr {
	if a.Is6() {
		return netip.PrefixFrom(a, 64).Masked().Addr()
	}
	return a
}

// fullnatSource allocates the source endpoint of a fullnat session. A non-nil was is the session to
// replace.
func (m *Model) fullnatSource(s *service, v *view, to netip.AddrPort, was *session) (outsideKey, Reason) {
	addresses := expand(s.SourcePool, to.Addr().Is6())
	if len(addresses) == 0 {
		if next, ok := m.host.route(to.Addr()); ok {
			if a, ok := next.source(); ok {
				addresses = []netip.Addr{a}
			}
		}
		addresses = m.withFormerAddress(was, addresses, to.Addr().Is6())
	}
	key, ok := m.formerPort(s, to, addresses)
	if !ok {
		key, ok = m.allocate(portRequest{addresses: addresses, protocol: v.protocol, wanted: v.src.Port(),
			ports: config.PortSet{{First: 1024, Last: 65535}}})
	}
	if !ok {
		return key, ReasonNoPort
	}
	m.ports[key] = forever
	return key, ""
}

// formerPort returns the source endpoint of the session that the current SYN replaced. A new
// connection to the same backend keeps it while its address is in the pool.
func (m *Model) formerPort(s *service, to netip.AddrPort, addresses []netip.Addr) (outsideKey, bool) {
	was := m.replaced
	if was == nil || was.service != s || was.port == nil || was.tuple[1].Source != to ||
		!slices.Contains(addresses, was.port.endpoint.Addr()) || !m.isFree(*was.port) {
		return outsideKey{}, false
	}
	return *was.port, true
}

// serviceReply handles a backend's packet without a session: a reply of a stateless service, or an
// answer to a SYN without a session.
func (m *Model) serviceReply(v *view) (plan, bool) {
	for _, s := range m.services {
		from, b, ok := s.answersFor(m, v)
		if !ok {
			continue
		}
		reason := ReasonStateless
		if s.Mode != config.ModeStateless {
			switch answers := s.answersSYN(v.protocol, v.flags) && m.answersSYN(v.tuple()); {
			case answers:
				reason = ReasonSYNACK
			case !s.answersOtherNode(m, v.tuple(), from, b):
				continue // a connection that the backend opened
			}
		}
		p := plan{action: Forward, reason: reason, to: v.tuple(), count: []*tally{&s.tally, &b.tally}, clamp: s.MSSClamp}
		p.to.Source = from
		p.local = m.host.Owns(v.dst.Addr())
		return p, true
	}
	return plan{}, false
}

// answersFor returns the virtual endpoint for the sender of v, and its backend.
func (s *service) answersFor(m *Model, v *view) (netip.AddrPort, *backend, bool) {
	if s.Mode != config.ModeStateless && !(s.endpointSuffices(m) && s.answersSYN(v.protocol, v.flags)) && !s.sharesReplies(m) {
		return netip.AddrPort{}, nil, false
	}
	return s.virtual(v.protocol, v.src)
}

// answersSYN reports whether a segment of a backend can answer a SYN.
func (s *service) answersSYN(p flow.Protocol, flags packet.TCPFlags) bool {
	return s.Protocol == flow.TCP && p == flow.TCP && (flags&(packet.SYN|packet.ACK) == packet.SYN|packet.ACK || flags&packet.RST != 0)
}

// sharesReplies reports whether a node of a cluster translates replies to packets that another node received.
func (s *service) sharesReplies(m *Model) bool {
	return s.rule == nil && datapath.SharesReplies(m.config, s.Service) && s.uniqueReplies(m)
}

// answersOtherNode reports whether a reply belongs to a flow that another node can have: the hash of the request
// selects the sender.
func (s *service) answersOtherNode(m *Model, reply flow.Tuple, from netip.AddrPort, b *backend) bool {
	if !s.sharesReplies(m) || len(s.table) == 0 {
		return false
	}
	return s.byHash(&view{v6: from.Addr().Is6(), protocol: reply.Protocol, src: reply.Dest, dst: from}) == b
}

// virtual returns the first virtual endpoint of the service for a backend's endpoint, and that
// backend.
func (s *service) virtual(p flow.Protocol, from netip.AddrPort) (netip.AddrPort, *backend, bool) {
	if s.Protocol != flow.Any && s.Protocol != p {
		return netip.AddrPort{}, nil, false
	}
	for _, b := range s.backends {
		if b.Address != from.Addr() || b.Port != 0 && b.Port != from.Port() {
			continue
		}
		for _, l := range s.Listen {
			switch {
			case l.Address.Is4() != from.Addr().Is4():
			case b.Port == 0 && inPorts(l.Ports, from.Port()):
				return netip.AddrPortFrom(l.Address, from.Port()), b, true
			case b.Port != 0 && len(l.Ports) > 0:
				return netip.AddrPortFrom(l.Address, l.Ports[0].First), b, true
			}
		}
	}
	return netip.AddrPort{}, nil, false
}

// translatesSource reports whether the packet gets an address of this host as its source. Otherwise
// a backend in the client's network, or the client itself, would answer directly.
func (s *service) translatesSource(m *Model, v *view, backend netip.Addr) bool {
	if s.rule != nil && s.rule.Crosses() || !datapath.Turns(s.Service) || v.protocol != flow.TCP && v.protocol != flow.UDP {
		return false
	}
	near, _ := datapath.Connected(m.host.networks(), backend)
	next, routed := m.host.route(backend)
	_, sourced := next.address(backend.Is6())
	return routed && sourced && near.Contains(v.src.Addr())
}
