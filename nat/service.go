// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// service is a configured service, or a port-forward rule, with its state.
type service struct {
	*config.Service
	tally
	rule        *rule // of a port-forward
	state       []datapath.State
	backends    []backend
	table       []uint16 // slots of indices into Backends
	sequence    int
	active      int
	guesses     int  // live sessions whose backend the datapath under judgement has not shown
	guessed     bool // one of them has ended so
	connections uint64
	refused     uint64
	sentAgain   uint64 // SYNs of refused connections beyond the first
	synsRefused map[flow.Tuple]uint32
	sticky      map[string]sticky
	cookieAt    time.Duration // when it last gave a cookie, plus 1; 0 for never
	reset       time.Duration // when the next reset conforms
	credit      credits       // the zero Addr is the whole service
}

type backend struct {
	tally
	active      int
	connections uint64
}

type sticky struct {
	backend int
	seen    time.Duration
}

func newService(c *config.Service) *service {
	s := &service{Service: c, state: make([]datapath.State, len(c.Backends)), backends: make([]backend, len(c.Backends)),
		sticky: map[string]sticky{}, credit: credits{}, synsRefused: map[flow.Tuple]uint32{}}
	for i, b := range c.Backends {
		if b.Drain {
			s.state[i] = datapath.Drain
		}
	}
	s.schedule()
	return s
}

// portForward makes a service of a port-forward rule: one backend, always up.
func portForward(r *rule) *service {
	c := &config.Service{Name: r.Name, Listen: []config.Listen{*r.Listen}, Protocol: r.Protocol, Mode: config.ModeDNAT,
		Scheduler: config.SchedulerRR, MSSClamp: r.MSSClamp,
		Backends: []config.Backend{{Name: r.Name, Address: r.To.Address, Port: r.To.Port, Weight: 1, Priority: 1}}}
	s := &service{Service: c, rule: r, state: make([]datapath.State, 1), backends: make([]backend, 1), synsRefused: map[flow.Tuple]uint32{}}
	s.schedule()
	return s
}

// schedule fills the slots anew after a change of a backend's state.
func (s *service) schedule() {
	active := datapath.Service{Service: s.Service, State: s.state}.Active()
	members := make([]balance.Member, len(active))
	for i, a := range active {
		b := s.Backends[a]
		members[i] = balance.Member{Key: netip.AddrPortFrom(b.Address, b.Port).String(), Weight: b.Weight}
	}
	var slots []uint16
	if s.hashes() {
		slots = balance.Maglev(members, balance.TableSize(len(s.Backends)))
	} else {
		if s.Scheduler == config.SchedulerRR || s.Scheduler == config.SchedulerLC {
			for i := range members {
				members[i].Weight = 1
			}
		}
		for _, i := range balance.Smooth(members) {
			slots = append(slots, uint16(i))
		}
	}
	s.table = nil
	for _, i := range slots {
		s.table = append(s.table, uint16(active[i]))
	}
}

// hashes reports whether the scheduler gives the same backend for the same packet
// without remembering.
func (s *service) hashes() bool {
	switch s.Scheduler {
	case config.SchedulerMaglev, config.SchedulerSourceHash, config.SchedulerSymmetricHash:
		return true
	}
	return false
}

// bypassed reports whether the backends answer their clients directly.
func (s *service) bypassed() bool {
	return s.Mode == config.ModeDSR || s.Mode == config.ModeTunnel
}

// listens returns the listener that an endpoint matches; an empty interface
// matches every listener.
func (s *service) listens(p flow.Protocol, to netip.AddrPort, iface string) (config.Listen, bool) {
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

// serviceOf returns the service that a packet is for: one that names its port goes
// before one that takes every port.
func (m *Model) serviceOf(v *view, iface string) (*service, config.Listen) {
	var wide *service
	var listen config.Listen
	for _, s := range m.services {
		if s.rule != nil && !s.rule.In.Has(iface) {
			continue
		}
		if (v.protocol == flow.ICMP || v.protocol == flow.ICMPv6) && v.kind != icmpQuery {
			continue
		}
		l, ok := s.listens(v.protocol, v.dst, iface)
		switch {
		case !ok:
		case len(l.Ports) > 0:
			return s, l
		case wide == nil:
			wide, listen = s, l
		}
	}
	return wide, listen
}

const (
	tcpOpening = packet.SYN | packet.ACK | packet.RST
	tcpSYN     = packet.SYN
)

// statelessSYN reports whether a SYN to the service leaves no state behind: the
// hash gives the same backend again, and the backend's answer is recognised by
// its endpoint.
func (s *service) statelessSYN(m *Model) bool {
	return s.Protocol == flow.TCP && s.Mode == config.ModeDNAT && s.hashes() && s.rule == nil && !s.SYNCookies && s.Persistence == nil && s.unambiguous(m)
}

// recognised reports whether what a backend answers to a SYN is known by its
// endpoint alone. Schedulers that remember fall back to it when too many
// handshakes are in progress.
func (s *service) recognised(m *Model) bool {
	return s.Protocol == flow.TCP && s.Mode == config.ModeDNAT && s.unambiguous(m)
}

// unambiguous reports whether every backend of the service answers for one
// virtual endpoint only, among all services.
func (s *service) unambiguous(m *Model) bool {
	for _, b := range s.Backends {
		found := 0
		for _, o := range m.services {
			for _, ob := range o.Backends {
				if ob.Address == b.Address && (ob.Port == b.Port || ob.Port == 0 || b.Port == 0) && (o.Protocol == s.Protocol || o.Protocol == flow.Any) {
					found += o.endpoints(ob)
				}
			}
		}
		if found != 1 {
			return false
		}
	}
	return true
}

// endpoints counts the virtual endpoints that one endpoint of the backend can
// stand for.
func (s *service) endpoints(b config.Backend) int {
	n := 0
	for _, l := range s.Listen {
		switch {
		case b.Port == 0:
			n++ // each port is its own
		case len(l.Ports) == 0:
			n += 65536
		default:
			for _, p := range l.Ports {
				n += p.Len()
			}
		}
	}
	return n
}

// newService handles a packet to a service that belongs to no session.
func (m *Model) newService(in Arrival, v *view, s *service, l config.Listen) plan {
	if p, done := m.cookies(in, v, s); done {
		return p
	}
	opens := v.protocol == flow.TCP && v.flags&tcpOpening == tcpSYN
	handshake := s.Mode == config.ModeDNAT && v.flags&packet.SYN == 0 && m.synsCame[v.tuple()].service != nil // its SYN was admitted
	refuse := func(reason Reason) plan { return m.refuse(s, v, reason) }
	stateless := s.keepsNone()
	if reason := s.excludes(m, v); reason != "" {
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
	odd := !opens && !handshake && !stateless || opens && v.flags&packet.FIN != 0
	if v.protocol == flow.TCP && odd && (s.Limits.StrictTCP || s.ClientAddress == config.ClientAddressProxyV2) {
		return refuse(ReasonStrictTCP)
	}
	if len(s.table) == 0 {
		p := refuse(ReasonNoBackend)
		p.answer = map[config.WhenDown]answer{config.WhenDownReset: reset, config.WhenDownReject: portUnreachable}[s.WhenDown]
		return p
	}
	if !stateless || opens {
		if reason := s.refuses(m, v, handshake); reason != "" {
			return refuse(reason)
		}
	}
	i, reason := s.choose(m, v, !stateless, handshake || v.cookie != nil)
	if reason != "" {
		return refuse(reason)
	}
	if stateless || s.statelessSYN(m) && opens && !s.turns(m, v, s.Backends[i].Address) {
		reason := ReasonStateless
		if opens && !stateless {
			reason = ReasonSYN
		}
		p := s.withoutSession(v, i, reason)
		if reason == ReasonSYN {
			m.rememberSYN(v.tuple(), syn{s, i, p.to})
		}
		return p
	}
	return m.openService(in, v, s, i)
}

// syn is one that left without a session.
type syn struct {
	service *service
	backend int
	to      flow.Tuple // as it left
}

// rememberSYN notes where a SYN without a session went, in the place of an earlier one of its
// tuple.
func (m *Model) rememberSYN(came flow.Tuple, s syn) {
	delete(m.synsSent, m.synsCame[came].to)
	m.syns++
	m.synsSent[s.to], m.synsCame[came] = m.syns, s
}

// keepsNone reports whether nothing is remembered of the service's connections: no
// answer comes back this way, or none needs it, the hash gives the same backend again,
// and nothing else asks for it.
func (s *service) keepsNone() bool {
	if s.Mode == config.ModeStateless {
		return true
	}
	l := &s.Limits
	counts := l.Connections+l.ConnectionsPerClient+l.ConnectionsPerBackend > 0 ||
		slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return b.MaxConnections > 0 })
	return s.bypassed() && s.hashes() && s.Persistence == nil && !counts
}

// checksumsAddresses reports whether a transport that is left alone would have a
// wrong checksum with the service's addresses. SCTP's covers no addresses.
func (s *service) checksumsAddresses(v *view) bool {
	if s.bypassed() || v.protocol == flow.TCP || v.protocol == flow.UDP {
		return false
	}
	const dccp, udplite = 33, 136
	return s.Mode == config.ModeFullNAT || v.protocol == dccp || v.protocol == udplite
}

// endpoint returns where a packet to the service goes on backend i.
func (s *service) endpoint(i int, port uint16) netip.AddrPort {
	if s.rule != nil {
		return s.rule.Target(port)
	}
	if b := s.Backends[i]; b.Port != 0 {
		return netip.AddrPortFrom(b.Address, b.Port)
	}
	return netip.AddrPortFrom(s.Backends[i].Address, port)
}

// towards completes the plan of a packet to backend i for the modes that do not
// rewrite its destination.
func (s *service) towards(p *plan, v *view, i int) {
	switch s.Mode {
	case config.ModeDSR:
		p.to, p.via, p.mac = v.tuple(), s.Backends[i].Address, packet.MAC(s.Backends[i].MAC)
	case config.ModeTunnel:
		p.to, p.via, p.encap = v.tuple(), s.Backends[i].Address, &encapsulation{Tunnel: s.Tunnel, to: s.Backends[i].Address}
	}
}

// withoutSession forwards a packet of which nothing is remembered.
func (s *service) withoutSession(v *view, i int, reason Reason) plan {
	p := plan{action: Forward, reason: reason, to: v.tuple(), count: []*tally{&s.tally, &s.backends[i].tally}, clamp: s.MSSClamp}
	p.to.Dest = s.endpoint(i, v.dst.Port())
	s.towards(&p, v, i)
	return p
}

// openService makes the session of a packet to backend i.
func (m *Model) openService(in Arrival, v *view, s *service, i int) plan {
	to := s.endpoint(i, v.dst.Port())
	n := &session{service: s, backend: i, rule: s.rule}
	n.tuple[0] = v.tuple()
	reply := flow.Tuple{Protocol: v.protocol, Source: to, Dest: v.src}
	switch {
	case s.bypassed():
		reply = v.tuple().Reverse()
	case s.Mode == config.ModeFullNAT:
		key, reason := m.fullnatSource(s, v, to)
		if reason != "" {
			return m.refuse(s, v, reason)
		}
		reply.Dest, n.port = key.endpoint, &key
	case s.turns(m, v, to.Addr()):
		key, reason := m.fullnatSource(s, v, to)
		if reason != "" {
			return m.refuse(s, v, reason)
		}
		reply.Dest, n.port = key.endpoint, &key
	case s.rule != nil && s.rule.Crosses():
		reply = m.crossed(s.rule, v, to)
	case s.rule != nil && v.portless():
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
		}
	}
	n.tuple[1] = reply
	if !s.bypassed() && m.clashes(n) {
		if n.port != nil {
			delete(m.ports, *n.port) // nobody has seen it
		}
		if n.binding != nil {
			m.dropUnused(n.binding)
		}
		return m.refuse(s, v, ReasonClash)
	}
	n.unseen = m.conceals(s, n, v)
	if n.guess() {
		s.guesses++
	}
	n.spliced = v.cookie
	n.client = m.countClient(s, n.client, v.src.Addr())
	s.connections++
	s.backends[i].connections++
	m.addSession(n)
	return m.first(v, n)
}

// countClient returns the quota entry of a client of the service: IPv6 clients
// count by /64.
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

// fullnatSource gives out the source endpoint of a fullnat session.
func (m *Model) fullnatSource(s *service, v *view, to netip.AddrPort) (outsideKey, Reason) {
	addresses := expand(s.SourcePool, to.Addr().Is6())
	if len(addresses) == 0 {
		if next, ok := m.host.route(to.Addr()); ok {
			if a, ok := next.address(to.Addr().Is6()); ok {
				addresses = []netip.Addr{a}
			}
		}
	}
	key, ok := m.allocate(request{addresses: addresses, protocol: v.protocol, wanted: v.src.Port(),
		ports: config.PortSet{{First: 1024, Last: 65535}}})
	if !ok {
		return key, ReasonNoPort
	}
	m.ports[key] = forever
	return key, ""
}

// forwardHairpin gives an inside client of a port-forward an outside source when
// the inside server would otherwise answer it directly.
func (m *Model) forwardHairpin(in Arrival, v *view, forward *rule, to netip.AddrPort) (*binding, plan, bool) {
	next, ok := m.host.route(to.Addr())
	if !ok || next.Name != in.Interface || forward.Hairpin == config.SwitchOff {
		return nil, plan{}, false
	}
	r := m.hairpinRule(nil, in, v)
	if r == nil {
		return nil, plan{}, false
	}
	b, refusal := m.bindingFor(r, v, v.dst)
	if b != nil {
		b.remotes[v.dst.Addr()] = true
	}
	return b, refusal, true
}

// turns reports whether a client gets an address of this host as its source: the backend would
// answer it directly, under its own address, as they are on one network or one host.
func (s *service) turns(m *Model, v *view, backend netip.Addr) bool {
	if s.rule != nil || !datapath.Turns(s.Service) || v.protocol != flow.TCP && v.protocol != flow.UDP {
		return false
	}
	near, _ := datapath.Connected(m.host.networks(), backend)
	next, routed := m.host.route(backend)
	_, sourced := next.address(backend.Is6())
	return routed && sourced && near.Contains(v.src.Addr())
}

// crossed returns the answers of an IPv6 host to an IPv4 client of a port-forward, which it
// knows behind the prefix of its nat64 rule.
func (m *Model) crossed(forward *rule, v *view, to netip.AddrPort) flow.Tuple {
	t := flow.Tuple{Protocol: v.protocol, Source: to, Dest: netip.AddrPortFrom(Embed(m.translator(forward).Prefix, v.src.Addr()), v.src.Port())}
	if t.Protocol == flow.ICMP {
		t.Protocol = flow.ICMPv6
	}
	return t
}

// translator is the nat64 rule of the target of such a port-forward.
func (m *Model) translator(forward *rule) *config.NATRule {
	var rules []*config.NATRule
	for _, r := range m.rules {
		rules = append(rules, r.NATRule)
	}
	return forward.Translator(rules)
}

// forward64 returns the IPv6 host that a port-forward leads to from an IPv4 endpoint, which a
// packet of another one is for.
func (m *Model) forward64(in Arrival, v *view, to netip.AddrPort) (netip.AddrPort, bool) {
	about := *v
	if about.dst = to; v.protocol == flow.ICMPv6 {
		about.protocol = flow.ICMP
	}
	s, _ := m.serviceOf(&about, in.Interface)
	if s == nil || s.rule == nil || !s.rule.Crosses() || s.rule.Hairpin == config.SwitchOff {
		return netip.AddrPort{}, false
	}
	return s.endpoint(0, to.Port()), true
}

// serviceReply handles what a backend sends that belongs to no session: replies of
// stateless services, and answers to SYNs of which nothing was remembered.
func (m *Model) serviceReply(v *view) (plan, bool) {
	for _, s := range m.services {
		from, i, ok := s.answersFor(m, v)
		if !ok {
			continue
		}
		reason := ReasonStateless
		if s.Mode != config.ModeStateless {
			if !m.answersSYN(v.tuple()) {
				continue // a connection of the backend's own
			}
			reason = ReasonSYNACK
		}
		p := plan{action: Forward, reason: reason, to: v.tuple(), count: []*tally{&s.tally, &s.backends[i].tally}, clamp: s.MSSClamp}
		p.to.Source = from
		p.here = m.host.Owns(v.dst.Addr())
		return p, true
	}
	return plan{}, false
}

// answersFor returns the virtual endpoint that stands for the sender of v, and the
// backend that it is.
func (s *service) answersFor(m *Model, v *view) (netip.AddrPort, int, bool) {
	syn := s.recognised(m) && v.protocol == flow.TCP && (v.flags&(packet.SYN|packet.ACK) == packet.SYN|packet.ACK || v.flags&packet.RST != 0)
	if s.Mode != config.ModeStateless && !syn {
		return netip.AddrPort{}, 0, false
	}
	return s.virtual(v.protocol, v.src)
}

// virtual returns the first virtual endpoint of the service that a backend's
// endpoint stands for, and that backend.
func (s *service) virtual(p flow.Protocol, from netip.AddrPort) (netip.AddrPort, int, bool) {
	if s.Protocol != flow.Any && s.Protocol != p {
		return netip.AddrPort{}, 0, false
	}
	for i, b := range s.Backends {
		if b.Address != from.Addr() || b.Port != 0 && b.Port != from.Port() {
			continue
		}
		for _, l := range s.Listen {
			switch {
			case l.Address.Is4() != from.Addr().Is4():
			case b.Port == 0 && inPorts(l.Ports, from.Port()):
				return netip.AddrPortFrom(l.Address, from.Port()), i, true
			case b.Port != 0 && len(l.Ports) > 0:
				return netip.AddrPortFrom(l.Address, l.Ports[0].First), i, true
			}
		}
	}
	return netip.AddrPort{}, 0, false
}
