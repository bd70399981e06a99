// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
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
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, false, fmt.Errorf("local routes: %w", err)
	}
	defer s.Close()
	if err := unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return nil, false, fmt.Errorf("local routes: %w", err)
	}
	single := uint8(32)
	if family == unix.AF_INET6 {
		single = 128
	}
	list, err = Whole(func() (list []OwnSource, err error) {
		whole = true
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family, Table: unix.RT_TABLE_LOCAL}})
		err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(m []byte) bool {
			if len(m) < unix.SizeofRtMsg || m[7] != unix.RTN_LOCAL && m[7] != unix.RTN_BROADCAST && m[7] != unix.RTN_ANYCAST {
				return true
			}
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
			return true
		})
		if errors.Is(err, unix.ENOENT) {
			return nil, nil // the first address makes the table
		}
		if err != nil {
			return nil, fmt.Errorf("local routes: %w", err)
		}
		return list, nil
	})
	return list, whole, err
}

// HasRules reports whether "ip rule" has rules of a family other than the default ones.
func HasRules(family int) (bool, error) {
	rules, err := Whole(func() ([]netlink.Rule, error) { return netlink.RuleList(family) })
	if err != nil {
		return false, fmt.Errorf("routing rules: %w", err)
	}
	for _, r := range rules {
		if r.Table != unix.RT_TABLE_LOCAL && r.Table != unix.RT_TABLE_MAIN && r.Table != unix.RT_TABLE_DEFAULT || r.Src != nil || r.Dst != nil {
			return true, nil
		}
	}
	return false, nil
}

// SysctlName returns the name of an interface as part of a sysctl key.
func SysctlName(iface string) string { return strings.ReplaceAll(iface, ".", "/") }
