// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/flow"
)

// claim is a port range of an object on an address.
type claim struct {
	address  netip.Addr
	protocol flow.Protocol // Any covers every protocol.
	ports    flow.Ports    // 0-65535 for a protocol without ports.
	iface    Interfaces    // Empty covers every interface.
	path     path
	owner    string
	follows  string // the interface that provides the address; address is then a placeholder
}

func (c claim) String() string {
	if c.follows != "" {
		family := "IPv4"
		if c.address == placeholder6(c.follows) {
			family = "IPv6"
		}
		s := "the " + family + " address of " + c.follows
		if c.protocol != flow.Any {
			s = fmt.Sprintf("%s port %s of %s", c.protocol, c.ports, s)
		}
		return s
	}
	s := c.address.String()
	if c.protocol != flow.Any {
		s = c.protocol.String() + " " + netip.AddrPortFrom(c.address, c.ports.First).String()
		if c.ports.Len() > 1 {
			s += "-" + flow.Ports{First: c.ports.Last, Last: c.ports.Last}.String()
		}
	}
	if c.iface != "" {
		s += " on " + string(c.iface)
	}
	return s
}

// placeholder4 and followed6 are placeholders for the unknown address of an interface.
func placeholder4(iface string) netip.Addr { return netip.IPv6Unspecified().WithZone(iface) }
func placeholder6(iface string) netip.Addr { return netip.IPv6LinkLocalAllNodes().WithZone(iface) }

// listenerClaims returns the listeners of services and port forwards.
func (v *validator) listenerClaims() []claim {
	var out []claim
	add := func(l *Listen, in Interfaces, proto flow.Protocol, p path, owner string, to ...netip.Addr) {
		c := claim{address: l.Address, protocol: proto, iface: Interfaces(l.Interface), path: p, owner: owner}
		if c.iface == "" {
			c.iface = in
		}
		at := []netip.Addr{l.Address}
		if l.Follows() {
			c.follows, c.iface, at = l.Interface, in, nil
			for _, a := range to {
				one := placeholder6(l.Interface)
				if a.Is4() {
					one = placeholder4(l.Interface)
				}
				if a.IsValid() && !slices.Contains(at, one) {
					at = append(at, one)
				}
			}
		}
		for _, c.address = range at {
			for _, c.ports = range portsOrAll(l.Ports) {
				if c.address.IsValid() {
					out = append(out, c)
				}
			}
		}
	}
	for i := range v.c.Services {
		s := &v.c.Services[i]
		var to []netip.Addr
		for _, b := range s.Backends {
			to = append(to, b.Address)
		}
		for j := range s.Listen {
			add(&s.Listen[j], "", s.Protocol, path{{key: "services"}, {index: i}, {key: "listen"}, {index: j}}, "service "+s.Name, to...)
		}
	}
	for i := range v.c.NAT {
		if r := &v.c.NAT[i]; r.Listens() {
			in := r.In
			if r.Hairpin == SwitchOn { // reachable also from other networks
				in = ""
			}
			add(r.Listen, in, r.Protocol, path{{key: "nat"}, {index: i}, {key: "listen"}}, "NAT rule "+r.Name, r.To.Address)
		}
	}
	return out
}

// portsOrAll returns each port as a range; all ports if the list is empty.
func portsOrAll(ports []flow.Ports) []flow.Ports {
	if len(ports) == 0 {
		return []flow.Ports{{First: 0, Last: 65535}}
	}
	return ports
}

// overlaps reports listeners that match the same packets.
func (v *validator) overlaps() {
	all := v.listenerClaims()
	v.checkChained(all)
	for _, o := range collisions(all) {
		hint := "give one of them another address, port or interface"
		v.errorf(o.later.path, hint, "%s overlaps %s of %s", o.later, o.earlier, o.earlier.owner).depends =
			[]path{o.earlier.path, o.later.path, o.earlier.path[:2].key("protocol"), o.later.path[:2].key("protocol")}
	}
	var returns []claim
	for i := range v.c.Services {
		if s := &v.c.Services[i]; s.Mode == ModeStateless {
			returns = append(returns, s.replyEndpoints(i)...)
		}
	}
	for _, o := range collisions(returns) {
		if o.earlier.path[1] == o.later.path[1] {
			continue // a duplicate server within one service is reported elsewhere
		}
		v.errorf(o.later.path, "give the server another port for one of them, or use another mode",
			"replies from %s could belong to %s too: mode stateless cannot tell", o.later, o.earlier.owner).depends =
			[]path{o.earlier.path[:2], o.later.path[:2]}
	}
}

// prefixes reports one-to-one rules with overlapping outside or inside prefixes, where a packet
// would match both. Rules of different interfaces cannot conflict.
func (v *validator) prefixes() {
	type owned struct {
		AddressRange
		index int
		key   string
	}
	for _, key := range []string{"external", "internal"} {
		var all []owned
		for i := range v.c.NAT {
			r := &v.c.NAT[i]
			p := r.External
			if key == "internal" {
				p = r.Internal
			}
			if r.Type.OneToOne() && p.IsValid() {
				all = append(all, owned{rangeOf(p), i, key})
			}
		}
		slices.SortStableFunc(all, func(a, b owned) int { return a.First.Compare(b.First) })
		reach := map[Interfaces]int{} // out → index into all with the highest last address
		for n, o := range all {
			r := &v.c.NAT[o.index]
			for _, out := range overlappingKeys(r.Out, reach) {
				if e := all[reach[out]]; o.overlaps(e.AddressRange) {
					first, second := &v.c.NAT[min(e.index, o.index)], max(e.index, o.index)
					v.errorf(path{{key: "nat"}, {index: second}, {key: key}}, "write prefixes that share no address, or give each rule another out",
						"%s overlaps that of NAT rule %s", key, first.Name)
					break
				}
			}
			if old, ok := reach[r.Out]; !ok || all[old].Last.Less(o.Last) {
				reach[r.Out] = n
			}
		}
	}
}

// overlappingKeys returns the keys of reach whose interfaces overlap out.
func overlappingKeys(out Interfaces, reach map[Interfaces]int) (met []Interfaces) {
	for k := range reach {
		if k.Overlaps(out) {
			met = append(met, k)
		}
	}
	slices.Sort(met)
	return met
}

// replyEndpoints lists the source endpoints that a stateless service treats as replies.
func (s *Service) replyEndpoints(index int) []claim {
	var out []claim
	for j := range s.Backends {
		b := &s.Backends[j]
		if !b.Address.IsValid() {
			continue
		}
		c := claim{address: b.Address, protocol: s.Protocol, owner: "service " + s.Name,
			path: path{{key: "services"}, {index: index}, {key: "backends"}, {index: j}}}
		if b.Port != 0 {
			c.ports = flow.Ports{First: b.Port, Last: b.Port}
			out = append(out, c)
			continue
		}
		for _, l := range s.Listen {
			for _, r := range portsOrAll(l.Ports) {
				c.ports = r
				out = append(out, c)
			}
		}
	}
	return out
}

// collision is a claim that overlaps an earlier one.
type collision struct{ earlier, later claim }

// protocolInterface is a protocol and an interface word; "*" represents all interface words together.
type protocolInterface struct{ protocol, iface string }

// files lists the lanes in which a claim is stored.
func (c *claim) files() []protocolInterface {
	p := c.protocol.String()
	lanes := []protocolInterface{{p, "*"}, {"*", "*"}}
	for _, w := range c.interfaceNames() {
		lanes = append(lanes, protocolInterface{p, w}, protocolInterface{"*", w})
	}
	return lanes
}

// interfaceNames returns the names and patterns of the claim's interfaces; "" for every interface.
func (c *claim) interfaceNames() []string {
	if c.iface == "" {
		return []string{""}
	}
	return c.iface.Words()
}

// rivals lists the lanes with claims that can overlap this one: its own protocol and protocol any,
// its own interfaces and every interface. known are the interface words of all claims.
func (c *claim) rivals(known []string) []protocolInterface {
	protocols, ifaces := []string{c.protocol.String(), flow.Any.String()}, []string{""}
	if c.protocol == flow.Any {
		protocols = []string{"*"}
	}
	if c.iface == "" {
		ifaces = []string{"*"}
	}
	for _, w := range known {
		if c.iface != "" && w != "" && c.iface.Overlaps(Interfaces(w)) {
			ifaces = append(ifaces, w)
		}
	}
	lanes := make([]protocolInterface, 0, 4)
	for _, p := range protocols {
		for _, f := range ifaces {
			lanes = append(lanes, protocolInterface{p, f})
		}
	}
	return lanes
}

// collisions finds an overlapping claim for each claim in O(n log n): it sweeps over the ports of
// each address and remembers, for every lane, the claim with the highest last port.
func collisions(claims []claim) []collision {
	order := make([]int, len(claims))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		a, b := &claims[i], &claims[j]
		return cmp.Or(a.address.Compare(b.address), cmp.Compare(a.ports.First, b.ports.First))
	})
	var known []string
	for i := range claims {
		for _, w := range claims[i].interfaceNames() {
			if !slices.Contains(known, w) {
				known = append(known, w)
			}
		}
	}
	var out []collision
	var furthest map[protocolInterface]int
	for n, i := range order {
		c := &claims[i]
		if n == 0 || claims[order[n-1]].address != c.address {
			furthest = map[protocolInterface]int{}
		}
		for _, l := range c.rivals(known) {
			if j, ok := furthest[l]; ok && claims[j].ports.Last >= c.ports.First {
				out = append(out, collision{claims[min(i, j)], claims[max(i, j)]})
				break
			}
		}
		for _, l := range c.files() {
			if j, ok := furthest[l]; !ok || claims[j].ports.Last < c.ports.Last {
				furthest[l] = i
			}
		}
	}
	return out
}

// span is a range in a list that is sorted by first address; see spans.
type span struct {
	AddressRange
	index    int // in the list
	furthest int // The earlier span with the highest last address.
}

// spans are ranges sorted by first address.
type spans []span

func spansOf(list []AddressRange) spans {
	all := make(spans, len(list))
	for i, r := range list {
		all[i] = span{AddressRange: r, index: i}
	}
	slices.SortStableFunc(all, func(a, b span) int { return a.First.Compare(b.First) })
	for n := range all {
		all[n].furthest = n
		if n > 0 && all[n].Last.Less(all[all[n-1].furthest].Last) {
			all[n].furthest = all[n-1].furthest
		}
	}
	return all
}

// indexOverlapping returns the index of a range that overlaps r, or -1.
func (all spans) indexOverlapping(r AddressRange) int {
	behind, _ := slices.BinarySearchFunc(all, r.Last, func(s span, last netip.Addr) int {
		if last.Less(s.First) {
			return 1
		}
		return -1
	})
	if behind > 0 {
		if s := all[all[behind-1].furthest]; s.overlaps(r) {
			return s.index
		}
	}
	return -1
}

// overlaps maps each range that overlaps an earlier range in the list to that range.
func (all spans) overlaps() map[int]int {
	twice := map[int]int{}
	for n := 1; n < len(all); n++ {
		if before := all[all[n-1].furthest]; before.overlaps(all[n].AddressRange) {
			twice[max(before.index, all[n].index)] = min(before.index, all[n].index)
		}
	}
	return twice
}

// pools checks that source pools of fullnat services contain only addresses of the gateway: no
// listener, no server, no client of a NAT rule.
func (v *validator) pools() {
	type owned struct {
		address netip.Addr
		owner   string
	}
	if !slices.ContainsFunc(v.c.Services, func(s Service) bool { return len(s.SourcePool) > 0 }) {
		return
	}
	var taken []owned
	for i := range v.c.Services {
		s := &v.c.Services[i]
		for _, l := range s.Listen {
			taken = append(taken, owned{l.Address, "the listener of service " + s.Name})
		}
		for _, b := range s.Backends {
			taken = append(taken, owned{b.Address, "backend " + b.Name + " of service " + s.Name})
		}
	}
	for i := range v.c.NAT {
		if r := &v.c.NAT[i]; r.Listen != nil {
			taken = append(taken, owned{r.Listen.Address, "the listener of NAT rule " + r.Name})
		}
	}
	slices.SortStableFunc(taken, func(a, b owned) int { return a.address.Compare(b.address) })
	var sources []AddressRange
	var of []string // index of the NAT rule of each source
	for i := range v.c.NAT {
		r := &v.c.NAT[i]
		if !r.Type.RewritesSource() || r.Out != "" {
			continue
		}
		for _, s := range r.Source {
			sources, of = append(sources, rangeOf(s)), append(of, r.Name)
		}
	}
	again := spansOf(sources)
	for i := range v.c.Services {
		for j, r := range v.c.Services[i].SourcePool {
			p := path{{key: "services"}, {index: i}, {key: "source-pool"}, {index: j}}
			first, _ := slices.BinarySearchFunc(taken, r.First, func(o owned, a netip.Addr) int { return o.address.Compare(a) })
			if first < len(taken) && r.Contains(taken[first].address) {
				v.errorf(p, "write addresses that nothing else uses", "pool %s contains %s, %s", r, taken[first].address, taken[first].owner)
			}
			if n := again.indexOverlapping(r); n >= 0 {
				v.errorf(p, "write other addresses, or give the NAT rule out",
					"pool %s lies inside source %s of NAT rule %s, which would translate its packets again", r, sources[n], of[n])
			}
		}
	}
}
