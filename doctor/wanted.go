// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// wanted is the part of dropped packets that somebody waits for. Broadcasts and group messages have no
// single receiver, and a scan expects most of its packets to be lost. Router protocols also use groups, but depend on
// each message.
func (c *Case) wanted(g trace.DropGroup) trace.DropGroup {
	if len(g.Sampled) == 0 {
		return g
	}
	scanners := scanners(g.Sampled)
	var kept []*trace.DropSample
	for _, s := range g.Sampled {
		if c.control(s) != "" || !c.toGroup(s.Packet.Dest.Addr()) && !scanners[s.Packet.Source.Addr()] {
			kept = append(kept, s)
		}
	}
	share := float64(len(kept)) / float64(len(g.Sampled))
	g.Packets = uint64(share*float64(g.Packets) + 0.5)
	g.PerSecond *= share
	shown := slices.DeleteFunc(slices.Clone(g.Samples), func(s *trace.DropSample) bool { return !slices.Contains(kept, s) })
	if len(shown) == 0 && len(kept) > 0 {
		shown = kept[:1]
	}
	g.Sampled, g.Samples = kept, shown
	blamed := map[string]bool{}
	for _, s := range kept {
		for _, id := range s.Blamed {
			blamed[id] = true
		}
	}
	if len(blamed) > 0 {
		g.Rules = slices.DeleteFunc(slices.Clone(g.Rules), func(r firewall.Rule) bool { return !blamed[r.ID()] })
	}
	return g
}

// toGroup reports whether several hosts share an address.
func (c *Case) toGroup(to netip.Addr) bool {
	if to.IsMulticast() || to == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return true
	}
	return slices.ContainsFunc(c.NS.After.Links, func(l observe.Link) bool {
		return slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool {
			return p.Addr().Is4() && to.Is4() && p.Bits() < 31 && p.Contains(to) && lastOf(p) == to
		})
	})
}

// lastOf is the last address of an IPv4 network, its broadcast address.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(b)
}

// manyTargets is from how many targets of one source on its packets may be a scan.
const manyTargets = 5

// scanners returns the sources that try many addresses or ports, each about once. A client repeats
// lost packets.
func scanners(samples []*trace.DropSample) map[netip.Addr]bool {
	type tried struct {
		packets int
		targets map[netip.AddrPort]bool
	}
	bySource := map[netip.Addr]*tried{}
	for _, s := range samples {
		from := s.Packet.Source.Addr()
		if bySource[from] == nil {
			bySource[from] = &tried{targets: map[netip.AddrPort]bool{}}
		}
		bySource[from].packets++
		bySource[from].targets[s.Packet.Dest] = true
	}
	found := map[netip.Addr]bool{}
	for from, t := range bySource {
		found[from] = len(t.targets) >= manyTargets && 5*len(t.targets) >= 4*t.packets
	}
	return found
}

// routerProtocols are protocols between routers, by number.
var routerProtocols = map[flow.Protocol]string{112: "VRRP", 89: "OSPF", 88: "EIGRP", 103: "PIM"}

// discovery is neighbour discovery as control names it. acceptDiscovery are its messages, as nft matches them.
const (
	discovery       = "neighbour discovery"
	acceptDiscovery = "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert }"
)

// control names the protocol of a packet that configures this host or its routes; empty: none. One lost packet
// matters.
func (c *Case) control(s *trace.DropSample) string {
	if name := routerProtocols[s.Packet.Protocol]; name != "" {
		return name
	}
	kind, _, isICMP := s.ICMP()
	switch {
	case isICMP && s.Packet.Protocol == flow.ICMPv6 && (kind == 135 || kind == 136):
		return discovery
	case s.Packet.Protocol == flow.UDP && (s.Packet.Dest.Port() == 67 || s.Packet.Dest.Port() == 547) && c.listens(flow.UDP, s.Packet.Dest.Port()):
		return "DHCP"
	}
	return ""
}

// listens reports whether a program of this host waits at a port.
func (c *Case) listens(protocol flow.Protocol, port uint16) bool {
	return slices.ContainsFunc(c.NS.After.Listeners, func(l observe.Listener) bool { return l.Protocol == protocol && l.Port == port })
}

// controlDrops judges packets of control protocols that a rule drops.
func (c *Case) controlDrops(g trace.DropGroup) (Finding, bool) {
	for _, s := range g.Sampled {
		name := c.control(s)
		if name == "" {
			continue
		}
		what, symptom, match := name+" messages", "neighbours and routes of other routers are missing", fmt.Sprintf("meta l4proto %d", s.Packet.Protocol)
		old := fmt.Sprintf("-p %d", s.Packet.Protocol)
		switch name {
		case "VRRP":
			what, symptom = "VRRP advertisements (protocol 112)", "both gateways of a pair hold its addresses, and clients reach now one, now the other"
		case discovery:
			what, symptom, match, old = "neighbour discovery of IPv6", "no host of the link reaches this one by IPv6", acceptDiscovery, "-p icmpv6"
		case "DHCP":
			what, symptom = "requests to this host's DHCP server", "hosts get no address"
			match, old = fmt.Sprintf("udp dport %d", s.Packet.Dest.Port()), fmt.Sprintf("-p udp --dport %d", s.Packet.Dest.Port())
		}
		f := found(Critical, "a firewall rule drops %s from %s on %s%s", what, s.Packet.Source.Addr(), s.Interface, ruleText(g)).losing(g.PerSecond).
			concerning(Concerns{Protocols: []flow.Protocol{s.Packet.Protocol}})
		f.Symptom = symptom
		f.Remedy = &Remedy{Do: "accept them before the rule named above", Commands: c.accept(g, match, old), Risk: "none: hosts of the link send them"}
		return f, true
	}
	return Finding{}, false
}

// accept are the commands that accept packets before the rule of a group.
func (c *Case) accept(g trace.DropGroup, match, old string) []string {
	if chain, is := nftChain(g); is {
		return []string{fmt.Sprintf("nft insert rule %s %s accept", chain, match)}
	}
	if program, rest, legacy := strings.Cut(ruleChain(g), "tables "); legacy {
		table, name, _ := strings.Cut(rest, " ")
		return []string{fmt.Sprintf("%stables-legacy -t %s -I %s %s -j ACCEPT", program, table, name, old)}
	}
	return nil
}
