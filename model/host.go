// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// Host is the network state of the machine. A real datapath reads this state by netlink.
type Host struct {
	Interfaces []Interface
	Neighbours []Neighbour
	Routes     []Route
}

// Interface is a network interface of the host.
type Interface struct {
	Name      string
	MAC       packet.MAC
	MTU       int            // Bytes of the largest IP packet.
	Addresses []netip.Prefix // Addresses of the host with their prefix lengths.
	// RPFilter is rp_filter. Mode 1 (strict) refuses IPv4 sources with a route through another
	// interface. Mode 2 (loose) refuses IPv4 sources without a route.
	RPFilter int
	// AcceptLocal accepts IPv4 packets with a source address of this host.
	AcceptLocal bool
	// Stations are further MAC addresses of this host on the interface: of upper links (macvlan,
	// VRRP).
	Stations []packet.MAC
}

// isUnicastTo reports whether a frame with that destination address is unicast to this host.
func (i Interface) isUnicastTo(to packet.MAC) bool {
	return to == i.MAC || slices.Contains(i.Stations, to)
}

// Neighbour is a resolved neighbour.
type Neighbour struct {
	Interface string
	Address   netip.Addr
	MAC       packet.MAC
}

// Route is a route to a prefix through a next hop. A zero Via means an on-link network.
type Route struct {
	To        netip.Prefix
	Via       netip.Addr
	Interface string
	MTU       int // bytes, 0 for the MTU of the interface
}

// Interface returns the interface of that name.
func (h *Host) Interface(name string) (Interface, bool) {
	for _, i := range h.Interfaces {
		if i.Name == name {
			return i, true
		}
	}
	return Interface{}, false
}

// Owns reports whether a is an address of the host. For IPv6 it includes the subnet-router anycast
// address of each network (RFC 4291 §2.6.1), except networks of length /127 (RFC 6164).
func (h *Host) Owns(a netip.Addr) bool {
	for _, i := range h.Interfaces {
		for _, p := range i.Addresses {
			if p.Addr() == a || a.Is6() && p.Bits() < 127 && p.Masked().Addr() == a {
				return true
			}
		}
	}
	return false
}

// hop is a next hop with its egress interface.
type hop struct {
	Interface
	gateway netip.Addr
	mac     packet.MAC
	known   bool // the neighbour's MAC is known
}

// route returns the next hop to dst: the longest matching prefix among the routes and the on-link
// networks. It returns false if no prefix matches.
func (h *Host) route(dst netip.Addr) (hop, bool) {
	best, found := -1, Route{}
	consider := func(r Route) {
		if r.To.Contains(dst) && r.To.Bits() > best {
			best, found = r.To.Bits(), r
		}
	}
	for _, i := range h.Interfaces {
		for _, p := range i.Addresses {
			consider(Route{To: p.Masked(), Interface: i.Name})
		}
	}
	for _, r := range h.Routes {
		consider(r)
	}
	if best < 0 {
		return hop{}, false
	}
	iface, ok := h.Interface(found.Interface)
	if !ok {
		return hop{}, false
	}
	if found.MTU > 0 {
		iface.MTU = min(iface.MTU, found.MTU)
	}
	next := hop{Interface: iface, gateway: dst}
	if found.Via.IsValid() {
		next.gateway = found.Via
	}
	for _, n := range h.Neighbours {
		if n.Interface == iface.Name && n.Address == next.gateway {
			next.mac, next.known = n.MAC, true
		}
	}
	return next, true
}

// Routed reports whether the host has a route to dst or owns dst.
func (h *Host) Routed(dst netip.Addr) bool {
	_, ok := h.route(dst)
	return ok || h.Owns(dst)
}

// refusesSource reports whether the kernel drops packets from src on an ingress interface
// (fib_validate_source). The kernel has no such check for IPv6. Sluice always refuses broadcast
// addresses (RFC 1812 §5.3.7).
func (h *Host) refusesSource(iface string, src netip.Addr) bool {
	in, ok := h.Interface(iface)
	if !ok || !src.Is4() {
		return false
	}
	if h.Owns(src) {
		return !in.AcceptLocal
	}
	for _, i := range h.Interfaces {
		for _, p := range i.Addresses {
			if p.Addr().Is4() && p.Bits() < 31 && p.Contains(src) && !p.Contains(src.Next()) {
				return true // the source is a broadcast address
			}
		}
	}
	if in.RPFilter == 0 {
		return false
	}
	back, ok := h.route(src)
	return !ok || in.RPFilter == 1 && back.Name != iface
}

// networks returns the on-link networks of the host.
func (h *Host) networks() (list []netip.Prefix) {
	for _, i := range h.Interfaces {
		for _, p := range i.Addresses {
			list = append(list, p.Masked())
		}
	}
	return list
}

// specific returns the prefix length of the most specific route to dst, -1 for none.
func (h *Host) routeLength(dst netip.Addr) int {
	if h.Owns(dst) {
		return dst.BitLen()
	}
	best := -1
	for _, i := range h.Interfaces {
		for _, p := range i.Addresses {
			if p.Masked().Contains(dst) {
				best = max(best, p.Bits())
			}
		}
	}
	for _, r := range h.Routes {
		if r.To.Contains(dst) {
			best = max(best, r.To.Bits())
		}
	}
	return best
}

// NextHop returns the egress interface and the MAC address for packets to dst. It returns false if
// no route exists or the neighbour is unresolved.
func (h *Host) NextHop(dst netip.Addr) (iface Interface, mac packet.MAC, ok bool) {
	n, found := h.route(dst)
	return n.Interface, n.mac, found && n.known
}

// address returns the first address of a family on the interface, the source of the host's own
// packets.
func (i Interface) address(v6 bool) (netip.Addr, bool) {
	for _, p := range i.Addresses {
		if p.Addr().Is6() == v6 {
			return p.Addr(), true
		}
	}
	return netip.Addr{}, false
}

// source returns the source address of the host's own packets through the next hop. For IPv4 it is
// the first address in the next hop's network (inet_select_addr). For IPv6 it is the last one there
// (RFC 6724 leaves this choice open).
func (h hop) source() (netip.Addr, bool) {
	if a, ok := h.connectedAddress(); ok {
		return a, true
	}
	return h.address(h.gateway.Is6())
}

// near returns the address of the interface in the next hop's network, without link-local
// addresses.
func (h hop) connectedAddress() (found netip.Addr, ok bool) {
	for _, p := range h.Addresses {
		if p.Contains(h.gateway) && !p.Addr().IsLinkLocalUnicast() && (h.gateway.Is6() || !ok) {
			found, ok = p.Addr(), true
		}
	}
	return found, ok
}

// address returns the source of the host's own packets on an interface. An interface without an
// address of the family uses an address of another interface (RFC 1812 §4.3.2.4, RFC 4443 §2.2). A
// host without IPv4 addresses uses the first address of the siit pool, or the reserved address (RFC
// 7600 §4.8).
func (m *Model) address(i Interface, v6 bool) (netip.Addr, bool) {
	for _, i := range append([]Interface{i}, m.host.Interfaces...) {
		if a, ok := i.address(v6); ok {
			return a, true
		}
	}
	crosses := false
	for _, r := range m.rules {
		if r.Type.CrossesStateless() && len(r.Pool) > 0 && !v6 {
			return r.Pool[0].First, true
		}
		crosses = crosses || r.Type.CrossesFamilies()
	}
	return netip.AddrFrom4([4]byte{192, 0, 0, 8}), crosses && !v6
}

// listenAddress returns the global address of an interface for a listener of that family.
func (h *Host) listenAddress(iface string, v6 bool) (netip.Addr, bool) {
	i, _ := h.Interface(iface)
	return i.globalAddress(v6)
}

// known returns the global address of a family: for IPv4 the first one, for IPv6 the last one, in
// the kernel's order.
func (i Interface) globalAddress(v6 bool) (found netip.Addr, ok bool) {
	for _, p := range i.Addresses {
		if a := p.Addr(); a.Is6() == v6 && !a.IsLinkLocalUnicast() && (v6 || !ok) {
			found, ok = a, true
		}
	}
	return found, ok
}

// chosen returns the source addresses that the interface uses. For IPv4 each network contributes
// its first address.
func (i Interface) sourceAddresses() (list []netip.Addr) {
	for at, p := range i.Addresses {
		if (p.Addr().Is6() || i.isPrimary(at)) && !p.Addr().IsLinkLocalUnicast() {
			list = append(list, p.Addr())
		}
	}
	return list
}

// isPrimary reports whether an IPv4 address is the first one in its network. The kernel sends with
// primary addresses only.
func (i Interface) isPrimary(at int) bool {
	p := i.Addresses[at]
	return p.Addr().Is4() && slices.IndexFunc(i.Addresses, func(o netip.Prefix) bool { return o.Masked() == p.Masked() }) == at
}

// AddAddress inserts an address at the kernel's position (__inet_insert_ifa). A primary IPv4
// address follows the other primary addresses. All other addresses follow at the end.
func (i *Interface) AddAddress(p netip.Prefix) {
	at := len(i.Addresses)
	if p.Addr().Is4() && !slices.ContainsFunc(i.Addresses, func(o netip.Prefix) bool { return o.Masked() == p.Masked() }) {
		for at > 0 && !i.isPrimary(at-1) {
			at--
		}
		if at == 0 {
			at = len(i.Addresses)
		}
	}
	i.Addresses = slices.Insert(i.Addresses, at, p)
}

// RemoveAddress removes an existing address as the kernel does (__inet_del_ifa with
// promote_secondaries). The next address in the same network becomes primary. It moves behind the
// last primary address between the two, or else behind the first IPv4 address.
func (i *Interface) RemoveAddress(p netip.Prefix) {
	at := slices.Index(i.Addresses, p)
	next := -1
	if i.isPrimary(at) {
		next = slices.IndexFunc(i.Addresses, func(o netip.Prefix) bool { return o != p && o.Masked() == p.Masked() })
	}
	if next < 0 {
		i.Addresses = slices.Delete(i.Addresses, at, at+1)
		return
	}
	behind, between := slices.IndexFunc(i.Addresses, func(o netip.Prefix) bool { return o.Addr().Is4() }), false
	for n := at + 1; n < next; n++ {
		if i.isPrimary(n) {
			behind = n
		}
		between = between || i.Addresses[n].Addr().Is4()
	}
	promoted := i.Addresses[next]
	if between {
		i.Addresses = slices.Delete(i.Addresses, next, next+1)
		i.Addresses = slices.Insert(i.Addresses, behind+1, promoted)
	}
	at = slices.Index(i.Addresses, p)
	i.Addresses = slices.Delete(i.Addresses, at, at+1)
}

// Arrival is a received frame.
type Arrival struct {
	Interface string
	Frame     []byte
}

// Departure is a sent frame, or a frame for the kernel if the action is Pass.
type Departure struct {
	Interface string
	Frame     []byte
}

// Outcome is the result for one frame.
type Outcome struct {
	Action Action
	Reason Reason
	// Out contains the sent frames. With Pass it is empty if the kernel gets the received frame
	// unchanged. Otherwise it contains the changed frame.
	Out []Departure
	// Planned is set for packets to an unresolved next hop that begin with their ports.
	Planned Planned
}

// Planned is the translation of a packet that waits for its next hop.
type Planned struct {
	Tuple   flow.Tuple
	Gateway netip.Addr // the destination of the route lookup
}

// Action is the decision of a datapath about a frame.
type Action string

// Actions.
const (
	Forward Action = "forward" // Sent to the next hop, translated or not.
	Drop    Action = "drop"    // Dropped; Outcome.Out contains the answer.
	Pass    Action = "pass"    // Passed to the kernel.
)

// Timing of the model that is not configurable.
const (
	// FragmentLife is the lifetime of the ports of a first fragment. RFC 6146 §3.4 requires at
	// least 2 s. Hosts wait up to 60 s (RFC 791 and RFC 8200).
	FragmentLife = 30 * time.Second
	// PortHold is the hold-down of a freed port before another inside endpoint may use it (RFC 6888
	// REQ-8).
	PortHold = 120 * time.Second
)
