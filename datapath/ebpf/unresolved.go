// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/netdev"
)

// Limits of packets waiting for the hardware address of their next hop. The kernel queues as many
// full packets for a next hop (unres_qlen_bytes) and gives up after three seconds (mcast_solicit
// times retrans_time_ms; Documentation/networking/ip-sysctl.rst).
const (
	unresolvedHops   = 256
	unresolvedPerHop = 100
	unresolvedLife   = 3 * time.Second
)

// The first check of the neighbour table follows after minCheckInterval. Each further interval is a
// quarter of the time waited, at most maxCheckInterval.
const minCheckInterval, maxCheckInterval = time.Millisecond, 100 * time.Millisecond

// waitingPackets contains the packets of one next hop as received, the oldest first.
type waitingPackets struct {
	frames    []heldFrame
	nextCheck time.Duration // Monotonic time of the next check of the neighbour table.
	asked     bool          // The kernel has sent requests since the first packet.
}

// enqueue stores a packet until its next hop is resolved, or does not answer.
func (h *holder) enqueue(hop netdev.Hop, f heldFrame) {
	u := h.unresolved[hop]
	if u == nil && len(h.unresolved) < unresolvedHops {
		u = &waitingPackets{nextCheck: f.at + minCheckInterval}
		h.unresolved[hop] = u
	}
	if u == nil || len(u.frames) >= unresolvedPerHop {
		h.d.failedEvents.Add(1)
		return
	}
	f.hop = hop
	u.frames = append(u.frames, f)
}

// nextHopOf returns the next hop of the last route lookup of a program.
func nextHopOf(w *wire.Work) netdev.Hop {
	fib := (*[64]byte)(unsafe.Pointer(&w.Fib)) // struct bpf_fib_lookup
	hop := netdev.Hop{Ifindex: int(binary.NativeEndian.Uint32(fib[8:]))}
	if fib[0] == unix.AF_INET6 { // also for an IPv4 packet with a route via IPv6
		hop.Addr = netip.AddrFrom16([16]byte(fib[32:48]))
	} else {
		hop.Addr = netip.AddrFrom4([4]byte(fib[32:36]))
	}
	return hop
}

// nextCheck returns the time until the next check, and false if no packet waits.
func (h *holder) nextCheck(now time.Duration) (time.Duration, bool) {
	next := maxCheckInterval
	for _, u := range h.unresolved {
		next = min(next, u.nextCheck-now)
	}
	return max(next, 0), len(h.unresolved) > 0
}

// resolve runs packets through the program when their next hop is resolved or has not answered. The
// program sends them, or ICMP errors to their senders. A failure that is older than the packets does
// not count, as the kernel asks again for each packet.
func (h *holder) resolve(now time.Duration) {
	for hop, u := range h.unresolved {
		if u.nextCheck > now {
			continue
		}
		age := now - u.frames[0].at
		u.nextCheck = now + min(max(age/4, minCheckInterval), maxCheckInterval)
		state, err := netdev.ResolutionOf(hop)
		u.asked = u.asked || state == netdev.Asked
		switch {
		case err != nil:
			h.countLost(len(u.frames), err)
			delete(h.unresolved, hop)
		case state == netdev.Resolved, state == netdev.Failed && u.asked, age > unresolvedLife:
			delete(h.unresolved, hop)
			h.send(u.frames...)
		}
	}
}
