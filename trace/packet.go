// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/flow"
)

// Point is where a packet was seen.
type Point uint8

// The points, in the numbering of the observer.
const (
	Received    = Point(observePacketPointPACKET_RECEIVED)
	Transmitted = Point(observePacketPointPACKET_TRANSMITTED)
	Dropped     = Point(observePacketPointPACKET_DROPPED)
)

// String returns the point in lower case.
func (p Point) String() string { return nameOf([]string{"received", "transmitted", "dropped"}, int(p)) }

// Flags of TCP (RFC 9293 §3.1).
const (
	TCPFin = 0x01
	TCPSyn = 0x02
	TCPRst = 0x04
	TCPAck = 0x10
)

// Packet is a packet at an interface of the host, or where it was dropped.
type Packet struct {
	Time      time.Duration // Since boot, without suspend (CLOCK_MONOTONIC).
	Netns     uint64        // Inode.
	Point     Point
	Interface string     // "" for a drop without a device.
	IfIndex   uint32     // of Interface
	InIfIndex uint32     // Transmitted, dropped: of arrival; 0 for packets of this host.
	Buffer    uint64     // Address of the socket buffer; reused after milliseconds.
	Tuple     flow.Tuple // as the header says; invalid for ARP
	Length    int        // from layer 3, of all segments of a GSO packet
	GSOSize   int        // Payload of one segment; 0: the packet is one segment.
	TTL       uint8

	TCPFlags byte
	Seq, Ack uint32 // of TCP
	Payload  int    // of TCP, bytes
	Window   uint16 // of TCP, not scaled

	Query uint16 // of UDP: the first two bytes of the payload, with which DNS identifies a transaction

	ICMPType, ICMPCode uint8
	Quoted             flow.Tuple // of an ICMP error: the packet that it is about

	// Neighbour is the question or answer of ARP or neighbour discovery; nil for other packets.
	Neighbour *Neighbour

	Tracked    Tracked
	Connection uint64     // Address of the conntrack entry; 0: none.
	Original   flow.Tuple // Before NAT; invalid when not tracked.
	Reply      flow.Tuple // Tuple of the reply packets.
	Direction  flow.Direction
	Confirmed  bool // The entry is in the table.
	SeenReply  bool // The entry has seen a packet of the reply direction.

	HasMACs   bool
	SourceMAC [6]byte
	DestMAC   [6]byte

	// Cause, Reason and Place are those of a drop.
	Cause  Cause
	Reason string
	Place  Symbol
	Hook   Hook
}

// Neighbour is a message of ARP or of IPv6 neighbour discovery.
type Neighbour struct {
	Answer bool
	Sender netip.Addr // Invalid for a probe.
	Target netip.Addr // Whose link address is asked for, or answered.
}

// Opening reports whether the packet opens a TCP connection.
func (p *Packet) Opening() bool { return p.TCPFlags&(TCPSyn|TCPAck) == TCPSyn }

// Error reports whether the packet is an ICMP error.
func (p *Packet) Error() bool { return p.Quoted.IsValid() }

// echoReply reports whether an ICMP type answers an echo request.
func echoReply(p flow.Protocol, kind uint8) bool {
	return p == flow.ICMP && kind == 0 || p == flow.ICMPv6 && kind == 129
}

// EchoReply reports whether the packet answers an ICMP echo request.
func (p *Packet) EchoReply() bool {
	return echoReply(p.Tuple.Protocol, p.ICMPType) && p.Tuple.IsValid()
}

// EtherARP is the Ethernet type of ARP (IEEE 802).
const EtherARP = 0x0806

const arpLen = 28

// readHeaders decodes the packet from its first bytes of layer 3.
func (p *Packet) readHeaders(etherType uint16, b []byte) {
	if etherType == EtherARP {
		p.readARP(b)
		return
	}
	p.Tuple = headerTuple(b)
	var l4 []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		p.TTL = b[8]
		if n := int(b[0]&0xf) * 4; binary.BigEndian.Uint16(b[6:])&0x1fff == 0 && n >= 20 && n <= len(b) {
			l4 = b[n:]
		}
	case len(b) >= 40 && b[0]>>4 == 6:
		p.TTL = b[7]
		l4 = b[40:]
	}
	switch p.Tuple.Protocol {
	case flow.TCP:
		if len(l4) >= 16 {
			p.Seq, p.Ack, p.TCPFlags, p.Window = binary.BigEndian.Uint32(l4[4:]), binary.BigEndian.Uint32(l4[8:]), l4[13], binary.BigEndian.Uint16(l4[14:])
			p.Payload = max(p.Length-(len(b)-len(l4))-int(l4[12]>>4)*4, 0)
		}
	case flow.UDP:
		if len(l4) >= 10 {
			p.Query = binary.BigEndian.Uint16(l4[8:])
		}
	case flow.ICMP, flow.ICMPv6:
		if len(l4) >= 8 {
			p.ICMPType, p.ICMPCode = l4[0], l4[1]
			p.readICMP(l4)
		}
	}
}

func (p *Packet) readICMP(b []byte) {
	six := p.Tuple.Protocol == flow.ICMPv6
	switch {
	case six && p.ICMPType < 128, !six && (p.ICMPType == 3 || p.ICMPType == 11 || p.ICMPType == 12):
		p.Quoted = headerTuple(b[8:])
	case six && (p.ICMPType == 135 || p.ICMPType == 136) && len(b) >= 24:
		target, _ := netip.AddrFromSlice(b[8:24])
		p.Neighbour = &Neighbour{Answer: p.ICMPType == 136, Sender: p.Tuple.Source.Addr(), Target: target}
	}
}

// readARP decodes a message of ARP for IPv4 over Ethernet (RFC 826).
func (p *Packet) readARP(b []byte) {
	if len(b) < arpLen || b[4] != 6 || b[5] != 4 {
		return
	}
	sender, _ := netip.AddrFromSlice(b[14:18])
	target, _ := netip.AddrFromSlice(b[24:28])
	n := &Neighbour{Answer: b[7] == 2, Sender: sender, Target: target}
	if n.Answer {
		n.Target = sender // the answer is about its sender
	}
	p.Neighbour = n
}
