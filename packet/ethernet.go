// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Ethernet types (IANA "IEEE 802 Numbers").
const (
	TypeIPv4 = 0x0800
	TypeARP  = 0x0806
	TypeVLAN = 0x8100
	TypeQinQ = 0x88a8
	TypeIPv6 = 0x86dd
)

// Ethernet is the header eth(src,dst,type).
type Ethernet struct {
	Src, Dst MAC
	Type     Forced // determined by the next layer if not forced
}

// Name implements Layer.
func (*Ethernet) Name() string { return "eth" }

func (e *Ethernet) fields() []field {
	return []field{hardware("src", &e.Src), hardware("dst", &e.Dst), force("type", &e.Type, 16)}
}

func (e *Ethernet) encode(payload []byte, at encoding) []byte {
	b := make([]byte, 14, 14+len(payload))
	copy(b, e.Dst[:])
	copy(b[6:], e.Src[:])
	binary.BigEndian.PutUint16(b[12:], uint16(e.Type.valueOr(etherType(at.next))))
	return append(b, payload...)
}

// etherType returns the Ethernet type of the next layer; 0xffff (reserved) if it has none.
func etherType(next Layer) uint32 {
	switch next.(type) {
	case *IPv4:
		return TypeIPv4
	case *IPv6:
		return TypeIPv6
	case *ARP:
		return TypeARP
	case *VLAN:
		return TypeVLAN
	}
	return 0xffff
}

// VLAN is the 802.1Q tag vlan(id,prio,type).
type VLAN struct {
	ID       uint16 // 12 bits.
	Priority uint8  // 3 bits.
	Drop     bool   // Drop eligible.
	Type     Forced
}

// Name implements Layer.
func (*VLAN) Name() string { return "vlan" }

func (v *VLAN) fields() []field {
	return []field{shownField("id", &v.ID), number("prio", &v.Priority, 0), flag("dei", &v.Drop), force("type", &v.Type, 16)}
}

func (v *VLAN) encode(payload []byte, at encoding) []byte {
	b := make([]byte, 4, 4+len(payload))
	tag := uint16(v.Priority&7)<<13 | v.ID&0xfff
	if v.Drop {
		tag |= 1 << 12
	}
	binary.BigEndian.PutUint16(b, tag)
	binary.BigEndian.PutUint16(b[2:], uint16(v.Type.valueOr(etherType(at.next))))
	return append(b, payload...)
}

// ARP is an Ethernet/IPv4 ARP packet arp(op,sha,spa,tha,tpa); op 1 is a request, 2 a reply.
type ARP struct {
	Operation            uint16
	SenderMAC, TargetMAC MAC
	Sender, Target       netip.Addr
}

// Name implements Layer.
func (*ARP) Name() string { return "arp" }

func (a *ARP) fields() []field {
	return []field{number("op", &a.Operation, 1), hardware("sha", &a.SenderMAC), address("spa", &a.Sender),
		hardware("tha", &a.TargetMAC), address("tpa", &a.Target)}
}

func (a *ARP) encode(payload []byte, _ encoding) []byte {
	b := make([]byte, 28, 28+len(payload))
	binary.BigEndian.PutUint16(b, 1)
	binary.BigEndian.PutUint16(b[2:], TypeIPv4)
	b[4], b[5] = 6, 4
	binary.BigEndian.PutUint16(b[6:], a.Operation)
	copy(b[8:], a.SenderMAC[:])
	copy(b[14:], address4(a.Sender))
	copy(b[18:], a.TargetMAC[:])
	copy(b[24:], address4(a.Target))
	return append(b, payload...)
}

// address4 returns the four bytes of a, or zeros if a is not an IPv4 address.
func address4(a netip.Addr) []byte {
	if !a.Is4() && !a.Is4In6() {
		return make([]byte, 4)
	}
	v := a.As4()
	return v[:]
}

// address6 returns the sixteen bytes of a, or zeros if a is invalid.
func address6(a netip.Addr) []byte {
	if !a.IsValid() {
		return make([]byte, 16)
	}
	v := a.As16()
	return v[:]
}

// Data is a payload: data(100) is 100 bytes of a fixed pattern, data("text") the
// text, data(0x0102) the bytes.
type Data struct {
	Bytes []byte
}

// Pattern returns the n bytes of data(n): 0, 1, ..., 255, 0, ...
func Pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

// Name implements Layer.
func (*Data) Name() string { return "data" }

func (d *Data) fields() []field {
	return []field{{show: func() string { return showData(d.Bytes) },
		set: func(s string, _ bool) (err error) { d.Bytes, err = readData(s); return err }}}
}

func (d *Data) encode(payload []byte, _ encoding) []byte {
	return append(append(make([]byte, 0, len(d.Bytes)+len(payload)), d.Bytes...), payload...)
}

// Trailer is the data after the IP packet in a frame, for example the padding of short frames: trailer(0x0000). It is
// the last layer, and no length includes it.
type Trailer struct {
	Bytes []byte
}

// Name implements Layer.
func (*Trailer) Name() string { return "trailer" }

func (t *Trailer) fields() []field {
	return []field{{show: func() string { return fmt.Sprintf("%#x", t.Bytes) },
		set: func(s string, _ bool) (err error) { t.Bytes, err = parseHex(s); return err }}}
}

func (t *Trailer) encode(payload []byte, _ encoding) []byte { return append(payload, t.Bytes...) }
