// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Selector is a property of a packet that rules compare, look up or hash.
type Selector struct {
	Text string
	Type Type
	load func(a *Attrs, dst int)
	// only payload fields are writable
	base, offset uint32
}

func payload(text string, t Type, base, offset uint32) Selector {
	return Selector{
		Text: text, Type: t, base: base, offset: offset,
		load: func(a *Attrs, dst int) { a.payloadLoad(base, offset, uint32(t.Len), dst) },
	}
}

func meta(text string, t Type, key uint32) Selector {
	return Selector{Text: text, Type: t, load: func(a *Attrs, dst int) { a.metaLoad(key, dst) }}
}

// Source returns the source address.
func Source(f Family) Selector {
	if f == IP6 {
		return payload("ip6 saddr", IPv6Addr, unix.NFT_PAYLOAD_NETWORK_HEADER, 8)
	}
	return payload("ip saddr", IPv4Addr, unix.NFT_PAYLOAD_NETWORK_HEADER, 12)
}

// Dest returns the destination address.
func Dest(f Family) Selector {
	if f == IP6 {
		return payload("ip6 daddr", IPv6Addr, unix.NFT_PAYLOAD_NETWORK_HEADER, 24)
	}
	return payload("ip daddr", IPv4Addr, unix.NFT_PAYLOAD_NETWORK_HEADER, 16)
}

// TTL returns the TTL or hop limit.
func TTL(f Family) Selector {
	if f == IP6 {
		return payload("ip6 hoplimit", Integer8, unix.NFT_PAYLOAD_NETWORK_HEADER, 7)
	}
	return payload("ip ttl", Integer8, unix.NFT_PAYLOAD_NETWORK_HEADER, 8)
}

// Selectors common to all families. Ports apply to every layer-4 protocol.
var (
	SourcePort = payload("th sport", InetService, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0)
	DestPort   = payload("th dport", InetService, unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2)
	SourceMAC  = payload("ether saddr", EtherAddr, unix.NFT_PAYLOAD_LL_HEADER, 6)
	DestMAC    = payload("ether daddr", EtherAddr, unix.NFT_PAYLOAD_LL_HEADER, 0)
	L4Proto    = meta("meta l4proto", InetProto, unix.NFT_META_L4PROTO)
	InName     = meta("iifname", IfName, unix.NFT_META_IIFNAME)
	OutName    = meta("oifname", IfName, unix.NFT_META_OIFNAME)
	PacketMark = meta("meta mark", Mark, unix.NFT_META_MARK)
	// PacketType distinguishes frames for this host, for others and for groups.
	PacketType = meta("meta pkttype", Integer8, unix.NFT_META_PKTTYPE)
	Priority   = meta("meta priority", Mark, unix.NFT_META_PRIORITY)
	CtMark     = Selector{Text: "ct mark", Type: Mark, load: func(a *Attrs, dst int) { a.ctLoad(unix.NFT_CT_MARK, -1, dst) }}
	// OriginalPort is the destination port of the connection's original tuple.
	OriginalPort = Selector{
		Text: "ct original proto-dst", Type: InetService,
		load: func(a *Attrs, dst int) { a.ctLoad(unix.NFT_CT_PROTO_DST, 0, dst) },
	}
)

// OriginalDest returns the destination address of the connection's original tuple.
func OriginalDest(f Family) Selector {
	if f == IP6 {
		return Selector{Text: "ct original ip6 daddr", Type: IPv6Addr, load: func(a *Attrs, dst int) { a.ctLoad(unix.NFT_CT_DST_IP6, 0, dst) }}
	}
	return Selector{Text: "ct original ip daddr", Type: IPv4Addr, load: func(a *Attrs, dst int) { a.ctLoad(unix.NFT_CT_DST_IP, 0, dst) }}
}

// ReplyDest returns the destination address of the connection's reply tuple: its translated source address.
func ReplyDest(f Family) Selector {
	if f == IP6 {
		return Selector{Text: "ct reply ip6 daddr", Type: IPv6Addr, load: func(a *Attrs, dst int) { a.ctLoad(unix.NFT_CT_DST_IP6, 1, dst) }}
	}
	return Selector{Text: "ct reply ip daddr", Type: IPv4Addr, load: func(a *Attrs, dst int) { a.ctLoad(unix.NFT_CT_DST_IP, 1, dst) }}
}

// Slots are the numbers First to First+Count-1; each packet gets one.
type Slots struct {
	First uint32
	Count int
}

func (s Slots) offset() string {
	if s.First == 0 {
		return ""
	}
	return fmt.Sprintf(" offset %d", s.First)
}

// Next assigns slots to packets in rotation.
func Next(s Slots) Selector {
	return Selector{
		Text: fmt.Sprintf("numgen inc mod %d%s", s.Count, s.offset()), Type: Mark,
		load: func(a *Attrs, dst int) { a.numgen(unix.NFT_NG_INCREMENTAL, s, dst) },
	}
}

// Random assigns a random slot.
func Random(s Slots) Selector {
	return Selector{
		Text: fmt.Sprintf("numgen random mod %d%s", s.Count, s.offset()), Type: Mark,
		load: func(a *Attrs, dst int) { a.numgen(unix.NFT_NG_RANDOM, s, dst) },
	}
}

// hashScratch is the first register for the input of a hash or a lookup. It does not overlap the registers of the
// result.
const hashScratch = 4

// Hash returns Jenkins' hash of the selectors with a seed, reduced to the slots. balance.JHash and balance.Slot
// compute the same.
func Hash(s Slots, seed uint32, of ...Selector) Selector {
	text, width := concatText(of), concatWidth(of)
	return Selector{
		Text: fmt.Sprintf("jhash %s mod %d seed 0x%x%s", text, s.Count, seed, s.offset()), Type: Mark,
		load: func(a *Attrs, dst int) {
			concatLoad(a, of, hashScratch)
			a.hash(hashScratch, width, s, seed, dst)
		},
	}
}

// Masked returns s with the bits of mask; other bits are cleared.
func Masked(s Selector, mask Value) Selector {
	return Selector{
		Text: s.Text + " & " + mask.Text, Type: s.Type,
		load: func(a *Attrs, dst int) {
			s.load(a, dst)
			a.bitwise(dst, dst, mask.Raw, strings.Repeat("\x00", len(mask.Raw)))
		},
	}
}

func concatText(sel []Selector) string {
	parts := make([]string, len(sel))
	for i, s := range sel {
		parts[i] = s.Text
	}
	return strings.Join(parts, " . ")
}

func concatWidth(sel []Selector) int {
	if len(sel) == 1 {
		return sel[0].Type.Len
	}
	n := 0
	for _, s := range sel {
		n += pad4(s.Type.Len)
	}
	return n
}

// concatLoad loads the selectors in sequence into registers from first on.
func concatLoad(a *Attrs, sel []Selector, first int) {
	for _, s := range sel {
		s.load(a, first)
		first += pad4(s.Type.Len) / 4
	}
}

// Types returns the types of the selectors, for a set with these keys.
func Types(sel []Selector) []Type {
	types := make([]Type, len(sel))
	for i, s := range sel {
		types[i] = s.Type
	}
	return types
}

// Field returns a 16-bit field of the layer-4 header.
func Field(text string, t Type, offset uint32) Selector {
	return payload(text, t, unix.NFT_PAYLOAD_TRANSPORT_HEADER, offset)
}

// Word returns one of the 16-bit words of an address.
func Word(s Selector, n int) Selector {
	return subfield(s, InetService, uint32(2*n))
}

// Byte returns one of the bytes of an address.
func Byte(s Selector, n int) Selector {
	return subfield(s, Integer8, uint32(n))
}

func subfield(s Selector, t Type, at uint32) Selector {
	text := fmt.Sprintf("@nh,%d,%d", 8*(s.offset+at), 8*t.Len)
	return payload(text, t, s.base, s.offset+at)
}
