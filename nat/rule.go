// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// rule is a NAT rule with its state.
type rule struct {
	*config.NATRule
	tally
	pool4, pool6 []netip.Addr
	credit       credits
	inForce      bool
}

// addRule takes in a rule of the configuration: port-forwards become services of
// one backend, prefix rules go to the table of prefixes. A masquerade rule with several
// interfaces is one for each: its bindings have the address of the one they leave by.
func (m *Model) addRule(n *config.NATRule) {
	if n.Type == config.NATMasquerade && n.Out.Several() {
		some := false
		for _, i := range m.host.Interfaces {
			if n.Out.Has(i.Name) {
				one := *n
				one.Out = config.Interfaces(i.Name)
				m.ruleOf(&one, n.Name+" "+i.Name)
				some = true
			}
		}
		if some {
			return
		}
	}
	m.ruleOf(n, n.Name)
}

// ruleOf puts a rule in force; name tells it apart from others.
func (m *Model) ruleOf(n *config.NATRule, name string) {
	r := m.allRules[name]
	if r == nil {
		r = &rule{credit: credits{}}
		m.allRules[name] = r
	}
	if !r.inForce {
		r.tally = tally{}
	}
	r.NATRule, r.inForce = n, true
	ranges := slices.Clone(n.To.Addresses)
	if n.Type != config.NATSIIT { // whose pool only names routers in ICMP errors (RFC 6791)
		ranges = append(ranges, n.Pool...)
	}
	r.pool4, r.pool6 = expand(ranges, false), expand(ranges, true)
	m.rules = append(m.rules, r)
	switch n.Type {
	case config.NATPortForward:
		m.serve("nat "+n.Name, r.asService(), r)
	case config.NATStatic, config.NATNPT66, config.NATSIIT:
		m.addPrefixes(r)
	}
}

// pool returns the outside addresses for packets that leave by the next hop. Masquerade has the interface's one in
// the next hop's network, as the kernel has.
func (r *rule) pool(by hop, v6 bool) []netip.Addr {
	if r.Type == config.NATMasquerade {
		a, ok := by.Interface.globalAddress(v6)
		if near, in := by.connectedAddress(); in && !v6 {
			a, ok = near, true
		}
		if ok {
			return []netip.Addr{a}
		}
		return nil
	}
	if v6 && r.Type != config.NATNAT64 {
		return r.pool6
	}
	return r.pool4
}

// outbound handles a packet of an inside host that belongs to no session: the
// first rule that matchSource it makes one.
func (m *Model) outbound(in Arrival, v *view) (plan, bool) {
	for _, r := range m.rules {
		to, ok := m.matchSource(r, in, v)
		if !ok {
			continue
		}
		if contains(r.Except, v.dst.Addr()) || contains(r.Except, to.Addr()) {
			return pass(ReasonExcepted), true
		}
		return m.open(r, in, v, to), true
	}
	return plan{}, false
}

// translates tells whether a rule would translate the packet's source, if it could
// open a session.
func (m *Model) translates(in Arrival, v *view) bool {
	for _, r := range m.rules {
		if to, ok := m.matchSource(r, in, v); ok {
			return !contains(r.Except, v.dst.Addr()) && !contains(r.Except, to.Addr())
		}
	}
	return false
}

// matchSource tells whether a source translating rule takes the packet, and what its
// destination becomes: itself, for nat64 the IPv4 address in it.
func (m *Model) matchSource(r *rule, in Arrival, v *view) (to netip.AddrPort, ok bool) {
	if !r.In.Has(in.Interface) || !r.inside(v.src.Addr()) {
		return to, false
	}
	switch r.Type {
	case config.NATNAT64:
		if !v.v6 || !r.Prefix.Contains(v.dst.Addr()) {
			return to, false
		}
		a, ok := extract(r.Prefix, v.dst.Addr())
		if m.host.routeLength(v.dst.Addr()) > r.Prefix.Bits() { // routed untranslated (RFC 7915 §5.6)
			return to, false
		}
		if next, routed := m.host.route(a); r.Out != "" && !m.isHairpin64(in, v, netip.AddrPortFrom(a, v.dst.Port())) && (!routed || m.host.Owns(a) || !r.Out.Has(next.Name)) {
			return to, false
		}
		return netip.AddrPortFrom(a, v.dst.Port()), ok
	case config.NATMasquerade, config.NATSNAT:
		next, routed := m.host.route(v.dst.Addr())
		if !routed || m.host.Owns(v.dst.Addr()) || !r.Out.Has(next.Name) {
			return to, false
		}
		// Masquerade drops what it names and has no address for; nobody masks IPv6 by accident.
		masked := r.Type == config.NATMasquerade && (len(r.Source) > 0 || !v.v6)
		return v.dst, masked || len(r.pool(next, v.v6)) > 0
	}
	return to, false
}

// inside reports whether the rule translates the source; without a list it takes
// every address.
func (r *rule) inside(a netip.Addr) bool {
	switch r.Type {
	case config.NATMasquerade, config.NATSNAT, config.NATNAT64:
		return len(r.Source) == 0 || contains(r.Source, a)
	}
	return false
}

func contains(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// refuse drops what would have opened a session and tells its sender.
func (r *rule) refuse(reason Reason) plan {
	p := drop(reason)
	p.answer = hostUnreachable
	if r.Unreachable == "prohibited" {
		p.answer = prohibited
	}
	return p
}

// counts reports whether the rule keeps count of each client's ports: for a quota, for blocks, or so
// that a client keeps its pool address.
func (r *rule) counts() bool {
	return r.PortsPerClient > 0 || !r.Deterministic && (r.PortBlock > 0 || len(r.pool4) > 1 || len(r.pool6) > 1)
}

// holds reports whether an address is of the rule's pool.
func (r *rule) holds(a netip.Addr) bool {
	return slices.Contains(r.pool4, a) || slices.Contains(r.pool6, a)
}

// pooled reports whether the address is one of a pool: nobody else's.
func (m *Model) pooled(a netip.Addr) bool {
	for _, r := range m.rules {
		if slices.Contains(r.pool4, a) || slices.Contains(r.pool6, a) {
			return true
		}
	}
	for _, s := range m.services {
		for _, p := range s.SourcePool {
			if p.Contains(a) {
				return true
			}
		}
		if s.Mode == config.ModeFullNAT && len(s.SourcePool) == 0 && slices.ContainsFunc(s.Backends, func(b config.Backend) bool {
			next, ok := m.host.route(b.Address)
			own, _ := next.source()
			return ok && own == a
		}) {
			return true
		}
	}
	return false
}

// hairpinRule returns the rule by which an inside host's packet to an outside
// endpoint gets an outside source (RFC 4787 REQ-9): the endpoint's own rule if it
// takes the source, otherwise the first that does.
func (m *Model) hairpinRule(own *rule, in Arrival, v *view) *rule {
	for _, r := range append([]*rule{own}, m.rules...) {
		if r != nil && r.inForce && r.Hairpin != config.SwitchOff && len(r.Source)+len(r.In) > 0 && r.inside(v.src.Addr()) &&
			r.In.Has(in.Interface) && r.Type != config.NATNAT64 {
			return r
		}
	}
	return nil
}
