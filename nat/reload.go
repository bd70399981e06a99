// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"reflect"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// Apply puts another configuration in the place of the one in force, while traffic flows. Services,
// backends and rules are known by their names: what they remember goes on. Sessions that the new
// configuration would treat otherwise end, those of TCP and SCTP by its policy ("established").
// All backends are up again, or drained as they are configured.
// A configuration like the one in force ends nothing.
func (m *Model) Apply(c *config.Config) {
	was, established := m.snapshot(m.config), m.config.Established
	for i := range was.Services {
		s := &was.Services[i]
		for n, b := range m.allServices["service "+s.Name].backends {
			s.State[n] = b.state
		}
	}
	listeners := m.configure(c)
	if established == c.Established && len(datapath.Differing(was, m.snapshot(c))) == 0 {
		return
	}
	for _, b := range m.outside {
		if b.mapped && !m.mayMap(b) {
			m.unmap(b)
		}
	}
	for _, h := range m.sessions {
		if h.direction == flow.Original && m.differs(h.session, listeners) {
			m.removeSession(h.session)
		}
	}
}

// SetHost has addresses, routes, neighbours or links of the host be others from now on. Flows go on
// by what is there now, but those with an address of the host's own that is gone; the states of
// backends stay, and flows to those that are down end, as they do before long.
func (m *Model) SetHost(h Host) {
	m.host = h
	states := map[*backend]datapath.State{}
	for _, s := range m.services {
		for _, b := range s.backends {
			states[b] = b.state
		}
	}
	m.configure(m.config)
	for _, h := range m.sessions { // what is sent there reaches this host no more
		if h.direction == flow.Original && h.lostAddress(m) {
			m.removeSession(h.session)
		}
	}
	for _, s := range m.services {
		for _, b := range s.backends {
			b.state = states[b]
		}
		s.schedule()
	}
	m.endDown()
}

// lost reports whether a session was given an address of the host that it has no more: by masquerade, or by a
// service without a pool.
func (s *session) lostAddress(m *Model) bool {
	if s.service != nil {
		return s.port != nil && (s.service.Mode != config.ModeFullNAT || len(s.service.SourcePool) == 0) && !m.host.Owns(s.port.endpoint.Addr())
	}
	outside := s.tuple[1].Dest
	if s.binding != nil {
		outside = s.binding.outside.endpoint
	}
	return s.rule != nil && s.rule.Type == config.NATMasquerade && !m.host.Owns(outside.Addr())
}

// configure puts a configuration in force, and returns who listens in it.
func (m *Model) configure(c *config.Config) *datapath.Listeners {
	m.config = c
	s := datapath.Resolve(m.snapshot(c), m.host.listenAddress)
	services, rules := m.services, m.rules
	m.services, m.rules, m.prefixes = nil, nil, nil
	for _, svc := range s.Services {
		m.serve("service "+svc.Name, svc.Service, nil)
	}
	for _, n := range s.NAT {
		m.addRule(n)
	}
	for _, s := range services {
		if !slices.Contains(m.services, s) {
			s.retire()
		}
	}
	for _, r := range rules {
		r.inForce = slices.Contains(m.rules, r)
	}
	m.rate(c.Firewall.Rules)
	return datapath.NewListeners(s)
}

// snapshot is a configuration whose backends are up, or drained as it says.
func (*Model) snapshot(c *config.Config) *datapath.Snapshot {
	s := &datapath.Snapshot{Config: c}
	for i := range c.Services {
		states := make([]datapath.State, len(c.Services[i].Backends))
		for n, b := range c.Services[i].Backends {
			if b.Drain {
				states[n] = datapath.Drain
			}
		}
		s.Services = append(s.Services, datapath.Service{Service: &c.Services[i], State: states})
	}
	for i := range c.NAT {
		s.NAT = append(s.NAT, &c.NAT[i])
	}
	return s
}

// serve puts a service in force, or a port-forward rule that is made one.
func (m *Model) serve(name string, c *config.Service, r *rule) {
	s := m.allServices[name]
	if s == nil {
		s = newService()
		m.allServices[name] = s
	}
	s.rule = r
	s.configure(c)
	if !s.inForce {
		s.begin()
	}
	m.services = append(m.services, s)
}

// begin has a service count from zero, whether it is new or was in force before.
func (s *service) begin() {
	s.inForce = true
	s.tally, s.connections, s.refused, s.sequence, s.cookieAt, s.reset = tally{}, 0, 0, 0, 0, 0
	s.miscounted = false
	delete(s.credit, allClients)
	for _, b := range s.known {
		b.tally, b.connections = tally{}, 0
	}
}

// retire takes a service out of force.
func (s *service) retire() {
	was := s.backends
	s.inForce, s.backends, s.table = false, nil, nil
	s.leave(was)
}

// rate makes room for the rates of firewall rules. A rule that stays as it is, in its place, keeps
// what it has let through.
func (m *Model) rate(rules []config.FirewallRule) {
	place := 0
	for _, r := range rules {
		r.Name = ""
		for range max(1, len(r.Ports)) {
			switch {
			case place == len(m.rates):
				m.rates = append(m.rates, rated{rule: r})
			case !reflect.DeepEqual(m.rates[place].rule, r):
				m.rates[place] = rated{rule: r}
			}
			place++
		}
	}
}

// differs reports whether the configuration in force would treat a session otherwise than it is,
// and its policy lets it be ended.
func (m *Model) differs(s *session, listeners *datapath.Listeners) bool {
	if s.service != nil {
		if !s.service.inForce {
			return true
		}
		return !m.keeps(s) && s.service.changesService(s, listeners)
	}
	if !s.rule.inForce {
		return true
	}
	return !m.keeps(s) && s.rule.changesTranslation(s, listeners)
}

// keeps reports whether the policy keeps a session: one that is open, so not of TCP that has closed
// or was never answered.
func (m *Model) keeps(s *session) bool {
	if m.config.Established == config.EstablishedEnd {
		return false
	}
	switch s.tuple[0].Protocol {
	case flow.SCTP:
		return true
	case flow.TCP:
		state := s.State()
		return state != "TIME_WAIT" && state != "CLOSE" && (s.flagsSeen[0].ack || s.flagsSeen[1] != flagsSeen{})
	}
	return false
}

// changesService reports whether the service of a session has another backend for it, another
// source for its backend, or listens elsewhere.
func (s *service) changesService(n *session, listeners *datapath.Listeners) bool {
	name := "service " + s.Name
	if s.rule != nil {
		name = "nat " + s.Name
	}
	listens := slices.ContainsFunc(listeners.Find(n.tuple[0].Protocol, n.tuple[0].Dest), func(l datapath.Listener) bool { return l.Name() == name })
	pooled := s.Mode != config.ModeFullNAT || len(s.SourcePool) == 0 || slices.ContainsFunc(s.SourcePool, func(r config.AddressRange) bool {
		return r.Contains(n.tuple[1].Dest.Addr())
	})
	return !listens || !pooled || !slices.Contains(s.backends, n.backend)
}

// changesTranslation reports whether the rule of a session does not want its inside host or its
// remote any more, gives out other addresses, or a listener takes its packets.
func (r *rule) changesTranslation(s *session, listeners *datapath.Listeners) bool {
	to := s.tuple[0].Dest
	inside := r.inside(s.tuple[0].Source.Addr()) || r.inside(s.tuple[1].Source.Addr())
	taken := slices.ContainsFunc(listeners.Find(s.tuple[0].Protocol, to), func(l datapath.Listener) bool { return !l.Bound })
	outside := s.tuple[1].Dest.Addr()
	if s.binding != nil {
		outside = s.binding.outside.endpoint.Addr()
	}
	pooled := r.Type == config.NATMasquerade || r.holds(outside)
	return !inside || taken || contains(r.Except, to.Addr()) || !pooled
}

// mayMap reports whether the configuration in force lets a host have the mapping that it has.
func (m *Model) mayMap(b *binding) bool {
	r := b.rule
	return r.inForce && r.PCP && contains(r.Source, b.inside.Addr()) && (r.Type == config.NATMasquerade || r.holds(b.outside.endpoint.Addr()))
}

// Mapped reports whether a host has a mapping.
func (m *Model) Mapped(w datapath.Mapping) bool {
	b := m.outside[outsideKey{portClass(w.Protocol), w.Outside}]
	return b != nil && b.mapped && b.inside == w.Inside && b.rule.Name == w.Rule
}

// poolChanges reports whether the rule is to give out other addresses.
func (r *rule) poolChanges(next *config.NATRule) bool {
	return next != nil && (!reflect.DeepEqual(next.To, r.To) || !reflect.DeepEqual(next.Pool, r.Pool))
}
