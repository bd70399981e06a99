// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"encoding/binary"
	"net/netip"
)

// maxLayers bounds the layers of a parsed packet; deeper layers are data.
const maxLayers = 24

// Parse decodes a frame. It never fails: unparsable bytes become data. Building the result returns the frame.
func Parse(frame []byte) Packet {
	r := layerReader{}
	if len(frame) < 14 {
		return Packet{&Data{Bytes: bytes.Clone(frame)}}
	}
	e := &Ethernet{Dst: MAC(frame[:6]), Src: MAC(frame[6:12]), Type: Force(uint32(binary.BigEndian.Uint16(frame[12:])))}
	r.add(e, frame)
	r.link(uint16(e.Type.Value), frame[14:])
	r.finish(len(frame))
	return r.packet
}

// ParseIP decodes an IP packet without a link header.
func ParseIP(b []byte) Packet {
	r := layerReader{}
	if len(b) > 0 && b[0]>>4 == 6 {
		r.ipv6(b)
	} else {
		r.ipv4(b)
	}
	r.finish(len(b))
	return r.packet
}

// layerReader collects layers with the bytes from each layer's start.
type layerReader struct {
	packet    Packet
	from      [][]byte // from[i] begins with layer i and includes the layers inside it
	inner     bool     // Inside an ICMP error.
	extension *Extension
	trailer   []byte
}

func (r *layerReader) add(l Layer, from []byte) {
	r.packet = append(r.packet, l)
	r.from = append(r.from, from)
}

func (r *layerReader) data(b []byte) {
	if len(b) > 0 {
		r.add(&Data{Bytes: bytes.Clone(b)}, b)
	}
}

// finish appends the trailer and the extension. It clears computed fields with the value that Build computes, from
// the innermost layer out.
func (r *layerReader) finish(total int) {
	for i := len(r.packet) - 1; i >= 0; i-- {
		l, at := r.packet[i], r.packet[:i].enclosingLayer()
		var payload []byte
		if i+1 < len(r.packet) {
			at.next = r.packet[i+1]
			payload = r.from[i+1]
		}
		if _, ok := l.(*ICMP); ok && r.extension != nil && !r.errorBefore(i) {
			at.extension = r.extension
			payload = payload[:len(payload):len(payload)]
		}
		wire := r.from[i]
		for _, f := range l.fields() {
			if f.forced == nil || !f.forced.Set {
				continue
			}
			was := *f.forced
			*f.forced = Forced{}
			if !bytes.Equal(l.encode(payload, at), wire) {
				*f.forced = was
			}
		}
	}
	if r.extension != nil {
		r.packet = append(r.packet, r.extension)
	}
	if len(r.trailer) > 0 {
		r.packet = append(r.packet, &Trailer{Bytes: bytes.Clone(r.trailer)})
	}
}

func (r *layerReader) errorBefore(i int) bool {
	for _, l := range r.packet[:i] {
		if m, ok := l.(*ICMP); ok && m.IsError() {
			return true
		}
	}
	return false
}

func (r *layerReader) link(kind uint16, b []byte) {
	switch {
	case len(r.packet) >= maxLayers:
		r.data(b)
	case kind == TypeIPv4:
		r.ipv4(b)
	case kind == TypeIPv6:
		r.ipv6(b)
	case (kind == TypeVLAN || kind == TypeQinQ) && len(b) >= 4:
		tag := binary.BigEndian.Uint16(b)
		v := &VLAN{ID: tag & 0xfff, Priority: uint8(tag >> 13), Drop: tag&(1<<12) != 0, Type: Force(uint32(binary.BigEndian.Uint16(b[2:])))}
		r.add(v, b)
		r.link(uint16(v.Type.Value), b[4:])
	case kind == TypeARP && len(b) >= 28 && bytes.Equal(b[:6], []byte{0, 1, 8, 0, 6, 4}):
		r.add(&ARP{Operation: binary.BigEndian.Uint16(b[6:]), SenderMAC: MAC(b[8:14]), Sender: netip.AddrFrom4([4]byte(b[14:18])),
			TargetMAC: MAC(b[18:24]), Target: netip.AddrFrom4([4]byte(b[24:28]))}, b)
		r.data(b[28:])
	default:
		r.data(b)
	}
}

// isOutermost reports whether no IP layer was read yet: only then can bytes after the packet be a trailer.
func (r *layerReader) isOutermost() bool {
	for _, l := range r.packet {
		switch l.(type) {
		case *IPv4, *IPv6:
			return false
		}
	}
	return true
}

// cutTrailer removes the bytes after the length bytes of the outermost packet from b and from every enclosing layer.
func (r *layerReader) cutTrailer(b []byte, length int) []byte {
	if !r.isOutermost() || length >= len(b) {
		return b
	}
	n := len(b) - length
	r.trailer = b[length:]
	for i := range r.from {
		r.from[i] = r.from[i][:len(r.from[i])-n]
	}
	return b[:length]
}

func (r *layerReader) ipv4(b []byte) {
	if len(b) < 20 || b[0]>>4 != 4 || b[0]&15 < 5 || int(b[0]&15)*4 > len(b) {
		r.data(b)
		return
	}
	size := int(b[0]&15) * 4
	length := int(binary.BigEndian.Uint16(b[2:]))
	if length >= size {
		b = r.cutTrailer(b, length)
	}
	fragment := binary.BigEndian.Uint16(b[6:])
	ip := &IPv4{
		Src: netip.AddrFrom4([4]byte(b[12:16])), Dst: netip.AddrFrom4([4]byte(b[16:20])),
		TTL: b[8], TOS: b[1], ID: binary.BigEndian.Uint16(b[4:]),
		DF: fragment&0x4000 != 0, MF: fragment&0x2000 != 0, Reserved: fragment&0x8000 != 0, Offset: fragment & 0x1fff * 8,
		Options: bytes.Clone(b[20:size]), Protocol: Force(uint32(b[9])), Length: Force(uint32(length)),
		Checksum: Force(uint32(binary.BigEndian.Uint16(b[10:]))),
	}
	r.add(ip, b)
	r.next(b[9], b[size:], ip.Offset != 0, false)
}

func (r *layerReader) ipv6(b []byte) {
	if len(b) < 40 || b[0]>>4 != 6 {
		r.data(b)
		return
	}
	length := int(binary.BigEndian.Uint16(b[4:]))
	b = r.cutTrailer(b, 40+length)
	word := binary.BigEndian.Uint32(b)
	r.add(&IPv6{
		Src: netip.AddrFrom16([16]byte(b[8:24])), Dst: netip.AddrFrom16([16]byte(b[24:40])), HopLimit: b[7],
		TrafficClass: uint8(word >> 20), FlowLabel: word & 0xfffff, NextHeader: Force(uint32(b[6])), Length: Force(uint32(length)),
	}, b)
	r.next(b[6], b[40:], false, true)
}

// next decodes the payload of an IP header or an extension header. The payload of a later fragment is data, never a
// header.
func (r *layerReader) next(protocol uint8, b []byte, later, v6 bool) {
	if later || len(r.packet) >= maxLayers {
		r.data(b)
		return
	}
	switch {
	case protocol == protoTCP && len(b) >= 8:
		r.tcp(b)
	case protocol == protoUDP && len(b) >= 8:
		r.udp(b)
	case protocol == protoSCTP && len(b) >= 12:
		r.add(&SCTP{SrcPort: binary.BigEndian.Uint16(b), DstPort: binary.BigEndian.Uint16(b[2:]), Tag: binary.BigEndian.Uint32(b[4:]),
			Checksum: Force(binary.BigEndian.Uint32(b[8:]))}, b)
		r.data(b[12:])
	case (protocol == protoICMP || protocol == protoICMPv6) && len(b) >= 8:
		r.icmp(protocol == protoICMPv6, b)
	case protocol == protoIPv4:
		r.ipv4(b)
	case protocol == protoIPv6:
		r.ipv6(b)
	case v6 && len(b) >= 8:
		r.extensionHeader(protocol, b)
	default:
		r.data(b)
	}
}

func (r *layerReader) extensionHeader(protocol uint8, b []byte) {
	next, size := Force(uint32(b[0])), 8+8*int(b[1])
	switch {
	case protocol == protoFragment:
		v := binary.BigEndian.Uint16(b[2:])
		f := &Fragment{Offset: v &^ 7, More: v&1 != 0, ID: binary.BigEndian.Uint32(b[4:]),
			Reserved: uint16(b[1])<<8 | v>>1&3, NextHeader: next}
		r.add(f, b)
		r.next(b[0], b[8:], f.Offset != 0, true)
	case size > len(b):
		r.data(b)
	case protocol == protoHopByHop || protocol == protoDestOpts:
		o := &Options6{Destination: protocol == protoDestOpts, NextHeader: next, Length: Force(uint32(b[1]))}
		if !bytes.Equal(b[2:size], []byte{1, 4, 0, 0, 0, 0}) {
			o.Options = bytes.Clone(b[2:size])
		}
		r.add(o, b)
		r.next(b[0], b[size:], false, true)
	case protocol == protoRouting:
		r.add(&Routing{Type: b[2], SegmentsLeft: b[3], Data: bytes.Clone(b[4:size]), NextHeader: next, Length: Force(uint32(b[1]))}, b)
		r.next(b[0], b[size:], false, true)
	default:
		r.data(b)
	}
}

func (r *layerReader) tcp(b []byte) {
	size := len(b)
	if size > 12 {
		size = int(b[12]>>4) * 4
	}
	switch {
	case len(b) < 20 && r.inner: // an ICMP error may contain only a part
		wide := make([]byte, 20)
		copy(wide, b)
		t := readTCP(wide)
		t.Cut, t.DataOffset = uint8(len(b)), Forced{}
		if len(b) < 15 {
			t.Window = 65535 // truncated: the default value of the text form
		}
		if len(b) > 12 {
			t.DataOffset = Force(uint32(b[12] >> 4))
		}
		if !bytes.Equal(t.encode(nil, encoding{}), b) { // a part of the checksum is present
			r.data(b)
			return
		}
		r.add(t, b)
	case len(b) < 20 || size < 20 || size > len(b):
		r.data(b)
	default:
		t := readTCP(b)
		t.Options = bytes.Clone(b[20:size])
		r.add(t, b)
		r.data(b[size:])
	}
}

func readTCP(b []byte) *TCP {
	return &TCP{
		SrcPort: binary.BigEndian.Uint16(b), DstPort: binary.BigEndian.Uint16(b[2:]),
		Seq: binary.BigEndian.Uint32(b[4:]), Ack: binary.BigEndian.Uint32(b[8:]), DataOffset: Force(uint32(b[12] >> 4)),
		Reserved: b[12] & 15, Flags: TCPFlags(b[13]), Window: binary.BigEndian.Uint16(b[14:]),
		Checksum: Force(uint32(binary.BigEndian.Uint16(b[16:]))), Urgent: binary.BigEndian.Uint16(b[18:]),
	}
}

func (r *layerReader) udp(b []byte) {
	u := &UDP{SrcPort: binary.BigEndian.Uint16(b), DstPort: binary.BigEndian.Uint16(b[2:]),
		Length: Force(uint32(binary.BigEndian.Uint16(b[4:]))), Checksum: Force(uint32(binary.BigEndian.Uint16(b[6:])))}
	r.add(u, b)
	if u.DstPort == PortGUE && len(b) > 12 && b[8] == 0 && (b[9] == protoIPv4 || b[9] == protoIPv6) {
		r.add(&GUE{Protocol: Force(uint32(b[9])), Flags: binary.BigEndian.Uint16(b[10:])}, b[8:])
		r.next(b[9], b[12:], false, false)
		return
	}
	r.data(b[8:])
}

func (r *layerReader) icmp(v6 bool, b []byte) {
	m := &ICMP{V6: v6, Type: b[0], Code: b[1], Checksum: Force(uint32(binary.BigEndian.Uint16(b[2:]))), Rest: binary.BigEndian.Uint32(b[4:])}
	r.add(m, b)
	body := b[8:]
	if !m.IsError() {
		r.data(body)
		return
	}
	if position, unit := m.lengthByte(); unit > 0 && b[position] != 0 {
		m.Rest &^= 0xff << (8 * (7 - position))
		m.Length = Force(uint32(b[position]))
		if r.inner || !r.decodeExtension(body, int(b[position])*unit, unit) {
			r.data(body)
			return
		}
		body = r.from[len(r.from)-1][8:][:r.unpaddedLength(body)]
		// The layers around the inner packet end with it; encode adds the rest.
	}
	nested := r.inner
	r.inner = true
	if nested || len(body) == 0 {
		r.data(body)
		return
	}
	if body[0]>>4 == 6 {
		r.ipv6(body)
	} else {
		r.ipv4(body)
	}
}

// decodeExtension decodes the extension structure after size bytes of an ICMP error's body. It reports whether Build would
// produce the same bytes.
func (r *layerReader) decodeExtension(body []byte, size, unit int) bool {
	if size+4 > len(body) || body[size] != 2<<4 || body[size+1] != 0 {
		return false
	}
	end := r.unpaddedLength(body)
	padded := max(128, (end+unit-1)/unit*unit)
	if end > size || padded != size || bytes.ContainsFunc(body[end:size], func(c rune) bool { return c != 0 }) {
		return false
	}
	e := body[size:]
	r.extension = &Extension{Objects: bytes.Clone(e[4:])}
	if !bytes.Equal(r.extension.encode(nil, encoding{}), e) {
		r.extension.Checksum = Force(uint32(binary.BigEndian.Uint16(e[2:])))
	}
	return true
}

// unpaddedLength returns the length of the packet at the beginning of body according to its header.
func (r *layerReader) unpaddedLength(body []byte) int {
	n := 0
	switch {
	case len(body) >= 20 && body[0]>>4 == 4:
		n = int(binary.BigEndian.Uint16(body[2:]))
	case len(body) >= 40 && body[0]>>4 == 6:
		n = 40 + int(binary.BigEndian.Uint16(body[4:]))
	}
	return min(n, len(body))
}
