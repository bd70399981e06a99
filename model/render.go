// SPDX-License-Identifier: Apache-2.0

package model

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// translationParams describes the translation of a packet.
type translationParams struct {
	to              flow.Tuple
	quote           *flow.Tuple // Tuple of the packet in an ICMP error after translation.
	neutral         bool        // Keep the transport checksum.
	quoted          bool        // V is the packet in an ICMP error.
	id              uint16      // Identification for the translation of an IPv6 packet.
	class           config.TrafficClass
	requireChecksum bool // drop UDP without a checksum
	// mtu translates the MTU of a "too big" error to the other family (RFC 7915 §4.2, §5.2).
	mtu func(uint32) uint32
}

// render returns the translation of v. It decrements the hop limit, except in quoted packets.
func render(v *view, r translationParams) ([]byte, Reason) {
	if r.to.Source.Addr().Is6() == v.v6 {
		return renderSame(v, r)
	}
	return renderOther(v, r)
}

// renderSame translates within one family. It changes the packet in place, so that options,
// extension headers and wrong checksums are preserved.
func renderSame(v *view, r translationParams) ([]byte, Reason) {
	b := slices.Clone(v.ip)
	if v.v6 {
		copy(b[8:], r.to.Source.Addr().AsSlice())
		copy(b[24:], r.to.Dest.Addr().AsSlice())
		if !r.quoted {
			b[7]--
		}
	} else {
		was := slices.Clone(b[8:20])
		copy(b[12:], r.to.Source.Addr().AsSlice())
		copy(b[16:], r.to.Dest.Addr().AsSlice())
		if !r.quoted {
			b[8]--
		}
		now := slices.Clone(b[8:20])
		was[2], was[3], now[2], now[3] = 0, 0, 0, 0
		sum := packet.UpdateChecksum(binary.BigEndian.Uint16(b[10:]), was, now)
		binary.BigEndian.PutUint16(b[10:], sum)
	}
	return b, renderTransport(v, r, b[v.header:], v.protocol)
}

// renderTransport translates ports, identifiers, checksums and the quoted packet in segment p,
// within one family.
func renderTransport(v *view, r translationParams, p []byte, protocol flow.Protocol) Reason {
	if v.later {
		return ""
	}
	switch protocol {
	case flow.TCP, flow.UDP:
		before := slices.Clone(p[:4])
		binary.BigEndian.PutUint16(p, r.to.Source.Port())
		binary.BigEndian.PutUint16(p[2:], r.to.Dest.Port())
		return adjust(v, p, protocol, r, before, slices.Clone(p[:4]))
	case flow.ICMP, flow.ICMPv6:
		if v.kind == notICMP { // the protocol is ICMP of the other family
			return ""
		}
		if v.kind == icmpError && r.quote != nil {
			return renderError(v, r, p)
		}
		if v.kind != icmpQuery && v.kind != icmpReply {
			return adjust(v, p, protocol, r, nil, nil)
		}
		before := slices.Clone(p[4:6])
		binary.BigEndian.PutUint16(p[4:], r.to.Source.Port())
		return adjust(v, p, protocol, r, before, slices.Clone(p[4:6]))
	}
	return ""
}

// checksumAt returns the offset of the checksum in a transport header, and whether the checksum
// covers a pseudo header.
func checksumAt(p flow.Protocol) (at int, pseudo, ok bool) {
	switch p {
	case flow.TCP:
		return 16, true, true
	case flow.UDP:
		return 6, true, true
	case flow.ICMP:
		return 2, false, true
	case flow.ICMPv6:
		return 2, true, true
	}
	return 0, false, false
}

// adjust updates the transport checksum for replaced words and addresses (RFC 1624), if the packet
// includes the checksum.
func adjust(v *view, p []byte, protocol flow.Protocol, r translationParams, before, after []byte) Reason {
	at, pseudo, ok := checksumAt(protocol)
	if !ok || len(p) < at+2 || r.neutral {
		return ""
	}
	sum := binary.BigEndian.Uint16(p[at:])
	if protocol == flow.UDP && sum == 0 {
		return "" // no checksum (RFC 768; over IPv6 RFC 6935)
	}
	if pseudo {
		before = append(before, addresses(v.src.Addr(), v.dst.Addr())...)
		after = append(after, addresses(r.to.Source.Addr(), r.to.Dest.Addr())...)
	}
	if protocol == flow.ICMP && bytes.Equal(before, after) {
		return "" // an update of zeros would invert the zero checksum
	}
	sum = packet.UpdateChecksum(sum, before, after)
	if protocol == flow.UDP && sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(p[at:], sum)
	return ""
}

func addresses(src, dst netip.Addr) []byte { return append(src.AsSlice(), dst.AsSlice()...) }

// renderError translates the packet in an ICMP error in place (RFC 5508 REQ-4, REQ-5) and updates
// the error's checksum.
func renderError(v *view, r translationParams, p []byte) Reason {
	inner, reason := renderSame(v.quoted, translationParams{to: *r.quote, quoted: true, neutral: r.neutral})
	if reason != "" {
		return reason
	}
	before, after := slices.Clone(p[8:8+len(inner)]), inner
	if len(inner)%2 == 1 {
		before, after = append(before, 0), append(slices.Clone(inner), 0)
	}
	copy(p[8:], inner)
	r.neutral = false // the source may be the address of another host
	return adjust(v, p, v.protocol, r, before, after)
}

// renderOther translates between the address families (RFC 7915).
func renderOther(v *view, r translationParams) ([]byte, Reason) {
	payload, protocol, reason := translatePayload(v, r)
	if reason != "" {
		return nil, reason
	}
	if v.v6 {
		return header4(v, r, payload, protocol), ""
	}
	return header6(v, r, payload, protocol), ""
}

// tos returns the traffic class after a change of family (RFC 7915 §4.1, §5.1).
func (r translationParams) tos(v *view) uint8 {
	if r.class.Fixed && !r.quoted {
		return r.class.Octet
	}
	return v.tos
}

// header6 replaces an IPv4 header with an IPv6 header (RFC 7915 §4.1).
func header6(v *view, r translationParams, payload []byte, protocol flow.Protocol) []byte {
	b := make([]byte, 40, 48+len(payload))
	tos := r.tos(v)
	b[0], b[1] = 6<<4|tos>>4, tos<<4
	b[6], b[7] = byte(protocol), v.ttl
	if !r.quoted {
		b[7]--
	}
	copy(b[8:], r.to.Source.Addr().AsSlice())
	copy(b[24:], r.to.Dest.Addr().AsSlice())
	if v.first || v.later {
		b[6] = nextFragment
		f := make([]byte, 8)
		f[0] = byte(protocol)
		word := v.offset
		if v.ip[6]&0x20 != 0 {
			word |= 1
		}
		binary.BigEndian.PutUint16(f[2:], word)
		binary.BigEndian.PutUint32(f[4:], v.id)
		b = append(b, f...)
	}
	// The length is the original one: a quoted packet may be truncated.
	length := int(binary.BigEndian.Uint16(v.ip[2:])) - v.header + len(b) - 40
	if !r.quoted {
		length = len(b) - 40 + len(payload)
	}
	binary.BigEndian.PutUint16(b[4:], uint16(length))
	return append(b, payload...)
}

// smallPacket is the length of the largest IPv4 packet without DF from a translator (RFC 7915
// §5.1). After the reverse translation it fits the minimum IPv6 MTU.
const smallPacket = 1260

// header4 replaces an IPv6 header with an IPv4 header (RFC 7915 §5.1).
func header4(v *view, r translationParams, payload []byte, protocol flow.Protocol) []byte {
	b := make([]byte, 20, 20+len(payload))
	b[0], b[1] = 4<<4|5, r.tos(v)
	length := 20 + len(payload)
	if r.quoted {
		length = 20 + 40 + int(binary.BigEndian.Uint16(v.ip[4:])) - v.header
	}
	binary.BigEndian.PutUint16(b[2:], uint16(length))
	switch {
	case v.fragmentAt > 0:
		word := v.offset / 8
		if v.ip[v.fragmentAt+3]&1 != 0 {
			word |= 0x2000
		}
		binary.BigEndian.PutUint16(b[4:], uint16(v.id))
		binary.BigEndian.PutUint16(b[6:], word)
	case length > smallPacket:
		binary.BigEndian.PutUint16(b[4:], r.id)
		b[6] = 0x40
	default:
		binary.BigEndian.PutUint16(b[4:], r.id)
	}
	b[8], b[9] = v.ttl, byte(protocol)
	if !r.quoted {
		b[8]--
	}
	copy(b[12:], r.to.Source.Addr().AsSlice())
	copy(b[16:], r.to.Dest.Addr().AsSlice())
	binary.BigEndian.PutUint16(b[10:], packet.Checksum(b))
	return append(b, payload...)
}

// translatePayload returns the transport segment for the other family.
func translatePayload(v *view, r translationParams) ([]byte, flow.Protocol, Reason) {
	p := slices.Clone(v.payload())
	if (v.first || v.later) && !r.quoted && portClass(r.to.Protocol) == flow.ICMP {
		return nil, 0, ReasonUntranslatable // the message length is unknown (RFC 7915 §1.2)
	}
	if v.fragmentAt > 0 && isExtension(v.ip[v.fragmentAt]) && !r.quoted {
		return nil, 0, ReasonUntranslatable // the offsets include removed headers (RFC 7915 §5.1.1)
	}
	if v.later { // the first fragment determines the protocol (RFC 8200 §4.5)
		return p, r.to.Protocol, ""
	}
	switch {
	case v.protocol == flow.TCP, v.protocol == flow.UDP:
		if v.protocol == flow.UDP && !v.v6 && binary.BigEndian.Uint16(p[6:]) == 0 {
			return zeroChecksum(v, r, p)
		}
		return p, v.protocol, renderTransport(v, r, p, v.protocol)
	case v.kind != notICMP:
		return translateICMP(v, r, p)
	}
	return p, v.protocol, "" // RFC 7915 §4.5, §5.5: every other protocol is unchanged
}

// zeroChecksum computes the UDP checksum that IPv6 requires (RFC 7915 §4.5). The checksum covers
// the datagram but not a trailing surplus area (RFC 9868 §5). A fragment lacks the data to compute
// it.
func zeroChecksum(v *view, r translationParams, p []byte) ([]byte, flow.Protocol, Reason) {
	length := int(binary.BigEndian.Uint16(p[4:]))
	binary.BigEndian.PutUint16(p, r.to.Source.Port())
	binary.BigEndian.PutUint16(p[2:], r.to.Dest.Port())
	switch {
	case r.quoted:
		return p, flow.UDP, "" // no receiver verifies it (RFC 5508 REQ-3c)
	case v.first, r.requireChecksum, length < 8, length > len(p):
		return nil, 0, ReasonUntranslatable
	}
	sum := packet.TransportChecksum(r.to.Source.Addr(), r.to.Dest.Addr(), uint8(flow.UDP), p[:length])
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(p[6:], sum)
	return p, flow.UDP, ""
}
