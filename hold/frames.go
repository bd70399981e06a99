// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/sluice-lb/sluice/packet"
)

// Messages of neighbour discovery (RFC 4861 §4.3, §4.4).
const (
	solicitation  = 135
	advertisement = 136

	fromRouter = 1 << 31 // flags of an advertisement
	override   = 1 << 29
)

var (
	broadcast = packet.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	allNodes  = netip.MustParseAddr("ff02::1")
)

// probeFrame probes for the station with an address: an ARP probe (RFC 5227 §2.1.1) or a neighbour solicitation from
// the unspecified address (RFC 4862 §5.4.2).
func probeFrame(mac net.HardwareAddr, a netip.Addr) []byte {
	src := packet.MAC(mac)
	if a.Is4() {
		return packet.Packet{&packet.Ethernet{Src: src, Dst: broadcast},
			&packet.ARP{Operation: 1, SenderMAC: src, Sender: netip.IPv4Unspecified(), Target: a}}.Build()
	}
	group := solicitedNode(a)
	return packet.Packet{&packet.Ethernet{Src: src, Dst: multicastMAC(group)},
		&packet.IPv6{Src: netip.IPv6Unspecified(), Dst: group, HopLimit: 255},
		&packet.ICMP{V6: true, Type: solicitation}, &packet.Data{Bytes: a.AsSlice()}}.Build()
}

// gratuitousFrame updates the neighbour caches with the address of a station: a gratuitous ARP request (RFC 5227 §2.3)
// or an unsolicited neighbour advertisement (RFC 4861 §7.2.6).
func gratuitousFrame(mac net.HardwareAddr, a netip.Addr, router bool) []byte {
	src := packet.MAC(mac)
	if a.Is4() {
		return packet.Packet{&packet.Ethernet{Src: src, Dst: broadcast},
			&packet.ARP{Operation: 1, SenderMAC: src, Sender: a, Target: a}}.Build()
	}
	flags := uint32(override)
	if router {
		flags |= fromRouter
	}
	option := append([]byte{2, 1}, mac...) // target link-layer address, of eight bytes
	return packet.Packet{&packet.Ethernet{Src: src, Dst: multicastMAC(allNodes)},
		&packet.IPv6{Src: a, Dst: allNodes, HopLimit: 255},
		&packet.ICMP{V6: true, Type: advertisement, Rest: flags}, &packet.Data{Bytes: append(a.AsSlice(), option...)}}.Build()
}

// solicitedNode returns the solicited-node multicast address (RFC 4291 §2.7.1).
func solicitedNode(a netip.Addr) netip.Addr {
	b, group := a.As16(), netip.MustParseAddr("ff02::1:ff00:0").As16()
	copy(group[13:], b[13:])
	return netip.AddrFrom16(group)
}

// multicastMAC returns the hardware address of an IPv6 multicast group (RFC 2464 §7).
func multicastMAC(group netip.Addr) packet.MAC {
	b := group.As16()
	return packet.MAC{0x33, 0x33, b[12], b[13], b[14], b[15]}
}

// claimedAddress returns the address that another station uses, or is about to use, according to a frame, and the station's
// hardware address. It returns false if the frame claims no address.
func claimedAddress(frame []byte) (a netip.Addr, mac string, ok bool) {
	if len(frame) < 14 {
		return a, "", false
	}
	mac = string(frame[6:12])
	body := frame[14:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case packet.TypeARP:
		if len(body) < 28 || binary.BigEndian.Uint16(body[2:]) != packet.TypeIPv4 || body[4] != 6 || body[5] != 4 {
			return a, "", false
		}
		a = netip.AddrFrom4([4]byte(body[14:18]))
		if a.IsUnspecified() { // an ARP probe: the sender address is 0.0.0.0
			a = netip.AddrFrom4([4]byte(body[24:28]))
		}
		return a, string(body[8:14]), true
	case packet.TypeIPv6:
		const header, message = 40, 24 // of IPv6; of a solicitation or advertisement without options
		if len(body) < header+message || body[6] != 58 || body[7] != 255 {
			return a, "", false
		}
		target := netip.AddrFrom16([16]byte(body[header+8 : header+24]))
		probes := body[header] == solicitation && netip.AddrFrom16([16]byte(body[8:24])).IsUnspecified()
		return target, mac, body[header] == advertisement || probes
	}
	return a, "", false
}
