// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
)

// nextHopMAC returns the hardware address of the next hop for dest on an interface, in the current namespace. It
// makes the kernel resolve an unknown neighbour, and waits up to two seconds.
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
			triggerResolution(hop, ifindex)
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil, fmt.Errorf("next hop %s: no answer to address resolution", hop)
}

// triggerResolution makes the kernel resolve a neighbour without a packet to the neighbour. After an error the neighbour stays
// unresolved.
func triggerResolution(hop net.IP, ifindex int) {
	_ = netlink.NeighSet(&netlink.Neigh{LinkIndex: ifindex, IP: hop, Flags: netlink.NTF_USE, State: netlink.NUD_NONE})
}
