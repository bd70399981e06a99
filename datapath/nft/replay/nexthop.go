// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Next hop objects ("ip nexthop") of linux/nexthop.h, which golang.org/x/sys/unix does not name.
const (
	rtmNewNextHop = 104
	rtmGetNextHop = 106
	sizeofNhMsg   = 8 // family, scope, protocol, reserved, 32 bits of flags

	nhaID        = 1
	nhaGroup     = 2
	nhaBlackhole = 4
	nhaOIF       = 5
	nhaGateway   = 6
	nhaEncapType = 7
	nhaEncap     = 8

	sizeofNhGroup = 8 // member of a group: 32 bits of identifier, weight
)

// nhMsg is the header of a request for all objects.
type nhMsg [sizeofNhMsg]byte

func (m *nhMsg) Len() int          { return sizeofNhMsg }
func (m *nhMsg) Serialize() []byte { return m[:] }

// readNextHops reads the objects. Routes that refer to one may lack its device and gateway
// (net.ipv4.nexthop_compat_mode=0).
func (h *host) readNextHops() error {
	list, err := dump(rtmGetNextHop, rtmNewNextHop, &nhMsg{})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil // Linux before 5.3
	}
	h.nextHops = list
	return h.tolerateChange(err, "next hop objects")
}

// copyNextHops adds the objects: single ones, then groups of those that are usable.
func (h *host) copyNextHops() {
	copied := map[uint32]bool{}
	for _, groups := range []bool{false, true} {
		for _, b := range h.nextHops {
			id, out, group := h.nextHop(b, copied)
			if out == nil || group != groups {
				continue
			}
			if err := send(rtmNewNextHop, out, unix.EEXIST); err != nil {
				h.omitted = append(h.omitted, fmt.Sprintf("left out: next hop object %d, which the kernel does not take again (%v)", id, err))
				continue
			}
			copied[id] = true
		}
	}
}

// nextHop converts an object of the host; out is nil if it is unusable at present. A resilient group becomes a plain one.
func (h *host) nextHop(b []byte, copied map[uint32]bool) (id uint32, out []byte, group bool) {
	if len(b) < sizeofNhMsg || native.Uint32(b[4:])&unix.RTNH_F_DEAD != 0 {
		return 0, nil, false
	}
	out = slices.Clone(b[:sizeofNhMsg])
	out[1], out[3] = 0, 0
	native.PutUint32(out[4:], native.Uint32(b[4:])&unix.RTNH_F_ONLINK)
	eachAttribute(b, sizeofNhMsg, func(kind uint16, whole, v []byte) {
		switch kind {
		case nhaID:
			id = native.Uint32(v)
		case nhaGroup:
			group = true
			var members []byte
			for m := range slices.Chunk(v, sizeofNhGroup) {
				if len(m) == sizeofNhGroup && copied[native.Uint32(m)] {
					members = append(members, m...)
				}
			}
			out = append(native.AppendUint16(native.AppendUint16(out, uint16(4+len(members))), nhaGroup), members...)
			return
		case nhaOIF:
			h.translateIndex(v)
		case nhaBlackhole, nhaGateway, nhaEncapType, nhaEncap:
		default:
			return
		}
		out = append(out, whole...)
	})
	return id, out, group
}
