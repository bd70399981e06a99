// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// Gateway is a router on a link that a route uses as its next hop.
type Gateway struct {
	Address   netip.Addr
	Interface string
	Route     netip.Prefix // The widest destination of its routes.
	Multipath bool         // The route has further next hops.
	State     int          // of its neighbour entry (NUD_*); 0: no entry
}

// Dead reports whether the kernel asks for the gateway in vain.
func (g *Gateway) Dead() bool { return g.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) != 0 }

// Detached is a route for a part of a link's own network by another interface. Hosts of the link ask for such an
// address by ARP or neighbour discovery.
type Detached struct {
	Prefix  netip.Prefix
	By      string // The interface of the route.
	Within  string // The link that has the network.
	Network netip.Prefix
	Proxied bool // the host answers for the prefix on the link
}

// Refusal is a route or a rule of the routing policy that refuses packets.
type Refusal struct {
	Kind        string // "blackhole", "unreachable", "prohibit"
	Destination netip.Prefix
	Source      netip.Prefix // of a rule; invalid: any
	In          string       // of a rule: the input interface; "": any
	Rule        bool
	Table       int // of a route
	Priority    int // of a rule
}

// String returns the refusal as the ip program names it.
func (r *Refusal) String() string {
	if !r.Rule {
		return "the " + r.Kind + " route " + r.Destination.String()
	}
	text := "the rule (ip rule)"
	if r.Source.IsValid() {
		text += " from " + r.Source.String()
	}
	if r.In != "" {
		text += " iif " + r.In
	}
	return text + " " + r.Kind
}

// Matches reports whether packets from source to dest that arrive by an interface are refused.
func (r *Refusal) Matches(source, dest netip.Addr, in string) bool {
	return (!r.Source.IsValid() || r.Source.Contains(source)) && (r.In == "" || r.In == in) && (!r.Destination.IsValid() || r.Destination.Contains(dest)) &&
		(r.Destination.IsValid() || r.Source.IsValid() || r.In != "")
}

// refusals are the kinds of routes and rules that refuse.
var refusals = map[uint8]string{unix.RTN_BLACKHOLE: "blackhole", unix.RTN_UNREACHABLE: "unreachable", unix.RTN_PROHIBIT: "prohibit"}

// Attributes of a rule of the routing policy (linux/fib_rules.h).
const (
	fraDest     = 1
	fraSource   = 2
	fraInName   = 3
	fraPriority = 6
	fraMark     = 10
)

// ruleRefusals reads the rules of the routing policy that refuse. The library does not read the action of a rule.
func ruleRefusals() (list []Refusal) {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(unix.RTM_GETRULE, unix.NLM_F_DUMP)
		req.AddData(nl.NewIfInfomsg(family))
		messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWRULE)
		if err != nil {
			continue
		}
		for _, m := range messages {
			if len(m) < unix.SizeofRtMsg {
				continue
			}
			header := nl.DeserializeRtMsg(m) // struct fib_rule_hdr has the same layout
			r := Refusal{Rule: true, Kind: refusals[header.Type]}
			attributes, err := nl.ParseRouteAttr(m[unix.SizeofRtMsg:])
			if err != nil || r.Kind == "" || header.Flags&netlink.FibRuleInvert != 0 {
				continue
			}
			marked := false
			for _, a := range attributes {
				addr, isAddress := netip.AddrFromSlice(a.Value)
				switch {
				case a.Attr.Type == fraDest && isAddress:
					r.Destination = netip.PrefixFrom(addr, int(header.Dst_len))
				case a.Attr.Type == fraSource && isAddress:
					r.Source = netip.PrefixFrom(addr, int(header.Src_len))
				case a.Attr.Type == fraInName:
					r.In = unix.ByteSliceToString(a.Value)
				case a.Attr.Type == fraPriority && len(a.Value) == 4:
					r.Priority = int(binary.NativeEndian.Uint32(a.Value))
				case a.Attr.Type == fraMark:
					marked = true
				}
			}
			if !marked {
				list = append(list, r)
			}
		}
	}
	return list[:min(len(list), mostGateways)]
}

// Bounds on the data from routing tables, which may hold all routes of the Internet.
const (
	mostGateways = 256
	mostDetached = 256
)

// readRoutes reads the routes of all tables of the calling thread's namespace.
func (r *NamespaceReading) readRoutes() {
	names := map[int]*Link{}
	for i := range r.Links {
		names[r.Links[i].Index] = &r.Links[i]
	}
	entries := neighbours()
	r.readNeighbours(entries, names)
	uplinks, proxied := map[int]bool{}, proxiedAddresses()
	visit := func(route netlink.Route) bool {
		if kind, refuses := refusals[uint8(route.Type)]; refuses && route.Protocol != unix.RTPROT_KERNEL && len(r.Routing.Refusals) < mostGateways {
			r.Routing.Refusals = append(r.Routing.Refusals, Refusal{Kind: kind, Destination: destinationOf(&route), Table: route.Table})
		}
		if route.Type != unix.RTN_UNICAST || route.Table == unix.RT_TABLE_LOCAL {
			return true
		}
		dest := destinationOf(&route)
		hops := []*netlink.NexthopInfo{{LinkIndex: route.LinkIndex, Gw: route.Gw}}
		if len(route.MultiPath) > 0 {
			hops = route.MultiPath
		}
		for _, hop := range hops {
			link := names[hop.LinkIndex]
			if link == nil {
				continue
			}
			if dest.Bits() == 0 && dest.Addr().Is4() && (hop.Gw != nil || route.Scope == netlink.SCOPE_LINK || len(route.MultiPath) > 0) {
				uplinks[hop.LinkIndex] = true // of IPv4: rp_filter is IPv4's
			}
			if gw, ok := netip.AddrFromSlice(hop.Gw); ok {
				r.Routing.gateway(Gateway{Address: gw.Unmap(), Interface: link.Name, Route: dest, Multipath: len(hops) > 1, State: entries[neighbour{hop.LinkIndex, gw.Unmap()}].State})
			}
		}
		if len(hops) == 1 && dest.Bits() > 0 {
			r.detached(dest, names[hops[0].LinkIndex], proxied)
		}
		return true
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		_ = netlink.RouteListFilteredIter(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE, visit)
	}
	r.Uplinks = len(uplinks)
}

// destinationOf is the destination of a route; a default route has 0 bits.
func destinationOf(route *netlink.Route) netip.Prefix {
	if route.Dst != nil {
		if addr, ok := netip.AddrFromSlice(route.Dst.IP); ok {
			bits, _ := route.Dst.Mask.Size()
			return netip.PrefixFrom(addr.Unmap(), bits)
		}
	}
	if route.Family == unix.AF_INET6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// gateway adds a next hop, once for each interface. IPv6 has a route for each hop of a multipath route.
func (r *Routing) gateway(g Gateway) {
	for i := range r.Gateways {
		known := &r.Gateways[i]
		if known.Address == g.Address && known.Interface == g.Interface {
			if g.Route.Bits() < known.Route.Bits() {
				known.Route = g.Route
			}
			known.Multipath = known.Multipath || g.Multipath
			return
		}
	}
	if len(r.Gateways) < mostGateways {
		r.Gateways = append(r.Gateways, g)
	}
}

// detached adds a route for a part of another link's network.
func (r *NamespaceReading) detached(dest netip.Prefix, by *Link, proxied map[netip.Addr]bool) {
	if by == nil || len(r.Routing.Detached) == mostDetached {
		return
	}
	for i := range r.Links {
		l := &r.Links[i]
		if l.Loopback || !l.Up || l.NoARP || l.Index == by.Index || l.Index == by.Master || l.Master == by.Index {
			continue
		}
		for _, own := range l.Addresses {
			if own.Addr().IsLinkLocalUnicast() || !own.Contains(dest.Addr()) || dest.Bits() <= own.Bits() || own.Addr().Is4() != dest.Addr().Is4() {
				continue
			}
			r.Routing.Detached = append(r.Routing.Detached, Detached{Prefix: dest, By: by.Name, Within: l.Name, Network: own.Masked(),
				Proxied: proxied[dest.Addr()] || dest.Addr().Is4() && r.proxyARP(l.Name)})
			return
		}
	}
}

// proxyARP reports whether the host answers ARP on a link for addresses that it routes elsewhere.
func (r *NamespaceReading) proxyARP(link string) bool {
	for _, name := range []string{"all", link} {
		if on, _ := Number(r.Sysctl, "net.ipv4.conf."+name+".proxy_arp"); on == 1 {
			return true
		}
	}
	return false
}

// neighbour is an address on a link.
type neighbour struct {
	link    int
	address netip.Addr
}

// Neighbour is an address of a link with its hardware address.
type Neighbour struct {
	Address   netip.Addr
	Interface string
	MAC       net.HardwareAddr
}

// neighbours are the neighbour entries of the calling thread's namespace.
func neighbours() map[neighbour]netlink.Neigh {
	entries := map[neighbour]netlink.Neigh{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, _ := netdev.Whole(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, family) })
		for _, n := range list {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				entries[neighbour{n.LinkIndex, addr.Unmap()}] = n
			}
		}
	}
	return entries
}

// readNeighbours keeps the neighbour entries that failed, and those that were set by hand.
func (r *NamespaceReading) readNeighbours(entries map[neighbour]netlink.Neigh, names map[int]*Link) {
	for at, n := range entries {
		switch link := names[at.link]; {
		case n.State&netlink.NUD_FAILED != 0:
			r.Failed = append(r.Failed, at.address)
		case n.State == netlink.NUD_PERMANENT && link != nil && !at.address.IsMulticast() && len(r.ByHand) < mostGateways:
			r.ByHand = append(r.ByHand, Neighbour{at.address, link.Name, n.HardwareAddr})
		}
	}
	slices.SortFunc(r.Failed, netip.Addr.Compare)
	r.Failed = slices.Compact(r.Failed)
}

// proxiedAddresses are those for which the host answers by a proxy entry.
func proxiedAddresses() map[netip.Addr]bool {
	proxied := map[netip.Addr]bool{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, _ := netdev.Whole(func() ([]netlink.Neigh, error) { return netlink.NeighProxyList(0, family) })
		for _, n := range list {
			if addr, ok := netip.AddrFromSlice(n.IP); ok {
				proxied[addr.Unmap()] = true
			}
		}
	}
	return proxied
}
