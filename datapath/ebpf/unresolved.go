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

// Bounds of the packets that wait for the hardware address of their next hop. The kernel
// keeps as many full packets for one that it asks for (unres_qlen_bytes), and gives up
// after three seconds (mcast_solicit times retrans_time_ms; Documentation/networking/ip-sysctl.rst).
const (
	unresolvedHops   = 256
	unresolvedPerHop = 100
	unresolvedLife   = 3 * time.Second
)

// The neighbour table is looked at after the shortest of these times first, then whenever a
// quarter more of the wait is over, and at least as often as the longest says.
const shortestLook, longestLook = time.Millisecond, 100 * time.Millisecond

// unresolved are the packets of one next hop, the oldest first.
type unresolved struct {
	frames []heldFrame
	look   time.Duration // of the monotonic clock: when to look at the neighbour table
}

// await keeps a packet, of IPv4 and translated, until its next hop is resolved.
func (h *holder) await(hop netdev.Hop, f heldFrame) {
	u := h.unresolved[hop]
	if u == nil && len(h.unresolved) < unresolvedHops {
		u = &unresolved{look: f.at + shortestLook}
		h.unresolved[hop] = u
	}
	if u == nil || len(u.frames) >= unresolvedPerHop {
		h.d.missed.Add(1)
		return
	}
	u.frames = append(u.frames, f)
}

// nextLook tells how long it is until a next hop is to be looked at; false when none waits.
func (h *holder) nextLook(now time.Duration) (time.Duration, bool) {
	next := longestLook
	for _, u := range h.unresolved {
		next = min(next, u.look-now)
	}
	return max(next, 0), len(h.unresolved) > 0
}

// resolve sends the packets whose next hops are known now, and drops those that nobody
// has answered for.
func (h *holder) resolve(now time.Duration) {
	for hop, u := range h.unresolved {
		if u.look > now {
			continue
		}
		age := now - u.frames[0].at
		u.look = now + min(max(age/4, shortestLook), longestLook)
		mac, err := netdev.HardwareAddr(hop)
		switch {
		case mac != nil:
			for _, f := range u.frames {
				if err := h.sendTo(hop, mac, f.frame); err != nil {
					h.lose(1, err)
				}
			}
		case err != nil:
			h.lose(len(u.frames), err)
		case age > unresolvedLife:
			h.d.missed.Add(uint64(len(u.frames)))
		default:
			continue
		}
		delete(h.unresolved, hop)
	}
}

// sendTo sends a packet that was translated for the kernel to forward: it takes one off
// the TTL, and fragments what is too large, as the kernel would have done.
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
