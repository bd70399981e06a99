// SPDX-License-Identifier: Apache-2.0

package model

import (
	"reflect"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// Apply replaces the configuration while traffic flows. Services, backends and rules with the same
// name keep their state. Sessions end if the new configuration would treat them differently. For
// TCP and SCTP, the policy ("established") may keep them. All backends are then up, or draining as
// configured. An equal configuration ends no session.
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
			m.removeMapping(b)
		}
	}
	for _, h := range m.sessions {
		if h.direction == flow.Original && m.mustEnd(h.session, listeners) {
			m.removeSession(h.session)
		}
	}
}

// SetHost replaces the addresses, routes, neighbours and links of the host. Sessions continue with
// the new state. A session ends if it uses a former address of the host. Backends keep their
// states, and sessions to a down backend end.
func (m *Model) SetHost(h Host) {
	m.host = h
	states := map[*backend]datapath.State{}
	for _, s := range m.services {
		for _, b := range s.backends {
			states[b] = b.state
		}
	}
	m.configure(m.config)
	for _, h := range m.sessions { // their packets no longer reach this host
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

// lostAddress reports whether a session uses a former address of the host: by masquerade, or by a
// service without a pool.
func (s *session) lostAddress(m *Model) bool {
	if s.service != nil {
		return s.port != nil && (s.service.Mode != config.ModeFullNAT || len(s.service.SourcePool) == 0) && !m.host.Owns(s.port.endpoint.Addr())
	}
	outside := s.tuple[1].Dest
	if s.binding != nil {
		outside = s.binding.outside.endpoint
	}
	return s.rule != nil && s.rule.Type.UsesInterfaceAddress() && !m.host.Owns(outside.Addr())
}

// configure activates a configuration and returns its listeners.
func (m *Model) configure(c *config.Config) *datapath.Listeners {
	m.config = c
	s := datapath.Resolve(m.snapshot(c), m.host.listenAddress)
	services, rules := m.services, m.rules
	m.services, m.rules, m.prefixes = nil, nil, nil
	for _, svc := range s.Services {
		m.activateService("service "+svc.Name, svc.Service, nil)
	}
	for _, n := range s.NAT {
		m.addRule(n)
	}
	for _, s := range services {
		if !slices.Contains(m.services, s) {
			s.drainBackends()
		}
	}
	for _, r := range rules {
		r.inForce = slices.Contains(m.rules, r)
	}
	m.rate(c.Firewall.Rules)
	return datapath.NewListeners(s)
}

// snapshot returns a configuration with all backends up, or draining as configured.
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

// activateService activates a service, or the service of a port-forward rule.
func (m *Model) activateService(name string, c *config.Service, r *rule) {
	s := m.allServices[name]
	if s == nil {
		s = newService()
		m.allServices[name] = s
	}
	s.rule = r
	s.configure(c)
	if !s.inForce {
		s.activate()
	}
	m.services = append(m.services, s)
}

// activate resets the counters of a service and marks it active.
func (s *service) activate() {
	s.inForce = true
	s.tally, s.connections, s.refused, s.sequence, s.cookieAt, s.reset = tally{}, 0, 0, 0, 0, 0
	s.miscounted = false
	delete(s.credit, allClients)
	for _, b := range s.known {
		b.tally, b.connections = tally{}, 0
	}
}

// drainBackends drains the backends of a service and clears its slots.
func (s *service) drainBackends() {
	was := s.backends
	s.inForce, s.backends, s.table = false, nil, nil
	s.drainRemoved(was)
}

// rate prepares the rate state of the firewall rules. An unchanged rule at the same position keeps
// its state.
func (m *Model) rate(rules []config.FirewallRule) {
	place := 0
	for _, r := range rules {
		r.Name = ""
		for range max(1, len(r.Ports)) {
			switch {
			case place == len(m.rates):
				m.rates = append(m.rates, ratedRule{rule: r})
			case !reflect.DeepEqual(m.rates[place].rule, r):
				m.rates[place] = ratedRule{rule: r}
			}
			place++
		}
	}
}

// mustEnd reports whether the current configuration would treat a session differently and its
// policy permits the end of the session.
func (m *Model) mustEnd(s *session, listeners *datapath.Listeners) bool {
	if s.service != nil {
		if !s.service.inForce {
			return true
		}
		return !m.keepsSession(s) && s.service.changesService(s, listeners)
	}
	if !s.rule.inForce {
		return true
	}
	return !m.keepsSession(s) && s.rule.changesTranslation(s, listeners)
}

// keepsSession reports whether the policy keeps a session. It keeps open sessions only: not a closed or
// unanswered TCP session.
func (m *Model) keepsSession(s *session) bool {
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

// changesService reports whether the service of a session lacks its backend, its source address or
// its listener now.
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

// changesTranslation reports whether the rule excludes the inside host or the remote now, has
// another pool, or a listener takes the session's packets.
func (r *rule) changesTranslation(s *session, listeners *datapath.Listeners) bool {
	to := s.tuple[0].Dest
	inside := r.matchesSource(s.tuple[0].Source.Addr()) || r.matchesSource(s.tuple[1].Source.Addr())
	taken := slices.ContainsFunc(listeners.Find(s.tuple[0].Protocol, to), func(l datapath.Listener) bool { return !l.Bound })
	outside := s.tuple[1].Dest.Addr()
	if s.binding != nil {
		outside = s.binding.outside.endpoint.Addr()
	}
	pooled := r.Type.UsesInterfaceAddress() || r.poolContains(outside)
	return !inside || taken || contains(r.Except, to.Addr()) || !pooled
}

// mayMap reports whether the current configuration permits an existing mapping.
func (m *Model) mayMap(b *binding) bool {
	r := b.rule
	return r.inForce && r.PCP && contains(r.Source, b.inside.Addr()) && (r.Type.UsesInterfaceAddress() || r.poolContains(b.outside.endpoint.Addr()))
}

// Mapped reports whether a host has a mapping.
func (m *Model) Mapped(w datapath.Mapping) bool {
	b := m.outside[outsideKey{portClass(w.Protocol), w.Outside}]
	return b != nil && b.mapped && b.inside == w.Inside && b.rule.Name == w.Rule
}

// poolChanges reports whether the next version of the rule has another pool.
func (r *rule) poolChanges(next *config.NATRule) bool {
	return next != nil && (!reflect.DeepEqual(next.To, r.To) || !reflect.DeepEqual(next.Pool, r.Pool))
}
