// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// Traffic generates the random packets of the judge for tests without the model.
type Traffic struct {
	w *generatorState
	r *rand.Rand
}

// NewTraffic returns traffic with those openings on the host. The prefixes embed IPv4 addresses.
func NewTraffic(opens []Opening, host model.Host, r *rand.Rand, prefixes ...netip.Prefix) *Traffic {
	return &Traffic{w: &generatorState{scenario: Scenario{Opens: opens}, host: host, prefixes: prefixes}, r: r}
}

// Packet is a packet of a conversation.
type Packet struct{ arrivingFrame }

// First returns the first packet of a new conversation.
func (t *Traffic) First() model.Arrival { return t.w.open(t.r)[0].Arrival }

// Next returns the packets of the next event. A host opens or continues a conversation, answers,
// reports an error, sends fragments, or sends a hairpin packet.
func (t *Traffic) Next() (list []Packet) {
	e := randomEvent(t.r)
	for e.kind == unrelated || e.kind == hostile || e.kind == changing || e.kind == waiting {
		e = randomEvent(t.r)
	}
	for _, a := range t.w.arrivals(e) {
		list = append(list, Packet{a})
	}
	return list
}

// Saw records the outcome of a packet, for later answers.
func (t *Traffic) Saw(p Packet, got model.Outcome) { t.w.record(p.arrivingFrame, got) }

// Forget drops uncertain conversations. Call it after a change of the gateway or the time, because
// flows may have ended.
func (t *Traffic) Forget() { t.w.dropUncertain() }

// record stores the outcome of a packet.
func (w *generatorState) record(a arrivingFrame, got model.Outcome) {
	c := a.conversation
	if c == nil {
		return
	}
	if got.Reason == model.ReasonCookie && len(got.Out) == 1 {
		c.cookie, _ = packet.Find[*packet.TCP](packet.Parse(got.Out[0].Frame))
	}
	if got.Action == model.Forward && len(got.Out) == 1 {
		c.age = w.age
		c.in[a.direction] = a.Arrival
		c.out[a.direction] = &got.Out[0]
	} else if c.in[a.direction].Frame == nil {
		c.in[a.direction] = a.Arrival
	}
}

// About wraps a packet in ICMP errors, depth levels deep. The errors are from its receiver, mostly
// on the other side.
func About(r *rand.Rand, a model.Arrival, depth int) model.Arrival {
	for range depth {
		p := packet.Parse(a.Frame)
		if len(p) < 2 {
			return a
		}
		out := "wan0"
		if (a.Interface == "wan0") != (r.IntN(4) == 0) {
			out = "lan0"
		}
		src, dst, ok := replyAddresses(p[1:])
		if !ok {
			return a
		}
		m := &packet.ICMP{Type: pick(r, []uint8{3, 3, 11, 12, 4, 5}), Code: uint8(r.IntN(16)), Rest: r.Uint32() & 0xff0005ff}
		if src.Is6() {
			m.V6, m.Type, m.Code = true, uint8(1+r.IntN(4)), uint8(r.IntN(6))
		}
		quoted := &packet.Data{Bytes: slices.Clone(a.Frame[14:min(len(a.Frame), 14+28+r.IntN(520))])}
		a = model.Arrival{Interface: out, Frame: packet.Packet{p[0], header(r, src, dst), m, quoted}.Build()}
	}
	return a
}

// Spoil corrupts a packet in ways that the model need not support. It mostly keeps the IP header's
// checksum correct.
func Spoil(r *rand.Rand, a model.Arrival) model.Arrival {
	b := slices.Clone(a.Frame)
	for range 1 + r.IntN(3) {
		switch r.IntN(6) {
		case 0: // truncate
			b = b[:min(len(b), 54+r.IntN(max(1, len(b)-54)))]
		case 1: // random bytes
			for range 1 + r.IntN(4) {
				b[14+r.IntN(len(b)-14)] = byte(r.Uint32())
			}
		case 2: // lengths
			b[pick(r, []int{14, 16, 17, 18, 19})] = byte(r.Uint32())
		case 3: // fragments that overlap, start late or never end
			if b[14]>>4 == 4 {
				binary.BigEndian.PutUint16(b[18:], uint16(r.IntN(8)))
				binary.BigEndian.PutUint16(b[20:], uint16(r.Uint32())&0x20ff)
			}
		case 4:
			b = impossibleHeaders(r, b)
		default: // protocol
			b[pick(r, []int{23, 20})] = pick(r, []byte{0, 1, 6, 17, 41, 44, 47, 50, 51, 58, 60, 132})
		}
	}
	if b[14]>>4 == 4 && r.IntN(8) > 0 {
		fixHeader(b)
	}
	return model.Arrival{Interface: a.Interface, Frame: b}
}

// impossibleHeaders adds extension headers to an IPv6 packet. Some of the headers are invalid.
func impossibleHeaders(r *rand.Rand, b []byte) []byte {
	if b[14]>>4 != 6 || len(b) < 54 {
		return b
	}
	for range 1 + r.IntN(9) {
		x := []byte{b[20], byte(r.IntN(3)), 0, byte(r.IntN(2)), 0, 0, 0, byte(r.IntN(8))}
		if r.IntN(2) == 0 {
			x[1], x[3] = 0, 0
		}
		b[20] = pick(r, []byte{0, 43, 44, 51, 60})
		b = slices.Insert(b, 54, x...)
	}
	binary.BigEndian.PutUint16(b[18:], uint16(len(b)-54))
	return b
}
