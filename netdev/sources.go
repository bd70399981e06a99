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

// OwnSource is an IPv4 address of this host, or a broadcast address of one of its networks.
type OwnSource struct {
	Addr      netip.Addr
	Broadcast bool
}

// OwnSources lists the single addresses in the local table.
func OwnSources() ([]OwnSource, error) {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("local routes: %w", err)
	}
	defer s.Close()
	if err := unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return nil, fmt.Errorf("local routes: %w", err)
	}
	return Whole(func() (list []OwnSource, err error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: s}}
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET, Table: unix.RT_TABLE_LOCAL}})
		err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(m []byte) bool {
			if len(m) < unix.SizeofRtMsg || m[1] != 32 || m[7] != unix.RTN_LOCAL && m[7] != unix.RTN_BROADCAST {
				return true
			}
			attributes(m[unix.SizeofRtMsg:], func(kind uint16, value []byte) {
				if a, ok := netip.AddrFromSlice(value); ok && kind == unix.RTA_DST {
					list = append(list, OwnSource{Addr: a, Broadcast: m[7] == unix.RTN_BROADCAST})
				}
			})
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
}

// HasRules reports whether "ip rule" has IPv4 rules other than the three default ones.
func HasRules() (bool, error) {
	rules, err := Whole(func() ([]netlink.Rule, error) { return netlink.RuleList(unix.AF_INET) })
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
