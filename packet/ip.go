// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"net/netip"
)

// IP protocol numbers of layers without a name in flow.
const (
	protoHopByHop = 0
	protoICMP     = 1
	protoIPv4     = 4
	protoTCP      = 6
	protoUDP      = 17
	protoIPv6     = 41
	protoRouting  = 43
	protoFragment = 44
	protoICMPv6   = 58
	protoNone     = 59
	protoDestOpts = 60
	protoSCTP     = 132
	protoUnknown  = 253 // "for experimentation", RFC 3692
)

// IPv4 is the header ip4(src,dst,ttl,tos,id,df,mf,rf,off,proto,opts,ihl,len,sum).
type IPv4 struct {
	Src, Dst netip.Addr
	TTL      uint8 // default in texts: 64
	TOS      uint8
	ID       uint16
	DF, MF   bool
	Reserved bool   // The "evil bit", rf.
	Offset   uint16 // of the fragment, in bytes, a multiple of 8
	Options  []byte // Padded with zeros to a multiple of four bytes.
	IHL      Forced // Header length in 32-bit words.
	Protocol Forced
	Length   Forced // total length in bytes
	Checksum Forced
}

// Name implements Layer.
func (*IPv4) Name() string { return "ip4" }

func (ip *IPv4) fields() []field {
	return []field{
		address("src", &ip.Src), address("dst", &ip.Dst), number("ttl", &ip.TTL, 64), hexNumber("tos", &ip.TOS, 0),
		number("id", &ip.ID, 0), flag("df", &ip.DF), flag("mf", &ip.MF), flag("rf", &ip.Reserved), number("off", &ip.Offset, 0),
		force("proto", &ip.Protocol, 10), octets("opts", &ip.Options),
		force("ihl", &ip.IHL, 10), force("len", &ip.Length, 10), force("sum", &ip.Checksum, 16),
	}
}

func (ip *IPv4) encode(payload []byte, at encoding) []byte {
	words := 5 + (len(ip.Options)+3)/4
	b := make([]byte, words*4, words*4+len(payload))
	b[0] = 4<<4 | byte(ip.IHL.valueOr(uint32(words)))&15
	b[1] = ip.TOS
	binary.BigEndian.PutUint16(b[2:], uint16(ip.Length.valueOr(uint32(words*4+len(payload)))))
	binary.BigEndian.PutUint16(b[4:], ip.ID)
	fragment := ip.Offset / 8 & 0x1fff
	for i, on := range []bool{ip.MF, ip.DF, ip.Reserved} {
		if on {
			fragment |= 0x2000 << i
		}
	}
	binary.BigEndian.PutUint16(b[6:], fragment)
	b[8] = ip.TTL
	b[9] = byte(ip.Protocol.valueOr(protocolOf(at.next, family4)))
	copy(b[12:], address4(ip.Src))
	copy(b[16:], address4(ip.Dst))
	copy(b[20:], ip.Options)
	binary.BigEndian.PutUint16(b[10:], uint16(ip.Checksum.valueOr(uint32(Checksum(b)))))
	return append(b, payload...)
}

// protocolOf returns the protocol number of the next layer in the family.
func protocolOf(next Layer, family addrFamily) uint32 {
	switch l := next.(type) {
	case *IPv4:
		return protoIPv4
	case *IPv6:
		return protoIPv6
	case *TCP:
		return protoTCP
	case *UDP:
		return protoUDP
	case *SCTP:
		return protoSCTP
	case *ICMP:
		return uint32(l.protocol())
	case *Options6:
		if l.Destination {
			return protoDestOpts
		}
		return protoHopByHop
	case *Routing:
		return protoRouting
	case *Fragment:
		return protoFragment
	case nil:
		if family == family6 {
			return protoNone
		}
	}
	return protoUnknown
}

// IPv6 is the header ip6(src,dst,hl,tc,flow,next,len).
type IPv6 struct {
	Src, Dst     netip.Addr
	HopLimit     uint8 // default in texts: 64
	TrafficClass uint8
	FlowLabel    uint32 // 20 bits wide
	NextHeader   Forced
	Length       Forced // length of the payload in bytes
}

// Name implements Layer.
func (*IPv6) Name() string { return "ip6" }

func (ip *IPv6) fields() []field {
	return []field{
		address("src", &ip.Src), address("dst", &ip.Dst), number("hl", &ip.HopLimit, 64), hexNumber("tc", &ip.TrafficClass, 0),
		hexNumber("flow", &ip.FlowLabel, 0), force("next", &ip.NextHeader, 10), force("len", &ip.Length, 10),
	}
}

func (ip *IPv6) encode(payload []byte, at encoding) []byte {
	b := make([]byte, 40, 40+len(payload))
	binary.BigEndian.PutUint32(b, 6<<28|uint32(ip.TrafficClass)<<20|ip.FlowLabel&0xfffff)
	binary.BigEndian.PutUint16(b[4:], uint16(ip.Length.valueOr(uint32(len(payload)))))
	b[6] = byte(ip.NextHeader.valueOr(protocolOf(at.next, family6)))
	b[7] = ip.HopLimit
	copy(b[8:], address6(ip.Src))
	copy(b[24:], address6(ip.Dst))
	return append(b, payload...)
}

// Options6 is a hop-by-hop (hbh) or destination options (dstopts) header; empty
// options are a PadN.
type Options6 struct {
	Destination bool
	Options     []byte // padded to 8n+6 bytes with zeros (Pad1)
	NextHeader  Forced
	Length      Forced // in units of 8 bytes, minus the first unit
}

// Name implements Layer.
func (o *Options6) Name() string {
	if o.Destination {
		return "dstopts"
	}
	return "hbh"
}

func (o *Options6) fields() []field {
	return []field{octets("opts", &o.Options), force("next", &o.NextHeader, 10), force("len", &o.Length, 10)}
}

func (o *Options6) encode(payload []byte, at encoding) []byte {
	n := (2 + len(o.Options) + 7) / 8
	b := make([]byte, 8*n, 8*n+len(payload))
	b[0] = byte(o.NextHeader.valueOr(protocolOf(at.next, family6)))
	b[1] = byte(o.Length.valueOr(uint32(n - 1)))
	if len(o.Options) == 0 {
		b[2], b[3] = 1, 4 // PadN, RFC 8200 §4.2
	}
	copy(b[2:], o.Options)
	return append(b, payload...)
}

// Routing is the header routing(type,left,data).
type Routing struct {
	Type         uint8
	SegmentsLeft uint8
	Data         []byte // padded to 8n+4 bytes
	NextHeader   Forced
	Length       Forced // in units of 8 bytes, minus the first unit
}

// Name implements Layer.
func (*Routing) Name() string { return "routing" }

func (r *Routing) fields() []field {
	return []field{number("type", &r.Type, 0), number("left", &r.SegmentsLeft, 0), octets("data", &r.Data),
		force("next", &r.NextHeader, 10), force("len", &r.Length, 10)}
}

func (r *Routing) encode(payload []byte, at encoding) []byte {
	n := (4 + len(r.Data) + 7) / 8
	b := make([]byte, 8*n, 8*n+len(payload))
	b[0] = byte(r.NextHeader.valueOr(protocolOf(at.next, family6)))
	b[1] = byte(r.Length.valueOr(uint32(n - 1)))
	b[2], b[3] = r.Type, r.SegmentsLeft
	copy(b[4:], r.Data)
	return append(b, payload...)
}

// Fragment is the header frag(off,more,id) of IPv6.
type Fragment struct {
	Offset     uint16 // in bytes, a multiple of 8
	More       bool
	ID         uint32
	Reserved   uint16 // reserved bits: the header's second byte, and two bits of the offset field
	NextHeader Forced
}

// Name implements Layer.
func (*Fragment) Name() string { return "frag" }

func (f *Fragment) fields() []field {
	return []field{number("off", &f.Offset, 0), flag("more", &f.More), number("id", &f.ID, 0),
		hexNumber("res", &f.Reserved, 0), force("next", &f.NextHeader, 10)}
}

func (f *Fragment) encode(payload []byte, at encoding) []byte {
	b := make([]byte, 8, 8+len(payload))
	b[0] = byte(f.NextHeader.valueOr(protocolOf(at.next, family6)))
	b[1] = byte(f.Reserved >> 8)
	v := f.Offset&^7 | f.Reserved&3<<1
	if f.More {
		v |= 1
	}
	binary.BigEndian.PutUint16(b[2:], v)
	binary.BigEndian.PutUint32(b[4:], f.ID)
	return append(b, payload...)
}
