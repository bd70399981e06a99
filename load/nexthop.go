// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
)

// nextHopMAC finds the hardware address to which the current namespace sends
// packets for dest on an interface. It asks the kernel to resolve the neighbour
// when it is not known yet, and waits up to two seconds.
func nextHopMAC(dest netip.Addr, ifindex int) (net.HardwareAddr, error) {
	hop := net.IP(dest.AsSlice())
	routes, err := netlink.RouteGet(hop)
	if err == nil && len(routes) > 0 && routes[0].Gw != nil {
		hop = routes[0].Gw
	}
	for try := range 40 {
		neighbours, err := netlink.NeighList(ifindex, 0)
		if err != nil {
			return nil, fmt.Errorf("next hop %s: neighbours: %w", hop, err)
		}
		for _, n := range neighbours {
			if n.IP.Equal(hop) && len(n.HardwareAddr) == 6 && n.State&netlink.NUD_FAILED == 0 {
				return n.HardwareAddr, nil
			}
		}
		if try%10 == 0 {
			poke(hop, ifindex)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil, fmt.Errorf("next hop %s: no answer to address resolution", hop)
}

// poke makes the kernel resolve a neighbour without sending it a packet of ours.
// An error shows as a neighbour that stays unknown.
func poke(hop net.IP, ifindex int) {
	_ = netlink.NeighSet(&netlink.Neigh{LinkIndex: ifindex, IP: hop, Flags: netlink.NTF_USE, State: netlink.NUD_NONE})
}
