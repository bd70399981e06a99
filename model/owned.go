// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// unmatchedPlan returns the plan for a packet that no service, rule or session matches. The gateway owns
// the listen addresses of its services. Forwarded packets to these addresses would loop back from
// the next router. Without a route the gateway rejects them too. The host's stack handles the
// host's own addresses, and an address in a connected network may belong to another host.
func (m *Model) unmatchedPlan(in Arrival, v *view) plan {
	to := v.dst.Addr()
	answer, bound, owned := m.owner(to)
	next, routed := m.host.route(to)
	if !owned || m.host.Owns(to) || m.host.onLink(to) || bound && !(routed && next.Name == in.Interface) {
		return passPlan(ReasonNotOurs)
	}
	p := drop(ReasonUnserved)
	if v.kind != icmpReply {
		p.answer = answer
	}
	return p
}

// owner returns the strongest answer of the listeners on an address. It also reports whether all
// listeners are bound to interfaces.
func (m *Model) owner(a netip.Addr) (strongest errorReply, bound, owned bool) {
	bound = true
	listener := func(l config.Listen, own errorReply, tied bool) {
		if l.Address != a {
			return
		}
		if own == reset || strongest == noAnswer {
			strongest = own
		}
		bound, owned = bound && tied, true
	}
	for _, s := range m.config.Services {
		own := reset
		switch s.WhenDown {
		case config.WhenDownReject:
			own = portUnreachable
		case config.WhenDownDrop:
			own = noAnswer
		}
		for _, l := range s.Listen {
			listener(l, own, l.Interface != "")
		}
		if slices.ContainsFunc(s.Backup(), func(r config.AddressRange) bool { return r.Contains(a) }) {
			bound, owned = false, true
		}
	}
	for _, n := range m.config.NAT {
		if n.Listens() {
			listener(*n.Listen, reset, n.In != "" || n.Listen.Interface != "")
		}
		if slices.ContainsFunc(n.Backup(), func(r config.AddressRange) bool { return r.Contains(a) }) {
			bound, owned = false, true
		}
	}
	return strongest, bound, owned
}

// onLink reports whether a is in a connected network of the host.
func (h *Host) onLink(a netip.Addr) bool {
	for _, i := range h.Interfaces {
		for _, p := range i.Addresses {
			if p.Contains(a) {
				return true
			}
		}
	}
	return false
}
