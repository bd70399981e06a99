// SPDX-License-Identifier: Apache-2.0

package model

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
	credit       rateCredits
	inForce      bool
}

// addRule adds a rule of the configuration. A port-forward rule becomes a service with one backend,
// and a stateless rule adds prefixes. A masquerade rule with several interfaces becomes one rule
// for each interface: its bindings have the address of the egress interface.
func (m *Model) addRule(n *config.NATRule) {
	if n.Type.UsesInterfaceAddress() && n.Out.MatchesSeveral() {
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

// ruleOf activates a rule under a unique name.
func (m *Model) ruleOf(n *config.NATRule, name string) {
	r := m.allRules[name]
	if r == nil {
		r = &rule{credit: rateCredits{}}
		m.allRules[name] = r
	}
	if !r.inForce {
		r.tally = tally{}
	}
	r.NATRule, r.inForce = n, true
	ranges := slices.Clone(n.To.Addresses)
	if !n.Type.CrossesStateless() { // the siit pool is for routers in ICMP errors only (RFC 6791)
		ranges = append(ranges, n.Pool...)
	}
	r.pool4, r.pool6 = expand(ranges, false), expand(ranges, true)
	m.rules = append(m.rules, r)
	switch {
	case n.Type.Forwards():
		m.activateService("nat "+n.Name, r.asService(), r)
	case n.Type.OneToOne() || n.Type.CrossesStateless():
		m.addPrefixes(r)
	}
}

// pool returns the outside addresses for packets through the next hop. Masquerade uses the
// interface's address in the next hop's network, as the kernel does.
func (r *rule) pool(by hop, v6 bool) []netip.Addr {
	if r.Type.UsesInterfaceAddress() {
		a, ok := by.Interface.globalAddress(v6)
		if near, in := by.connectedAddress(); in && !v6 {
			a, ok = near, true
		}
		if ok {
			return []netip.Addr{a}
		}
		return nil
	}
	if v6 && !r.Type.CrossesStateful() {
		return r.pool6
	}
	return r.pool4
}

// handleOutbound handles a packet of an inside host without a session. The first matching rule opens one.
func (m *Model) handleOutbound(in Arrival, v *view) (plan, bool) {
	for _, r := range m.rules {
		to, ok := m.matchSource(r, in, v)
		if !ok {
			continue
		}
		if contains(r.Except, v.dst.Addr()) || contains(r.Except, to.Addr()) {
			return passPlan(ReasonExcepted), true
		}
		return m.open(r, in, v, to), true
	}
	return plan{}, false
}

// wouldTranslate reports whether a rule would translate the source of the packet, regardless of limits.
func (m *Model) wouldTranslate(in Arrival, v *view) bool {
	for _, r := range m.rules {
		if to, ok := m.matchSource(r, in, v); ok {
			return !contains(r.Except, v.dst.Addr()) && !contains(r.Except, to.Addr())
		}
	}
	return false
}

// matchSource reports whether a source NAT rule matches the packet. It returns the destination: for
// nat64 the embedded IPv4 address, otherwise unchanged.
func (m *Model) matchSource(r *rule, in Arrival, v *view) (to netip.AddrPort, ok bool) {
	if !r.In.Has(in.Interface) || !r.matchesSource(v.src.Addr()) {
		return to, false
	}
	switch {
	case r.Type.CrossesStateful():
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
	case r.Type.RewritesSource():
		next, routed := m.host.route(v.dst.Addr())
		if !routed || m.host.Owns(v.dst.Addr()) || !r.Out.Has(next.Name) {
			return to, false
		}
		// Masquerade without an address drops the packets that match its sources. A rule without
		// sources leaves IPv6 alone.
		masked := r.Type.UsesInterfaceAddress() && (len(r.Source) > 0 || !v.v6)
		return v.dst, masked || len(r.pool(next, v.v6)) > 0
	}
	return to, false
}

// matchesSource reports whether the rule translates the source address. Without a source list it
// translates every address.
func (r *rule) matchesSource(a netip.Addr) bool {
	switch {
	case r.Type.HasBindings():
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

// refusePacket drops the first packet of a session and sends an ICMP error.
func (r *rule) refusePacket(reason Reason) plan {
	p := drop(reason)
	p.answer = hostUnreachable
	if r.Unreachable == "prohibited" {
		p.answer = prohibited
	}
	return p
}

// counts reports whether the rule counts the ports of each client: for a quota, for blocks, or for
// paired pooling.
func (r *rule) counts() bool {
	return r.PortsPerClient > 0 || !r.Deterministic && (r.PortBlock > 0 || len(r.pool4) > 1 || len(r.pool6) > 1)
}

// poolContains reports whether the rule's pool contains an address.
func (r *rule) poolContains(a netip.Addr) bool {
	return slices.Contains(r.pool4, a) || slices.Contains(r.pool6, a)
}

// inAnyPool reports whether any pool contains the address.
func (m *Model) inAnyPool(a netip.Addr) bool {
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

// hairpinRule returns the rule that assigns an outside source to a hairpin packet (RFC 4787 REQ-9).
// The rule of the destination endpoint has priority, then the first matching rule.
func (m *Model) hairpinRule(own *rule, in Arrival, v *view) *rule {
	for _, r := range append([]*rule{own}, m.rules...) {
		if r != nil && r.inForce && r.Hairpin != config.SwitchOff && len(r.Source)+len(r.In) > 0 && r.matchesSource(v.src.Addr()) &&
			r.In.Has(in.Interface) && !r.Type.CrossesStateful() {
			return r
		}
	}
	return nil
}
