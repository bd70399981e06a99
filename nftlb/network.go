// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// link is an interface; the index is -1 while it is unknown.
type link struct {
	Name  string `json:"name"`
	Index int    `json:"index"`
	MAC   string `json:"mac"`
}

// Network provides the host's network properties for the states of farms and backends.
type Network interface {
	// Holder returns the interface with an address of this host.
	Holder(netip.Addr) (name string, index int, mac string, ok bool)
	// Towards returns the output interface for packets to an address.
	Towards(netip.Addr) (name string, index int, mac string, ok bool)
	// Neighbour returns the hardware address of a host on the same network. If it is unknown, Neighbour requests it,
	// and a later call may return it.
	Neighbour(netip.Addr) (mac string, ok bool)
}

// Host is the network of the process's namespace.
type Host struct{}

// Holder implements [Network].
func (Host) Holder(a netip.Addr) (name string, index int, mac string, ok bool) {
	all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return "", 0, "", false
	}
	for _, have := range all {
		if ip, is := netip.AddrFromSlice(have.IP); is && ip.Unmap() == a {
			return byIndex(have.LinkIndex)
		}
	}
	return "", 0, "", false
}

// Towards implements [Network].
func (Host) Towards(a netip.Addr) (name string, index int, mac string, ok bool) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 {
		return "", 0, "", false
	}
	return byIndex(routes[0].LinkIndex)
}

func byIndex(index int) (string, int, string, bool) {
	l, err := netlink.LinkByIndex(index)
	if err != nil {
		return "", 0, "", false
	}
	mac := l.Attrs().HardwareAddr
	if len(mac) == 0 {
		mac = make(net.HardwareAddr, 6) // loopback
	}
	return l.Attrs().Name, index, mac.String(), true
}

// known are the states of a neighbour with a usable hardware address.
const known = unix.NUD_REACHABLE | unix.NUD_PERMANENT | unix.NUD_STALE

// Neighbour implements [Network].
func (Host) Neighbour(a netip.Addr) (mac string, ok bool) {
	family := netlink.FAMILY_V4
	if a.Is6() {
		family = netlink.FAMILY_V6
	}
	all, err := netlink.NeighList(0, family)
	if err != nil {
		return "", false
	}
	for _, n := range all {
		if ip, is := netip.AddrFromSlice(n.IP); is && ip.Unmap() == a && n.State&known != 0 {
			return n.HardwareAddr.String(), true
		}
	}
	// A datagram to the discard port makes the kernel resolve the address.
	if c, err := net.Dial("udp", netip.AddrPortFrom(a, 9).String()); err == nil {
		_, _ = c.Write([]byte{0})
		c.Close()
	}
	return "", false
}

// device returns the name of the interface of an alias such as eth0:1.
func device(name string) string {
	name, _, _ = strings.Cut(name, ":")
	return name
}
