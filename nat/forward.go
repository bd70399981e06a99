// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// asService makes a service of a port-forward rule: one backend, always up.
func (r *rule) asService() *config.Service {
	return &config.Service{Name: r.Name, Listen: []config.Listen{*r.Listen}, Protocol: r.Protocol, Mode: config.ModeDNAT,
		Scheduler: config.SchedulerRR, MSSClamp: r.MSSClamp, Hairpin: r.Hairpin,
		Backends: []config.Backend{{Name: r.Name, Address: r.To.Address, Port: r.To.Port, Weight: 1, Priority: 1}}}
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
		b.permit(v.dst.Addr())
	}
	return b, refusal, true
}

// crossed returns the answers of an IPv6 host to an IPv4 client of a port-forward, which it
// knows behind the prefix of its nat64 rule.
func (m *Model) replyTuple64(forward *rule, v *view, to netip.AddrPort) flow.Tuple {
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
	return s.endpoint(s.backends[0], to.Port()), true
}
