// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
)

// fragmentKey identifies the fragments of one packet (RFC 791, RFC 8200 §4.5).
type fragmentKey struct {
	src, dst netip.Addr
	id       uint32
	protocol flow.Protocol
}

// fragment is the state of a first fragment for the later fragments.
type fragment struct {
	plan  plan
	seen  time.Duration
	half  *sessionHalf // half of the packet's session, nil for none
	tuple flow.Tuple
}

// laterFragment applies the plan of the first fragment to a later fragment (RFC 4787 REQ-14, RFC
// 6146 §3.4).
func (m *Model) laterFragment(in Arrival, v *view) plan {
	f := m.fragments[v.fragmentKey()]
	if f != nil && f.plan.action == Forward && v.withPorts(f.tuple).firewallDrops(m, in.Interface) { // firewall rates count every packet
		return drop(ReasonDenied)
	}
	if f != nil {
		p := f.plan
		p.clamp, p.room, p.grow, p.edit, p.answer = false, 0, 0, nil, noAnswer // a later fragment has no TCP header
		if p.action == Forward {
			p.reason = ReasonFragment
			if f.half != nil {
				f.half.seen[f.half.direction] = m.now
			}
		} else {
			p.count = nil // only the first fragment is counted
		}
		return p
	}
	if v.firewallDrops(m, in.Interface) { // a firewall rule without ports
		return drop(ReasonDenied)
	}
	if v.neverRouted() {
		return passPlan(ReasonNotRouted)
	}
	if p, ok := m.stateless(in, v); ok { // stateless translation ignores ports
		p.neutral = true
		if p.action == Forward {
			p.reason = ReasonFragment
		}
		return p
	}
	if !m.mayMatch(in, v) {
		return passPlan(ReasonNotOurs)
	}
	return drop(ReasonHeldFragment)
}

// withPorts returns a later fragment with the ports of its first fragment.
func (v *view) withPorts(t flow.Tuple) *view {
	return &view{v6: v.v6, protocol: t.Protocol, src: t.Source, dst: t.Dest}
}

// mayMatch reports whether a fragment without ports could match a service, a pool or a rule.
func (m *Model) mayMatch(in Arrival, v *view) bool {
	for _, s := range m.services {
		for _, l := range s.Listen {
			if l.Address == v.dst.Addr() {
				return true
			}
		}
		for _, b := range s.Backends {
			if b.Address == v.src.Addr() {
				return true
			}
		}
	}
	return m.inAnyPool(v.dst.Addr()) || m.isMasqueradeAddress(v.dst.Addr()) || m.wouldTranslate(in, v)
}

// isMasqueradeAddress reports whether a masquerade rule uses an address of the host as outside address.
func (m *Model) isMasqueradeAddress(a netip.Addr) bool {
	for _, r := range m.rules {
		out, ok := m.host.Interface(string(r.Out))
		if ok && r.Type.UsesInterfaceAddress() && slices.Contains(out.sourceAddresses(), a) {
			return true
		}
	}
	return false
}

func (v *view) fragmentKey() fragmentKey {
	k := fragmentKey{v.src.Addr(), v.dst.Addr(), v.id, v.protocol}
	if v.v6 { // RFC 8200 §4.5: the protocol does not distinguish packets
		k.protocol = 0
	}
	return k
}

func (m *Model) rememberFragment(v *view, p plan) {
	m.fragments[v.fragmentKey()] = &fragment{plan: p, seen: m.now, half: m.session(v), tuple: v.tuple()}
}
