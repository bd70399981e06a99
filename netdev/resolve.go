// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// Interface is a network interface with the properties that Sluice needs.
type Interface struct {
	Index    int
	Name     string
	MAC      net.HardwareAddr
	MTU      int
	Up       bool
	Loopback bool
	// Kind is the driver's kind of a virtual link ("veth", "bridge", "vlan", ...);
	// "device" for hardware.
	Kind string
	// Master is the index of the link's bridge, bond or VRF; 0 for none.
	Master int
	// Parent is the index of the lower link of a VLAN, a macvlan and similar links, in this namespace or another one.
	// For a veth it is the other end; 0 for none.
	Parent int
	// Lower is Parent if that link is in this namespace and not a veth's other end, else 0.
	Lower int
}

// joins are the kinds of links that receive their ports' packets as their own. A VRF's ports keep their addresses and
// routes.
var joins = map[string]bool{"bridge": true, "bond": true, "team": true, "openvswitch": true}

// PortOf returns the bridge or bond in all that receives the link's packets.
func (i Interface) PortOf(all []Interface) (Interface, bool) {
	for _, m := range all {
		if i.Master != 0 && m.Index == i.Master && joins[m.Kind] {
			return m, true
		}
	}
	return Interface{}, false
}

// Virtual reports whether the link has a local stack or another link below it instead of hardware. Its packets may
// lack their checksum (CHECKSUM_PARTIAL) and may exceed its MTU (GSO).
func (i Interface) Virtual() bool { return i.Kind != "device" }

// Ethernet reports whether frames of the link have Ethernet headers. Tunnels of IP packets (tun, WireGuard) and PPP
// have none.
func (i Interface) Ethernet() bool { return len(i.MAC) == 6 }

// bare are the kinds of links with packets that begin with the IP header. A tun has no MAC, a tap has one.
var bare = map[string]bool{"tuntap": true, "wireguard": true, "ppp": true}

// Bare reports whether received packets of the link begin with an IP header. Other tunnels of IP packets may present
// the removed outer header to programs.
func (i Interface) Bare() bool { return !i.Ethernet() && bare[i.Kind] }

// Whole reads a list from the kernel. It repeats the dump if the kernel reports a change during the dump
// (NLM_F_DUMP_INTR), because entries may be missing. On a host with frequent container changes this affects every
// tenth dump.
func Whole[T any](read func() ([]T, error)) (list []T, err error) {
	for range 100 {
		if list, err = read(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}

// Network returns the network of an interface's address. On a point-to-point link it is the network of the peer.
func Network(a netlink.Addr) (netip.Prefix, bool) {
	n := a.IPNet
	if a.Peer != nil {
		n = a.Peer
	}
	ip, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return netip.Prefix{}, false
	}
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(ip.Unmap(), bits).Masked(), true
}

// Global returns the global address of an interface for a family. It is the first address that is neither link-local,
// held by Sluice nor deprecated. Secondary and temporary addresses are used only if there are no others. The kernel lists
// the newest IPv6 address first: the oldest permanent one is taken, so that an address added later does not replace it,
// and without one the newest, because a provider may advertise a new prefix without deprecating the old one.
func Global(list []netlink.Addr, v6 bool) (first netip.Addr, ok bool) {
	least := 4
	for _, a := range list {
		ip, _ := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		bits, _ := a.Mask.Size()
		deprecated := a.Flags&unix.IFA_F_DEPRECATED != 0
		switch {
		case ip.Is6() != v6, a.Scope >= unix.RT_SCOPE_LINK, v6 && ip.IsLinkLocalUnicast(), v6 && deprecated && bits == 128,
			a.Flags&unix.IFA_F_DADFAILED != 0, a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_OPTIMISTIC) == unix.IFA_F_TENTATIVE:
			continue
		}
		worse := 0
		if a.Flags&unix.IFA_F_SECONDARY != 0 { // the same bit as IFA_F_TEMPORARY
			worse = 1
		}
		if deprecated {
			worse += 2
		}
		if worse < least || v6 && worse == least && a.Flags&unix.IFA_F_PERMANENT != 0 {
			first, ok, least = ip, true, worse
		}
	}
	return first, ok
}

// Interfaces returns the interfaces of the calling thread's network namespace.
func Interfaces() ([]Interface, error) {
	links, err := Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	out := make([]Interface, len(links))
	for i, l := range links {
		out[i] = interfaceOf(l)
	}
	return out, nil
}

// ByName returns an interface of the calling thread's network namespace by name; false if there is none.
func ByName(name string) (Interface, bool) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return Interface{}, false
	}
	return interfaceOf(l), true
}

func interfaceOf(l netlink.Link) Interface {
	a, lower := l.Attrs(), 0
	if a.NetNsID < 0 && l.Type() != "veth" { // IFLA_LINK_NETNSID is present if the lower link is in another namespace
		lower = a.ParentIndex
	}
	return Interface{Index: a.Index, Name: a.Name, MAC: a.HardwareAddr, MTU: a.MTU,
		Up: a.Flags&net.FlagUp != 0, Loopback: a.Flags&net.FlagLoopback != 0, Kind: l.Type(), Master: a.MasterIndex, Parent: a.ParentIndex, Lower: lower}
}

// ErrNoNextHop is wrapped by NextHop if no neighbour needs to be resolved.
var ErrNoNextHop = errors.New("no next hop on a link")

// Hop is a host on a link.
type Hop struct {
	Ifindex int
	Addr    netip.Addr
}

// Resolve makes the kernel resolve the MAC of a neighbour and keep it fresh until Forget (NTF_EXT_MANAGED, Linux
// 5.16). It does not wait for the answer. It must not be used on a permanent entry, because it would make that entry
// age.
func Resolve(n Hop) error { return startResolution(n, netlink.NTF_EXT_MANAGED) }

// Forget ends the effect of Resolve; the entry then ages normally.
func Forget(n Hop) error { return startResolution(n, 0) }

func startResolution(n Hop, extended int) error {
	entry := &netlink.Neigh{LinkIndex: n.Ifindex, IP: n.Addr.AsSlice(), Flags: netlink.NTF_USE, FlagsExt: extended, State: netlink.NUD_NONE}
	if extended != 0 {
		entry.Flags = 0
	}
	if err := netlink.NeighSet(entry); err != nil {
		return fmt.Errorf("neighbour %s on interface %d: %w", n.Addr, n.Ifindex, err)
	}
	return nil
}

// Resolution is the progress of the kernel with the hardware address of a neighbour.
type Resolution int

// Resolutions.
const (
	NotAsked Resolution = iota // No entry, or an entry without a request.
	Asked                      // Requests are sent (NUD_INCOMPLETE).
	Resolved                   // The kernel sends to the address.
	Failed                     // No request was answered (NUD_FAILED).
)

// ResolutionOf returns the state of a neighbour.
func ResolutionOf(n Hop) (Resolution, error) {
	family := netlink.FAMILY_V4
	if n.Addr.Is6() {
		family = netlink.FAMILY_V6
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	request.AddData(&netlink.Ndmsg{Family: uint8(family), Index: uint32(n.Ifindex)})
	request.AddData(nl.NewRtAttr(netlink.NDA_DST, n.Addr.AsSlice()))
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if errors.Is(err, unix.ENOENT) {
		return NotAsked, nil
	}
	if err != nil {
		return NotAsked, fmt.Errorf("neighbour %s on interface %d: %w", n.Addr, n.Ifindex, err)
	}
	for _, a := range answers {
		e, err := netlink.NeighDeserialize(a)
		switch {
		case err != nil:
		case e.State&usable != 0:
			return Resolved, nil
		case e.State&netlink.NUD_INCOMPLETE != 0:
			return Asked, nil
		case e.State&netlink.NUD_FAILED != 0:
			return Failed, nil
		}
	}
	return NotAsked, nil
}

// Kept returns the neighbours that do not age: those kept fresh by the kernel (true), and permanent ones (false).
func Kept() (map[Hop]bool, error) {
	all, err := Whole(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("neighbours: %w", err)
	}
	kept := map[Hop]bool{}
	for _, n := range all {
		managed := n.FlagsExt&netlink.NTF_EXT_MANAGED != 0
		if a, ok := netip.AddrFromSlice(n.IP); ok && (managed || n.State&netlink.NUD_PERMANENT != 0) {
			kept[Hop{n.LinkIndex, a.Unmap()}] = managed
		}
	}
	return kept, nil
}

// NextHop returns the output interface and the neighbour for packets to an address: the router, or the address itself
// if it is on the link.
func NextHop(to netip.Addr) (ifindex int, hop netip.Addr, err error) {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil {
		return 0, netip.Addr{}, fmt.Errorf("route to %s: %w", to, err)
	}
	if len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return 0, netip.Addr{}, fmt.Errorf("route to %s: %w", to, ErrNoNextHop)
	}
	hop = to
	if gw, ok := netip.AddrFromSlice(routes[0].Gw); ok && !gw.IsUnspecified() {
		hop = gw.Unmap()
	} else if via, ok := routes[0].Via.(*netlink.Via); ok {
		if a, ok := netip.AddrFromSlice(via.Addr); ok {
			hop = a
		}
	}
	return routes[0].LinkIndex, hop, nil
}

// Routed is like NextHop for a forwarded packet with tuple t from an interface: rules of "ip rule" may match its
// source, protocol and ports. EINVAL and EXDEV result from the reverse path filter and from invalid source addresses.
// It ignores marks.
func Routed(in int, t flow.Tuple) (ifindex int, hop netip.Addr, err error) {
	src, dst := t.Source.Addr(), t.Dest.Addr()
	family, bits := unix.AF_INET6, uint8(128)
	if dst.Is4() {
		family, bits = unix.AF_INET, 32
	}
	message := nl.NewRtMsg()
	message.Family, message.Dst_len, message.Src_len = uint8(family), bits, bits
	request := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_REQUEST)
	request.AddData(message)
	request.AddData(nl.NewRtAttr(unix.RTA_DST, dst.AsSlice()))
	request.AddData(nl.NewRtAttr(unix.RTA_SRC, src.AsSlice()))
	request.AddData(nl.NewRtAttr(unix.RTA_IIF, nl.Uint32Attr(uint32(in))))
	if t.Protocol == flow.TCP || t.Protocol == flow.UDP { // the kernel accepts only these here
		request.AddData(nl.NewRtAttr(unix.RTA_IP_PROTO, []byte{uint8(t.Protocol)}))
		request.AddData(nl.NewRtAttr(unix.RTA_SPORT, binary.BigEndian.AppendUint16(nil, t.Source.Port())))
		request.AddData(nl.NewRtAttr(unix.RTA_DPORT, binary.BigEndian.AppendUint16(nil, t.Dest.Port())))
	}
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	if err != nil {
		return 0, netip.Addr{}, fmt.Errorf("route from %s to %s: %w", t.Source, t.Dest, err)
	}
	if len(answers) == 0 || len(answers[0]) < unix.SizeofRtMsg || nl.DeserializeRtMsg(answers[0]).Type != unix.RTN_UNICAST {
		return 0, netip.Addr{}, fmt.Errorf("route from %s to %s: %w", t.Source, t.Dest, ErrNoNextHop)
	}
	attributes, err := nl.ParseRouteAttr(answers[0][unix.SizeofRtMsg:])
	if err != nil {
		return 0, netip.Addr{}, fmt.Errorf("route from %s to %s: %w", t.Source, t.Dest, err)
	}
	hop = dst
	for _, a := range attributes {
		switch a.Attr.Type {
		case unix.RTA_OIF:
			if len(a.Value) == 4 {
				ifindex = int(binary.NativeEndian.Uint32(a.Value))
			}
		case unix.RTA_GATEWAY:
			if gw, ok := netip.AddrFromSlice(a.Value); ok {
				hop = gw
			}
		case unix.RTA_VIA: // the family precedes the address
			if len(a.Value) > 2 {
				if gw, ok := netip.AddrFromSlice(a.Value[2:]); ok {
					hop = gw
				}
			}
		}
	}
	return ifindex, hop, nil
}
