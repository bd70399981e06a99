// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// BridgePort is a port of a bridge. The bridge drops the packets that arrive at a port that does not forward
// (spanning tree), and those of unknown stations at a locked port.
type BridgePort struct {
	Forwards bool
	Locked   bool
}

// BridgePorts returns the ports of the bridges in the calling thread's network namespace, by interface index.
func BridgePorts() (map[int]BridgePort, error) {
	const (
		portState  = 1  // IFLA_BRPORT_STATE
		portLocked = 39 // IFLA_BRPORT_LOCKED
		forwarding = 3  // BR_STATE_FORWARDING
	)
	messages, err := Whole(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		request.AddData(nl.NewIfInfomsg(unix.AF_BRIDGE))
		return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	})
	if err != nil {
		return nil, fmt.Errorf("ports of bridges: %w", err)
	}
	ports := map[int]BridgePort{}
	for _, m := range messages {
		if len(m) < unix.SizeofIfInfomsg {
			continue
		}
		attributes(m[unix.SizeofIfInfomsg:], func(kind uint16, value []byte) {
			if kind != unix.IFLA_PROTINFO {
				return
			}
			var p BridgePort
			attributes(value, func(kind uint16, value []byte) {
				switch {
				case len(value) == 0:
				case kind == portState:
					p.Forwards = value[0] == forwarding
				case kind == portLocked:
					p.Locked = value[0] != 0
				}
			})
			ports[int(nl.DeserializeIfInfomsg(m).Index)] = p
		})
	}
	return ports, nil
}
