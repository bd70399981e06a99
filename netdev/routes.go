// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Destination is a destination of the routing table.
type Destination struct {
	Prefix netip.Prefix
	Here   bool // an address of this host
}

// Destinations returns the destinations in the main table and the addresses of this host. It reads only this part of
// a route, because a full table has a million routes.
func Destinations(v6 bool) ([]Destination, error) {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	return Whole(func() (list []Destination, err error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.AddData(nl.NewRtMsg())
		req.Data[0].(*nl.RtMsg).Family = uint8(family)
		err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(m []byte) bool {
			if d, ok := destination(m); ok && (d.Prefix.Addr().Is6() == v6) {
				list = append(list, d)
			}
			return true
		})
		if err != nil {
			return nil, fmt.Errorf("routes: %w", err)
		}
		return list, nil
	})
}

// Local returns the prefixes with local delivery: the addresses of this host and additional local routes. It requests
// only the local table from the kernel.
func Local() (list []netip.Prefix, err error) {
	err = dumpTable(unix.RT_TABLE_LOCAL, func(m []byte) {
		if d, ok := destination(m); ok && d.Here {
			list = append(list, d.Prefix)
		}
	}, func() { list = nil })
	if err != nil {
		return nil, fmt.Errorf("local routes: %w", err)
	}
	return list, nil
}

// TableRoute is a route of a table.
type TableRoute struct {
	To       netip.Prefix
	Metric   uint32
	Protocol uint8 // RTPROT.
	Type     uint8 // RTN.
}

// Table returns the routes of one table, of both families. It requests only this table from the kernel.
func Table(table uint32) (list []TableRoute, err error) {
	err = dumpTable(table, func(m []byte) {
		if r, at, ok := tableRoute(m); ok && at == table {
			list = append(list, r)
		}
	}, func() { list = nil })
	if err != nil {
		return nil, fmt.Errorf("routes of table %d: %w", table, err)
	}
	return list, nil
}

// dumpTable calls yield for each route of a table. It calls restart before it repeats an interrupted dump.
func dumpTable(table uint32, yield func([]byte), restart func()) error {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return err
	}
	_, err = Whole(func() ([]struct{}, error) {
		restart()
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
			req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
			req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family}})
			req.AddData(nl.NewRtAttr(unix.RTA_TABLE, binary.NativeEndian.AppendUint32(nil, table)))
			err := req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(m []byte) bool {
				yield(m)
				return true
			})
			if err != nil && !errors.Is(err, unix.ENOENT) { // the first route creates the table
				return nil, err
			}
		}
		return nil, nil
	})
	return err
}

// tableRoute decodes struct rtmsg with its attributes, and returns the route and its table.
func tableRoute(m []byte) (r TableRoute, table uint32, ok bool) {
	if len(m) < unix.SizeofRtMsg || m[0] != unix.AF_INET && m[0] != unix.AF_INET6 {
		return r, 0, false
	}
	table, r.Protocol, r.Type = uint32(m[4]), m[5], m[7]
	a := netip.IPv4Unspecified()
	if m[0] == unix.AF_INET6 {
		a = netip.IPv6Unspecified()
	}
	attributes(m[unix.SizeofRtMsg:], func(kind uint16, value []byte) {
		switch {
		case kind == unix.RTA_DST:
			if to, valid := netip.AddrFromSlice(value); valid {
				a = to
			}
		case kind == unix.RTA_TABLE && len(value) >= 4:
			table = binary.NativeEndian.Uint32(value)
		case kind == unix.RTA_PRIORITY && len(value) >= 4:
			r.Metric = binary.NativeEndian.Uint32(value)
		}
	})
	r.To = netip.PrefixFrom(a, int(m[1]))
	return r, table, r.To.IsValid()
}

// destination decodes struct rtmsg and the attributes of a route's destination.
func destination(m []byte) (d Destination, ok bool) {
	if len(m) < unix.SizeofRtMsg {
		return d, false
	}
	family, bits, table, kind, flags := m[0], int(m[1]), uint32(m[4]), m[7], binary.NativeEndian.Uint32(m[8:])
	a := netip.IPv4Unspecified()
	if family == unix.AF_INET6 {
		a = netip.IPv6Unspecified()
	}
	attributes(m[unix.SizeofRtMsg:], func(kind uint16, value []byte) {
		switch kind {
		case unix.RTA_DST:
			if to, valid := netip.AddrFromSlice(value); valid {
				a = to
			}
		case unix.RTA_TABLE:
			if len(value) >= 4 {
				table = binary.NativeEndian.Uint32(value)
			}
		}
	})
	d = Destination{Prefix: netip.PrefixFrom(a, bits), Here: kind == unix.RTN_LOCAL || kind == unix.RTN_ANYCAST}
	main := table == unix.RT_TABLE_MAIN && kind == unix.RTN_UNICAST && flags&unix.RTM_F_CLONED == 0
	return d, main || table == unix.RT_TABLE_LOCAL && d.Here
}
