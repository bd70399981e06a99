// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// RouteMTU is a route by an interface, and its MTU in bytes (RTAX_MTU); 0 for a route without one
// inside a route that has one.
type RouteMTU struct {
	Ifindex int
	To      netip.Prefix
	MTU     uint32
}

// RouteFacts are properties of the routing tables of the calling thread's namespace.
type RouteFacts struct {
	MTUs      []RouteMTU
	Multipath bool // An IPv4 route has several next hops.
	Default   bool // The main table has an IPv4 default route.
	Class     bool // A type of service selects an IPv4 route.
}

// Routes reads the routing tables. MTUs are the routes with an MTU, and the more specific routes without one through
// the same interfaces. Among equal routes in one table the kernel uses the one with the lowest metric. For equal routes
// in several tables the list has the smallest MTU. Without any MTU each table is read once.
func Routes() (facts RouteFacts, err error) {
	with, err := unicastRoutes(func(r *unicastRoute) bool {
		if r.to.Addr().Is4() {
			facts.Multipath = facts.Multipath || len(r.by) > 1
			facts.Class = facts.Class || r.class
			facts.Default = facts.Default || r.to.Bits() == 0 && r.table == unix.RT_TABLE_MAIN
		}
		return r.mtu > 0
	})
	if err != nil || len(with) == 0 {
		return facts, err
	}
	all, err := unicastRoutes(func(r *unicastRoute) bool {
		return r.mtu > 0 || slices.ContainsFunc(with, func(w unicastRoute) bool { // Contains is false for another family
			return w.to.Bits() <= r.to.Bits() && w.to.Contains(r.to.Addr()) && slices.ContainsFunc(w.by, r.leavesBy)
		})
	})
	if err != nil {
		return facts, err
	}
	type place struct {
		table, ifindex uint32
		to             netip.Prefix
	}
	best := map[place]unicastRoute{}
	for _, r := range all {
		for _, i := range r.by {
			p := place{r.table, i, r.to}
			if b, ok := best[p]; !ok || r.metric < b.metric {
				best[p] = r
			}
		}
	}
	smallest := map[RouteMTU]uint32{}
	for p, r := range best {
		key := RouteMTU{Ifindex: int(p.ifindex), To: p.to}
		if mtu, ok := smallest[key]; !ok || r.mtu > 0 && (mtu == 0 || r.mtu < mtu) {
			smallest[key] = r.mtu
		}
	}
	for key, mtu := range smallest {
		key.MTU = mtu
		facts.MTUs = append(facts.MTUs, key)
	}
	return facts, nil
}

// unicastRoute is a route of any table.
type unicastRoute struct {
	to                 netip.Prefix
	table, metric, mtu uint32
	by                 []uint32 // indexes of the next hops' interfaces
	class              bool     // the route has a type of service
}

func (r *unicastRoute) leavesBy(ifindex uint32) bool { return slices.Contains(r.by, ifindex) }

// isRelevant reports whether Routes returns anything about the route.
func (r *unicastRoute) isRelevant() bool {
	return r.mtu > 0 || r.to.Addr().Is4() && (len(r.by) > 1 || r.to.Bits() == 0 || r.class)
}

// unicastRoutes lists the unicast routes of all tables that wanted selects.
func unicastRoutes(wanted func(*unicastRoute) bool) ([]unicastRoute, error) {
	return Whole(func() (list []unicastRoute, err error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.AddData(nl.NewRtMsg()) // of both families
		var r unicastRoute         // One for all: a table may have a million routes.
		err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(m []byte) bool {
			if r.read(m) && wanted(&r) {
				kept := r
				kept.by = slices.Clone(r.by)
				list = append(list, kept)
			}
			return true
		})
		if err != nil {
			return nil, fmt.Errorf("routes: %w", err)
		}
		return list, nil
	})
}

// read decodes struct rtmsg and its attributes; false if the message is about no unicast route.
func (r *unicastRoute) read(m []byte) bool {
	if len(m) < unix.SizeofRtMsg || m[0] != unix.AF_INET && m[0] != unix.AF_INET6 || m[7] != unix.RTN_UNICAST {
		return false
	}
	*r = unicastRoute{table: uint32(m[4]), by: r.by[:0], class: m[3] != 0}
	a := netip.IPv4Unspecified()
	if m[0] == unix.AF_INET6 {
		a = netip.IPv6Unspecified()
	}
	attributes(m[unix.SizeofRtMsg:], func(kind uint16, value []byte) {
		switch {
		case kind == unix.RTA_DST:
			if to, ok := netip.AddrFromSlice(value); ok {
				a = to
			}
		case kind == unix.RTA_METRICS:
			attributes(value, func(kind uint16, value []byte) {
				if kind == unix.RTAX_MTU && len(value) >= 4 {
					r.mtu = binary.NativeEndian.Uint32(value)
				}
			})
		case kind == unix.RTA_MULTIPATH:
			for len(value) >= unix.SizeofRtNexthop {
				size := int(binary.NativeEndian.Uint16(value))
				if size < unix.SizeofRtNexthop {
					break
				}
				r.by = append(r.by, binary.NativeEndian.Uint32(value[4:]))
				value = value[min((size+3)&^3, len(value)):]
			}
		case len(value) < 4:
		case kind == unix.RTA_OIF:
			r.by = append(r.by, binary.NativeEndian.Uint32(value))
		case kind == unix.RTA_PRIORITY:
			r.metric = binary.NativeEndian.Uint32(value)
		case kind == unix.RTA_TABLE:
			r.table = binary.NativeEndian.Uint32(value)
		}
	})
	r.to = netip.PrefixFrom(a, int(m[1]))
	return true
}

// attributes calls yield for each attribute of a netlink message, until one is malformed.
func attributes(b []byte, yield func(kind uint16, value []byte)) {
	for len(b) >= unix.SizeofRtAttr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofRtAttr || size > len(b) {
			return
		}
		yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.SizeofRtAttr:size])
		b = b[min((size+3)&^3, len(b)):]
	}
}
