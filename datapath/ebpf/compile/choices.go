// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"
)

// HostAddress is an address of the host, with the attributes that the kernel uses for source
// selection.
type HostAddress struct {
	netip.Addr
	Network    netip.Prefix // The on-link prefix.
	Deprecated bool         // RFC 6724 rule 3: used only without an alternative.
	Secondary  bool         // IPv4: not the primary address of its network; IPv6: a temporary address.
	Unusable   bool         // Link or host scope, or duplicate address detection has not succeeded.
}

// choice is a source address for packets leaving by an interface. The first choice of a family is
// the default. A choice without destinations may still have flows.
type choice struct {
	netip.Addr
	// towards lists the IPv4 next hops or IPv6 destinations that use this address.
	towards []netip.Prefix
}

// maxChoices limits the source addresses of one interface and family. Each takes a rule and the
// memory of a pool address.
const maxChoices = 4

// choices returns the possible source addresses for packets leaving by an interface, in the
// kernel's order. IPv4 is selected by the next hop's network (inet_select_addr), IPv6 by RFC 6724.
// The first element is the routing table's source for a far destination. Single addresses that the
// configuration assigns to services or pools are used only without an alternative.
func (h *Host) choices(ifindex int, v6 bool, assigned func(netip.Addr) bool) []choice {
	var all []HostAddress
	for _, a := range h.Details[ifindex] {
		if a.Is6() == v6 && !a.Unusable {
			all = append(all, a)
		}
	}
	for _, worse := range []func(HostAddress) bool{
		func(a HostAddress) bool { return a.Network.IsSingleIP() && assigned(a.Addr) },
		func(a HostAddress) bool { return a.Deprecated },
		func(a HostAddress) bool { return a.Secondary },
	} {
		if some := slices.DeleteFunc(slices.Clone(all), worse); len(some) > 0 {
			all = some
		}
	}
	if len(all) == 0 {
		return h.unnumberedSource(ifindex, v6)
	}
	if far := h.farSource(ifindex, v6); far.IsValid() {
		// A route may name a secondary address as its source.
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

// byNextHop assigns each network to its first address.
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
			list[0].towards = []netip.Prefix{all[0].Network} // a narrower network inside a wider one
		}
	}
	return list
}

var uniqueLocal = netip.MustParsePrefix("fc00::/7")

// byDestination assigns each destination to the address with the longest common prefix, at most the
// address's own network (RFC 6724 rule 8). Unique local destinations get unique local addresses
// (rule 6). If several addresses share a prefix, the first address wins.
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
		above := 0 // owner of the prefix that is one bit shorter
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

// farSource returns the kernel's source for packets by an interface to a remote destination, or the
// zero Addr.
func (h *Host) farSource(ifindex int, v6 bool) netip.Addr {
	to := netip.AddrFrom4([4]byte{240, 0, 0, 1}) // reserved (class E), but routed like any other
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

// unnumberedSource returns the source of the default route by an interface without addresses: the
// address of another interface (an unnumbered link).
func (h *Host) unnumberedSource(ifindex int, v6 bool) []choice {
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
	return slices.ContainsFunc(h.Details[ifindex], func(a HostAddress) bool { return a.Is6() == v6 && !a.Unusable }) || len(h.unnumberedSource(ifindex, v6)) > 0
}
