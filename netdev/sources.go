// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// OwnSource is an address of this host, or a broadcast address of one of its IPv4 networks.
type OwnSource struct {
	Addr      netip.Addr
	Broadcast bool
}

// OwnSources lists the single addresses in the local tables of both families. whole4 and whole6 report whether
// they are all local destinations of the family: the table has no local prefix but the loopback network.
func OwnSources() (list []OwnSource, whole4, whole6 bool, err error) {
	list, whole4, err = ownSources(unix.AF_INET)
	if err != nil {
		return nil, false, false, err
	}
	list6, whole6, err := ownSources(unix.AF_INET6)
	return append(list, list6...), whole4, whole6, err
}

func ownSources(family uint8) (list []OwnSource, whole bool, err error) {
	single := uint8(32)
	if family == unix.AF_INET6 {
		single = 128
	}
	list, err = Whole(func() (list []OwnSource, err error) {
		whole = true
		err = eachLocal(unix.RtMsg{Family: family, Table: unix.RT_TABLE_LOCAL}, func(m []byte) {
			dst := netip.IPv6Unspecified()
			attributes(m[unix.SizeofRtMsg:], func(kind uint16, value []byte) {
				if a, ok := netip.AddrFromSlice(value); ok && kind == unix.RTA_DST {
					dst = a
				}
			})
			if m[1] == single {
				list = append(list, OwnSource{Addr: dst, Broadcast: m[7] == unix.RTN_BROADCAST})
			} else if !dst.IsLoopback() {
				whole = false
			}
		})
		return list, err
	})
	return list, whole, err
}

// eachLocal calls f for each local, broadcast and anycast route that the kernel selects by a header (strict check).
func eachLocal(of unix.RtMsg, f func(m []byte)) error {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("local routes: %w", err)
	}
	defer s.Close()
	if err := unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return fmt.Errorf("local routes: %w", err)
	}
	req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
	req.AddData(&nl.RtMsg{RtMsg: of})
	err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(m []byte) bool {
		if len(m) >= unix.SizeofRtMsg && (m[7] == unix.RTN_LOCAL || m[7] == unix.RTN_BROADCAST || m[7] == unix.RTN_ANYCAST) {
			f(m)
		}
		return true
	})
	if err != nil && !errors.Is(err, unix.ENOENT) { // the first address makes the table
		return fmt.Errorf("local routes: %w", err)
	}
	return nil
}

// RuleFacts are what the rules of "ip rule" of one family select packets by. Any may be true without the others.
type RuleFacts struct {
	Any    bool // A rule is not one of the default ones.
	Client bool // The route to one destination depends on more than the destination.
	Input  bool // The interface of arrival selects.
	Class  bool // The type of service selects, or a field that this package does not know.
	Hidden bool // BPF programs do not see what selects a route, or which rule refuses a packet.
}

// Rules reads the rules of a family in the calling thread's namespace. own reports addresses of this host: a rule for
// such a source selects no forwarded packet.
func Rules(family uint8, own func(netip.Addr) bool) (RuleFacts, error) {
	facts, err := Whole(func() (facts []RuleFacts, err error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETRULE, unix.NLM_F_DUMP)
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family}})
		err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWRULE, func(m []byte) bool {
			if len(m) >= unix.SizeofRtMsg && m[0] == family {
				facts = append(facts, ruleFacts(m, own))
			}
			return true
		})
		return facts, err
	})
	if err != nil {
		return RuleFacts{}, fmt.Errorf("routing rules: %w", err)
	}
	var sum RuleFacts
	for _, f := range facts {
		sum = RuleFacts{sum.Any || f.Any, sum.Client || f.Client, sum.Input || f.Input, sum.Class || f.Class, sum.Hidden || f.Hidden}
	}
	return sum, nil
}

// HasLocalInOtherTables reports whether a table other than "local" has local routes of a family.
func HasLocalInOtherTables(family uint8) (bool, error) {
	tables, err := Whole(func() (tables []uint32, err error) {
		err = eachLocal(unix.RtMsg{Family: family, Type: unix.RTN_LOCAL}, func(m []byte) {
			if _, table, ok := tableRoute(m); ok && table != unix.RT_TABLE_LOCAL {
				tables = append(tables, table)
			}
		})
		return tables, err
	})
	return len(tables) > 0, err
}

// Attributes that package nl does not know.
const (
	fraSportMask = 28
	fraDportMask = 29
)

// ruleFacts reads a struct fib_rule_hdr and its attributes.
func ruleFacts(m []byte, own func(netip.Addr) bool) (f RuleFacts) {
	const toTable, jump, invert = 1, 2, 2 // FR_ACT_TO_TBL, FR_ACT_GOTO, FIB_RULE_INVERT
	table, not := uint32(m[4]), binary.NativeEndian.Uint32(m[8:])&invert != 0
	f.Any = m[7] != toTable || not
	f.Class = m[3] != 0
	f.Hidden = m[0] == unix.AF_INET6 && m[7] != toTable && m[7] != jump // fib6_rule_action_alt returns only an error
	attributes(m[unix.SizeofRtMsg:], func(kind uint16, value []byte) {
		switch kind {
		case nl.FRA_TABLE:
			table = binary.NativeEndian.Uint32(value)
		case nl.FRA_DST:
			f.Any = true
		case nl.FRA_FWMARK, nl.FRA_FWMASK, nl.FRA_TUN_ID: // netfilter sets marks behind the programs
			f.Any, f.Hidden = true, true
		case nl.FRA_SRC:
			a, ok := netip.AddrFromSlice(value)
			f.Any = true
			f.Client = f.Client || not || !ok || int(m[2]) != a.BitLen() || !own(a)
		case nl.FRA_IIFNAME:
			f.Any = true
			f.Input = f.Input || string(value) != "lo\x00"
		case nl.FRA_IP_PROTO, nl.FRA_SPORT_RANGE, nl.FRA_DPORT_RANGE, fraSportMask, fraDportMask:
			f.Client = true
		case nl.FRA_SUPPRESS_PREFIXLEN, nl.FRA_SUPPRESS_IFGROUP:
			f.Any = f.Any || binary.NativeEndian.Uint32(value) != 0xffffffff
		case nl.FRA_GOTO, nl.FRA_PRIORITY, nl.FRA_FLOW, nl.FRA_OIFNAME, nl.FRA_UID_RANGE, nl.FRA_PAD, nl.FRA_PROTOCOL: // equal for all forwarded packets
		case nl.FRA_L3MDEV:
			f.Input = f.Input || value[0] != 0
		default:
			f.Class, f.Hidden = true, true
		}
	})
	f.Client = f.Client || f.Input || f.Class
	f.Any = f.Any || f.Client || table != unix.RT_TABLE_LOCAL && table != unix.RT_TABLE_MAIN && table != unix.RT_TABLE_DEFAULT
	return f
}

// SysctlName returns the name of an interface as part of a sysctl key.
func SysctlName(iface string) string { return strings.ReplaceAll(iface, ".", "/") }
