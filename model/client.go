// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// Backends of fullnat services receive the client's address in TCP option 254, or in a PROXY
// protocol header (version 2) in front of the client's first byte.

// proxyState is the state of a session with a PROXY header.
type proxyState struct {
	base uint32 // Sequence number of the client's first byte.
	sent bool   // The backend was sent the header.
	lost bool   // The backend did not acknowledge the header.
}

// addEdit adds the editing function for the client's address or the SYN cookie to a plan.
func (h *sessionHalf) addEdit(p *plan, v *view) {
	s := h.service
	switch {
	case h.splice == nil:
	case h.direction == flow.Original:
		p.edit = h.splice.forward
	default:
		p.edit = h.splice.editReply
	}
	if s == nil || v.protocol != flow.TCP || s.ClientAddress == config.ClientAddressNone || s.ClientAddress == "" {
		return
	}
	client := h.tuple[0]
	size := len(toaOption(client.Source))
	if s.ClientAddress == config.ClientAddressProxyV2 {
		size = len(proxyHeader(client))
	}
	original := h.direction == flow.Original
	if !original && v.flags&packet.SYN != 0 {
		p.room = size
	}
	switch {
	case s.ClientAddress == config.ClientAddressProxyV2 && original:
		p.grow = size
		p.edit = func(b []byte, _ int) ([]byte, Reason) { return h.proxyForward(v, b, proxyHeader(client)) }
	case s.ClientAddress == config.ClientAddressProxyV2:
		p.edit = func(b []byte, _ int) ([]byte, Reason) { return h.proxyAnswer(b, uint32(size)), "" }
	case original && v.flags&(packet.SYN|packet.RST|packet.ACK) == packet.ACK && !h.flagsSeen[1].ack:
		p.edit = func(b []byte, mtu int) ([]byte, Reason) {
			if len(b)+size > mtu || v.first { // a longer fragment would overlap the next one
				return b, ""
			}
			return withTOA(b, toaOption(client.Source)), ""
		}
	}
}

func toaOption(a netip.AddrPort) []byte {
	b := binary.BigEndian.AppendUint16([]byte{254, byte(4 + a.Addr().BitLen()/8)}, a.Port())
	return append(b, a.Addr().AsSlice()...)
}

// proxyHeader builds the header in section 2.2 of the PROXY protocol specification.
func proxyHeader(t flow.Tuple) []byte {
	family := byte(0x11)
	if t.Source.Addr().Is6() {
		family = 0x21
	}
	ends := slices.Concat(t.Source.Addr().AsSlice(), t.Dest.Addr().AsSlice())
	ends = binary.BigEndian.AppendUint16(ends, t.Source.Port())
	ends = binary.BigEndian.AppendUint16(ends, t.Dest.Port())
	b := append([]byte("\r\n\r\n\x00\r\nQUIT\n"), 0x21, family)
	return append(binary.BigEndian.AppendUint16(b, uint16(len(ends))), ends...)
}

// withTOA inserts the option in front of the other options, if the header has room.
func withTOA(b, option []byte) []byte {
	v, _ := readIP(b)
	doff := int(v.payload()[12] >> 4)
	if doff*4+len(option) > 60 {
		return b
	}
	b = insert(b, v, 20, option)
	v, _ = readIP(b)
	setWord(v.payload(), 12, binary.BigEndian.Uint16(v.payload()[12:])+uint16(len(option)/4)<<12)
	return b
}

// insert inserts bytes into the TCP segment at offset at, and updates lengths and checksums. The
// offset is at least 20, the end of the fixed header.
func insert(b []byte, v *view, at int, what []byte) []byte {
	b = slices.Insert(slices.Clone(b), v.header+at, what...)
	setIPLength(b, v.v6)
	p := b[v.header:]
	length := binary.BigEndian.AppendUint16(nil, uint16(len(what)))
	sum := packet.UpdateChecksum(binary.BigEndian.Uint16(p[16:]), []byte{0, 0}, length)
	sum = packet.UpdateChecksum(sum, make([]byte, len(what)), what)
	binary.BigEndian.PutUint16(p[16:], sum)
	return b
}

// cutData truncates the TCP segment after at bytes, and updates lengths and checksums. The removed
// bytes are data of TCP Fast Open (RFC 7413).
func cutData(b []byte, v *view, at int) []byte {
	b = slices.Clone(b)
	p := b[v.header:]
	data := p[at:]
	length := binary.BigEndian.AppendUint16(nil, uint16(len(data)))
	sum := packet.UpdateChecksum(binary.BigEndian.Uint16(p[16:]), length, []byte{0, 0})
	sum = packet.UpdateChecksum(sum, append(slices.Clone(data), make([]byte, len(data)%2)...), nil)
	binary.BigEndian.PutUint16(p[16:], sum)
	b = b[:v.header+at]
	setIPLength(b, v.v6)
	return b
}

// setIPLength updates the length in the IP header.
func setIPLength(b []byte, v6 bool) {
	if v6 {
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-40))
		return
	}
	was := slices.Clone(b[2:4])
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	binary.BigEndian.PutUint16(b[10:], packet.UpdateChecksum(binary.BigEndian.Uint16(b[10:]), was, b[2:4]))
}

// proxyForward inserts the header before the client's first byte until the backend acknowledges it.
// It adds the header's length to later sequence numbers. Packet arrived is the packet before its
// translation to b.
func (h *sessionHalf) proxyForward(arrived *view, b, header []byte) ([]byte, Reason) {
	v, _ := readIP(b)
	t := v.payload()
	seq := binary.BigEndian.Uint32(t[4:])
	if v.flags&packet.SYN != 0 {
		h.proxyState = &proxyState{base: seq + 1}
		at := int(t[12]>>4) * 4
		switch {
		case v.first:
			return nil, ReasonUntranslatable
		case at < 20 || at >= len(t):
			return b, ""
		}
		arrived.trailer = nil
		return cutData(b, v, at), ""
	}
	s := h.proxyState
	if s == nil {
		return b, ""
	}
	if seq == s.base && v.flags&packet.RST == 0 && (!s.sent || s.lost) {
		if v.first {
			return nil, ReasonUntranslatable
		}
		at := int(t[12]>>4) * 4
		if at < 20 || at > len(t) {
			return nil, ReasonBadHeader
		}
		s.sent, s.lost = true, false
		return insert(b, v, at, header), ""
	}
	if int32(seq-s.base) > 0 || seq == s.base && s.sent {
		setNumber(t, 4, seq+uint32(len(header)))
	}
	return b, ""
}

// proxyAnswer subtracts the header's length from the acknowledgement numbers of the backend.
func (h *sessionHalf) proxyAnswer(b []byte, size uint32) []byte {
	v, _ := readIP(b)
	t, s := v.payload(), h.proxyState
	if s == nil || v.flags&packet.ACK == 0 {
		return b
	}
	ack := binary.BigEndian.Uint32(t[8:])
	switch {
	case v.flags&packet.SYN == 0 && ack == s.base && s.sent:
		s.lost = true
	case int32(ack-s.base) > 0:
		s.sent, s.lost = true, false
	}
	without := func(n uint32) uint32 {
		switch {
		case int32(n-s.base) <= 0:
			return n
		case int32(n-s.base-size) <= 0:
			return s.base
		}
		return n - size
	}
	setNumber(t, 8, without(ack))
	eachOption(t, func(kind byte, at, end int) {
		for ; kind == 5 && at+4 <= end; at += 4 { // RFC 2018
			setNumber(t, at, without(binary.BigEndian.Uint32(t[at:])))
		}
	})
	return b
}

// eachOption calls f for each TCP option with a value, with the offsets of its start and its end.
func eachOption(t []byte, f func(kind byte, at, end int)) {
	end := min(int(t[12]>>4)*4, len(t))
	for i := 20; i+1 < end && t[i] != 0; {
		if t[i] == 1 {
			i++
			continue
		}
		n := int(t[i+1])
		if n < 2 || i+n > end {
			return
		}
		f(t[i], i+2, i+n)
		i += n
	}
}

// setNumber replaces the 32-bit number at offset i of a TCP segment and updates the checksum.
func setNumber(t []byte, i int, value uint32) {
	setWord(t, i, uint16(value>>16))
	setWord(t, i+2, uint16(value))
}
