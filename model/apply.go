// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// apply carries out a plan: hop limit, rewriting, route, MTU and link header.
func (m *Model) apply(in Arrival, v *view, p plan) Outcome {
	for _, c := range p.count {
		c.packets++
		c.bytes += uint64(len(v.ip))
	}
	if p.action != Forward {
		return m.withAnswer(in, v, p.answer, Outcome{Action: p.action, Reason: p.reason})
	}
	crosses := p.to.Source.IsValid() && p.to.Source.Addr().Is6() != v.v6
	untranslated := v.kind == icmpError || v.later && v.protocol == flow.ICMP // the ICMP type of these packets is unknown here
	if p.local || !(untranslated && crosses) && m.host.refusesSource(in.Interface, v.src.Addr()) {
		return Outcome{Action: Pass, Reason: ReasonNotRouted}
	}
	if p.half.leftRule(m, v) {
		m.removeSession(p.half.session)
		gone := drop(ReasonRerouted)
		if f := m.fragments[v.fragmentKey()]; f != nil && (v.first || v.later) {
			f.plan = gone
		}
		return Outcome{Action: gone.action, Reason: gone.reason}
	}
	if !crosses && !v.v6 && v.sourceRoute { // Linux drops it (accept_source_route) before it sends an error
		return Outcome{Action: Drop, Reason: ReasonUntranslatable}
	}
	if !p.to.Source.IsValid() {
		p.to = v.tuple()
	}
	if p.replacement != nil {
		v = p.replacement
	}
	via := p.to.Dest.Addr()
	if p.via.IsValid() {
		via = p.via
	}
	next, routed := m.host.route(via)
	if !routed && !m.host.Owns(via) && !leftToKernel(via) {
		return m.withAnswer(in, v, noRoute, Outcome{Action: Drop, Reason: ReasonNoRoute})
	}
	if v.ttl <= 1 {
		return m.withAnswer(in, v, ttlExceeded, Outcome{Action: Drop, Reason: ReasonTTLExceeded})
	}
	crossing := p.to.Source.Addr().Is6() != v.v6
	mac, known := next.mac, next.known
	if p.mac != (packet.MAC{}) {
		mac, known = p.mac, true
	}
	var planned Planned
	if !known && v.kind != icmpError && !v.later {
		planned = Planned{Tuple: p.to, Gateway: via}
	}
	// Without room in user space the packet is translated as for a known next hop.
	full := m.choices.Ends(ReasonNoNeighbour) || m.choices.Ends(ReasonUntranslatable)
	leaves := routed && !m.host.Owns(via)
	held := leaves && !known && len(in.Frame) <= maxUserFrame && !full
	waits := Outcome{Action: Drop, Reason: ReasonUnresolved, Planned: planned} // user space waits for the next hop
	if crossing && v.kind == icmpError {
		v.trailer = nil // the model builds a new error
	}
	b, reason := render(v, translationParams{to: p.to, quote: p.quote, neutral: p.neutral, id: m.choices.Identification(false),
		class: p.class, requireChecksum: p.requireChecksum, mtu: m.translatedMTU(in, v, next)})
	sourceRouted := crossing && v.sourceRoute
	if held && reason != "" {
		if _, _, big := m.untranslatable(v, p, next); reason != ReasonUntranslatable || !big {
			return waits
		}
	}
	if reason != "" && sourceRouted { // another reason does not suppress this error
		return m.withAnswer(in, v, sourceRouteFailed, Outcome{Action: Drop, Reason: ReasonUntranslatable})
	}
	if reason == ReasonUntranslatable { // RFC 7915 §4.4, §5.4
		return m.dropUntranslatable(in, v, p, next)
	}
	if reason != "" {
		return Outcome{Action: Drop, Reason: reason}
	}
	arrival, ok := m.host.Interface(in.Interface)
	switch {
	case p.clamp && ok && m.host.Owns(via): // the answer leaves by the ingress interface
		clampMSS(b, arrival.MTU)
	case p.clamp && routed:
		clampMSS(b, next.MTU-p.encap.size())
	}
	if ok && p.room > 0 {
		headers := 40
		if v.v6 {
			headers = 60
		}
		lowerMSS(b, arrival.MTU-headers-p.room)
	}
	if p.encap != nil {
		b = p.encap.wrap(m, b, next)
	}
	if (!routed || m.host.Owns(via)) && !sourceRouted { // local delivery or no route: the MTU and the neighbour do not matter
		if p.edit != nil {
			if b, reason = p.edit(b, next.MTU); reason != "" {
				return Outcome{Action: Drop, Reason: reason}
			}
		}
		return Outcome{Action: Pass, Reason: ReasonNotRouted, Out: []Departure{{in.Interface, kernelFrame(in.Frame, b, v.trailer)}}}
	}
	if most := m.maxPacketSize(v, b, next); !m.host.Owns(via) && len(b)+p.grow > most && (known || !fragmentable(v, b, p)) {
		return m.tooBig(in, v, p, b, next, most)
	}
	if held {
		return waits
	}
	if sourceRouted {
		return m.withAnswer(in, v, sourceRouteFailed, Outcome{Action: Drop, Reason: ReasonUntranslatable})
	}
	if p.edit != nil {
		if b, reason = p.edit(b, next.MTU); reason != "" {
			return Outcome{Action: Drop, Reason: reason}
		}
	}
	if !known {
		return Outcome{Action: Pass, Reason: ReasonNoNeighbour, Out: []Departure{{next.Name, kernelFrame(in.Frame, b, v.trailer)}}, Planned: planned}
	}
	b = append(b, v.trailer...) // padding keeps its place: no length field counts it
	return Outcome{Action: p.action, Reason: p.reason, Out: []Departure{{next.Name, link(next.MAC, mac, b)}}}
}

// leftToKernel reports whether the kernel decides about a destination without a route: this network,
// loopback, link-local IPv6, multicast and reserved addresses.
func leftToKernel(a netip.Addr) bool {
	first := a.AsSlice()[0]
	if a.Is6() {
		return first >= 0xfe
	}
	return first == 0 || first == 127 || first >= 224
}

// dropUntranslatable drops a packet that has no translation and sends an ICMP error to its sender.
// "Packet too big" has priority over "prohibited".
func (m *Model) dropUntranslatable(in Arrival, v *view, p plan, next hop) Outcome {
	if b, most, big := m.untranslatable(v, p, next); big {
		return m.tooBig(in, v, p, b, next, most)
	}
	return m.withAnswer(in, v, prohibited, Outcome{Action: Drop, Reason: ReasonUntranslatable})
}

// untranslatable returns a packet without a translation as it would be if it had one, its maximum
// size, and whether it is refused for its size.
func (m *Model) untranslatable(v *view, p plan, next hop) (b []byte, most int, big bool) {
	if p.quote != nil || p.to.Source.Addr().Is6() == v.v6 || m.host.Owns(p.to.Dest.Addr()) {
		return nil, 0, false
	}
	write := header6
	if v.v6 {
		write = header4
	}
	b = write(v, translationParams{to: p.to}, v.payload(), p.to.Protocol)
	most = m.maxPacketSize(v, b, next)
	return b, most, len(b) > most && (next.known || !fragmentable(v, b, p))
}

// fragmentable reports whether packet b, the translation of v, may be fragmented (RFC 7915 §5.1).
func fragmentable(v *view, b []byte, p plan) bool {
	if p.encap != nil && b[0]>>4 == 6 {
		return false
	}
	if v.v6 && b[0]>>4 == 4 && p.encap == nil {
		return b[6]&0x40 == 0
	}
	return !v.df
}

// link puts an Ethernet header in front of an IP packet.
func link(src, dst packet.MAC, b []byte) []byte {
	out := append(slices.Clone(dst[:]), src[:]...)
	kind := uint16(packet.TypeIPv4)
	if b[0]>>4 == 6 {
		kind = packet.TypeIPv6
	}
	return append(binary.BigEndian.AppendUint16(out, kind), b...)
}

// kernelFrame returns the frame of a packet that the kernel forwards. It has the link addresses of
// the received frame, because the kernel finds the next hop itself. Its hop limit is one more than
// the final value, because the kernel decrements it (RFC 5508 REQ-10a, RFC 7915 §4.1).
func kernelFrame(frame, b, trailer []byte) []byte {
	if b[0]>>4 == 6 {
		b[7]++
	} else {
		was := slices.Clone(b[8:10])
		b[8]++
		binary.BigEndian.PutUint16(b[10:], packet.UpdateChecksum(binary.BigEndian.Uint16(b[10:]), was, b[8:10]))
	}
	return link(packet.MAC(frame[6:12]), packet.MAC(frame[:6]), append(b, trailer...))
}

// maxPacketSize returns the maximum size of packet b, the translation of v, on the egress link. A packet
// without DF must fit every IPv6 path behind this gateway (RFC 7915 §4.1).
func (m *Model) maxPacketSize(v *view, b []byte, next hop) int {
	if lowest := m.config.LowestIPv6MTU; lowest > 0 && !v.df && b[0]>>4 == 6 {
		return min(lowest, next.MTU)
	}
	return next.MTU
}

// maxUserFrame is the longest frame, in bytes, that user space of a datapath handles.
const maxUserFrame = 2048

// tooBig handles a packet larger than most, the limit of its next hop. The sender gets an ICMP error where
// fragmentation is forbidden (RFC 4787 REQ-13, RFC 8200 §5). Otherwise the kernel fragments the
// packet. User space fragments a translation to IPv6 and a packet that the kernel would refuse.
func (m *Model) tooBig(in Arrival, v *view, p plan, b []byte, next hop, most int) Outcome {
	crossed := b[0]>>4 == 6 && !v.v6
	full := m.choices.Ends(ReasonTooBig) // the limit per second is reached
	taken := m.kernelForwards(b)
	if !v.df && (crossed || b[0]>>4 == 4 && !taken) && len(in.Frame) <= maxUserFrame && !full {
		return Outcome{Action: Drop, Reason: ReasonToFragment6}
	}
	if v.v6 && b[0]>>4 == 4 && binary.BigEndian.Uint16(b[6:])&0x4000 == 0 && len(in.Frame) <= maxUserFrame && !full && p.encap == nil { // RFC 7915 §5.1
		return Outcome{Action: Drop, Reason: ReasonToFragment6}
	}
	if v.df || !taken || b[0]>>4 == 6 { // routers do not fragment IPv6
		a := tooBig
		a.mtu = uint32(most - (len(b) - len(v.ip) + p.grow))
		if v.v6 {
			a.mtu = max(a.mtu, 1280) // hosts discard less (RFC 8201 §4)
		}
		return m.withAnswer(in, v, a, Outcome{Action: Drop, Reason: ReasonTooBig})
	}
	if p.edit != nil {
		var reason Reason
		if b, reason = p.edit(b, next.MTU); reason != "" {
			return Outcome{Action: Drop, Reason: reason}
		}
	}
	return Outcome{Action: Pass, Reason: ReasonToFragment, Out: []Departure{{next.Name, kernelFrame(in.Frame, b, v.trailer)}}}
}

// kernelForwards reports whether the kernel forwards packet b after ingress. The kernel refuses a
// packet with a source address of this host or without a route to its source.
func (m *Model) kernelForwards(b []byte) bool {
	if b[0]>>4 == 6 {
		return false
	}
	src := netip.AddrFrom4([4]byte(b[12:16]))
	_, ok := m.host.route(src)
	return ok && !m.host.Owns(src)
}

// translatedMTU returns the function that translates the MTU of an ICMP error to the other address
// family (RFC 7915 §4.2 and §5.2). The error leaves by next. The oversized packet arrived by next.
func (m *Model) translatedMTU(in Arrival, v *view, next hop) func(uint32) uint32 {
	arrival, _ := m.host.Interface(in.Interface)
	return func(mtu uint32) uint32 {
		if v.v6 {
			less := 20
			if v.quoted.fragmentAt > 0 {
				less += 8
			}
			return uint32(max(0, min(int(mtu)-less, next.MTU, arrival.MTU-less)))
		}
		return max(1280, min(mtu+20, uint32(next.MTU), uint32(arrival.MTU)+20))
	}
}

// errorReply describes the packet that a datapath sends when it drops a packet.
type errorReply struct {
	reset        bool
	kind4, kind6 message
	mtu          uint32
	pointer      bool // IPv6: at "segments left" in the routing header.
	cookie       bool // SYN-ACK.
	number       uint32
	mss          int
}

var (
	noAnswer          = errorReply{}
	ttlExceeded       = errorReply{kind4: message{11, 0}, kind6: message{3, 0}}
	tooBig            = errorReply{kind4: message{3, 4}, kind6: message{2, 0}}
	noRoute           = errorReply{kind4: message{3, 0}, kind6: message{1, 0}}
	hostUnreachable   = errorReply{kind4: message{3, 1}, kind6: message{1, 3}}
	portUnreachable   = errorReply{kind4: message{3, 3}, kind6: message{1, 4}}
	prohibited        = errorReply{kind4: message{3, 13}, kind6: message{1, 1}}
	sourceRouteFailed = errorReply{kind4: message{3, 5}, kind6: message{4, 0}, pointer: true}
	reset             = errorReply{reset: true}
)

// withAnswer adds the answer to an outcome. Configuration or the rate limit may suppress it (RFC
// 1812 §4.3.2.8).
func (m *Model) withAnswer(in Arrival, v *view, a errorReply, o Outcome) Outcome {
	if a == noAnswer || !mayAnswer(v) || m.config.ICMPErrors == config.SwitchOff && !a.cookie && !(a.reset && v.protocol == flow.TCP) {
		return o
	}
	if m.choices.Silent(o.Reason) {
		return o
	}
	iface, _ := m.host.Interface(in.Interface)
	var b []byte
	switch {
	case a.cookie:
		b = cookieFor(v, a)
	case a.reset && v.protocol == flow.TCP:
		b = resetFor(v)
	case a.reset:
		return m.withAnswer(in, v, portUnreachable, o)
	default:
		src, ok := m.address(iface, v.v6)
		if !ok {
			return o
		}
		b = errorFor(v, a, src)
	}
	o.Out = []Departure{{in.Interface, link(iface.MAC, packet.MAC(in.Frame[6:12]), b)}}
	return o
}

// mayAnswer reports whether an ICMP error or a reset may answer v. An ICMP error, a later fragment
// and a packet without a single sender get no answer (RFC 1812 §4.3.2.7, RFC 4443 §2.4 (e)).
func mayAnswer(v *view) bool {
	src := v.src.Addr()
	return v.kind != icmpError && v.kind != icmpOther && v.kind != icmpLink && !v.later && !src.IsUnspecified() && !src.IsMulticast() && !src.IsLoopback() &&
		!v.dst.Addr().IsMulticast() && v.flags&packet.RST == 0
}

// errorFor builds an ICMP error about v. The error quotes as much of v as fits in 576 bytes (RFC
// 1812 §4.3.2.3), for IPv6 in 1280 bytes (RFC 4443 §2.4 (c)).
func errorFor(v *view, a errorReply, src netip.Addr) []byte {
	rest := a.mtu
	if v.v6 {
		if a.pointer {
			rest = uint32(v.routeAt)
		}
		p := packet.Packet{&packet.IPv6{Src: src, Dst: v.src.Addr(), HopLimit: 64},
			&packet.ICMP{V6: true, Type: a.kind6.kind, Code: a.kind6.code, Rest: rest},
			&packet.Data{Bytes: v.ip[:min(len(v.ip), 1280-48)]}}
		return p.Build()
	}
	p := packet.Packet{&packet.IPv4{Src: src, Dst: v.src.Addr(), TTL: 64, TOS: 0xc0 | v.ip[1]&0x1e}, // RFC 1812 §4.3.2.5
		&packet.ICMP{Type: a.kind4.kind, Code: a.kind4.code, Rest: rest},
		&packet.Data{Bytes: v.ip[:min(len(v.ip), 576-28)]}}
	return p.Build()
}

// resetFor builds the TCP reset that answers v (RFC 9293 §3.10.7.1).
func resetFor(v *view) []byte {
	t := &packet.TCP{SrcPort: v.dst.Port(), DstPort: v.src.Port(), Flags: packet.RST}
	seg := v.payload()
	if v.flags&packet.ACK != 0 {
		t.Seq = binary.BigEndian.Uint32(seg[8:])
	} else {
		length := uint32(len(seg)) - uint32(seg[12]>>4)*4
		if v.flags&packet.SYN != 0 {
			length++
		}
		if v.flags&packet.FIN != 0 {
			length++
		}
		t.Flags |= packet.ACK
		t.Ack = binary.BigEndian.Uint32(seg[4:]) + length
	}
	return answerTo(v, t)
}

// cookieFor builds the SYN-ACK with a SYN cookie. It is not longer than the SYN.
func cookieFor(v *view, a errorReply) []byte {
	t := &packet.TCP{SrcPort: v.dst.Port(), DstPort: v.src.Port(), Flags: packet.SYN | packet.ACK,
		Seq: a.number, Ack: binary.BigEndian.Uint32(v.payload()[4:]) + 1}
	if len(v.payload()) >= 24 {
		t.Options = mssOption(a.mss)
	}
	return answerTo(v, t)
}

// answerTo builds a packet with segment t to the sender of v.
func answerTo(v *view, t *packet.TCP) []byte {
	if v.v6 {
		return packet.Packet{&packet.IPv6{Src: v.dst.Addr(), Dst: v.src.Addr(), HopLimit: 64}, t}.Build()
	}
	return packet.Packet{&packet.IPv4{Src: v.dst.Addr(), Dst: v.src.Addr(), TTL: 64, DF: true}, t}.Build()
}

// clampMSS lowers the MSS option of a SYN to the capacity of a link with that MTU (RFC 9293
// §3.7.1).
func clampMSS(b []byte, mtu int) {
	if b[0]>>4 == 6 {
		lowerMSS(b, mtu-60)
	} else {
		lowerMSS(b, mtu-40)
	}
}

// lowerMSS lowers the MSS option of a SYN to most.
func lowerMSS(b []byte, most int) {
	v, reason := readIP(b)
	if reason != "" || v.protocol != flow.TCP || v.later || v.flags&packet.SYN == 0 {
		return
	}
	t, done := v.payload(), false
	eachOption(t, func(kind byte, at, end int) {
		if kind == 2 && end-at == 2 && !done {
			done = true
			if int(binary.BigEndian.Uint16(t[at:])) > most {
				setWord(t, at, uint16(most))
			}
		}
	})
}

// setWord replaces the 16-bit word at offset i of a TCP segment and updates the checksum. The
// offset may be odd.
func setWord(p []byte, i int, value uint16) {
	from, to := i&^1, (i+3)&^1
	before := slices.Clone(p[from:to])
	binary.BigEndian.PutUint16(p[i:], value)
	sum := packet.UpdateChecksum(binary.BigEndian.Uint16(p[16:]), before, slices.Clone(p[from:to]))
	binary.BigEndian.PutUint16(p[16:], sum)
}

func readIP(b []byte) (*view, Reason) {
	if b[0]>>4 == 6 {
		return parseIPv6(b, false)
	}
	return parseIPv4(b, false)
}
