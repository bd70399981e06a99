// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// options4 lists IPv4 options: a record route, an expired source route, two unexpired source
// routes, and a truncated option.
var options4 = [][]byte{{1, 7, 7, 4, 0, 0, 0, 0}, {131, 7, 8, 198, 18, 9, 9, 0}, {131, 7, 4, 198, 18, 9, 9, 0}, {1, 137, 7, 4, 198, 18, 9, 9}, {7, 9, 4, 0}}

// addOptions rarely adds an unusual header to a packet with a flow. It removes unusual headers from
// other packets: a dropped packet that opens a flow would hide the choice of its port.
func (w *generatorState) addOptions(r *rand.Rand, p packet.Packet, c *hostPair) packet.Packet {
	if !w.hasFlow(c) {
		return withoutOptions(p)
	}
	if r.IntN(12) > 0 {
		return p
	}
	switch ip := p[0].(type) {
	case *packet.IPv4:
		if u, ok := p[min(1, len(p)-1)].(*packet.UDP); ok && r.IntN(2) == 0 {
			u.Checksum = packet.Force(0)
		} else {
			ip.Options = pick(r, options4)
		}
	case *packet.IPv6:
		if _, ok := packet.Find[*packet.Routing](p); ok || ip.NextHeader.Set {
			return p
		}
		return slices.Insert(p, 1, pick(r, []packet.Layer{&packet.Routing{Data: make([]byte, 20)},
			&packet.Routing{SegmentsLeft: 1, Data: make([]byte, 20)}, &packet.Fragment{ID: r.Uint32()}}))
	}
	return p
}

// withoutOptions removes routing headers and IPv4 options from a packet.
func withoutOptions(p packet.Packet) packet.Packet {
	if ip, ok := p[0].(*packet.IPv4); ok {
		ip.Options = nil
	}
	return slices.DeleteFunc(p, func(l packet.Layer) bool { _, is := l.(*packet.Routing); return is })
}

// errorSource returns a source address for an ICMP error: the receiver, a router before it, or an
// address of this host, which a sender may spoof.
func (w *generatorState) errorSource(r *rand.Rand, receiver netip.Addr) netip.Addr {
	switch r.IntN(16) {
	case 15: // martian source: such errors are still translated (RFC 7915 §4.1)
		if receiver.Is4() && r.IntN(4) == 0 {
			return netip.AddrFrom4(pick(r, [][4]byte{{169, 254, 3, 4}, {224, 0, 0, 1}}))
		}
	case 0:
		for _, p := range pick(r, w.host.Interfaces).Addresses {
			if p.Addr().Is6() == receiver.Is6() {
				return p.Addr()
			}
		}
	case 1, 2, 3, 4, 5, 6, 7:
		return router(receiver)
	}
	return receiver
}

// embed returns an IPv4 address in the prefix of a family-translating rule, if the scenario has
// one.
func (w *generatorState) embed(r *rand.Rand, a netip.Addr) netip.Addr {
	if len(w.prefixes) == 0 {
		return a
	}
	return model.Embed(pick(r, w.prefixes), a)
}
