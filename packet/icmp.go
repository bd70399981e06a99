// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
)

// ICMP is an ICMP message of either family: icmp(type,code,...) in IPv4, icmp6(type,code,...) in IPv6. Echo messages
// show id and seq, too-big messages mtu, parameter problems ptr, redirects gw. rest is the remainder of the second
// header word. In an error the offending packet follows.
type ICMP struct {
	V6         bool
	Type, Code uint8
	Rest       uint32 // Second word of the header.
	Length     Forced // of the packet in an RFC 4884 error, in 4-byte (ICMPv6: 8-byte) words; part of Rest on the wire
	Checksum   Forced
}

// icmpNames maps the names of types in texts (IANA "ICMP Parameters", "ICMPv6 Parameters").
var icmpNames = map[bool]map[string]uint8{
	false: {"reply": 0, "unreachable": 3, "quench": 4, "redirect": 5, "echo": 8, "time-exceeded": 11, "param": 12,
		"timestamp": 13, "timestamp-reply": 14, "info": 15, "info-reply": 16, "mask": 17, "mask-reply": 18},
	true: {"unreachable": 1, "too-big": 2, "time-exceeded": 3, "param": 4, "echo": 128, "reply": 129, "mld-query": 130,
		"rs": 133, "ra": 134, "ns": 135, "na": 136},
}

// Name implements Layer.
func (i *ICMP) Name() string {
	if i.V6 {
		return "icmp6"
	}
	return "icmp"
}

func (i *ICMP) protocol() uint8 {
	if i.V6 {
		return protoICMPv6
	}
	return protoICMP
}

// IsQuery reports whether the message has an identifier: echo and, in IPv4, timestamp, information and address mask.
func (i *ICMP) IsQuery() bool {
	if i.V6 {
		return i.Type == 128 || i.Type == 129
	}
	return i.Type == 0 || i.Type == 8 || i.Type >= 13 && i.Type <= 18
}

// IsError reports whether the message contains the offending packet.
func (i *ICMP) IsError() bool { return isICMPError(i.V6, i.Type) }

func isICMPError(v6 bool, kind uint8) bool {
	if v6 {
		return kind < 128 && kind > 0
	}
	return slices.Contains([]uint8{3, 4, 5, 11, 12}, kind)
}

// ID returns the identifier of a query, the high half of Rest.
func (i *ICMP) ID() uint16 { return uint16(i.Rest >> 16) }

// Seq is the sequence number of an echo message.
func (i *ICMP) Seq() uint16 { return uint16(i.Rest) }

// MTU returns the MTU of an IPv4 "fragmentation needed" (the low half of Rest) or an ICMPv6 "packet too big" (all of
// Rest).
func (i *ICMP) MTU() uint32 {
	if i.V6 {
		return i.Rest
	}
	return i.Rest & 0xffff
}

// The type determines the names of the parts of Rest, so type is first in a text.
func (i *ICMP) fields() []field {
	all := []field{
		{key: "type", show: i.showType, set: i.setType},
		number("code", &i.Code, 0),
	}
	half := func(key string, shift uint) field { return i.wordField(key, shift, 0xffff) }
	switch {
	case i.IsQuery():
		all = append(all, half("id", 16), half("seq", 0))
	case !i.V6 && i.Type == 3:
		all = append(all, half("mtu", 0), i.wordField("rest", 16, 0xffff))
	case i.V6 && i.Type == 2:
		all = append(all, i.wordField("mtu", 0, 0xffffffff))
	case !i.V6 && i.Type == 12:
		all = append(all, i.wordField("ptr", 24, 0xff), i.wordField("rest", 0, 0xffffff))
	case i.V6 && i.Type == 4:
		all = append(all, i.wordField("ptr", 0, 0xffffffff))
	case !i.V6 && i.Type == 5:
		all = append(all, field{key: "gw", show: func() string {
			return "gw=" + netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, i.Rest))).String()
		}, set: i.setGateway})
	default:
		all = append(all, i.wordField("rest", 0, 0xffffffff))
	}
	return append(all, force("len", &i.Length, 10), force("sum", &i.Checksum, 16))
}

func (i *ICMP) showType() string {
	for name, v := range icmpNames[i.V6] {
		if v == i.Type {
			return "type=" + name
		}
	}
	return fmt.Sprintf("type=%d", i.Type)
}

func (i *ICMP) setType(s string, _ bool) error {
	if v, ok := icmpNames[i.V6][s]; ok {
		i.Type = v
		return nil
	}
	v, err := strconv.ParseUint(s, 0, 8)
	if err != nil {
		return fmt.Errorf("%q: not an %s type", s, i.Name())
	}
	i.Type = uint8(v)
	return nil
}

func (i *ICMP) setGateway(s string, _ bool) error {
	a, err := netip.ParseAddr(s)
	if err != nil || !a.Is4() {
		return fmt.Errorf("%q: not an IPv4 address", s)
	}
	v := a.As4()
	i.Rest = binary.BigEndian.Uint32(v[:])
	return nil
}

func (i *ICMP) wordField(key string, shift uint, mask uint32) field {
	return field{key: key, show: func() string {
		if i.Rest>>shift&mask == 0 {
			return ""
		}
		return fmt.Sprintf("%s=%d", key, i.Rest>>shift&mask)
	}, set: func(s string, _ bool) error {
		v, err := strconv.ParseUint(s, 0, 32)
		if err != nil || v > uint64(mask) {
			return fmt.Errorf("%q: not a number that fits", s)
		}
		i.Rest = i.Rest&^(mask<<shift) | uint32(v)<<shift
		return nil
	}}
}

// lengthByte returns the position of RFC 4884's length in the header and its unit in bytes; 0 if the message has no
// length.
func (i *ICMP) lengthByte() (position, unit int) {
	switch {
	case i.V6 && (i.Type == 1 || i.Type == 3):
		return 4, 8
	case !i.V6 && (i.Type == 3 || i.Type == 11 || i.Type == 12):
		return 5, 4
	}
	return 0, 0
}

func (i *ICMP) encode(payload []byte, at encoding) []byte {
	b := make([]byte, 8, 8+len(payload))
	b[0], b[1] = i.Type, i.Code
	binary.BigEndian.PutUint32(b[4:], i.Rest)
	length := uint32(0)
	position, unit := i.lengthByte()
	if at.extension != nil && unit > 0 {
		for len(payload) < 128 || len(payload)%unit != 0 { // RFC 4884 §3
			payload = append(payload, 0)
		}
		length = uint32(len(payload) / unit)
		payload = at.extension.encode(payload, at)
	}
	if unit > 0 && (length != 0 || i.Length.Set) {
		b[position] = byte(i.Length.valueOr(length))
	}
	b = append(b, payload...)
	sum := Checksum(b)
	if i.V6 {
		sum = TransportChecksum(at.src, at.dst, protoICMPv6, b)
	}
	binary.BigEndian.PutUint16(b[2:], uint16(i.Checksum.valueOr(uint32(sum))))
	return b
}

// Extension is the extension structure of an ICMP error (RFC 4884 §7): ext(0x...) with the objects' bytes. It follows
// the inner packet and belongs to the outermost ICMP error.
type Extension struct {
	Objects  []byte
	Checksum Forced
}

// Name implements Layer.
func (*Extension) Name() string { return "ext" }

func (e *Extension) fields() []field {
	return []field{{show: func() string { return fmt.Sprintf("%#x", e.Objects) },
		set: func(s string, _ bool) (err error) { e.Objects, err = parseHex(s); return err }},
		force("sum", &e.Checksum, 16)}
}

// encode appends the structure to the preceding padded packet.
func (e *Extension) encode(packet []byte, _ encoding) []byte {
	b := append([]byte{2 << 4, 0, 0, 0}, e.Objects...)
	binary.BigEndian.PutUint16(b[2:], uint16(e.Checksum.valueOr(uint32(Checksum(b)))))
	return append(packet, b...)
}
