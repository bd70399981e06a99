// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// asService returns a service with one backend, always up, for a port-forward rule.
func (r *rule) asService() *config.Service {
	return &config.Service{Name: r.Name, Listen: []config.Listen{*r.Listen}, Protocol: r.Protocol, Mode: config.ModeDNAT,
		Scheduler: config.SchedulerRR, MSSClamp: r.MSSClamp, Hairpin: r.Hairpin,
		Backends: []config.Backend{{Name: r.Name, Address: r.To.Address, Port: r.To.Port, Weight: 1, Priority: 1}}}
}

// forwardHairpin allocates an outside source for an inside client of a port-forward rule, if the
// inside server would otherwise answer the client directly.
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
		b.allowRemote(v.dst.Addr())
	}
	return b, refusal, true
}

// replyTuple64 returns the reply direction of an IPv6 host to an IPv4 client of a port-forward
// rule. The host sees the client's address in the prefix of its nat64 rule.
func (m *Model) replyTuple64(forward *rule, v *view, to netip.AddrPort) flow.Tuple {
	t := flow.Tuple{Protocol: v.protocol, Source: to, Dest: netip.AddrPortFrom(Embed(m.translator(forward).Prefix, v.src.Addr()), v.src.Port())}
	if t.Protocol == flow.ICMP {
		t.Protocol = flow.ICMPv6
	}
	return t
}

// translator returns the nat64 rule for the target of a port-forward rule that crosses families.
func (m *Model) translator(forward *rule) *config.NATRule {
	var rules []*config.NATRule
	for _, r := range m.rules {
		rules = append(rules, r.NATRule)
	}
	return forward.Translator(rules)
}

// findForward64 returns the IPv6 target of the port-forward rule for IPv4 endpoint to, the destination
// of a packet from another IPv6 host.
func (m *Model) findForward64(in Arrival, v *view, to netip.AddrPort) (netip.AddrPort, bool) {
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
