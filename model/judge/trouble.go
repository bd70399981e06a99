// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// icmpError returns an ICMP error about the last forwarded packet of a direction. The sender is the
// receiver or a router before it. The error quotes the whole packet or the minimum.
func (w *generatorState) icmpError(r *rand.Rand, c *hostPair, direction int) []arrivingFrame {
	out := c.out[direction]
	if out == nil && c.out[0] != nil { // the answer bypassed the gateway, or was lost
		out = &model.Departure{Interface: c.in[0].Interface, Frame: w.replyToLast(r, c)[0].Frame}
	}
	if out == nil {
		return w.sendMore(r, c)
	}
	quoted := out.Frame[14:]
	p := withoutLink(packet.Parse(out.Frame))
	src, dst, ok := replyAddresses(p)
	if !ok {
		return w.sendMore(r, c)
	}
	src = w.errorSource(r, src)
	m := &packet.ICMP{V6: src.Is6()}
	if m.V6 {
		m.Type, m.Code = uint8(1+r.IntN(4)), uint8(r.IntN(6))
		quoted = quoted[:min(len(quoted), 1200)]
		if m.Type == 2 {
			m.Code, m.Rest = 0, uint32(1280+r.IntN(220))
		}
		if m.Type == 4 {
			m.Rest = uint32(r.IntN(48))
		}
	} else {
		m.Type, m.Code = pick(r, []uint8{3, 3, 3, 3, 11, 12, 4, 5}), uint8(r.IntN(17))
		if m.Type == 3 && m.Code == 4 {
			m.Rest = uint32(r.IntN(1500))
		}
		if m.Type == 12 {
			m.Rest = uint32(r.IntN(20)) << 24
		}
		if r.IntN(3) == 0 {
			quoted = quoted[:min(len(quoted), 28)] // the minimum in RFC 792
		}
		quoted = quoted[:min(len(quoted), 548)]
	}
	body := addExtension(r, m, quoted)
	if r.IntN(20) == 0 {
		m.Checksum = packet.Force(r.Uint32() & 0xffff)
	}
	q := packet.Packet{header(r, src, dst), m, &packet.Data{Bytes: body}}
	return []arrivingFrame{{w.frame(out.Interface, q), c, 1 - direction}}
}

// addExtension rarely pads the quoted packet and appends an extension of any length (RFC 4884), even to
// errors without extensions.
func addExtension(r *rand.Rand, m *packet.ICMP, quoted []byte) []byte {
	body := slices.Clone(quoted)
	if r.IntN(12) > 0 {
		return body
	}
	unit, shift := 4, 16
	if m.V6 {
		unit, shift = 8, 24
	}
	field := max(128, (len(body)+unit-1)/unit*unit)
	body = append(body, make([]byte, field-len(body))...)
	m.Rest |= uint32(field/unit&0xff) << shift
	return append(body, random(r, 4*(1+r.IntN(100))).Bytes...)
}

// router returns a router near an address: another address in its network.
func router(a netip.Addr) netip.Addr {
	b := a.AsSlice()
	b[len(b)-1] ^= 0x55
	out, _ := netip.AddrFromSlice(b)
	return out
}

// splitLast returns the last packet of one side in fragments: mostly in order, sometimes
// reordered, overlapping or without the last fragment.
func (w *generatorState) splitLast(r *rand.Rand, c *hostPair) []arrivingFrame {
	if c.in[0].Frame == nil {
		return w.open(r)
	}
	d := 0
	if c.in[1].Frame != nil {
		d = r.IntN(2)
	}
	p := withoutLink(packet.Parse(c.in[d].Frame))
	w.changeTTL(r, p, &hostPair{})
	if u, ok := packet.Find[*packet.UDP](p); ok {
		u.Checksum, u.Length = packet.Forced{}, packet.Forced{}
		if _, ok := p[0].(*packet.IPv4); ok && w.hasFlow(c) && r.IntN(8) == 0 {
			u.Checksum = packet.Force(0)
		}
	}
	for _, l := range p {
		if _, ok := l.(*packet.Fragment); ok {
			return w.sendMore(r, c)
		}
	}
	data := make([]byte, 100+r.IntN(400))
	p = append(p, &packet.Data{Bytes: data})
	if _, v6 := p[0].(*packet.IPv6); v6 && w.hasFlow(c) && r.IntN(6) == 0 { // after the fragment header
		p = slices.Insert(p, 1, packet.Layer(&packet.Options6{Destination: true}))
	}
	frame := w.frame(c.in[d].Interface, p).Frame
	pieces, err := packet.Fragments(frame, 8*(4+r.IntN(20)), r.Uint32())
	if err != nil {
		return w.sendMore(r, c)
	}
	switch r.IntN(6) {
	case 0:
		slices.Reverse(pieces)
	case 1:
		pieces = pieces[min(1, len(pieces)-1):]
	case 2:
		pieces = append(pieces, pieces[len(pieces)-1])
	}
	var out []arrivingFrame
	for _, b := range pieces {
		out = append(out, arrivingFrame{model.Arrival{Interface: c.in[d].Interface, Frame: b}, c, d})
	}
	return out
}

// isFragment reports whether a frame carries a fragment.
func isFragment(frame []byte) bool {
	switch b := model.Untagged(frame); {
	case len(b) >= 34 && b[12] == 8 && b[13] == 0:
		return (b[20]&0x3f)|b[21] != 0
	case len(b) >= 54 && b[12] == 0x86 && b[13] == 0xdd && b[20] != 6 && b[20] != 17 && b[20] != 58:
		_, is := packet.Find[*packet.Fragment](packet.Parse(b))
		return is
	}
	return false
}

// unsolicitedPacket returns a packet from another remote endpoint to the outside endpoint of the opener.
func (w *generatorState) unsolicitedPacket(r *rand.Rand, c *hostPair) []arrivingFrame {
	out := w.replyToLast(r, c)
	p := withoutLink(packet.Parse(out[0].Frame))
	for _, l := range p {
		switch l := l.(type) {
		case *packet.IPv4:
			if r.IntN(2) == 0 {
				l.Src = router(l.Src)
			}
		case *packet.IPv6:
			if r.IntN(2) == 0 {
				l.Src = router(l.Src)
			}
		case *packet.TCP:
			l.SrcPort, l.Flags, l.Checksum = uint16(r.Uint32()), pick(r, []packet.TCPFlags{packet.SYN, packet.ACK, packet.RST}), packet.Forced{}
		case *packet.UDP:
			l.SrcPort = uint16(r.Uint32())
		case *packet.Data:
			l.Bytes = l.Bytes[:min(len(l.Bytes), 1200)] // see hasFlow
		}
	}
	n := &hostPair{}
	w.conversations = append(w.conversations, n)
	return []arrivingFrame{{w.frame(out[0].Interface, p), n, 0}}
}

// hairpin returns a packet from the inside to the outside endpoint of another inside host.
func (w *generatorState) hairpin(r *rand.Rand, c *hostPair) []arrivingFrame {
	if c.out[0] == nil || c.out[0].Interface != "wan0" {
		return w.open(r)
	}
	p := withoutLink(packet.Parse(c.out[0].Frame))
	_, _, ok := replyAddresses(p)
	if !ok {
		return w.open(r)
	}
	from := pick(r, w.scenario.Opens)
	src := pick(r, from.Sources)
	var dst netip.Addr
	switch ip := p[0].(type) {
	case *packet.IPv4:
		dst = ip.Src
	case *packet.IPv6:
		dst = ip.Src
	}
	if src.Is6() && dst.Is4() {
		dst = w.embed(r, dst)
	}
	if src.Is4() != dst.Is4() {
		return w.open(r)
	}
	q := packet.Packet{header(r, src, dst)}
	switch l := p[len(p)-1].(type) {
	case *packet.TCP:
		q = append(q, &packet.TCP{SrcPort: uint16(4000 + r.IntN(9)), DstPort: l.SrcPort, Flags: packet.SYN})
	default:
		if u, ok := packet.Find[*packet.UDP](p); ok {
			q = append(q, &packet.UDP{SrcPort: uint16(4000 + r.IntN(9)), DstPort: u.SrcPort}, payload(r))
		} else {
			return w.open(r)
		}
	}
	n := &hostPair{}
	w.conversations = append(w.conversations, n)
	return []arrivingFrame{{w.frame(from.Interface, q), n, 0}}
}

// unrelatedPackets returns packets without relevance for services and rules.
func (w *generatorState) unrelatedPackets(r *rand.Rand) []arrivingFrame {
	texts := []string{
		"arp(spa=198.51.100.2,tpa=198.51.100.1)",
		"ip4(src=198.18.7.7,dst=198.51.100.1)/tcp(sport=1000,dport=22,flags=S)",
		"ip4(src=198.18.7.7,dst=224.0.0.251)/udp(sport=5353,dport=5353)/data(30)",
		"ip4(src=198.18.7.7,dst=198.51.100.1)/icmp(type=echo,id=3)/data(30)",
		"ip6(src=fe80::1,dst=ff02::1:ff00:1,hl=255)/icmp6(type=ns)/data(16)",
		"ip6(src=2001:db8:77::1,dst=2001:db8:ff::1)/icmp6(type=echo,id=3)/data(30)",
		"ip4(src=198.18.7.7,dst=198.51.100.1,mf,id=9,proto=17)/data(64)",
		"vlan(id=7)/ip4(src=198.18.7.7,dst=192.0.2.10)/udp(sport=9,dport=53)",
	}
	return []arrivingFrame{{w.frame("wan0", packet.MustText(pick(r, texts))), nil, 0}}
}

// corruptedPacket returns a corrupted packet.
func (w *generatorState) corruptedPacket(r *rand.Rand, c *hostPair) []arrivingFrame {
	var base []arrivingFrame
	switch r.IntN(4) {
	case 0:
		base = w.sendMore(r, c)
	case 1:
		base = w.replyToLast(r, c)
	case 2:
		base = w.icmpError(r, c, r.IntN(2))
	default:
		base = w.splitLast(r, c)
	}
	a := base[r.IntN(len(base))]
	if len(a.Frame) < 34 || len(a.Frame) > 1300 { // see hasFlow
		return base
	}
	a.Frame = slices.Clone(a.Frame)
	switch r.IntN(7) {
	case 0: // Cut off.
		least := 14 + 20 // BPF_PROG_TEST_RUN takes no frames for TC that end within the IP header.
		if a.Frame[12] == 0x86 {
			least = 14 + 40
		}
		a.Frame = a.Frame[:min(len(a.Frame), least+r.IntN(max(1, len(a.Frame)-least)))]
	case 1: // flip bits after the Ethernet header
		for range 1 + r.IntN(3) {
			at := 14 + r.IntN(len(a.Frame)-14)
			if at == 21 && a.Frame[12] == 0x86 || at == 22 && a.Frame[12] == 8 {
				continue // the hop limit: see changeTTL
			}
			a.Frame[at] ^= 1 << r.IntN(8)
		}
	case 2: // wrong length field
		at := pick(r, []int{16, 17, 18, 19, 14})
		a.Frame[at] = byte(r.Uint32())
	case 3: // an error about an error
		p := withoutLink(packet.Parse(a.Frame))
		if src, dst, ok := replyAddresses(p); ok {
			m := &packet.ICMP{V6: src.Is6(), Type: 3, Code: 3}
			if m.V6 {
				m.Type, m.Code = 1, 4
			}
			inner := append(packet.Packet{header(r, dst, src), m}, p...)
			a.Arrival = w.frame(a.Interface, append(packet.Packet{header(r, src, dst), m}, inner...))
		}
	case 4: // chains of extension headers
		p := withoutLink(packet.Parse(a.Frame))
		if _, ok := p[0].(*packet.IPv6); ok {
			for range 1 + r.IntN(10) {
				p = slices.Insert(p, 1, pick(r, []packet.Layer{&packet.Options6{}, &packet.Options6{Destination: true},
					&packet.Routing{Data: make([]byte, 20)}, &packet.Fragment{ID: r.Uint32()}}))
			}
			a.Arrival = w.frame(a.Interface, p)
		}
	case 5: // overlapping or endless fragments
		if a.Frame[12] == 8 && len(a.Frame) >= 34 {
			a.Frame[20], a.Frame[21] = byte(r.Uint32())&0x3f, byte(r.Uint32())
			fixHeader(a.Frame)
		}
	case 6: // neither query nor error, directly or quoted
		p := withoutLink(packet.Parse(a.Frame))
		for i, l := range p {
			if m, ok := l.(*packet.ICMP); ok && m.IsQuery() {
				p[i] = &packet.ICMP{V6: m.V6, Type: pick(r, []uint8{4, 13, 139, 200})}
				a.Arrival = w.frame(a.Interface, p)
			}
		}
	}
	return []arrivingFrame{a}
}

func fixHeader(frame []byte) {
	size := int(frame[14]&15) * 4
	if size < 20 || 14+size > len(frame) {
		return
	}
	frame[24], frame[25] = 0, 0
	sum := packet.Checksum(frame[14 : 14+size])
	frame[24], frame[25] = byte(sum>>8), byte(sum)
}
