// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/netdev"
)

// readHost reads the state of the calling thread's network namespace.
func readHost() (*compile.Host, error) {
	h := &compile.Host{LocalPortLast: localPortLast(), Ask: compile.HostQueries{Route: routeTo, Source: sourceBy, NamedSource: namedSource, Local: netdev.Local, Destinations: netdev.Destinations}, Addresses: map[int][]netip.Addr{}, Details: map[int][]compile.HostAddress{}, Global: map[int][2]netip.Addr{}, Sources: map[netip.Addr]netip.Addr{}}
	var err error
	if h.Interfaces, err = netdev.Interfaces(); err != nil {
		return nil, err
	}
	indexes := make([]int, len(h.Interfaces))
	for n, i := range h.Interfaces {
		indexes[n] = i.Index
	}
	h.XDP = netdev.XDPFeatures(indexes)
	if err := readAddresses(h); err != nil {
		return nil, fmt.Errorf("addresses: %w", err)
	}
	if h.Policies, err = netdev.IPsecPolicies(); err != nil {
		return nil, err
	}
	return h, nil
}

// readAddresses fills in the addresses of the interfaces.
func readAddresses(h *compile.Host) error {
	list, err := netdev.Whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return err
	}
	for _, a := range list {
		if n, ok := netdev.Network(a); ok {
			h.Networks = append(h.Networks, n)
		}
		if d, ok := hostAddressOf(a); ok {
			h.Addresses[a.LinkIndex] = append(h.Addresses[a.LinkIndex], d.Addr)
			h.Details[a.LinkIndex] = append(h.Details[a.LinkIndex], d)
		}
	}
	for index := range h.Addresses {
		own := slices.DeleteFunc(slices.Clone(list), func(a netlink.Addr) bool { return a.LinkIndex != index })
		four, _ := netdev.Global(own, false)
		six, _ := netdev.Global(own, true)
		h.Global[index] = [2]netip.Addr{four, six}
	}
	return nil
}

func hostAddressOf(a netlink.Addr) (h compile.HostAddress, ok bool) {
	ip, ok := netip.AddrFromSlice(a.IP)
	if !ok {
		return h, false
	}
	h.Addr = ip.Unmap()
	near := a.IPNet
	if a.Peer != nil { // the network is that of the peer on a point-to-point link
		near = a.Peer
	}
	if net, ok := netip.AddrFromSlice(near.IP); ok {
		bits, _ := near.Mask.Size()
		h.Network = netip.PrefixFrom(net.Unmap(), bits).Masked()
	}
	h.Deprecated = a.Flags&unix.IFA_F_DEPRECATED != 0
	h.Secondary = a.Flags&unix.IFA_F_SECONDARY != 0 // the same bit as IFA_F_TEMPORARY
	h.Unusable = a.Scope >= unix.RT_SCOPE_LINK || h.IsLinkLocalUnicast() && h.Is6() ||
		a.Flags&unix.IFA_F_DADFAILED != 0 || a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_OPTIMISTIC) == unix.IFA_F_TENTATIVE
	return h, true
}

func routeTo(to netip.Addr) (source netip.Addr, ifindex int, err error) {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil {
		return source, 0, err
	}
	if len(routes) == 0 {
		return source, 0, errors.New("the kernel returned none")
	}
	source, _ = netip.AddrFromSlice(routes[0].Src)
	return source.Unmap(), routes[0].LinkIndex, nil
}

func namedSource(ifindex int, v6 bool) netip.Addr {
	return netdev.NamedSource(ifindex, v6, netlink.RouteListFiltered)
}

func sourceBy(to netip.Addr, iface string) netip.Addr {
	routes, err := netlink.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{Oif: iface})
	if err != nil || len(routes) == 0 {
		return netip.Addr{}
	}
	source, _ := netip.AddrFromSlice(routes[0].Src)
	return source.Unmap()
}

// localPortLast returns the last port that Sluice allocates on the host's own addresses. It lies
// below the ephemeral ports of local sockets.
func localPortLast() uint32 {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	first := uint32(0)
	if _, scan := fmt.Sscan(string(b), &first); err != nil || scan != nil || first <= 2048 {
		return 65535
	}
	return first - 1
}
