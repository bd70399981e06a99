// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// NamedSource returns the source address that the default route by an interface names ("src" of ip route), the zero Addr
// if there is none. The kernel chooses another source where none is named. read is netlink's RouteListFiltered.
func NamedSource(index int, v6 bool, read func(family int, filter *netlink.Route, mask uint64) ([]netlink.Route, error)) (source netip.Addr) {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	list, err := Whole(func() ([]netlink.Route, error) {
		return read(family, &netlink.Route{LinkIndex: index, Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return source
	}
	least := -1
	for _, r := range list {
		bits := 0
		if r.Dst != nil {
			bits, _ = r.Dst.Mask.Size()
		}
		a, ok := netip.AddrFromSlice(r.Src)
		if a = a.Unmap(); bits == 0 && ok && a.Is6() == v6 && (least < 0 || r.Priority < least) {
			source, least = a, r.Priority
		}
	}
	return source
}
