// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// event is one step of a run. It depends on the previous results of the datapath, for example "the
// answer in conversation 3". Its seed determines all other choices, so that shrinking can remove
// other events without a change to it.
type event struct {
	kind eventKind
	seed uint64
}

type eventKind uint8

const (
	opening eventKind = iota
	continuing
	answering
	errorOriginal // ICMP error about the last forwarded packet.
	errorReply    // ICMP error about the last forwarded answer.
	fragments
	unsolicited // from another remote endpoint to an observed outside endpoint
	hairpin
	unrelated
	hostile
	reusing  // Both ends close, and the opener reuses its port.
	changing // Change of a mapping or a backend's state, if the scenario has any.
	waiting
	eventKinds
)

// weights lists the relative frequencies of the kinds.
var weights = [eventKinds]int{opening: 22, continuing: 22, answering: 24, errorOriginal: 5, errorReply: 4, fragments: 4, unsolicited: 4,
	hairpin: 3, unrelated: 2, hostile: 8, reusing: 1, changing: 1, waiting: 2}

func randomEvent(r *rand.Rand) event {
	total := 0
	for _, w := range weights {
		total += w
	}
	n := r.IntN(total)
	for k, w := range weights {
		if n -= w; n < 0 {
			return event{eventKind(k), r.Uint64()}
		}
	}
	return event{opening, r.Uint64()}
}

// hostPair contains the observed packets between two hosts.
type hostPair struct {
	in     [2]model.Arrival    // Last received packet of each direction.
	out    [2]*model.Departure // The same packet as sent.
	age    int                 // Age of the world at the last forwarded packet.
	cookie *packet.TCP         // SYN cookie answer to its SYN.
}

// generatorState is the state of the packet generator.
type generatorState struct {
	scenario      Scenario
	host          model.Host
	conversations []*hostPair
	age           int            // Increases when time advances.
	prefixes      []netip.Prefix // Prefixes of rules that translate between the families.
	mapped        []datapath.Mapping
}

// maxConversations limits the memory of a run. The generator evicts the oldest conversations.
const maxConversations = 400

// arrivals returns the packets of an event, each with its conversation and direction.
func (w *generatorState) arrivals(e event) []arrivingFrame {
	r := rand.New(rand.NewPCG(e.seed, 1))
	switch e.kind {
	case opening:
		return w.open(r)
	case unrelated:
		return w.unrelatedPackets(r)
	case waiting:
		return nil
	}
	if len(w.conversations) == 0 {
		return w.open(r)
	}
	c := w.conversations[r.IntN(len(w.conversations))]
	if r.IntN(3) > 0 { // prefer recent conversations
		c = w.conversations[max(0, len(w.conversations)-1-r.IntN(8))]
	}
	switch e.kind {
	case continuing:
		return w.sendMore(r, c)
	case answering:
		return w.replyToLast(r, c)
	case errorOriginal:
		return w.icmpError(r, c, 0)
	case errorReply:
		return w.icmpError(r, c, 1)
	case fragments:
		return w.splitLast(r, c)
	case unsolicited:
		return w.unsolicitedPacket(r, c)
	case hairpin:
		return w.hairpin(r, c)
	case reusing:
		return w.reuseTuple(r, c)
	}
	return w.corruptedPacket(r, c)
}

type arrivingFrame struct {
	model.Arrival
	conversation *hostPair
	direction    int
}

func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// frame returns an IP packet in an Ethernet frame to the gateway.
func (w *generatorState) frame(iface string, p packet.Packet) model.Arrival {
	i, _ := w.host.Interface(iface)
	e := &packet.Ethernet{Dst: i.MAC, Src: packet.MAC{2, 0, 0, 0, 1, 2}}
	if iface == "lan0" {
		e.Src = packet.MAC{2, 0, 0, 0, 2, 2}
	}
	return model.Arrival{Interface: iface, Frame: append(packet.Packet{e}, p...).Build()}
}

// alterFrame rarely changes the link header of a frame. The frame gets another or a group address,
// as on a promiscuous or flooded port, or a priority tag.
func (w *generatorState) alterFrame(r *rand.Rand, a model.Arrival) model.Arrival {
	if len(a.Frame) < 34 {
		return a
	}
	switch n := r.IntN(120); {
	case n < 3:
		other := pick(r, w.host.Interfaces).MAC
		to := pick(r, []packet.MAC{other, {2, 9, 9, 9, 9, byte(r.Uint32())}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {1, 0, 0x5e, 0, 0, 0xfb}, {0x33, 0x33, 0, 0, 0, 1}})
		a.Frame = append(to[:], a.Frame[6:]...)
		if n > 0 {
			return a
		}
		fallthrough
	case n < 6:
		tpid := pick(r, []byte{0x81, 0x88})
		low := map[byte]byte{0x81: 0, 0x88: 0xa8}[tpid]
		tag := []byte{tpid, low, byte(r.Uint32()) & 0xf0, 0}
		a.Frame = slices.Concat(a.Frame[:12], tag, a.Frame[12:])
	}
	return a
}

// header returns the IP header of a packet.
func header(r *rand.Rand, src, dst netip.Addr) packet.Layer {
	if src.Is4() {
		ip := &packet.IPv4{Src: src, Dst: dst, TTL: 64, ID: uint16(r.Uint32()), DF: r.IntN(2) == 0}
		if r.IntN(8) == 0 {
			ip.TOS = uint8(r.Uint32())
		}
		if r.IntN(40) == 0 {
			ip.Options = []byte{0x94, 4, 0, 0} // router alert
		}
		return ip
	}
	return &packet.IPv6{Src: src, Dst: dst, HopLimit: 64, TrafficClass: uint8(r.Uint32()), FlowLabel: r.Uint32() & 0xfffff}
}

func payload(r *rand.Rand) *packet.Data {
	n := r.IntN(64)
	if r.IntN(30) == 0 {
		n = r.IntN(1200)
	}
	return random(r, n)
}

func random(r *rand.Rand, n int) *packet.Data {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return &packet.Data{Bytes: b}
}

// open starts a conversation.
func (w *generatorState) open(r *rand.Rand) []arrivingFrame {
	o := pick(r, w.scenario.Opens)
	src, dst := pick(r, o.Sources), pick(r, o.Dests)
	sport, dport := uint16(1+r.IntN(65535)), pick(r, o.Ports)
	if r.IntN(2) == 0 {
		sport = uint16(4000 + r.IntN(20)) // provoke port collisions
	}
	p := packet.Packet{header(r, src, dst)}
	switch pick(r, o.Protocols) {
	case TCP:
		flags := packet.SYN
		if r.IntN(12) == 0 {
			flags = packet.TCPFlags(r.Uint32() & 0x3f)
		}
		p = append(p, &packet.TCP{SrcPort: sport, DstPort: dport, Flags: flags, Seq: r.Uint32(), Window: 65535, Options: []byte{2, 4, 5, 180}})
		if r.IntN(8) == 0 { // data of TCP Fast Open
			p = append(p, payload(r))
		}
	case UDP:
		u := &packet.UDP{SrcPort: sport, DstPort: dport}
		if src.Is4() && r.IntN(10) == 0 {
			u.Checksum = packet.Force(0)
		}
		p = append(p, u, payload(r))
	case Ping:
		if r.IntN(4) == 0 {
			sport = 0 // no identifier
		}
		m := &packet.ICMP{Type: 8, Rest: uint32(sport)<<16 | 1}
		if src.Is6() {
			m.V6, m.Type = true, 128
		}
		p = append(p, m, payload(r))
	case SCTP:
		p = append(p, &packet.SCTP{SrcPort: sport, DstPort: dport, Tag: r.Uint32()}, payload(r))
	case Other:
		p = append(p, payload(r))
		setProtocol(p[0], pick(r, withoutPorts))
	}
	if ip, ok := p[0].(*packet.IPv6); ok && r.IntN(20) == 0 && !ip.NextHeader.Set {
		p = slices.Insert(p, 1, packet.Layer(&packet.Options6{Destination: r.IntN(2) == 0}))
	}
	c := &hostPair{}
	w.conversations = append(w.conversations, c)
	if len(w.conversations) > maxConversations {
		w.conversations = w.conversations[1:]
	}
	return []arrivingFrame{{w.frame(o.Interface, p), c, 0}}
}

// withoutPorts lists GRE, ESP, DCCP and UDP-Lite. The model ignores the ports of the last two, and
// their checksums cover the addresses.
var withoutPorts = []uint32{47, 50, 33, 136}

// setProtocol sets the protocol number of an IP header without a layer for that protocol.
func setProtocol(header packet.Layer, protocol uint32) {
	switch ip := header.(type) {
	case *packet.IPv4:
		ip.Protocol = packet.Force(protocol)
	case *packet.IPv6:
		ip.NextHeader = packet.Force(protocol)
	}
}

// sendMore returns another packet of the opener.
func (w *generatorState) sendMore(r *rand.Rand, c *hostPair) []arrivingFrame {
	if c.in[0].Frame == nil {
		return w.open(r)
	}
	p := withoutLink(packet.Parse(c.in[0].Frame))
	if c.cookie != nil && r.IntN(3) > 0 {
		return w.proveCookie(r, c, p)
	}
	if t, ok := packet.Find[*packet.TCP](p); ok && r.IntN(6) > 0 {
		*t = packet.TCP{SrcPort: t.SrcPort, DstPort: t.DstPort, Seq: t.Seq + 1, Ack: r.Uint32(), Window: 1000, Flags: nextFlags(r)}
	}
	p = w.replaceData(r, p, c)
	w.changeTTL(r, p, c)
	return []arrivingFrame{{w.frame(c.in[0].Interface, w.addOptions(r, p, c)), c, 0}}
}

// reuseTuple closes a connection and opens another one in its tuple.
func (w *generatorState) reuseTuple(r *rand.Rand, c *hostPair) []arrivingFrame {
	if c.in[0].Frame == nil || c.out[0] == nil {
		return w.sendMore(r, c)
	}
	there, back := withoutLink(packet.Parse(c.in[0].Frame)), innerPacket(withoutLink(packet.Parse(c.out[0].Frame)))
	t, isTCP := packet.Find[*packet.TCP](there)
	u, came := packet.Find[*packet.TCP](back)
	dst, src, ok := replyAddresses(there)
	from, to, known := replyAddresses(back)
	if !isTCP || !came || !ok || !known {
		return w.sendMore(r, c)
	}
	opener := func(flags packet.TCPFlags, seq uint32) arrivingFrame {
		return arrivingFrame{w.frame(c.in[0].Interface, packet.Packet{header(r, src, dst),
			&packet.TCP{SrcPort: t.SrcPort, DstPort: t.DstPort, Flags: flags, Seq: seq, Ack: r.Uint32(), Window: 1000}}), c, 0}
	}
	answer := arrivingFrame{w.frame(c.out[0].Interface, packet.Packet{header(r, from, to),
		&packet.TCP{SrcPort: u.DstPort, DstPort: u.SrcPort, Flags: packet.FIN | packet.ACK, Seq: r.Uint32(), Ack: t.Seq + 2, Window: 500}}), c, 1}
	return []arrivingFrame{opener(packet.FIN|packet.ACK, t.Seq+1), answer, opener(packet.ACK, t.Seq+2), opener(packet.SYN, r.Uint32())}
}

// hasFlow reports whether a packet of the conversation certainly belongs to a flow. A dropped
// packet that opens a flow would hide the choice of its port or backend.
func (w *generatorState) hasFlow(c *hostPair) bool { return c.out[0] != nil && c.age == w.age }

// replaceData replaces the data of a packet. Sometimes it leaves no data. If the packet has a flow,
// it sometimes nearly fills the link's MTU.
func (w *generatorState) replaceData(r *rand.Rand, p packet.Packet, c *hostPair) packet.Packet {
	p = slices.DeleteFunc(p, func(l packet.Layer) bool { _, is := l.(*packet.Data); return is })
	if u, ok := packet.Find[*packet.UDP](p); ok && u.Checksum.Value > 0 {
		u.Checksum = packet.Forced{}
	}
	switch n := r.IntN(24); {
	case n == 0 && w.hasFlow(c):
		return append(p, random(r, 1380+r.IntN(120)))
	case n < 4:
		return p
	}
	return append(p, payload(r))
}

// proveCookie acknowledges a cookie, sometimes with a nearby number.
func (w *generatorState) proveCookie(r *rand.Rand, c *hostPair, p packet.Packet) []arrivingFrame {
	if t, ok := packet.Find[*packet.TCP](p); ok {
		*t = packet.TCP{SrcPort: t.SrcPort, DstPort: t.DstPort, Seq: c.cookie.Ack, Ack: c.cookie.Seq + 1, Window: 1000, Flags: packet.ACK}
		if r.IntN(4) == 0 {
			t.Ack += r.Uint32N(9) - 4
		}
		if r.IntN(4) == 0 {
			t.Options = []byte{1, 1, 1, 1}
		}
		c.cookie = nil
	}
	w.changeTTL(r, p, c)
	return []arrivingFrame{{w.frame(c.in[0].Interface, p), c, 0}}
}

func nextFlags(r *rand.Rand) packet.TCPFlags {
	return pick(r, []packet.TCPFlags{packet.ACK, packet.ACK, packet.ACK | packet.PSH, packet.ACK | packet.PSH, packet.ACK | packet.FIN,
		packet.RST, packet.SYN, packet.SYN | packet.ACK, packet.RST | packet.ACK})
}

// changeTTL sets the hop limit of a packet. If the packet has a flow, the limit is sometimes too
// small.
func (w *generatorState) changeTTL(r *rand.Rand, p packet.Packet, c *hostPair) {
	ttl := uint8(64)
	if r.IntN(20) == 0 && w.hasFlow(c) {
		ttl = uint8(r.IntN(3))
	}
	for _, l := range p {
		switch l := l.(type) {
		case *packet.IPv4:
			l.TTL, l.ID = ttl, uint16(r.Uint32())
			return
		case *packet.IPv6:
			l.HopLimit = ttl
			return
		}
	}
}

// replyToLast returns an answer to the last forwarded packet, from its receiver's view.
func (w *generatorState) replyToLast(r *rand.Rand, c *hostPair) []arrivingFrame {
	if c.out[0] == nil {
		return w.sendMore(r, c)
	}
	p := innerPacket(withoutLink(packet.Parse(c.out[0].Frame)))
	src, dst, ok := replyAddresses(p)
	if !ok {
		return w.sendMore(r, c)
	}
	if r.IntN(60) == 0 {
		dst = w.gateway(r, dst) // the gateway itself sent the request, as in a health check
	}
	q := packet.Packet{header(r, src, dst)}
	for _, l := range p[1:] {
		switch l := l.(type) {
		case *packet.TCP:
			flags := nextFlags(r)
			if l.Flags&(packet.SYN|packet.ACK) == packet.SYN && r.IntN(8) > 0 {
				flags = packet.SYN | packet.ACK
			}
			q = append(q, &packet.TCP{SrcPort: l.DstPort, DstPort: l.SrcPort, Flags: flags, Seq: r.Uint32(), Ack: l.Seq + 1, Window: 500})
			if flags&packet.SYN == 0 {
				q = w.replaceData(r, q, c)
			}
		case *packet.UDP:
			q = w.replaceData(r, append(q, &packet.UDP{SrcPort: l.DstPort, DstPort: l.SrcPort}), c)
		case *packet.ICMP:
			if !l.IsQuery() {
				return w.sendMore(r, c)
			}
			m := &packet.ICMP{V6: l.V6, Rest: l.Rest, Type: 0}
			if l.V6 {
				m.Type = 129
			}
			q = append(q, m, payload(r))
		case *packet.SCTP:
			q = append(q, &packet.SCTP{SrcPort: l.DstPort, DstPort: l.SrcPort, Tag: r.Uint32()}, payload(r))
		}
	}
	if len(q) == 1 { // a protocol without ports
		if !copyProtocol(q[0], p[0]) {
			return w.sendMore(r, c)
		}
		q = append(q, payload(r))
	}
	return []arrivingFrame{{w.frame(c.out[0].Interface, w.addOptions(r, q, c)), c, 1}}
}

// gateway returns one of the host's own addresses, in the family of like.
func (w *generatorState) gateway(r *rand.Rand, like netip.Addr) netip.Addr {
	var own []netip.Addr
	for _, i := range w.host.Interfaces {
		for _, p := range i.Addresses {
			if p.Addr().Is4() == like.Is4() {
				own = append(own, p.Addr())
			}
		}
	}
	return pick(r, own)
}

// copyProtocol copies the protocol of a header, and reports whether withoutPorts contains it.
func copyProtocol(header, as packet.Layer) bool {
	var protocol uint32
	switch ip := as.(type) {
	case *packet.IPv4:
		protocol = ip.Protocol.Value
	case *packet.IPv6:
		protocol = ip.NextHeader.Value
	}
	setProtocol(header, protocol)
	return slices.Contains(withoutPorts, protocol)
}

// innerPacket removes tunnel headers: the backend answers the inner packet.
func innerPacket(p packet.Packet) packet.Packet {
	for i := len(p) - 1; i > 0; i-- {
		switch p[i].(type) {
		case *packet.IPv4, *packet.IPv6:
			if _, isError := p[i-1].(*packet.ICMP); !isError {
				return p[i:]
			}
		}
	}
	return p
}

func replyAddresses(p packet.Packet) (src, dst netip.Addr, ok bool) {
	if len(p) == 0 {
		return
	}
	switch ip := p[0].(type) {
	case *packet.IPv4:
		return ip.Dst, ip.Src, true
	case *packet.IPv6:
		return ip.Dst, ip.Src, true
	}
	return
}

func withoutLink(p packet.Packet) packet.Packet {
	if len(p) > 0 {
		if _, ok := p[0].(*packet.Ethernet); ok {
			return p[1:]
		}
	}
	return p
}
