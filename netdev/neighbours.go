// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Neighbours reads single entries of the neighbour table of the network namespace that it was opened in.
// One goroutine may use it at a time.
type Neighbours struct{ socket *nl.NetlinkSocket }

// OpenNeighbours opens the neighbour table of the current network namespace.
func OpenNeighbours() (*Neighbours, error) {
	s, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("neighbours: %w", err)
	}
	return &Neighbours{s}, nil
}

// Close closes the table.
func (n *Neighbours) Close() { n.socket.Close() }

// Resolved reports whether the kernel sends a packet to the neighbour at once, without asking for its
// hardware address first.
func (n *Neighbours) Resolved(h Hop) bool {
	family := netlink.FAMILY_V4
	if h.Addr.Is6() {
		family = netlink.FAMILY_V6
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: n.socket}}
	request.AddData(&netlink.Ndmsg{Family: uint8(family), Index: uint32(h.Ifindex)})
	request.AddData(nl.NewRtAttr(netlink.NDA_DST, h.Addr.AsSlice()))
	found := false
	err := request.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH, func(m []byte) bool {
		e, err := netlink.NeighDeserialize(m)
		found = err == nil && e.State&usable != 0
		return false
	})
	return found && (err == nil || errors.Is(err, unix.EINTR))
}
