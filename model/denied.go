// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// isDeniedSource reports whether a rule drops this source without another condition, and neither an accept
// rule nor a rule with a rate precedes it. Packets from such a source are dropped before they are
// parsed, and before later fragments follow their first fragment.
func (m *Model) isDeniedSource(from netip.Addr) bool {
	for i := range m.config.Firewall.Rules {
		r := &m.config.Firewall.Rules[i]
		switch {
		case r.Hook != config.HookIngress:
			continue
		case r.Action != config.ActionDrop || !r.Rate.IsZero():
			return false
		}
		if !r.Source.IsZero() && r.Destination.IsZero() && r.Protocol == flow.Any && r.In == "" && len(r.Ports) == 0 && m.matches(r.Source, from) {
			return true
		}
	}
	return false
}

// extensions lists the types of extension headers: hop-by-hop, routing, fragment, authentication,
// destination options.
var extensions = []uint8{0, 43, 44, 51, 60}

// earlySource returns the source of a frame with a complete IP header. It returns none for ICMPv6
// and for extension headers, because neighbour discovery of denied sources passes.
func earlySource(frame []byte) (netip.Addr, bool) {
	const header = 14
	if len(frame) < header {
		return netip.Addr{}, false
	}
	switch p := frame[header:]; binary.BigEndian.Uint16(frame[12:]) {
	case packet.TypeIPv4:
		if len(p) >= 20 {
			return netip.AddrFrom4([4]byte(p[12:16])), true
		}
	case packet.TypeIPv6:
		if len(p) >= 40 && flow.Protocol(p[6]) != flow.ICMPv6 && !slices.Contains(extensions, p[6]) {
			return netip.AddrFrom16([16]byte(p[8:24])), true
		}
	}
	return netip.Addr{}, false
}
