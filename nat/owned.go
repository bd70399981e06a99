// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"

	"github.com/sluice-lb/sluice/config"
)

// unserved is what becomes of a packet that nothing matchSource. The gateway owns the addresses
// that its services listen on: what it would route on would come back by the router that
// led it here; without a route they are refused all the same. Its own addresses are its stack's
// affair, and those of its networks may be another host's.
func (m *Model) unserved(in Arrival, v *view) plan {
	to := v.dst.Addr()
	answer, bound, owned := m.owner(to)
	next, routed := m.host.route(to)
	if !owned || m.host.Owns(to) || m.host.onLink(to) || bound && !(routed && next.Name == in.Interface) {
		return pass(ReasonNotOurs)
	}
	p := drop(ReasonUnserved)
	if v.kind != icmpReply {
		p.answer = answer
	}
	return p
}

// owner finds the most telling answer of those who listen on an address, and whether all of
// them are bound to interfaces.
func (m *Model) owner(a netip.Addr) (strongest answer, bound, owned bool) {
	bound = true
	listener := func(l config.Listen, own answer, tied bool) {
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
	}
	for _, n := range m.config.NAT {
		if n.Listens() {
			listener(*n.Listen, reset, n.In != "" || n.Listen.Interface != "")
		}
	}
	return strongest, bound, owned
}

// near reports whether a is within a network that the host is connected to.
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
