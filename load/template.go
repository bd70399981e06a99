// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

const (
	ethLen   = 14
	ipv4Len  = 20
	ipv6Len  = 40
	fragLen  = 8  // IPv6 fragment extension header.
	stampLen = 16 // Struct stamp of bpf/load/frame.h.
	// maxFrame is the room for a frame in a 4 KiB page of a live-frame run. The page also holds the headroom of 256
	// bytes, struct xdp_page_head and struct skb_shared_info.
	maxFrame = 3408
)

// frameTemplate is one frame with the lowest addresses and ports, and the offsets of the parts that the sender varies.
// Offsets count from the frame's start.
type frameTemplate struct {
	frame   []byte
	headLen int // headers and stamp
	l4Off   int
	plan    packetsPlan
}

var tcpFlags = []struct {
	name string
	bit  byte
}{{"fin", 1}, {"syn", 2}, {"rst", 4}, {"psh", 8}, {"ack", 16}, {"urg", 32}, {"ece", 64}, {"cwr", 128}}

func parseTCPFlags(s string) (byte, error) {
	if s == "" {
		return 16, nil
	}
	var bits byte
next:
	for _, name := range strings.Split(strings.ToLower(s), ",") {
		for _, f := range tcpFlags {
			if f.name == strings.TrimSpace(name) {
				bits |= f.bit
				continue next
			}
		}
		return 0, fmt.Errorf("tcp flag %q: not one of fin, syn, rst, psh, ack, urg, ece, cwr", name)
	}
	return bits, nil
}

func l4HeaderLen(p flow.Protocol) int {
	if p == flow.TCP {
		return 20
	}
	return 8
}

// newTemplate builds the frame from a normalized spec.
func newTemplate(s *PacketSpec) (*frameTemplate, error) {
	v6, fragmented := s.Source.First.Is6(), s.Fragments > 1
	t := &frameTemplate{l4Off: ethLen + ipv4Len}
	if v6 {
		t.l4Off = ethLen + ipv6Len
		if fragmented {
			t.l4Off += fragLen
		}
	}
	t.headLen = t.l4Off + l4HeaderLen(s.Protocol)
	if s.Stamp {
		t.headLen += stampLen
	}
	if s.Size == 0 {
		s.Size = max(60, t.headLen)
	}
	if fragmented {
		s.Size -= (s.Size - t.l4Off) % 8 // all fragments but the last are multiples of 8 bytes
	}
	if s.Size < t.headLen {
		return nil, fmt.Errorf("packets: size %d: the headers need %d bytes", s.Size, t.headLen)
	}
	if s.Size > maxFrame {
		return nil, fmt.Errorf("packets: size %d: at most %d bytes fit a frame", s.Size, maxFrame)
	}
	// Limit of IPv4's total length and IPv6's payload length.
	if all := (s.Size - t.l4Off) * max(s.Fragments, 1); all+ipv4Len > 65535 {
		return nil, fmt.Errorf("packets: %d fragments of %d bytes: a datagram of %d bytes, at most %d are possible", s.Fragments, s.Size, all, 65535-ipv4Len)
	}
	t.frame = make([]byte, s.Size)
	copy(t.frame[0:], s.DestMAC)
	copy(t.frame[6:], s.SourceMAC)
	if v6 {
		t.writeIPv6(s)
	} else {
		t.writeIPv4(s)
	}
	if err := t.writeTransport(s); err != nil {
		return nil, fmt.Errorf("packets: %w", err)
	}
	t.keepFixed(s)
	t.computeChecksums(s, v6)
	t.fixChecksums()
	return t, nil
}

// keepFixed clears the offsets of constant fields. The template's value then applies, and the program has less work.
func (t *frameTemplate) keepFixed(s *PacketSpec) {
	below := uint64(1) // number of tuples that the previous fields distinguish
	for _, f := range []struct {
		off   *uint16
		count uint32
	}{
		{&t.plan.SourcePortOff, s.Source.ports()}, {&t.plan.SourceOff, s.Source.addresses()},
		{&t.plan.DestOff, s.Dest.addresses()}, {&t.plan.DestPortOff, s.Dest.ports()},
	} {
		if f.count == 1 || uint64(s.Flows) <= below {
			*f.off = 0
		}
		below = min(below*uint64(f.count), maxFlows)
	}
}

// fixChecksums writes the checksums that are equal in every packet.
func (t *frameTemplate) fixChecksums() {
	p := &t.plan
	addresses := p.SourceOff != 0 || p.DestOff != 0
	if p.IpCsumOff != 0 && !addresses && p.FragOff == 0 {
		binary.LittleEndian.PutUint16(t.frame[p.IpCsumOff:], ^foldCarries(p.IpSum))
		p.IpCsumOff = 0
	}
	if !addresses && p.SourcePortOff == 0 && p.DestPortOff == 0 && p.StampOff == 0 && p.FragOff == 0 {
		csum := ^foldCarries(p.L4Sum)
		if csum == 0 {
			csum = 0xffff
		}
		binary.LittleEndian.PutUint16(t.frame[p.L4CsumOff:], csum)
		p.L4CsumOff = 0
	}
}

// foldCarries adds the carries of a one's complement sum.
func foldCarries(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

func (t *frameTemplate) writeIPv4(s *PacketSpec) {
	be := binary.BigEndian
	be.PutUint16(t.frame[12:], 0x0800)
	ip := t.frame[ethLen:]
	ip[0] = 0x45
	be.PutUint16(ip[2:], uint16(len(ip)))
	ip[8], ip[9] = byte(s.TTL), byte(s.Protocol)
	copy(ip[12:], s.Source.First.AsSlice())
	copy(ip[16:], s.Dest.First.AsSlice())
	t.plan.IpCsumOff = ethLen + 10
	t.plan.SourceOff, t.plan.DestOff = ethLen+12, ethLen+16
	if s.Fragments > 1 {
		t.plan.IdentOff, t.plan.FragOff = ethLen+4, ethLen+6
	} else {
		be.PutUint16(ip[6:], 0x4000) // DF
	}
}

func (t *frameTemplate) writeIPv6(s *PacketSpec) {
	be := binary.BigEndian
	be.PutUint16(t.frame[12:], 0x86dd)
	ip := t.frame[ethLen:]
	ip[0] = 0x60
	be.PutUint16(ip[4:], uint16(len(ip)-ipv6Len))
	ip[6], ip[7] = byte(s.Protocol), byte(s.TTL)
	copy(ip[8:], s.Source.First.AsSlice())
	copy(ip[24:], s.Dest.First.AsSlice())
	t.plan.SourceOff, t.plan.DestOff = ethLen+8+12, ethLen+24+12
	if s.Fragments > 1 {
		ip[6] = 44
		ip[ipv6Len] = byte(s.Protocol)
		t.plan.FragOff, t.plan.IdentOff, t.plan.FragV6 = ethLen+ipv6Len+2, ethLen+ipv6Len+6, 1
	}
}

func (t *frameTemplate) writeTransport(s *PacketSpec) error {
	be, off := binary.BigEndian, t.l4Off
	l4 := t.frame[off:]
	length := len(l4) * max(s.Fragments, 1)
	switch s.Protocol {
	case flow.UDP:
		be.PutUint16(l4[0:], s.Source.Ports.First)
		be.PutUint16(l4[2:], s.Dest.Ports.First)
		be.PutUint16(l4[4:], uint16(length))
		t.plan.SourcePortOff, t.plan.DestPortOff, t.plan.L4CsumOff = uint16(off), uint16(off+2), uint16(off+6)
	case flow.TCP:
		flags, err := parseTCPFlags(s.Flags)
		if err != nil {
			return err
		}
		be.PutUint16(l4[0:], s.Source.Ports.First)
		be.PutUint16(l4[2:], s.Dest.Ports.First)
		be.PutUint32(l4[4:], 1)
		if flags&16 != 0 {
			be.PutUint32(l4[8:], 1)
		}
		l4[12], l4[13] = 5<<4, flags
		be.PutUint16(l4[14:], 65535)
		t.plan.SourcePortOff, t.plan.DestPortOff, t.plan.L4CsumOff = uint16(off), uint16(off+2), uint16(off+16)
	case flow.ICMP, flow.ICMPv6:
		l4[0] = 8 // echo request
		if s.Protocol == flow.ICMPv6 {
			l4[0] = 128
		}
		be.PutUint16(l4[4:], s.Source.Ports.First)
		t.plan.SourcePortOff, t.plan.L4CsumOff = uint16(off+4), uint16(off+2)
	}
	if s.Stamp {
		t.plan.StampOff = uint16(off + l4HeaderLen(s.Protocol))
	}
	return nil
}

// computeChecksums computes the checksums without the varying fields, in the program's byte order (little-endian words of wire
// bytes).
func (t *frameTemplate) computeChecksums(s *PacketSpec, v6 bool) {
	still := append([]byte(nil), t.frame...)
	for _, f := range []struct {
		off  uint16
		size int
	}{
		{t.plan.SourceOff, 4}, {t.plan.DestOff, 4}, {t.plan.SourcePortOff, 2},
		{t.plan.DestPortOff, 2}, {t.plan.StampOff, stampLen},
	} {
		if f.off != 0 {
			clear(still[f.off : int(f.off)+f.size])
		}
	}
	l4Len := (len(still) - t.l4Off) * max(s.Fragments, 1)
	t.plan.L4Sum = sumWords(still[t.l4Off:])
	if s.Protocol != flow.ICMP {
		var pseudo [4]byte
		binary.BigEndian.PutUint16(pseudo[0:], uint16(l4Len))
		pseudo[3] = byte(s.Protocol)
		from := ethLen + 12
		if v6 {
			from = ethLen + 8
		}
		to := from + 8
		if v6 {
			to = from + 32
		}
		t.plan.L4Sum += sumWords(pseudo[:]) + sumWords(still[from:to])
		t.plan.Pseudo = 1
	}
	t.plan.L4Sum = uint32(foldCarries(t.plan.L4Sum))
	if !v6 {
		t.plan.IpSum = uint32(foldCarries(sumWords(still[ethLen : ethLen+ipv4Len])))
	}
}

// sumWords adds 16-bit little-endian words; an odd last byte counts as a low byte.
func sumWords(b []byte) uint32 {
	var sum uint32
	for len(b) >= 2 {
		sum += uint32(b[0]) | uint32(b[1])<<8
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint32(b[0])
	}
	return sum
}

// fill completes the program's plan for sender nth of senders.
func (t *frameTemplate) fill(s *PacketSpec, nth, senders int, ifindex int) packetsPlan {
	p := t.plan
	var head [len(p.Head) * 8]byte
	copy(head[:], t.frame[:t.headLen])
	for i := range p.Head {
		p.Head[i] = binary.LittleEndian.Uint64(head[8*i:])
	}
	flows := uint32(s.Flows)
	p.HeadLen, p.Ifindex = uint32(t.headLen+t.headLen%2), uint32(ifindex)
	p.L4Off = uint16(t.l4Off)
	p.Flows, p.Stride = flows, 1
	if s.Shuffled {
		p.Stride = goldenStride(flows)
	}
	p.First = uint32((uint64(s.Skip) + uint64(flows)*uint64(nth)/uint64(senders)) % uint64(flows))
	p.Source, p.SourceCount = lastWord(s.Source.First), s.Source.addresses()
	p.SourcePort, p.SourcePortCount = uint32(s.Source.Ports.First), s.Source.ports()
	p.Dest, p.DestCount = lastWord(s.Dest.First), s.Dest.addresses()
	p.DestPort, p.DestPortCount = uint32(s.Dest.Ports.First), s.Dest.ports()
	p.Sender, p.Senders = uint16(nth), uint16(senders)
	p.Fragments = uint16(max(s.Fragments, 1))
	if s.Fragments > 1 {
		p.FragWords = uint16((len(t.frame) - t.l4Off) / 8)
	}
	p.Limit = shareOf(s.Limit, nth, senders)
	if s.Rate > 0 {
		p.Interval = uint64(65536e9 * float64(senders) / s.Rate)
	}
	return p
}
