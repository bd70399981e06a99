// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"slices"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// message is the type and the code of an ICMP message.
type message struct{ kind, code uint8 }

// to6 maps the codes of IPv4 "destination unreachable" to IPv6 messages (RFC 7915 §4.2). Code 2
// becomes a parameter problem with a pointer to the next header field. Code 4 becomes "packet too
// big".
var to6 = map[uint8]message{
	0: {1, 0}, 1: {1, 0}, 2: {4, 1}, 3: {1, 4}, 4: {2, 0}, 5: {1, 0}, 6: {1, 0}, 7: {1, 0}, 8: {1, 0}, 9: {1, 1}, 10: {1, 1},
	11: {1, 0}, 12: {1, 0}, 13: {1, 1}, 15: {1, 1},
}

// to4 maps the codes of IPv6 "destination unreachable" to IPv4 messages (RFC 7915 §5.2).
var to4 = map[uint8]message{0: {3, 1}, 1: {3, 10}, 2: {3, 1}, 3: {3, 1}, 4: {3, 3}}

// pointers6 and pointers4 map the pointer of a parameter problem (RFC 7915 figures 3 and 6): the
// offset of a field in one header to the offset in the other. A missing pointer has no counterpart.
var (
	pointers6 = map[uint8]uint32{0: 0, 1: 1, 2: 4, 3: 4, 8: 7, 9: 6, 12: 8, 13: 8, 14: 8, 15: 8, 16: 24, 17: 24, 18: 24, 19: 24}
	pointers4 = map[uint32]uint8{0: 0, 1: 1, 4: 2, 5: 2, 6: 9, 7: 8}
)

// plateaus lists the MTUs to try if a router reports none (RFC 1191 §7).
var plateaus = []uint32{65535, 32000, 17914, 8166, 4352, 2002, 1492, 1006, 508, 296, 68}

// translateICMP translates an ICMP message and its quoted packet.
func translateICMP(v *view, r translationParams, p []byte) ([]byte, flow.Protocol, Reason) {
	if v.kind == icmpError && (v.quoted == nil || r.quote == nil) {
		return nil, 0, ReasonUntranslatable // an error about an error
	}
	var m message
	rest := binary.BigEndian.Uint32(p[4:])
	ok := false
	if v.v6 {
		m, rest, ok = toICMPv4(v, r, rest)
	} else {
		m, rest, ok = toICMPv6(v, r, rest)
	}
	if !ok {
		return nil, 0, ReasonUntranslatable
	}
	protocol := flow.ICMPv6
	if v.v6 {
		protocol = flow.ICMP
	}
	if v.kind != icmpError {
		return echo(v, r, p, m), protocol, ""
	}
	inner, reason := render(v.quoted, translationParams{to: *r.quote, quoted: true})
	if reason != "" {
		return nil, 0, ReasonUntranslatable
	}
	b := make([]byte, 8)
	b[0], b[1] = m.kind, m.code
	binary.BigEndian.PutUint32(b[4:], rest)
	limit := 1280 - 40 // RFC 4443 §2.4 (c)
	if v.v6 {
		limit = 576 - 20 // RFC 1812 §4.3.2.3
	}
	if extended := extend(v, b, inner, p, limit); extended != nil {
		b = extended
	} else {
		b = append(b, inner...)
		b = b[:min(len(b), limit)]
	}
	setICMPChecksum(b, r, protocol)
	return b, protocol, ""
}

// Extensions of ICMP errors (RFC 4884 §3, §4).
const (
	fieldMin = 128 // minimum length of the quoted packet before an extension, in bytes
)

// lengthByte returns the offset of the length field of an ICMP error, and its unit in bytes. Other
// messages return 0.
func lengthByte(v6 bool, kind uint8) (at, unit int) {
	switch {
	case v6 && (kind == 1 || kind == 3):
		return 4, 8
	case !v6 && (kind == 3 || kind == 11 || kind == 12):
		return 5, 4
	}
	return 0, 0
}

// quotedField returns the number of bytes for the quoted packet before an extension, 0 without an
// extension.
func quotedField(v *view, p []byte) int {
	at, unit := lengthByte(v.v6, p[0])
	field := int(p[at]) * unit
	if unit == 0 || field < fieldMin || 8+field >= len(p) {
		return 0
	}
	return field
}

// extend returns the error with header b, the translated quotation, and the extension of the
// original p. It writes the offset of the extension into the header (RFC 7915 §4.2, §5.2). It
// returns nil if no extension exists, the message allows none, or the extension does not fit.
func extend(v *view, b, inner, p []byte, limit int) []byte {
	at, unit := lengthByte(!v.v6, b[0])
	if v.field == 0 || unit == 0 {
		return nil
	}
	padding, extension := p[8+len(v.quoted.ip):8+v.field], p[8+v.field:]
	b = append(append(slices.Clone(b), inner...), padding...)
	for len(b) < 8+fieldMin {
		b = append(b, 0)
	}
	b = b[:8+(len(b)-8)/unit*unit]
	if len(b)+len(extension) > limit {
		return nil
	}
	b[at] = byte((len(b) - 8) / unit)
	return append(b, extension...)
}

func setICMPChecksum(b []byte, r translationParams, protocol flow.Protocol) {
	b[2], b[3] = 0, 0
	sum := packet.Checksum(b)
	if protocol == flow.ICMPv6 {
		sum = packet.TransportChecksum(r.to.Source.Addr(), r.to.Dest.Addr(), uint8(protocol), b)
	}
	binary.BigEndian.PutUint16(b[2:], sum)
}

// echo translates a query: type, identifier and checksum. Only the IPv6 checksum covers a pseudo
// header.
func echo(v *view, r translationParams, p []byte, m message) []byte {
	before := append(slices.Clone(p[:2]), p[4:6]...)
	p[0], p[1] = m.kind, m.code
	binary.BigEndian.PutUint16(p[4:], r.to.Source.Port())
	after := append(slices.Clone(p[:2]), p[4:6]...)
	if len(p) < 8 {
		return p
	}
	// The length of the whole message, also where a quotation is cut off.
	if v.v6 {
		length := 40 + int(binary.BigEndian.Uint16(v.ip[4:])) - v.header
		before = append(before, addresses(v.src.Addr(), v.dst.Addr())...)
		before = append(before, byte(length>>8), byte(length), 0, byte(flow.ICMPv6))
	} else {
		length := int(binary.BigEndian.Uint16(v.ip[2:])) - v.header
		after = append(after, addresses(r.to.Source.Addr(), r.to.Dest.Addr())...)
		after = append(after, byte(length>>8), byte(length), 0, byte(flow.ICMPv6))
	}
	binary.BigEndian.PutUint16(p[2:], packet.UpdateChecksum(binary.BigEndian.Uint16(p[2:]), before, after))
	return p
}

// toICMPv6 translates type, code and second word from IPv4 to IPv6.
func toICMPv6(v *view, r translationParams, rest uint32) (m message, word uint32, ok bool) {
	switch v.icmpType {
	case 8, 0:
		kind := uint8(128)
		if v.icmpType == 0 {
			kind = 129
		}
		return message{kind, v.icmpCode}, rest, true
	case 3:
		m, ok = to6[v.icmpCode]
		switch v.icmpCode {
		case 2:
			return m, 6, ok // the next header field
		case 4:
			mtu := rest & 0xffff
			if mtu == 0 {
				mtu = plateau(v.quoted)
			}
			return m, r.mtu(mtu), ok
		}
		return m, 0, ok
	case 11:
		return message{3, v.icmpCode}, 0, true
	case 12:
		if v.icmpCode != 0 && v.icmpCode != 2 {
			return message{}, 0, false
		}
		pointer, ok := pointers6[uint8(rest>>24)]
		return message{4, 0}, pointer, ok
	}
	return message{}, 0, false
}

// toICMPv4 translates type, code and second word from IPv6 to IPv4.
func toICMPv4(v *view, r translationParams, rest uint32) (m message, word uint32, ok bool) {
	switch v.icmpType {
	case 128, 129:
		kind := uint8(8)
		if v.icmpType == 129 {
			kind = 0
		}
		return message{kind, v.icmpCode}, rest, true
	case 1:
		m, ok = to4[v.icmpCode]
		return m, 0, ok
	case 2:
		return message{3, 4}, r.mtu(rest), true
	case 3:
		return message{11, v.icmpCode}, 0, true
	case 4:
		switch v.icmpCode {
		case 1:
			return message{3, 2}, 0, true
		case 0:
			pointer, ok := pointerToIPv4(rest)
			return message{12, 0}, uint32(pointer) << 24, ok
		}
	}
	return message{}, 0, false
}

func pointerToIPv4(p uint32) (uint8, bool) {
	switch {
	case p >= 8 && p < 24:
		return 12, true
	case p >= 24 && p < 40:
		return 16, true
	}
	v, ok := pointers4[p]
	return v, ok
}

// plateau returns the greatest plateau below the length of the oversized packet.
func plateau(q *view) uint32 {
	if q == nil {
		return plateaus[len(plateaus)-1]
	}
	length := uint32(binary.BigEndian.Uint16(q.ip[2:]))
	for _, p := range plateaus {
		if p < length {
			return p
		}
	}
	return plateaus[len(plateaus)-1]
}
