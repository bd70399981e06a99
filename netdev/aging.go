// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Aging is a neighbour with a hardware address that was not confirmed for longer than base_reachable_time
// (NUD_STALE, NUD_DELAY). bpf_fib_lookup still returns the address and starts no probe.
type Aging struct {
	Hop
	MAC     net.HardwareAddr
	managed bool // NTF_EXT_MANAGED.
	learned bool // NTF_EXT_LEARNED.
}

// aging are the states in which the kernel uses an address without a recent confirmation.
const aging = netlink.NUD_STALE | netlink.NUD_DELAY

// Aging lists the neighbours in these states, as the kernel has reported them to Run.
func (w *Watcher) Aging() []Aging {
	w.mu.Lock()
	defer w.mu.Unlock()
	list := make([]Aging, 0, len(w.aging))
	for _, a := range w.aging {
		list = append(list, a)
	}
	return list
}

// noteAge records whether a neighbour is aging.
func (w *Watcher) noteAge(key neighbour, n *netlink.Neigh) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n.State&aging == 0 || len(n.HardwareAddr) != 6 {
		delete(w.aging, key)
		return
	}
	if w.aging == nil {
		w.aging = map[neighbour]Aging{}
	}
	w.aging[key] = Aging{Hop: Hop{key.ifindex, key.address}, MAC: n.HardwareAddr,
		managed: n.FlagsExt&netlink.NTF_EXT_MANAGED != 0, learned: n.Flags&netlink.NTF_EXT_LEARNED != 0}
}

// Relist reads the states of all neighbours, for use after Lost. The caller's thread must be in the
// watcher's namespace.
func (w *Watcher) Relist() error {
	return neighbours(func(key neighbour, n *netlink.Neigh) { w.noteAge(key, n) })
}

// neighbours calls yield for each neighbour of the calling thread's namespace.
func neighbours(yield func(neighbour, *netlink.Neigh)) error {
	list, err := Whole(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, 0) })
	if err != nil {
		return fmt.Errorf("neighbours: %w", err)
	}
	for i := range list {
		if a, ok := netip.AddrFromSlice(list[i].IP); ok {
			yield(neighbour{list[i].LinkIndex, a.Unmap()}, &list[i])
		}
	}
	return nil
}

// Probe makes the kernel ask a neighbour whether it still has its address (NUD_PROBE): the kernel
// sends up to ucast_solicit requests, one per retrans_time_ms, and then looks for a new address.
// A neighbour that has meanwhile been removed is no error.
func Probe(n Aging) error {
	// A message with NTF_EXT_MANAGED changes no state, and one without it ends the management.
	message := &netlink.Ndmsg{Family: unix.AF_INET, Index: uint32(n.Ifindex), State: netlink.NUD_PROBE}
	if n.Addr.Is6() {
		message.Family = unix.AF_INET6
	}
	if n.learned {
		message.Flags = netlink.NTF_EXT_LEARNED
	}
	request := nl.NewNetlinkRequest(unix.RTM_NEWNEIGH, unix.NLM_F_ACK)
	request.AddData(message)
	request.AddData(nl.NewRtAttr(netlink.NDA_DST, n.Addr.AsSlice()))
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) { // EINVAL: no address is known any more
		err = nil
	}
	if err == nil && n.managed {
		return Resolve(n.Hop)
	}
	if err != nil {
		return fmt.Errorf("probe neighbour %s on interface %d: %w", n.Addr, n.Ifindex, err)
	}
	return nil
}
