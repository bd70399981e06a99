// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Flags of a translation (include/uapi/linux/netfilter/nf_nat.h).
const (
	natMapIPs         = 1 << 0
	natProtoSpecified = 1 << 1
	natPersistent     = 1 << 3
	natFullyRandom    = 1 << 4
	natNetmap         = 1 << 6
)

// Registers of a translation's operands: first and last address, first and last port.
const (
	regAddrMin, regAddrMax = 0, 4
	regPortMin, regPortMax = 8, 9
)

// Redirected matches packets of connections with a translated destination.
func (b *Builder) Redirected() *Builder {
	const dnat = 1 << 5 // IPS_DST_NAT
	b.attrs.ctLoad(unix.NFT_CT_STATUS, -1, 0)
	b.attrs.bitwise(0, 0, Number(dnat).Raw, Number(0).Raw)
	b.attrs.cmp(unix.NFT_CMP_NEQ, 0, Number(0).Raw)
	return b.appendText("ct status dnat")
}

// DNAT translates the destination to an address; port 0 keeps the port.
func (b *Builder) DNAT(f Family, a netip.Addr, port uint16) *Builder {
	b.attrs.immediate(regAddrMin, string(a.AsSlice()))
	if port != 0 {
		b.attrs.immediate(regPortMin, Port(port).Raw)
	}
	b.attrs.expr("nat", func(e *Attrs) {
		e.Uint32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
		e.Uint32(unix.NFTA_NAT_FAMILY, uint32(f))
		e.Uint32(unix.NFTA_NAT_REG_ADDR_MIN, register(regAddrMin))
		if port != 0 {
			e.Uint32(unix.NFTA_NAT_REG_PROTO_MIN, register(regPortMin))
		}
	})
	if port == 0 {
		return b.appendText("dnat to %s", a)
	}
	return b.appendText("dnat to %s", netip.AddrPortFrom(a, port))
}

// DNATFrom translates the destination to the address, or the address and port, from a map entry for the selectors.
func (b *Builder) DNATFrom(f Family, set string, ports bool, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, hashScratch)
	b.attrs.lookup(set, hashScratch, lookupValue, regAddrMin)
	b.attrs.expr("nat", func(e *Attrs) {
		e.Uint32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
		e.Uint32(unix.NFTA_NAT_FAMILY, uint32(f))
		e.Uint32(unix.NFTA_NAT_REG_ADDR_MIN, register(regAddrMin))
		if ports {
			port := 1 // the register after an IPv4 address
			if f == IP6 {
				port = 4
			}
			e.Uint32(unix.NFTA_NAT_REG_PROTO_MIN, register(port))
		}
	})
	word := "addr"
	if ports {
		word = "addr . port"
	}
	return b.appendText("dnat %s %s to %s map @%s", f, word, concatText(s), set)
}

// SNAT translates the source to an address of the range, and the port to one of ports unless ports is the zero value.
func (b *Builder) SNAT(f Family, to config.AddressRange, ports flow.Ports, fullyRandom bool) *Builder {
	flags := uint32(natMapIPs)
	b.attrs.immediate(regAddrMin, string(to.First.AsSlice()))
	text := to.First.String()
	if to.First != to.Last {
		b.attrs.immediate(regAddrMax, string(to.Last.AsSlice()))
		text += "-" + to.Last.String()
		flags |= natPersistent // one address per client for all destinations (RFC 4787 REQ-2)
	}
	if ports != (flow.Ports{}) {
		b.ports(ports)
		flags |= natProtoSpecified
		if f == IP6 {
			text = "[" + text + "]"
		}
		text += ":" + portRange(ports)
	}
	if fullyRandom {
		flags |= natFullyRandom
	}
	b.attrs.expr("nat", func(e *Attrs) {
		e.Uint32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
		e.Uint32(unix.NFTA_NAT_FAMILY, uint32(f))
		e.Uint32(unix.NFTA_NAT_REG_ADDR_MIN, register(regAddrMin))
		if to.First != to.Last {
			e.Uint32(unix.NFTA_NAT_REG_ADDR_MAX, register(regAddrMax))
		}
		portRegisters(e, ports, unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX)
		e.Uint32(natFlags, flags)
	})
	b.appendText("snat to %s", text)
	switch {
	case fullyRandom && to.First != to.Last:
		b.appendText("fully-random,persistent")
	case fullyRandom:
		b.appendText("fully-random")
	case to.First != to.Last:
		b.appendText("persistent")
	}
	return b
}

// SNATFrom translates the source to the map entry for the selectors.
func (b *Builder) SNATFrom(f Family, set string, fullyRandom bool, s ...Selector) *Builder {
	concatLoad(&b.attrs, s, hashScratch)
	b.attrs.lookup(set, hashScratch, lookupValue, regAddrMin)
	b.attrs.expr("nat", func(e *Attrs) {
		e.Uint32(unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT)
		e.Uint32(unix.NFTA_NAT_FAMILY, uint32(f))
		e.Uint32(unix.NFTA_NAT_REG_ADDR_MIN, register(regAddrMin))
		flags := uint32(natMapIPs)
		if fullyRandom {
			flags |= natFullyRandom
		}
		e.Uint32(natFlags, flags)
	})
	b.appendText("snat to %s map @%s", concatText(s), set)
	if fullyRandom {
		b.appendText("fully-random")
	}
	return b
}

// Masquerade translates the source to the address of the output interface.
func (b *Builder) Masquerade(ports flow.Ports, fullyRandom bool) *Builder {
	b.ports(ports)
	b.attrs.expr("masq", func(e *Attrs) {
		flags := uint32(0)
		if fullyRandom {
			flags |= natFullyRandom
		}
		if ports != (flow.Ports{}) {
			flags |= natProtoSpecified
		}
		if flags != 0 {
			e.Uint32(unix.NFTA_MASQ_FLAGS, flags)
		}
		portRegisters(e, ports, unix.NFTA_MASQ_REG_PROTO_MIN, unix.NFTA_MASQ_REG_PROTO_MAX)
	})
	b.appendText("masquerade")
	if ports != (flow.Ports{}) {
		b.appendText("to :" + portRange(ports))
	}
	if fullyRandom {
		b.appendText("fully-random")
	}
	return b
}

// NATPrefix replaces the prefix of the destination (dest) or of the source by another prefix of the same length.
func (b *Builder) NATPrefix(f Family, dest bool, to netip.Prefix) *Builder {
	kind, word := uint32(unix.NFT_NAT_SNAT), "snat"
	if dest {
		kind, word = unix.NFT_NAT_DNAT, "dnat"
	}
	first := to.Masked().Addr()
	b.attrs.immediate(regAddrMin, string(first.AsSlice()))
	b.attrs.immediate(regAddrMax, string(LastAddr(to).AsSlice()))
	b.attrs.expr("nat", func(e *Attrs) {
		e.Uint32(unix.NFTA_NAT_TYPE, kind)
		e.Uint32(unix.NFTA_NAT_FAMILY, uint32(f))
		e.Uint32(unix.NFTA_NAT_REG_ADDR_MIN, register(regAddrMin))
		e.Uint32(unix.NFTA_NAT_REG_ADDR_MAX, register(regAddrMax))
		e.Uint32(natFlags, natMapIPs|natNetmap)
	})
	return b.appendText("%s %s prefix to %s", word, f, to.Masked())
}

// LastAddr returns the highest address of a prefix.
func LastAddr(p netip.Prefix) netip.Addr {
	raw := p.Masked().Addr().AsSlice()
	for i, m := range Netmask(p) {
		raw[i] |= ^m
	}
	a, _ := netip.AddrFromSlice(raw)
	return a
}

func (b *Builder) ports(p flow.Ports) {
	if p == (flow.Ports{}) {
		return
	}
	b.attrs.immediate(regPortMin, Port(p.First).Raw)
	b.attrs.immediate(regPortMax, Port(p.Last).Raw)
}

func portRegisters(e *Attrs, p flow.Ports, first, last uint16) {
	if p == (flow.Ports{}) {
		return
	}
	e.Uint32(first, register(regPortMin))
	e.Uint32(last, register(regPortMax))
}

func portRange(p flow.Ports) string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return p.String()
}

// SetField overwrites a header field without connection tracking and updates its checksums. p is the layer-4 protocol
// if the field is a port. With fixChecksum false, a UDP packet keeps a zero checksum.
func (b *Builder) SetField(s Selector, v Value, p flow.Protocol, fixChecksum bool) *Builder {
	c := checksum{}
	switch {
	case s.Type == IPv4Addr:
		c = checksum{unix.NFT_PAYLOAD_CSUM_INET, 10, true}
	case s.Type == IPv6Addr:
		c = checksum{unix.NFT_PAYLOAD_CSUM_NONE, 0, true}
	case s.Type == InetService && fixChecksum:
		switch p {
		case flow.TCP:
			c = checksum{unix.NFT_PAYLOAD_CSUM_INET, 16, false}
		case flow.UDP, flow.UDPLite:
			c = checksum{unix.NFT_PAYLOAD_CSUM_INET, 6, false}
		case flow.SCTP:
			c = checksum{unix.NFT_PAYLOAD_CSUM_SCTP, 8, false}
		}
	}
	b.attrs.immediate(0, v.Raw)
	b.attrs.payloadStore(s.base, s.offset, uint32(s.Type.Len), 0, c)
	return b.appendText("%s set %s", s.Text, v.Text)
}

// SetPrefix overwrites the leading bits of an address without connection tracking.
func (b *Builder) SetPrefix(s Selector, to netip.Prefix, fixChecksum bool) *Builder {
	mask := Netmask(to)
	for i := range mask {
		mask[i] = ^mask[i]
	}
	c := checksum{unix.NFT_PAYLOAD_CSUM_NONE, 0, fixChecksum}
	if s.Type == IPv4Addr {
		c = checksum{unix.NFT_PAYLOAD_CSUM_INET, 10, fixChecksum}
	}
	s.load(&b.attrs, 0)
	b.attrs.bitwise(0, 0, string(mask), string(to.Masked().Addr().AsSlice()))
	b.attrs.payloadStore(s.base, s.offset, uint32(s.Type.Len), 0, c)
	m, _ := netip.AddrFromSlice(mask)
	return b.appendText("%s set %s & %s | %s", s.Text, s.Text, m, to.Masked().Addr())
}

// Forward sends the packet to a neighbour on an interface from the ingress hook. The kernel resolves the neighbour
// and decrements the TTL.
func (b *Builder) Forward(f Family, via netip.Addr, device string, index int) *Builder {
	b.attrs.immediate(0, Number(uint32(index)).Raw)
	b.attrs.immediate(4, string(via.AsSlice()))
	b.attrs.expr("fwd", func(e *Attrs) {
		e.Uint32(fwdSregDev, register(0))
		e.Uint32(fwdSregAddr, register(4))
		e.Uint32(fwdNFProto, uint32(f))
	})
	return b.appendText("fwd %s to %s device %q", f, via, device)
}

// ForwardFrame sends the unmodified frame on an interface.
func (b *Builder) ForwardFrame(device string, index int) *Builder {
	b.attrs.immediate(0, Number(uint32(index)).Raw)
	b.attrs.expr("fwd", func(e *Attrs) { e.Uint32(fwdSregDev, register(0)) })
	return b.appendText("fwd to %q", device)
}

// ClampMSS lowers the TCP maximum segment size to the MTU of the route.
func (b *Builder) ClampMSS() *Builder {
	const kind, offset, length = 2, 2, 2 // the option "maximum segment size" (RFC 9293 section 3.2), its value
	b.attrs.expr("rt", func(e *Attrs) {
		e.Uint32(unix.NFTA_RT_DREG, register(0))
		e.Uint32(unix.NFTA_RT_KEY, unix.NFT_RT_TCPMSS)
	})
	b.attrs.expr("byteorder", func(e *Attrs) {
		e.Uint32(unix.NFTA_BYTEORDER_SREG, register(0))
		e.Uint32(unix.NFTA_BYTEORDER_DREG, register(0))
		e.Uint32(unix.NFTA_BYTEORDER_OP, unix.NFT_BYTEORDER_HTON)
		e.Uint32(unix.NFTA_BYTEORDER_LEN, 2)
		e.Uint32(unix.NFTA_BYTEORDER_SIZE, 2)
	})
	b.attrs.expr("exthdr", func(e *Attrs) {
		e.Uint32(unix.NFTA_EXTHDR_SREG, register(0))
		e.Uint8(unix.NFTA_EXTHDR_TYPE, kind)
		e.Uint32(unix.NFTA_EXTHDR_OFFSET, offset)
		e.Uint32(unix.NFTA_EXTHDR_LEN, length)
		e.Uint32(unix.NFTA_EXTHDR_OP, unix.NFT_EXTHDR_OP_TCPOPT)
	})
	return b.appendText("tcp option maxseg size set rt mtu")
}

// SetFrom overwrites a header field with the map entry for the selectors. For the TTL it updates the IPv4 header
// checksum; it updates no other checksum.
func (b *Builder) SetFrom(s Selector, set string, by ...Selector) *Builder {
	concatLoad(&b.attrs, by, hashScratch)
	b.attrs.lookup(set, hashScratch, lookupValue, 0)
	var c checksum
	if s.Text == TTL(IP).Text {
		c = checksum{unix.NFT_PAYLOAD_CSUM_INET, 10, false}
	}
	b.attrs.payloadStore(s.base, s.offset, uint32(s.Type.Len), 0, c)
	return b.appendText("%s set %s map @%s", s.Text, concatText(by), set)
}
