// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// view is a parsed IP packet. It references the received frame and never changes it.
type view struct {
	ip       []byte // from the IP header to the end of the packet
	trailer  []byte // Ethernet padding after the packet.
	v6       bool
	header   int // Length of the IP header with options or extension headers, in bytes.
	upper    int // Offset in ip of the upper-layer protocol number.
	protocol flow.Protocol
	src, dst netip.AddrPort // for ICMP queries the port is the identifier
	ttl, tos uint8
	df       bool
	// A first fragment has offset 0 and the M flag. A later fragment has a positive offset.
	first, later bool
	id           uint32
	offset       uint16 // Bytes.
	fragmentAt   int    // Offset of an IPv6 fragment header in ip, 0 for none.
	flags        packet.TCPFlags
	icmpType     uint8
	icmpCode     uint8
	kind         icmpKind
	sourceRoute  bool // Unexpired IPv4 source route, or IPv6 routing header with segments left.
	routeAt      int  // Offset for the pointer of a parameter problem.
	quoted       *view
	field        int             // ICMP errors with an extension: length of the quoted packet (RFC 4884), else 0.
	cookie       *sequenceSplice // State from a valid SYN cookie.
	macs         [12]byte        // Destination and source MAC addresses of the frame.
}

type icmpKind uint8

const (
	notICMP   icmpKind = iota
	icmpQuery          // Echo request: opens a session.
	icmpReply          // Echo reply.
	icmpError
	icmpOther
	icmpLink // link scope: never forwarded
)

func (v *view) tuple() flow.Tuple {
	return flow.Tuple{Protocol: v.protocol, Source: v.src, Dest: v.dst}
}

// TupleOf returns the tuple of the packet in a frame. For an ICMP error it returns the tuple of an
// answer to the quoted packet. The port of an ICMP query is its identifier.
func TupleOf(frame []byte) (flow.Tuple, bool) {
	v, _, _ := read(frame)
	switch {
	case v == nil, v.kind == icmpError && v.quoted == nil:
		return flow.Tuple{}, false
	case v.kind == icmpError:
		return v.quoted.tuple().Reverse(), true
	}
	return v.tuple(), true
}

// payload returns the bytes after the IP header.
func (v *view) payload() []byte { return v.ip[v.header:] }

// Untagged removes a priority tag from an IP frame: VLAN 0 means the interface itself (IEEE 802.1Q
// §9.6). Sent frames have no tag.
func Untagged(frame []byte) []byte {
	if len(frame) < 18 {
		return frame
	}
	tpid, tci := binary.BigEndian.Uint16(frame[12:]), binary.BigEndian.Uint16(frame[14:])
	if tpid != packet.TypeVLAN && tpid != packet.TypeQinQ || tci&0xfff != 0 {
		return frame
	}
	inner := append(append([]byte(nil), frame[:12]...), frame[16:]...)
	if !isIP(inner) {
		return frame
	}
	return inner
}

func isIP(frame []byte) bool {
	if len(frame) < 14 {
		return false
	}
	kind := binary.BigEndian.Uint16(frame[12:])
	return kind == packet.TypeIPv4 || kind == packet.TypeIPv6
}

// read parses a frame. The reason is empty for a valid IP packet.
func read(frame []byte) (*view, Action, Reason) {
	if len(frame) < 14 {
		return nil, Pass, ReasonNotIP
	}
	switch binary.BigEndian.Uint16(frame[12:]) {
	case packet.TypeIPv4:
		if v, reason := parseIPv4(frame[14:], false); reason != "" {
			return nil, Drop, reason
		} else {
			v.macs = [12]byte(frame)
			return v, "", ""
		}
	case packet.TypeIPv6:
		if v, reason := parseIPv6(frame[14:], false); reason != "" {
			return nil, Drop, reason
		} else {
			v.macs = [12]byte(frame)
			return v, "", ""
		}
	}
	return nil, Pass, ReasonNotIP
}

// parseIPv4 parses an IPv4 packet. A quoted packet may be truncated after eight bytes of payload.
func parseIPv4(b []byte, quoted bool) (*view, Reason) {
	if len(b) < 20 {
		return nil, ReasonTruncated
	}
	header, length := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	switch {
	case b[0]>>4 != 4 || header < 20:
		return nil, ReasonBadHeader
	case length < header:
		return nil, ReasonBadHeader
	case header > len(b) || length > len(b) && !quoted:
		return nil, ReasonTruncated
	}
	fragment := binary.BigEndian.Uint16(b[6:])
	v := &view{
		ip: b[:min(length, len(b))], trailer: b[min(length, len(b)):], header: header, upper: 9, protocol: flow.Protocol(b[9]), ttl: b[8], tos: b[1],
		df: fragment&0x4000 != 0, offset: fragment & 0x1fff * 8, id: uint32(binary.BigEndian.Uint16(b[4:])),
	}
	v.first, v.later = fragment&0x2000 != 0 && v.offset == 0, v.offset != 0
	v.sourceRoute = unexpiredSourceRoute(b[20:header])
	return v, v.transport(netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), quoted)
}

// unexpiredSourceRoute reports whether a loose or strict source route option has a remaining hop:
// its pointer is not past its end (RFC 791 §3.1).
func unexpiredSourceRoute(options []byte) bool {
	for len(options) >= 2 && options[0] != 0 {
		if options[0] == 1 {
			options = options[1:]
			continue
		}
		n := int(options[1])
		if n < 2 || n > len(options) {
			return false
		}
		if (options[0] == 131 || options[0] == 137) && n >= 3 && options[2] <= options[1] {
			return true
		}
		options = options[n:]
	}
	return false
}

// Limits on the number and length of IPv6 extension headers (RFC 8504 §5.3 permits both).
const (
	maxExtensionHeaders = 7
	maxExtensionBytes   = 960
)

// Numbers of IPv6 extension headers (RFC 8200 §4.1).
const (
	nextHopByHop = 0
	nextRouting  = 43
	nextFragment = 44
	nextAuth     = 51
	nextDestOpts = 60
)

func parseIPv6(b []byte, quoted bool) (*view, Reason) {
	if len(b) < 40 {
		return nil, ReasonTruncated
	}
	length := 40 + int(binary.BigEndian.Uint16(b[4:]))
	switch {
	case b[0]>>4 != 6:
		return nil, ReasonBadHeader
	case length > len(b) && !quoted:
		return nil, ReasonTruncated
	}
	trailer := b[min(length, len(b)):]
	b = b[:min(length, len(b))]
	v := &view{ip: b, trailer: trailer, v6: true, header: 40, upper: 6, ttl: b[7], tos: b[0]<<4 | b[1]>>4, df: true}
	next := b[6]
	for n := 0; isExtension(next); n++ {
		switch {
		case v.header+8 > len(b):
			return nil, ReasonTruncated
		case n == maxExtensionHeaders:
			return nil, ReasonBadHeader
		}
		h := b[v.header:]
		size := 8
		switch next {
		case nextFragment:
			if v.fragmentAt > 0 { // at most one (RFC 8200 §4.1)
				return nil, ReasonBadHeader
			}
			word := binary.BigEndian.Uint16(h[2:])
			v.id, v.offset, v.fragmentAt = binary.BigEndian.Uint32(h[4:]), word&^7, v.header
			v.first, v.later = word&1 != 0 && v.offset == 0, v.offset != 0
		case nextAuth:
			size = 4 * (int(h[1]) + 2) // RFC 4302 §2.2
		default:
			size += 8 * int(h[1])
			if next == nextRouting && h[3] > 0 && !v.sourceRoute {
				v.sourceRoute, v.routeAt = true, v.header+3
			}
		}
		switch {
		case v.header+size > len(b):
			return nil, ReasonTruncated
		case v.header+size > 40+maxExtensionBytes:
			return nil, ReasonBadHeader
		}
		v.upper = v.header
		next = h[0]
		v.header += size
		if v.later {
			break
		}
	}
	v.protocol = flow.Protocol(next)
	return v, v.transport(netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40])), quoted)
}

func isExtension(next byte) bool {
	return next == nextHopByHop || next == nextRouting || next == nextFragment || next == nextAuth || next == nextDestOpts
}

// transport reads ports, identifiers, flags and the packet in an ICMP error.
func (v *view) transport(src, dst netip.Addr, quoted bool) Reason {
	ends := func(s, d uint16) { v.src, v.dst = netip.AddrPortFrom(src, s), netip.AddrPortFrom(dst, d) }
	ends(0, 0)
	if v.later {
		return ""
	}
	p := v.payload()
	need := map[flow.Protocol]int{flow.TCP: 20, flow.UDP: 8, flow.SCTP: 12, flow.ICMP: 8, flow.ICMPv6: 8}[v.protocol]
	if quoted {
		need = min(need, 8) // RFC 792: at least eight bytes are quoted
	}
	if v.protocol == flow.ICMP && v.v6 || v.protocol == flow.ICMPv6 && !v.v6 {
		return "" // ICMP of the other family has no special meaning
	}
	if len(p) < need {
		return ReasonTruncated
	}
	switch v.protocol {
	case flow.TCP:
		ends(binary.BigEndian.Uint16(p), binary.BigEndian.Uint16(p[2:]))
		if len(p) < 20 {
			return ""
		}
		v.flags = packet.TCPFlags(p[13])
	case flow.UDP, flow.SCTP:
		ends(binary.BigEndian.Uint16(p), binary.BigEndian.Uint16(p[2:]))
	case flow.ICMP, flow.ICMPv6:
		v.icmpType, v.icmpCode = p[0], p[1]
		v.kind = kindOf(v.v6, p[0])
		switch v.kind {
		case icmpQuery, icmpReply:
			ends(binary.BigEndian.Uint16(p[4:]), binary.BigEndian.Uint16(p[4:]))
		case icmpError:
			v.field = quotedField(v, p)
			end := len(p)
			if v.field > 0 {
				end = 8 + v.field
			}
			v.parseQuoted(p[8:end], quoted)
		}
	}
	return ""
}

// kindOf classifies ICMP types. Only echo is a query: the other IPv4 queries are obsolete (RFC
// 6918).
func kindOf(v6 bool, kind uint8) icmpKind {
	switch {
	case v6 && kind == 128, !v6 && kind == 8:
		return icmpQuery
	case v6 && kind == 129, !v6 && kind == 0:
		return icmpReply
	case v6 && kind >= 1 && kind <= 4, !v6 && (kind == 3 || kind == 5 || kind == 11 || kind == 12): // source quench has no effect (RFC 5508 REQ-10c)
		return icmpError
	case v6 && kind >= 130 && kind <= 137: // multicast listeners, neighbours, redirects
		return icmpLink
	}
	return icmpOther
}

// parseQuoted parses the packet in an ICMP error; v.quoted stays nil if the packet is invalid. It
// ignores errors about errors and about later fragments, because hosts must not send them (RFC 1122
// §3.2.2, RFC 4443 §2.4 (e)).
func (v *view) parseQuoted(b []byte, quoted bool) {
	if quoted {
		return
	}
	read := parseIPv4
	if v.v6 {
		read = parseIPv6
	}
	if q, reason := read(b, true); reason == "" && q.kind != icmpError && !q.later {
		v.quoted = q
	}
}
