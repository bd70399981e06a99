// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// An ICMP error quotes the offending packet after 8 bytes of its own header (RFC 792, RFC 4443 §3). The offsets count
// from the ICMP header, which nf_tables uses as the transport header. They apply to packets without options.
const (
	icmpChecksum   = 2
	quoteAt        = 8
	quotedChecksum = quoteAt + 10 // checksum of the quoted IPv4 header
	udpChecksumAt  = 6
)

// Quoted are the fields of the packet that an ICMP error quotes.
type Quoted struct {
	Source, Dest, Protocol, SourcePort, DestPort Selector
	// UDPChecksum is 0 in a datagram without a checksum.
	UDPChecksum Selector
	// First is the first byte: the version and, in IPv4, the header length.
	First Selector
}

// QuotedIn returns the quoted fields in errors of a family.
func QuotedIn(f Family) Quoted {
	if f == IP6 {
		return Quoted{
			Source: Field("@th,128,128", IPv6Addr, quoteAt+8), Dest: Field("@th,256,128", IPv6Addr, quoteAt+24),
			Protocol:   Field("@th,112,8", InetProto, quoteAt+6),
			SourcePort: Field("@th,384,16", InetService, quoteAt+40), DestPort: Field("@th,400,16", InetService, quoteAt+42),
			UDPChecksum: Field("@th,432,16", InetService, quoteAt+46), First: Field("@th,64,8", Integer8, quoteAt),
		}
	}
	return Quoted{
		Source: Field("@th,160,32", IPv4Addr, quoteAt+12), Dest: Field("@th,192,32", IPv4Addr, quoteAt+16),
		Protocol:   Field("@th,136,8", InetProto, quoteAt+9),
		SourcePort: Field("@th,224,16", InetService, quoteAt+20), DestPort: Field("@th,240,16", InetService, quoteAt+22),
		UDPChecksum: Field("@th,272,16", InetService, quoteAt+26), First: Field("@th,64,8", Integer8, quoteAt),
	}
}

// SetQuoted overwrites an address and, unless it is 0, a port of the packet that an ICMP error quotes. summed means
// that the packet is UDP with a checksum, which is updated. A quoted TCP segment may end before its checksum, which
// no receiver checks. The checksum of the error stays correct: a checksum inside the quotation, or the error's own,
// compensates each change.
func (b *Builder) SetQuoted(f Family, address Selector, to netip.Addr, portField Selector, port uint16, summed bool) *Builder {
	size, header := uint32(address.Type.Len), uint32(20)
	if f == IP6 {
		header = 40
	}
	of := func(offset uint32) checksum { return checksum{unix.NFT_PAYLOAD_CSUM_INET, offset, false} }
	inner := of(icmpChecksum)
	if summed {
		inner = of(quoteAt + header + udpChecksumAt)
	}
	store := func(s Selector, size uint32, from int, c checksum) {
		b.attrs.payloadStore(s.base, s.offset, size, from, c)
	}
	const was = 8 // register of the original address
	address.load(&b.attrs, was)
	b.attrs.immediate(0, string(to.AsSlice()))
	if f == IP {
		store(address, size, 0, of(quotedChecksum))
		if summed { // one checksum at a time: first the error's own, then the UDP checksum
			store(address, size, was, of(icmpChecksum))
			store(address, size, 0, inner)
		}
	} else {
		store(address, size, 0, inner)
	}
	b.appendText("%s set %s", address.Text, Addr(to).Text)
	if port != 0 {
		b.attrs.immediate(0, Port(port).Raw)
		store(portField, 2, 0, inner)
		b.appendText("%s set %s", portField.Text, Port(port).Text)
	}
	return b
}

// Defragment starts a rule that matches no packet. It makes the kernel reassemble fragments before the rules of the
// table, as with connection tracking. The kernel reassembles fragments for rules that may deliver packets to a local
// proxy.
func Defragment(f Family) Rule {
	nobody := Addr(netip.IPv4Unspecified())
	if f == IP6 {
		nobody = Addr(netip.IPv6Unspecified())
	}
	b := NewRule().Is(Source(f), nobody).Is(Dest(f), nobody).Is(L4Proto, Proto(flow.UDP))
	b.attrs.immediate(0, Port(1).Raw)
	b.attrs.expr("tproxy", func(a *Attrs) {
		a.Uint32(tproxyFamily, uint32(f))
		a.Uint32(tproxyPort, register(0))
	})
	return b.appendText("tproxy to :1").Rule("puts fragments together")
}
