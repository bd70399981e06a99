// SPDX-License-Identifier: Apache-2.0

// Package packet builds and parses Ethernet frames, with a readable text form:
//
//	eth(src=02:00:00:00:00:01,dst=02:00:00:00:00:02)/ip4(src=192.0.2.1,dst=198.51.100.7,df)/tcp(sport=1024,dport=80,flags=S,seq=1,opts=[mss:1460])/data(100)
//
// Build computes lengths, checksums and protocol numbers unless the text contains a value. It uses a value in the
// text even if the value is wrong. Parse shows such a field only if the frame differs from the computed value. So the
// text of a correct packet never contains these fields, and the text of an incorrect packet shows the error. For
// every frame, building the parsed packet returns the same bytes.
//
// Structs use host byte order, frames use network byte order. The package is pure: it reads no clock and does no I/O.
package packet

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// Packet is a stack of layers, outermost first.
type Packet []Layer

// Layer is one header or payload of a packet. The set of layers is closed: *Ethernet, *VLAN, *ARP, *IPv4, *IPv6,
// *Options6, *Routing, *Fragment, *TCP, *UDP, *SCTP, *ICMP, *GUE, *Data, *Extension and *Trailer.
type Layer interface {
	// Name of the layer in the text form.
	Name() string
	// fields returns the fields of the text form in order.
	fields() []field
	// encode returns the header followed by payload.
	encode(payload []byte, at encoding) []byte
}

// encoding is the context of a layer during encoding.
type encoding struct {
	next      Layer      // The next layer, or nil.
	src, dst  netip.Addr // of the innermost enclosing IP layer, for pseudo headers
	extension *Extension // of an ICMP error (RFC 4884), or nil
	family    addrFamily // of the innermost enclosing IP layer
}

type addrFamily uint8

const (
	noFamily addrFamily = iota
	family4
	family6
)

// Forced is a computed field that can be forced to a value. The zero value means
// "compute it".
type Forced struct {
	Value uint32
	Set   bool
}

// Force returns a field with the value v, correct or not.
func Force(v uint32) Forced { return Forced{Value: v, Set: true} }

func (f Forced) valueOr(v uint32) uint32 {
	if f.Set {
		return f.Value
	}
	return v
}

// MAC is a 48-bit hardware address; the zero value means none.
type MAC [6]byte

// String returns "02:00:00:00:00:01".
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// ParseMAC is the inverse of String.
func ParseMAC(s string) (MAC, error) {
	hw, err := net.ParseMAC(s)
	if err != nil || len(hw) != 6 {
		return MAC{}, fmt.Errorf("mac %q: not six hexadecimal bytes", s)
	}
	return MAC(hw), nil
}

// Build returns the packet's bytes.
func (p Packet) Build() []byte {
	layers := p
	var trailer []byte
	if n := len(layers); n > 0 {
		if t, ok := layers[n-1].(*Trailer); ok {
			trailer, layers = t.Bytes, layers[:n-1]
		}
	}
	var extension *Extension
	if n := len(layers); n > 0 {
		if e, ok := layers[n-1].(*Extension); ok {
			extension, layers = e, layers[:n-1]
		}
	}
	firstICMP := -1
	for i, l := range layers {
		if _, ok := l.(*ICMP); ok {
			firstICMP = i
			break
		}
	}
	var b []byte
	for i := len(layers) - 1; i >= 0; i-- {
		at := layers[:i].enclosingLayer()
		if i+1 < len(layers) {
			at.next = layers[i+1]
		}
		if i == firstICMP {
			at.extension = extension
		}
		b = layers[i].encode(b, at)
	}
	return append(b, trailer...)
}

// enclosingLayer returns the place of a layer after p.
func (p Packet) enclosingLayer() encoding {
	for i := len(p) - 1; i >= 0; i-- {
		switch ip := p[i].(type) {
		case *IPv4:
			return encoding{src: ip.Src, dst: ip.Dst, family: family4}
		case *IPv6:
			return encoding{src: ip.Src, dst: ip.Dst, family: family6}
		}
	}
	return encoding{}
}

// String returns the text form, on one line.
func (p Packet) String() string {
	var b strings.Builder
	for i, l := range p {
		if i > 0 {
			b.WriteByte('/')
		}
		b.WriteString(l.Name())
		b.WriteByte('(')
		first := true
		for _, f := range l.fields() {
			v := f.show()
			if v == "" {
				continue
			}
			if !first {
				b.WriteByte(',')
			}
			first = false
			b.WriteString(v)
		}
		b.WriteByte(')')
	}
	return b.String()
}

// Find returns the first layer of type T, or false if there is none.
func Find[T Layer](p Packet) (T, bool) {
	for _, l := range p {
		if t, ok := l.(T); ok {
			return t, true
		}
	}
	var none T
	return none, false
}

// MustText is like Text, for constant texts; it panics on an error.
func MustText(s string) Packet {
	p, err := Text(s)
	if err != nil {
		panic(fmt.Sprintf("packet: %v", err))
	}
	return p
}
