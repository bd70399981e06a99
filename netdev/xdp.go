// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// XDP features of an interface: bits of linux/netdev.h.
const (
	XDPBasic    = 1 << 0 // Runs programs (NETDEV_XDP_ACT_BASIC).
	XDPTransmit = 1 << 2 // Accepts redirected frames (NETDEV_XDP_ACT_NDO_XMIT).
)

// Generic netlink's family "netdev" (linux/netdev.h, since 6.3).
const (
	netdevGet         = 1 // NETDEV_CMD_DEV_GET.
	netdevIfindex     = 1 // NETDEV_A_DEV_IFINDEX.
	netdevXDPFeatures = 3 // NETDEV_A_DEV_XDP_FEATURES.
)

// XDPFeatures returns the XDP features of interfaces in the calling thread's network namespace, by index; nil before
// Linux 6.3, which does not report them. It requests them one by one, because the kernel does not mark the parts of a
// list (NLM_F_MULTI), so its end cannot be detected.
func XDPFeatures(interfaces []int) map[int]uint64 {
	family, err := netlink.GenlFamilyGet("netdev")
	if err != nil {
		return nil
	}
	socket, err := nl.Subscribe(unix.NETLINK_GENERIC)
	if err != nil {
		return nil
	}
	defer socket.Close()
	all := map[int]uint64{}
	for _, index := range interfaces {
		ask := nl.NewNetlinkRequest(int(family.ID), 0) // nl.Genlmsg is two bytes too short, and the kernel checks the length
		ask.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_GENERIC: {Socket: socket}}
		ask.AddRawData(append([]byte{netdevGet, 1, 0, 0}, nl.NewRtAttr(netdevIfindex, nl.Uint32Attr(uint32(index))).Serialize()...))
		answer, err := ask.Execute(unix.NETLINK_GENERIC, 0)
		if err != nil || len(answer) == 0 || len(answer[0]) < nl.SizeofGenlmsg {
			continue // the interface was removed
		}
		attributes, err := nl.ParseRouteAttr(answer[0][nl.SizeofGenlmsg:])
		if err != nil {
			continue
		}
		for _, a := range attributes {
			if a.Attr.Type == netdevXDPFeatures && len(a.Value) == 8 {
				all[index] = binary.NativeEndian.Uint64(a.Value)
			}
		}
	}
	return all
}
