// SPDX-License-Identifier: Apache-2.0

// Package hold adds addresses of services and pools to the host's interfaces, so that the host answers ARP and
// neighbour discovery for them. It adds an address only if it is in a connected network and no other station has it.
// It runs duplicate address detection first, sends gratuitous ARP, records it in a file, and removes it at the end.
package hold

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// MaxHeld bounds the number of held addresses, because the kernel searches an interface's address list linearly.
const MaxHeld = 1024

// Want is a range of addresses of a service or rule: packets to them must reach this host.
type Want struct {
	First, Last netip.Addr
	// Owner is "service NAME" or "nat NAME".
	Owner string
	// Leave is the reason not to hold the addresses, or "".
	Leave string
	// Listens reports that the owner listens on the addresses and could follow an interface's address.
	Listens bool
}

// AddressState is the state of an address on this host.
type AddressState string

// States.
const (
	Held    AddressState = "held"    // On an interface, added by Sluice.
	Probing AddressState = "probing" // About to be held: duplicate address detection runs.
	Own     AddressState = "own"     // The host has it; another program added it.
	Routed  AddressState = "routed"  // in no connected network: routers forward it to this host
	Lost    AddressState = "lost"    // Was Own, and the other program removed it: never held.
	Foreign AddressState = "foreign" // Another station answers for it.
	Absent  AddressState = "absent"  // in a connected network, but no station answers; Why is the reason why Sluice does not hold it
)

// Status is the state of a range of addresses.
type Status struct {
	First, Last netip.Addr
	Owners      []string
	State       AddressState
	Interface   string
	// Station is the hardware address of the station with a foreign address.
	Station string
	Why     string
}

const noCarrier = "the interface has no carrier"

// network is a connected network of an interface with ARP or neighbour discovery.
type network struct {
	prefix  netip.Prefix
	ifindex int
	name    string
	carrier bool
}

// view is the part of the host's state that placing depends on.
type view struct {
	networks []network
	own      map[netip.Addr]string // The host's addresses without held ones, with their interfaces.
	local    []netip.Prefix        // IPv4 prefixes of local routes: the host answers for each address.
	was      map[netip.Addr]string // wanted addresses that were in own or local before, with their interfaces
}

// addressDecision is the decision about one address. The address is wanted on its interface, if it has one.
type addressDecision struct {
	Status
	ifindex int
}

// decideWants decides for every wanted address whether to hold it. Ranges in connected networks are split into single
// addresses.
func decideWants(wants []Want, v view) (list []addressDecision) {
	seen := map[netip.Addr]int{} // index in list
	held := 0
	for _, w := range wants {
		if !w.First.IsValid() || w.First.IsLoopback() || w.First.IsLinkLocalUnicast() || w.First.IsUnspecified() {
			continue
		}
		whole := Status{First: w.First, Last: w.Last, Owners: []string{w.Owner}}
		met := slices.ContainsFunc(v.networks, func(n network) bool { return overlaps(n.prefix, w) })
		size, few := count(w.First, w.Last)
		switch {
		case !met && size != 1: // single addresses are reported as own
			whole.State = Routed
			list = append(list, addressDecision{Status: whole})
			continue
		case !few:
			whole.State = Absent
			whole.Why = fmt.Sprintf("more than %d addresses are not held one by one: have the prefix routed here, or of IPv4 add a local route for it (ip route add local PREFIX dev INTERFACE)", MaxHeld)
			list = append(list, addressDecision{Status: whole})
			continue
		}
		for a := w.First; ; a = a.Next() {
			if i, known := seen[a]; known {
				list[i].setOwner(w)
			} else {
				p := v.decideAddress(a, w)
				if p.State == Probing {
					if held++; held > MaxHeld {
						p.State, p.ifindex = Absent, 0
						p.Why = fmt.Sprintf("%d addresses are held already, which is the limit: have the prefix routed here", MaxHeld)
					}
				}
				seen[a] = len(list)
				list = append(list, p)
			}
			if a == w.Last {
				break
			}
		}
	}
	return list
}

// setOwner records that an address has another owner.
func (p *addressDecision) setOwner(w Want) {
	if !slices.Contains(p.Owners, w.Owner) {
		p.Owners = append(p.Owners, w.Owner)
	}
	if w.Leave != "" && p.State == Probing {
		p.State, p.Why, p.ifindex = Absent, w.Leave, 0
	}
}

// decideAddress decides about one address.
func (v view) decideAddress(a netip.Addr, w Want) addressDecision {
	s := Status{First: a, Last: a, Owners: []string{w.Owner}}
	n, met := v.networkOf(a)
	name, own := v.own[a]
	before, was := v.was[a]
	switch {
	case own:
		s.State, s.Interface = Own, name
	case slices.ContainsFunc(v.local, func(p netip.Prefix) bool { return p.Contains(a) }):
		s.State, s.Why = Own, "by a local route"
	case was && w.Leave == "": // VRRP moves addresses that Sluice leaves to others
		s.State, s.Interface, s.Why = Lost, before, "it was the host's own, and Sluice does not take it over: "+w.remedy(before)
	case !met:
		s.State = Routed
	case n.isEnd(a):
		s.State, s.Interface, s.Why = Absent, n.name, fmt.Sprintf("the first and the last address of %s are no host's", n.prefix)
	case w.Leave != "":
		s.State, s.Interface, s.Why = Absent, n.name, w.Leave
	case !n.carrier:
		s.State, s.Interface, s.Why = Absent, n.name, noCarrier
	default:
		s.State, s.Interface = Probing, n.name
		return addressDecision{Status: s, ifindex: n.ifindex}
	}
	return addressDecision{Status: s}
}

// remedy returns the remedy for an address that the host had on an interface and has lost; "" if a route had added
// it.
func (w Want) remedy(iface string) string {
	if w.Listens && iface != "" {
		return fmt.Sprintf("write listen: {interface: %s} to follow the interface's address, or give the host this one again", iface)
	}
	return "give it to the host again, or write another"
}

// networkOf returns the smallest network that contains the address.
func (v view) networkOf(a netip.Addr) (best network, met bool) {
	for _, n := range v.networks {
		if n.prefix.Contains(a) && (!met || n.prefix.Bits() > best.prefix.Bits()) {
			best, met = n, true
		}
	}
	return best, met
}

// isEnd reports whether an address is the network address or the broadcast address, or in IPv6 the routers' anycast
// address (RFC 4291 §2.6.1).
func (n network) isEnd(a netip.Addr) bool {
	if n.prefix.Bits() >= a.BitLen()-1 {
		return false
	}
	return a == n.prefix.Masked().Addr() || a.Is4() && !n.prefix.Contains(a.Next())
}

func overlaps(p netip.Prefix, w Want) bool {
	first := p.Masked().Addr()
	return first.BitLen() == w.First.BitLen() && (p.Contains(w.First) || w.First.Less(first) && !w.Last.Less(first))
}

// count returns the number of addresses in a range; few is false for more than MaxHeld.
func count(first, last netip.Addr) (n int, few bool) {
	a, b := first.As16(), last.As16()
	if [12]byte(a[:12]) != [12]byte(b[:12]) {
		return 0, false
	}
	low := func(x [16]byte) uint64 {
		return uint64(x[12])<<24 | uint64(x[13])<<16 | uint64(x[14])<<8 | uint64(x[15])
	}
	size := low(b) - low(a) + 1
	return int(min(size, MaxHeld+1)), size <= MaxHeld
}

// joinStatuses joins adjacent addresses with otherwise equal statuses.
func joinStatuses(list []Status) (out []Status) {
	slices.SortStableFunc(list, func(a, b Status) int { return cmp.Or(a.First.Compare(b.First), a.Last.Compare(b.Last)) })
	for _, s := range list {
		if n := len(out); n > 0 {
			if p := &out[n-1]; p.Last.Next() == s.First && p.State == s.State && p.Interface == s.Interface && p.Station == s.Station && p.Why == s.Why &&
				slices.Equal(p.Owners, s.Owners) {
				p.Last = s.Last
				continue
			}
		}
		out = append(out, s)
	}
	return out
}

// CountByState counts addresses by state. A routed range counts once.
func CountByState(list []Status) map[string]int {
	n := map[string]int{}
	for _, s := range list {
		size, few := count(s.First, s.Last)
		if !few || s.State == Routed {
			size = 1
		}
		n[string(s.State)] += size
	}
	return n
}

// On names the interface with the network of the addresses.
func (s Status) On() string {
	if s.Interface == "" {
		return "any interface"
	}
	return s.Interface
}

// Range formats the addresses of a status.
func (s Status) Range() string {
	if s.First == s.Last {
		return s.First.String()
	}
	return s.First.String() + "-" + s.Last.String()
}
