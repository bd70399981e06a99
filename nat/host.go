// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/packet"
)

// Host is what the model knows of the machine it forwards on: what netlink tells
// a real datapath.
type Host struct {
	Interfaces []Interface
	Neighbours []Neighbour
	Routes     []Route
}

// Interface is a network interface of the host.
type Interface struct {
	Name      string
	MAC       packet.MAC
	MTU       int            // bytes of the largest IP packet
	Addresses []netip.Prefix // the host's own, with the length of their network
	// RPFilter is rp_filter: 1 refuses IPv4 sources that are routed by another interface, 2 those that are not routed.
	RPFilter int
	// AcceptLocal takes IPv4 packets with a source address of this host.
	AcceptLocal bool
	// Stations are hardware addresses besides MAC at which frames are for this host: of links
	// that stand on the interface (macvlan, VRRP).
	Stations []packet.MAC
}

// takes reports whether a frame with that destination is for this host alone.
func (i Interface) takes(to packet.MAC) bool { return to == i.MAC || slices.Contains(i.Stations, to) }

// Neighbour is a resolved neighbour.
type Neighbour struct {
	Interface string
	Address   netip.Addr
	MAC       packet.MAC
}

// Route leads to a prefix by a next hop, or to an on-link network when Via is
// the zero Addr.
type Route struct {
	To        netip.Prefix
	Via       netip.Addr
	Interface string
	MTU       int // bytes, 0 for the interface's
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

// Owns reports whether a is an address of the host itself; of IPv6 also the subnet-router
// anycast address of one of its networks (RFC 4291 §2.6.1), which one of /127 has not (RFC 6164).
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

// hop is where a packet goes next.
type hop struct {
	Interface
	gateway netip.Addr
	mac     packet.MAC
	known   bool // the neighbour's MAC is known
}

// route returns the next hop routeTo dst: the longest matching prefix among the
// routes and the on-link networks. False when there is none.
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

// Routed reports whether packets to dst leave the host, or are for it.
func (h *Host) Routed(dst netip.Addr) bool {
	_, ok := h.route(dst)
	return ok || h.Owns(dst)
}

// refuses reports whether the kernel forwards no packet from src that arrives on an interface
// (fib_validate_source). It has no such check for IPv6.
func (h *Host) refuses(iface string, src netip.Addr) bool {
	in, ok := h.Interface(iface)
	if !ok || !src.Is4() {
		return false
	}
	if h.Owns(src) {
		return !in.AcceptLocal
	}
	if in.RPFilter == 0 {
		return false
	}
	for _, i := range h.Interfaces {
		for _, p := range i.Addresses {
			if p.Addr().Is4() && p.Bits() < 31 && p.Contains(src) && !p.Contains(src.Next()) {
				return true // a broadcast address
			}
		}
	}
	back, ok := h.route(src)
	return !ok || in.RPFilter == 1 && back.Name != iface
}

// networks are those that the host is connected to.
func (h *Host) networks() (list []netip.Prefix) {
	for _, i := range h.Interfaces {
		for _, p := range i.Addresses {
			list = append(list, p.Masked())
		}
	}
	return list
}

// specific returns the length of the most specific route to dst, -1 when there is none.
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

// NextHop returns the interface and MAC address that a packet to dst leaves by;
// false when there is no route or the neighbour is not known.
func (h *Host) NextHop(dst netip.Addr) (iface Interface, mac packet.MAC, ok bool) {
	n, found := h.route(dst)
	return n.Interface, n.mac, found && n.known
}

// address returns the host's own address of dst's family on the interface: the
// source of what the host itself sends there.
func (i Interface) address(v6 bool) (netip.Addr, bool) {
	for _, p := range i.Addresses {
		if p.Addr().Is6() == v6 {
			return p.Addr(), true
		}
	}
	return netip.Addr{}, false
}

// source returns the address that a packet of the host's own has by the next hop: of IPv4 the first one of the
// next hop's network (inet_select_addr), of IPv6 addresses in its network the latest (RFC 6724 leaves it open).
func (h hop) source() (netip.Addr, bool) {
	if a, ok := h.connectedAddress(); ok {
		return a, true
	}
	return h.address(h.gateway.Is6())
}

// near returns the address of the interface in the next hop's network, which is not link-local.
func (h hop) connectedAddress() (found netip.Addr, ok bool) {
	for _, p := range h.Addresses {
		if p.Contains(h.gateway) && !p.Addr().IsLinkLocalUnicast() && (h.gateway.Is6() || !ok) {
			found, ok = p.Addr(), true
		}
	}
	return found, ok
}

// address returns the source of what the host itself sends by an interface; by one without an
// address of the family it has that of another (RFC 1812 §4.3.2.4, RFC 4443 §2.2). A
// host without any of IPv4 has the first of siit's pool, or the reserved one (RFC 7600 §4.8).
func (m *Model) address(i Interface, v6 bool) (netip.Addr, bool) {
	for _, i := range append([]Interface{i}, m.host.Interfaces...) {
		if a, ok := i.address(v6); ok {
			return a, true
		}
	}
	crosses := false
	for _, r := range m.rules {
		if r.Type == config.NATSIIT && len(r.Pool) > 0 && !v6 {
			return r.Pool[0].First, true
		}
		crosses = crosses || r.Type.CrossesFamilies()
	}
	return netip.AddrFrom4([4]byte{192, 0, 0, 8}), crosses && !v6
}

// listenAddress returns the global address of a family by which others know an interface.
func (h *Host) listenAddress(iface string, v6 bool) (netip.Addr, bool) {
	i, _ := h.Interface(iface)
	return i.globalAddress(v6)
}

// known returns the first global address of a family, of IPv6 the latest, as the kernel lists them.
func (i Interface) globalAddress(v6 bool) (found netip.Addr, ok bool) {
	for _, p := range i.Addresses {
		if a := p.Addr(); a.Is6() == v6 && !a.IsLinkLocalUnicast() && (v6 || !ok) {
			found, ok = a, true
		}
	}
	return found, ok
}

// chosen lists the addresses that packets may leave with: of IPv4 the first one of each network.
func (i Interface) sourceAddresses() (list []netip.Addr) {
	for at, p := range i.Addresses {
		if (p.Addr().Is6() || i.primary(at)) && !p.Addr().IsLinkLocalUnicast() {
			list = append(list, p.Addr())
		}
	}
	return list
}

// primary reports whether an IPv4 address is the first one of its network: the kernel sends with no other one.
func (i Interface) primary(at int) bool {
	p := i.Addresses[at]
	return p.Addr().Is4() && slices.IndexFunc(i.Addresses, func(o netip.Prefix) bool { return o.Masked() == p.Masked() }) == at
}

// AddAddress puts an address where the kernel does: of IPv4 the first one of a network behind the first ones of
// the other networks, all others behind these (__inet_insert_ifa).
func (i *Interface) AddAddress(p netip.Prefix) {
	at := len(i.Addresses)
	if p.Addr().Is4() && !slices.ContainsFunc(i.Addresses, func(o netip.Prefix) bool { return o.Masked() == p.Masked() }) {
		for at > 0 && !i.primary(at-1) {
			at--
		}
		if at == 0 {
			at = len(i.Addresses)
		}
	}
	i.Addresses = slices.Insert(i.Addresses, at, p)
}

// RemoveAddress takes an address away that is there, as the kernel does: the next one of its network takes its
// part, behind the last first one of another network that followed it, or else behind the first address of all
// (__inet_del_ifa, with promote_secondaries).
func (i *Interface) RemoveAddress(p netip.Prefix) {
	at := slices.Index(i.Addresses, p)
	next := -1
	if i.primary(at) {
		next = slices.IndexFunc(i.Addresses, func(o netip.Prefix) bool { return o != p && o.Masked() == p.Masked() })
	}
	if next < 0 {
		i.Addresses = slices.Delete(i.Addresses, at, at+1)
		return
	}
	behind, between := slices.IndexFunc(i.Addresses, func(o netip.Prefix) bool { return o.Addr().Is4() }), false
	for n := at + 1; n < next; n++ {
		if i.primary(n) {
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

// Arrival is a frame that comes in.
type Arrival struct {
	Interface string
	Frame     []byte
}

// Departure is a frame that goes out of an interface, or up to the kernel when
// the action is Pass.
type Departure struct {
	Interface string
	Frame     []byte
}

// Outcome is what became of a frame.
type Outcome struct {
	Action Action
	Reason Reason
	// Out holds the frames that left. With Pass it is empty when the frame was
	// handed up unchanged, otherwise it holds the frame as it was handed up.
	Out []Departure
}

// Action is what a datapath does with a frame.
type Action string

// Actions.
const (
	Forward Action = "forward" // sent on, translated or not
	Drop    Action = "drop"    // gone; what was sent in answer is in Outcome.Out
	Pass    Action = "pass"    // handed to the kernel
)

// Timing of the model that is not configurable.
const (
	// FragmentLife is how long the ports of a first fragment are remembered (RFC
	// 6146 §3.4: at least 2 s; hosts wait up to 60 s, RFC 791 and RFC 8200).
	FragmentLife = 30 * time.Second
	// PortHold is how long a freed port is not given to another inside endpoint
	// (RFC 6888 REQ-8).
	PortHold = 120 * time.Second
)
