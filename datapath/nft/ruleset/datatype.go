// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

// Type is the type of a key or value field. ID is nft's number (enum datatypes in its datatype.h). The kernel only
// stores it; nft uses it for printing.
type Type struct {
	Name string
	ID   uint32
	Len  int  // Bytes.
	Host bool // in host byte order
}

// Types of fields.
var (
	IPv4Addr    = Type{"ipv4_addr", 7, 4, false}
	IPv6Addr    = Type{"ipv6_addr", 8, 16, false}
	EtherAddr   = Type{"ether_addr", 9, 6, false}
	InetProto   = Type{"inet_proto", 12, 1, false}
	InetService = Type{"inet_service", 13, 2, false}
	Mark        = Type{"mark", 19, 4, true}
	IfName      = Type{"ifname", 41, 16, false}
	Integer8    = Type{"integer", 4, 1, false}
)

// concatBits is the number of bits per type in the number of a concatenation.
const concatBits = 6

func keyType(types []Type) (id uint32) {
	for _, t := range types {
		id = id<<concatBits | t.ID
	}
	return id
}

// TypeNumber returns the type number of a concatenation.
func TypeNumber(types []Type) uint32 { return keyType(types) }

// Width returns the length in bytes of a key or value. The fields of a concatenation are padded to four bytes; a
// single field is not padded.
func Width(types []Type) int {
	if len(types) == 1 {
		return types[0].Len
	}
	n := 0
	for _, t := range types {
		n += pad4(t.Len)
	}
	return n
}

func pad4(n int) int { return (n + 3) &^ 3 }

// Value is a constant: bytes for the kernel and text for people.
type Value struct {
	Raw  string
	Text string
}

// Addr returns an address constant.
func Addr(a netip.Addr) Value { return Value{string(a.AsSlice()), a.String()} }

// ToHost is the PacketType of a frame for this host.
var ToHost = Value{"\x00", "host"}

// Port returns a port constant.
func Port(p uint16) Value {
	return Value{string([]byte{byte(p >> 8), byte(p)}), strconv.Itoa(int(p))}
}

// Proto returns a layer-4 protocol constant.
func Proto(p flow.Protocol) Value {
	text := p.String()
	switch p {
	case flow.ICMPv6:
		text = "ipv6-icmp"
	case flow.Any:
		text = "0"
	}
	return Value{string([]byte{byte(p)}), text}
}

// Number returns a 32-bit number in host byte order, as for marks.
func Number(v uint32) Value {
	return Value{string(binary.NativeEndian.AppendUint32(nil, v)), fmt.Sprintf("0x%08x", v)}
}

// Iface returns an interface name constant.
func Iface(name string) Value {
	b := make([]byte, 16)
	copy(b, name)
	return Value{string(b), strconv.Quote(name)}
}

// Ifaces returns the constant for the interfaces of a word: one name, or a name prefix if the word ends with "*".
func Ifaces(word string) Value {
	if start, wild := strings.CutSuffix(word, "*"); wild {
		return Value{start, strconv.Quote(word)}
	}
	return Iface(word)
}

// IfaceSpan returns the first and the last key of the interfaces of a word, for an interval map.
func IfaceSpan(word string) (first, last Value) {
	start, wild := strings.CutSuffix(word, "*")
	first, last = Iface(start), Iface(start)
	if wild {
		last.Raw = start + strings.Repeat("\xff", len(last.Raw)-len(start))
	}
	return first, last
}

// Concat joins constants to a key. A single constant is not padded.
func Concat(values ...Value) string {
	if len(values) == 1 {
		return values[0].Raw
	}
	var b []byte
	for _, v := range values {
		b = append(b, v.Raw...)
		for len(b)%4 != 0 {
			b = append(b, 0)
		}
	}
	return string(b)
}

// Render formats the bytes of a key or value by its types.
func Render(types []Type, raw string) string {
	parts := make([]string, 0, len(types))
	for _, t := range types {
		n := t.Len
		if len(raw) < n {
			return fmt.Sprintf("%x", raw)
		}
		parts = append(parts, t.render([]byte(raw[:n])))
		raw = raw[min(pad4(n), len(raw)):]
	}
	return strings.Join(parts, " . ")
}

func (t Type) render(b []byte) string {
	switch t {
	case IPv4Addr, IPv6Addr:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case EtherAddr:
		return net.HardwareAddr(b).String()
	case InetProto:
		return Proto(flow.Protocol(b[0])).Text
	case InetService:
		return strconv.Itoa(int(binary.BigEndian.Uint16(b)))
	case Mark:
		return fmt.Sprintf("0x%08x", binary.NativeEndian.Uint32(b))
	case IfName:
		return strconv.Quote(strings.TrimRight(string(b), "\x00"))
	}
	return strconv.Itoa(int(b[0]))
}

// renderRange formats a range of keys field by field, with prefixes in CIDR form.
func renderRange(types []Type, first, last string) string {
	parts := make([]string, 0, len(types))
	for _, t := range types {
		n := t.Len
		lo, hi := first[:n], last[:n]
		first, last = first[min(pad4(n), len(first)):], last[min(pad4(n), len(last)):]
		text := t.render([]byte(lo))
		if lo != hi {
			if bits, ok := prefixLen(lo, hi); ok && (t == IPv4Addr || t == IPv6Addr) {
				text += "/" + strconv.Itoa(bits)
			} else {
				text += "-" + t.render([]byte(hi))
			}
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, " . ")
}

// prefixLen returns the length of the prefix that covers exactly lo..hi.
func prefixLen(lo, hi string) (int, bool) {
	bits := 0
	for bits < len(lo)*8 && bit(lo, bits) == bit(hi, bits) {
		bits++
	}
	for i := bits; i < len(lo)*8; i++ {
		if bit(lo, i) != 0 || bit(hi, i) != 1 {
			return 0, false
		}
	}
	return bits, true
}

func bit(s string, i int) byte { return s[i/8] >> (7 - i%8) & 1 }

// TypesOf splits the type number of a concatenation. An unknown type becomes one field of the whole width.
func TypesOf(number uint32, width int) []Type {
	var types []Type
	for n := number; n != 0; n >>= concatBits {
		t, ok := typeByID[n&(1<<concatBits-1)]
		if !ok {
			return []Type{{Name: "unknown", ID: number, Len: width}}
		}
		types = append([]Type{t}, types...)
	}
	return types
}

var typeByID = func() map[uint32]Type {
	m := make(map[uint32]Type)
	for _, t := range []Type{IPv4Addr, IPv6Addr, EtherAddr, InetProto, InetService, Mark, IfName, Integer8} {
		m[t.ID] = t
	}
	return m
}()

// HardwareAddr returns a MAC address constant.
func HardwareAddr(m [6]byte) Value {
	return Value{string(m[:]), net.HardwareAddr(m[:]).String()}
}

// Uint8 returns a number of one byte.
func Uint8(n byte) Value { return Value{string([]byte{n}), strconv.Itoa(int(n))} }
