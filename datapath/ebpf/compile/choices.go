// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"
)

// HostAddress is an address of the host with what the kernel goes by when it chooses a source.
type HostAddress struct {
	netip.Addr
	Network    netip.Prefix // whose neighbours see it as one of theirs
	Deprecated bool         // RFC 6724 rule 3: only where there is no other
	Secondary  bool         // IPv4: another one of the same network comes first; IPv6: a temporary one
	Unusable   bool         // of link or host scope, or not unique (yet)
}

// choice is an address that packets leave with by an interface. The first one of a family is for
// all that no other one is for; one that is for nothing now may have flows.
type choice struct {
	netip.Addr
	// towards: of IPv4 next hops, of IPv6 destinations that it is for.
	towards []netip.Prefix
}

// maxChoices is how many addresses of one family an interface's packets leave with at most: each
// takes a rule and the memory of a pool address.
const maxChoices = 4

// choices returns the addresses of a family that what leaves by an interface may have, as the kernel
// chooses its own: for IPv4 by the next hop's network (inet_select_addr), for IPv6 by RFC 6724; what
// the routing table prefers for a far destination comes first. Addresses that the configuration
// gives to others (held) are taken where there are no others.
func (h *Host) choices(ifindex int, v6 bool, held func(netip.Addr) bool) []choice {
	var all []HostAddress
	for _, a := range h.Details[ifindex] {
		if a.Is6() == v6 && !a.Unusable {
			all = append(all, a)
		}
	}
	for _, worse := range []func(HostAddress) bool{
		func(a HostAddress) bool { return a.Network.IsSingleIP() && held(a.Addr) },
		func(a HostAddress) bool { return a.Deprecated },
		func(a HostAddress) bool { return a.Secondary },
	} {
		if some := slices.DeleteFunc(slices.Clone(all), worse); len(some) > 0 {
			all = some
		}
	}
	if len(all) == 0 {
		return h.borrowed(ifindex, v6)
	}
	if far := h.far(ifindex, v6); far.IsValid() {
		// Also a secondary one, where a route names it.
		at := slices.IndexFunc(all, func(a HostAddress) bool { return a.Addr == far })
		if at < 0 {
			if i := slices.IndexFunc(h.Details[ifindex], func(a HostAddress) bool { return a.Addr == far && a.Secondary && !a.Unusable }); i >= 0 {
				all = append(all, h.Details[ifindex][i])
				at = len(all) - 1
			}
		}
		if at > 0 {
			first := all[at]
			all = slices.Insert(slices.Delete(all, at, at+1), 0, first)
		}
	}
	if v6 {
		return byDestination(all)
	}
	return byNextHop(all)
}

// byNextHop gives each network to the first of its addresses.
func byNextHop(all []HostAddress) []choice {
	list := []choice{{Addr: all[0].Addr}}
	known := map[netip.Prefix]bool{all[0].Network: true}
	for _, a := range all[1:] {
		if len(list) == maxChoices {
			break
		}
		c := choice{Addr: a.Addr}
		if !known[a.Network] {
			known[a.Network] = true
			c.towards = []netip.Prefix{a.Network}
		}
		list = append(list, c)
		if a.Network.Overlaps(all[0].Network) && a.Network.Bits() < all[0].Network.Bits() {
			list[0].towards = []netip.Prefix{all[0].Network} // a narrower one in that
		}
	}
	return list
}

var uniqueLocal = netip.MustParsePrefix("fc00::/7")

// byDestination gives each destination to the address that shares the longest prefix with it, no
// longer than the address's network (RFC 6724 rule 8), and unique local ones to each other
// (rule 6). Of the prefixes that addresses share the first one has them.
func byDestination(all []HostAddress) []choice {
	if i := slices.IndexFunc(all, func(a HostAddress) bool { return !uniqueLocal.Contains(a.Addr) }); i > 0 {
		all = append([]HostAddress{all[i]}, slices.Delete(slices.Clone(all), i, i+1)...)
	}
	all = all[:min(len(all), maxChoices)]
	owner := map[netip.Prefix]int{}
	list := make([]choice, len(all))
	for i, a := range all {
		list[i].Addr = a.Addr
		least := 1
		if uniqueLocal.Contains(a.Addr) {
			least = uniqueLocal.Bits()
		}
		above := 0 // who has the prefix that is one bit shorter
		for bits := least; bits <= a.Network.Bits(); bits++ {
			p := netip.PrefixFrom(a.Addr, bits).Masked()
			if _, taken := owner[p]; !taken {
				owner[p] = i
				if above != i {
					list[i].towards = append(list[i].towards, p)
				}
			}
			above = owner[p]
		}
	}
	return list
}

// far is the source that the kernel gives to what goes by an interface to a destination that is
// near to nothing; the zero Addr when it has none.
func (h *Host) far(ifindex int, v6 bool) netip.Addr {
	to := netip.AddrFrom4([4]byte{240, 0, 0, 1}) // reserved, and routed as any other
	if v6 {
		to = netip.MustParseAddr("3fff:ffff::1")
	}
	name := ""
	for _, i := range h.Interfaces {
		if i.Index == ifindex {
			name = i.Name
		}
	}
	if name == "" {
		return netip.Addr{}
	}
	return h.Ask.Source(to, name)
}

// borrowed returns the address of another interface that the default route by one without addresses names as its source
// (an unnumbered link).
func (h *Host) borrowed(ifindex int, v6 bool) []choice {
	if h.Ask.NamedSource == nil {
		return nil
	}
	if a := h.Ask.NamedSource(ifindex, v6); a.IsValid() && h.Owns(a) {
		return []choice{{Addr: a}}
	}
	return nil
}

// Addressed reports whether an interface has an address to translate to.
func (h *Host) Addressed(ifindex int, v6 bool) bool {
	return slices.ContainsFunc(h.Details[ifindex], func(a HostAddress) bool { return a.Is6() == v6 && !a.Unusable }) || len(h.borrowed(ifindex, v6)) > 0
}
