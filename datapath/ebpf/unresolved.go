// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
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

// unresolved contains the packets of one next hop, the oldest first.
type unresolved struct {
	frames    []heldFrame
	nextCheck time.Duration // monotonic time of the next check of the neighbour table
}

// enqueue stores a translated IPv4 packet until its next hop is resolved.
func (h *holder) enqueue(hop netdev.Hop, f heldFrame) {
	u := h.unresolved[hop]
	if u == nil && len(h.unresolved) < unresolvedHops {
		u = &unresolved{nextCheck: f.at + minCheckInterval}
		h.unresolved[hop] = u
	}
	if u == nil || len(u.frames) >= unresolvedPerHop {
		h.d.failedEvents.Add(1)
		return
	}
	u.frames = append(u.frames, f)
}

// nextCheck returns the time until the next check, and false if no packet waits.
func (h *holder) nextCheck(now time.Duration) (time.Duration, bool) {
	next := maxCheckInterval
	for _, u := range h.unresolved {
		next = min(next, u.nextCheck-now)
	}
	return max(next, 0), len(h.unresolved) > 0
}

// resolve sends the packets with a resolved next hop, and drops packets that have waited too long.
func (h *holder) resolve(now time.Duration) {
	for hop, u := range h.unresolved {
		if u.nextCheck > now {
			continue
		}
		age := now - u.frames[0].at
		u.nextCheck = now + min(max(age/4, minCheckInterval), maxCheckInterval)
		mac, err := netdev.HardwareAddr(hop)
		switch {
		case mac != nil:
			for _, f := range u.frames {
				if err := h.sendTo(hop, mac, f.frame); err != nil {
					h.countLost(1, err)
				}
			}
		case err != nil:
			h.countLost(len(u.frames), err)
		case age > unresolvedLife:
			h.d.failedEvents.Add(uint64(len(u.frames)))
		default:
			continue
		}
		delete(h.unresolved, hop)
	}
}

// sendTo sends a packet that was translated for the kernel to forward. Like the kernel, it
// decrements the TTL and fragments packets that exceed the MTU.
func (h *holder) sendTo(hop netdev.Hop, to net.HardwareAddr, frame []byte) error {
	const ip = 14
	if len(frame) < ip+20 {
		return fmt.Errorf("a held packet of %d bytes is none of IPv4", len(frame))
	}
	out, err := net.InterfaceByIndex(hop.Ifindex)
	if err != nil {
		return fmt.Errorf("interface %d of a held packet: %w", hop.Ifindex, err)
	}
	was := [2]byte{frame[ip+8], frame[ip+9]}
	frame[ip+8]--
	sum := packet.UpdateChecksum(binary.BigEndian.Uint16(frame[ip+10:]), was[:], frame[ip+8:ip+10])
	binary.BigEndian.PutUint16(frame[ip+10:], sum)
	copy(frame, to)
	copy(frame[6:], out.HardwareAddr)
	frames := [][]byte{frame}
	if mayFragment := frame[ip+6]&0x40 == 0; mayFragment && int(binary.BigEndian.Uint16(frame[ip+2:])) > out.MTU {
		size := (out.MTU - int(frame[ip]&15)*4) &^ 7
		if frames, err = packet.Fragments(frame, size, uint32(binary.BigEndian.Uint16(frame[ip+4:]))); err != nil {
			return err
		}
	}
	for _, f := range frames {
		if err := unix.Sendto(h.socket, f, 0, &unix.SockaddrLinklayer{Ifindex: hop.Ifindex, Halen: 6}); err != nil {
			return fmt.Errorf("send a held packet to %s by %s: %w", hop.Addr, out.Name, err)
		}
	}
	return nil
}
