// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/packet"
)

// conversation makes a verb of what builds the next packet of a conversation; nil when there is none to send.
func conversation(build func(w *world, id, rest string) (string, packet.Packet, error)) func(*run, *world, string) (string, error) {
	return func(r *run, w *world, rest string) (string, error) {
		id, rest, _ := strings.Cut(rest, " ")
		if r.ended[id] {
			return "", nil
		}
		link, p, err := build(w, id, rest)
		if err != nil || p == nil {
			return "", err
		}
		w.sent = p
		w.talk, _ = strconv.Atoi(id[1:])
		if w.last == nil {
			w.last = map[string]frame{}
		}
		f := frame{link, p.Build()}
		w.last[id] = f
		if size, id := w.pieces, uint32(injectedID+7); size > 0 {
			w.pieces = 0
			pieces, err := packet.Fragments(f.bytes, size, id)
			if err != nil {
				return "", err
			}
			for _, b := range pieces {
				if err := w.wire.send(link, b); err != nil {
					return "", err
				}
			}
			return "", nil
		}
		return "", w.wire.send(link, f.bytes)
	}
}

// opening is the first packet of a conversation: "LINK PACKET", where "in=SIZE" before the packet sends it in fragments.
func (w *world) opening(_, rest string) (string, packet.Packet, error) {
	link, text, _ := strings.Cut(rest, " ")
	if size, after, ok := strings.Cut(text, " "); ok && strings.HasPrefix(size, "in=") {
		if _, err := fmt.Sscanf(size, "in=%d", &w.pieces); err != nil {
			return "", nil, err
		}
		text = after
	}
	p, err := packet.Text(text)
	return link, p, err
}

// reply answers the last packet of the conversation on the link where it arrived. rest lists changes of the answer.
func (w *world) reply(id, rest string) (string, packet.Packet, error) {
	f, ok := w.seen[id]
	if !ok {
		return "", nil, nil
	}
	delete(w.seen, id)
	return f.link, edited(answerTo(packet.Parse(f.bytes)), rest), nil
}

// again sends the last packet of the conversation once more, with changes. "on=LINK" before them sends it on another link.
func (w *world) again(id, rest string) (string, packet.Packet, error) {
	f, ok := w.last[id]
	if !ok {
		return "", nil, nil
	}
	p, link := packet.Parse(f.bytes), f.link
	if first, changes, _ := strings.Cut(rest, " "); strings.HasPrefix(first, "on=") {
		link, rest = strings.TrimPrefix(first, "on="), changes
		if eth, ok := packet.Find[*packet.Ethernet](p); ok {
			eth.Src, eth.Dst = packet.MAC{2, 0, 0, 0, linkNumber[link], 8}, gatewayMAC(link)
		}
	}
	return link, edited(p, rest), nil
}

// icmpError complains about the last packet of the conversation: "FROM ICMP-LAYER".
func (w *world) icmpError(id, rest string) (string, packet.Packet, error) {
	f, ok := w.seen[id]
	if !ok {
		return "", nil, nil
	}
	from, layer, _ := strings.Cut(rest, " ")
	p := packet.Parse(f.bytes)
	eth, _ := packet.Find[*packet.Ethernet](p)
	text := "eth(src=" + eth.Dst.String() + ",dst=" + eth.Src.String() + ")/"
	if ip, ok := packet.Find[*packet.IPv4](p); ok {
		if from == "host" {
			from = ip.Dst.String()
		}
		text += fmt.Sprintf("ip4(src=%s,dst=%s,id=%d)/", from, ip.Src, injectedID+3)
	} else if ip, ok := packet.Find[*packet.IPv6](p); ok {
		if from == "host" {
			from = ip.Dst.String()
		}
		text += fmt.Sprintf("ip6(src=%s,dst=%s)/", from, ip.Src)
	} else {
		return "", nil, nil
	}
	e, err := packet.Text(text + layer)
	if err != nil {
		return "", nil, err
	}
	e = append(e, packet.ParseIP(f.bytes[14:min(len(f.bytes), 14+540)])...)
	if r, err := packet.Text(e.String()); err == nil {
		e = r
	}
	return f.link, e, nil
}

// edited changes layers that the packet has.
func edited(p packet.Packet, changes string) packet.Packet {
	for _, change := range strings.Fields(changes) {
		if q, err := p.Edit(change); err == nil {
			p = q
		}
	}
	return p
}

// answerTo is the packet that a host sends back: of TCP the next segment.
func answerTo(p packet.Packet) packet.Packet {
	size := 0
	for _, l := range p {
		if d, ok := l.(*packet.Data); ok {
			size = len(d.Bytes)
		}
	}
	var back packet.Packet
	for _, l := range p {
		switch l := l.(type) {
		case *packet.Ethernet:
			back = append(back, &packet.Ethernet{Src: l.Dst, Dst: l.Src})
		case *packet.IPv4:
			back = append(back, &packet.IPv4{Src: l.Dst, Dst: l.Src, TTL: 64, ID: injectedID + 1, DF: l.DF})
		case *packet.IPv6:
			back = append(back, &packet.IPv6{Src: l.Dst, Dst: l.Src, HopLimit: 64})
		case *packet.UDP:
			back = append(back, &packet.UDP{SrcPort: l.DstPort, DstPort: l.SrcPort}, &packet.Data{Bytes: []byte("answer")})
		case *packet.ICMP:
			i := &packet.ICMP{V6: l.V6, Rest: l.Rest, Type: 0}
			if l.V6 {
				i.Type = 129
			}
			if l.Type == i.Type { // an answer that arrived: the next question
				i.Type = 8
				if l.V6 {
					i.Type = 128
				}
			}
			back = append(back, i, &packet.Data{Bytes: []byte("echo")})
		case *packet.TCP:
			t := &packet.TCP{SrcPort: l.DstPort, DstPort: l.SrcPort, Flags: packet.ACK, Seq: l.Ack, Ack: l.Seq + uint32(size), Window: 60000}
			switch {
			case l.Flags&packet.SYN != 0 && l.Flags&packet.ACK == 0:
				t.Flags, t.Seq, t.Ack, t.Options = packet.SYN|packet.ACK, 0x70000000+l.Seq, l.Seq+1, []byte{2, 4, 5, 0xb4}
				back = append(back, t)
				return back
			case l.Flags&packet.SYN != 0:
				t.Ack = l.Seq + 1
			case l.Flags&packet.RST != 0:
				return nil
			}
			t.Flags |= packet.PSH
			back = append(back, t, &packet.Data{Bytes: []byte("segment")})
		default:
			if len(back) > 0 {
				if _, ok := back[len(back)-1].(*packet.Data); ok {
					return back
				}
			}
		}
	}
	return back
}
