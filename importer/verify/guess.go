// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// Limits of a guessed host: more interfaces and neighbours add no kinds of probes.
const (
	maxInterfaces = 24
	maxNeighbours = 512
)

// MTU of the guessed interfaces in bytes. The outside one is smaller, so that a lowered MSS shows.
const (
	mtuInside  = 1500
	mtuOutside = 1400
)

// hostGuess builds a host for rules.
type hostGuess struct {
	h     model.Host
	rules []ruleValues
	taken map[netip.Addr]bool // own addresses and routers
}

// Guess returns a host for the rules of an import, with the interfaces in the rules and neighbours
// for their addresses. addresses has the host's own addresses by interface. Without them the
// outside interface gets public addresses, and inside interfaces get private networks.
func Guess(r *draft.Result, outside []string, addresses map[string][]netip.Prefix) model.Host {
	g := &hostGuess{taken: map[netip.Addr]bool{}}
	var named, leaving []string
	for _, l := range r.Lines {
		m := mentionsOf(l.Text)
		g.rules = append(g.rules, m)
		named = append(named, m.interfaces...)
		out := outNames(l.Text)
		named = append(named, out...)
		if strings.Contains(strings.ToUpper(l.Text), "MASQUERADE") || strings.Contains(strings.ToUpper(l.Text), "SNAT") {
			leaving = append(leaving, out...)
		}
	}
	out := g.outsideInterface(outside, leaving, named)
	for _, name := range append([]string{out}, append(named, "lan0")...) {
		g.add(name, mtuInside)
	}
	for name := range addresses {
		g.add(name, mtuInside)
	}
	for i := range g.h.Interfaces {
		if g.h.Interfaces[i].Name == out {
			g.h.Interfaces[i].MTU = mtuOutside
		}
	}
	if addresses != nil {
		for i := range g.h.Interfaces {
			for _, p := range addresses[g.h.Interfaces[i].Name] {
				if !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
					g.address(i, p)
				}
			}
		}
	} else {
		g.networks(out)
	}
	g.routes(out)
	g.neighbours()
	return g.h
}

// literalInterface returns an interface name for a pattern: "ppp0" for "ppp+".
func literalInterface(name string) string {
	if s := strings.TrimRight(name, "+*"); s != name {
		return s + "0"
	}
	return name
}

func outNames(text string) (list []string) {
	for _, s := range outWord.FindAllStringSubmatch(text, -1) {
		list = append(list, s[1])
	}
	return list
}

// outsideInterface chooses the interface of the default route.
func (g *hostGuess) outsideInterface(given, leaving, named []string) string {
	for _, name := range slices.Concat(given, leaving, named) {
		if name = literalInterface(name); name != "lo" && name != "" {
			return name
		}
	}
	return "wan0"
}

func (g *hostGuess) add(name string, mtu int) {
	name = literalInterface(name)
	if _, there := g.h.Interface(name); there || name == "lo" || name == "" || len(name) > 15 || strings.ContainsAny(name, "/ :") || len(g.h.Interfaces) == maxInterfaces {
		return
	}
	g.h.Interfaces = append(g.h.Interfaces, model.Interface{Name: name, MAC: packet.MAC{2, 0, 0, 1, byte(len(g.h.Interfaces)), 1}, MTU: mtu})
}

func (g *hostGuess) address(i int, p netip.Prefix) {
	if !g.taken[p.Addr()] {
		g.taken[p.Addr()] = true
		g.h.Interfaces[i].Addresses = append(g.h.Interfaces[i].Addresses, p)
	}
}

// networks sets the addresses of interfaces. Each inside interface gets the networks in its rules,
// the first one also all other networks.
func (g *hostGuess) networks(out string) {
	index := func(name string) int {
		return slices.IndexFunc(g.h.Interfaces, func(i model.Interface) bool { return i.Name == name })
	}
	outer := index(out)
	g.address(outer, netip.MustParsePrefix("198.51.100.1/24"))
	inner := slices.IndexFunc(g.h.Interfaces, func(i model.Interface) bool { return i.Name != out })
	for i := range g.h.Interfaces {
		if i != outer {
			g.address(i, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 199, byte(i), 1}), 24))
		}
	}
	used := map[netip.Prefix]bool{}
	network := func(i int, a netip.Addr) {
		bits := 24
		if a.Is6() {
			bits = 64
		}
		p, err := a.Prefix(bits)
		if err != nil || used[p] || i < 0 {
			return
		}
		used[p] = true
		own := p.Addr().Next()
		for g.isNamed(own) {
			own = own.Next()
		}
		g.address(i, netip.PrefixFrom(own, bits))
	}
	for _, m := range g.rules {
		at := inner
		for _, name := range m.interfaces {
			if i := index(literalInterface(name)); i >= 0 && i != outer {
				at = i
			}
		}
		for _, a := range m.targets {
			if a.IsPrivate() {
				network(at, a)
			}
		}
		for _, p := range m.sources {
			if p.Addr().IsPrivate() && (p.IsSingleIP() || p.Bits() >= 24) {
				network(at, p.Addr())
			}
		}
	}
	for _, m := range g.rules { // public destinations are addresses of the host unless a rule has an inside input interface
		inside := slices.ContainsFunc(m.interfaces, func(name string) bool { return literalInterface(name) != out })
		for _, p := range m.dests {
			if p.IsSingleIP() && !p.Addr().IsPrivate() && !inside && len(m.targets) > 0 && len(g.h.Interfaces[outer].Addresses) < 64 {
				g.address(outer, p)
			}
		}
	}
}

// isNamed reports whether a rule has the address of a single host.
func (g *hostGuess) isNamed(a netip.Addr) bool {
	return slices.ContainsFunc(g.rules, func(m ruleValues) bool {
		return slices.Contains(m.targets, a) || slices.ContainsFunc(slices.Concat(m.sources, m.dests), func(p netip.Prefix) bool { return p.IsSingleIP() && p.Addr() == a })
	})
}

// router returns an address of the network that is not the host's.
func (g *hostGuess) router(p netip.Prefix) netip.Addr {
	a := p.Masked().Addr().Next()
	for g.taken[a] || g.isNamed(a) {
		a = a.Next()
	}
	return a
}

// routes sets the default route to a router on the outside interface. The private networks in rules
// have a route to a router on the first inside interface.
func (g *hostGuess) routes(out string) {
	add := func(to string, iface model.Interface) {
		dst := netip.MustParsePrefix(to)
		for _, p := range iface.Addresses {
			if p.Addr().Is4() == dst.Addr().Is4() && !p.IsSingleIP() {
				via := g.router(p)
				g.h.Routes = append(g.h.Routes, model.Route{To: dst, Via: via, Interface: iface.Name})
				g.neighbour(iface.Name, via)
				return
			}
		}
	}
	for _, i := range g.h.Interfaces {
		if i.Name == out {
			add("0.0.0.0/0", i)
			add("::/0", i)
		}
	}
	for _, i := range g.h.Interfaces {
		if i.Name != out {
			for _, to := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} {
				add(to, i)
			}
			break
		}
	}
}

func (g *hostGuess) neighbour(iface string, a netip.Addr) {
	if g.taken[a] || len(g.h.Neighbours) >= maxNeighbours {
		return
	}
	g.taken[a] = true
	n := len(g.h.Neighbours)
	g.h.Neighbours = append(g.h.Neighbours, model.Neighbour{Interface: iface, Address: a, MAC: packet.MAC{2, 0, 0, 2, byte(n >> 8), byte(n)}})
}

// neighbours adds the hosts in rules that are on the networks of the interfaces, and two more on
// each network.
func (g *hostGuess) neighbours() {
	on := func(a netip.Addr) (string, bool) {
		for _, i := range g.h.Interfaces {
			for _, p := range i.Addresses {
				if p.Contains(a) && a != p.Masked().Addr() {
					return i.Name, true
				}
			}
		}
		return "", false
	}
	for _, m := range g.rules {
		for _, p := range slices.Concat(m.sources, m.dests) {
			m.targets = append(m.targets, p.Addr())
		}
		for _, a := range m.targets {
			for range 4 { // ranges of targets
				if i, ok := on(a); ok {
					g.neighbour(i, a)
				}
				a = a.Next()
			}
		}
	}
	for _, i := range g.h.Interfaces {
		for _, p := range i.Addresses {
			if p.Addr().BitLen()-p.Bits() >= 3 {
				for range 2 {
					g.neighbour(i.Name, g.router(p))
				}
			}
		}
	}
}

// Describe returns the interfaces and addresses of a host for the report.
func Describe(h model.Host) string {
	var words []string
	for _, i := range h.Interfaces {
		var list []string
		for _, p := range i.Addresses {
			list = append(list, p.String())
		}
		words = append(words, fmt.Sprintf("%s %s", i.Name, strings.Join(list, " ")))
	}
	return strings.Join(words, "; ")
}
