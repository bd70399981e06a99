// SPDX-License-Identifier: Apache-2.0

package nat

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// SYN cookies (RFC 4987 §3.6): while handshakes fill half of their quota or more, a
// service that has them keeps nothing for a SYN. A datapath computes its cookies
// from a secret; the model remembers which ones were given.

// cookie is one that was given to a client.
type cookie struct {
	number uint32 // initial sequence number of the service's side
	first  uint32 // number of the client's first byte
	class  int    // what the cookie says of the client's MSS
	at     time.Duration
}

// cookieLife is how long the kernel may take a cookie (MAX_SYNCOOKIE_AGE periods of
// a minute).
const cookieLife = 2 * time.Minute

// cookieMSS are the classes of MSS of IPv4 and IPv6 (msstab of Linux).
var cookieMSS = [2][4]int{{536, 1300, 1440, 1460}, {1220, 1420, 1440, 8940}}

func cookieClasses(v6 bool) [4]int {
	if v6 {
		return cookieMSS[1]
	}
	return cookieMSS[0]
}

// crowded reports whether handshakes in progress fill half of their quota. Without
// one in the configuration the model knows none.
func (m *Model) underPressure() bool {
	quota, n := m.config.Tables.HalfOpen, 0
	if quota == 0 {
		return false
	}
	for _, h := range m.sessions {
		if h.direction == flow.Original && h.halfOpen {
			n++
		}
	}
	return n >= quota-quota/2
}

// cookies handles what opens a connection to a service with SYN cookies. False: it
// goes on as every other, as does the proof of a cookie, which is the SYN then.
func (m *Model) cookies(in Arrival, v *view, s *service) (plan, bool) {
	open := v.flags & tcpOpening
	if !s.SYNCookies || v.protocol != flow.TCP || v.first || v.later || len(s.table) == 0 || s.excludes(m, v) != "" {
		return plan{}, false
	}
	switch {
	case open == packet.SYN && v.flags&packet.FIN == 0 && m.underPressure() && s.hasRoom(m, v):
		return m.sendCookie(in, v, s), true
	case open == packet.ACK && s.cookieAt > 0 && m.now+1-s.cookieAt <= cookieLife:
		if v.cookie = m.verifyCookie(v); v.cookie != nil {
			v.flags = packet.SYN
		} else if m.underPressure() && !s.Limits.StrictTCP {
			return drop(ReasonBadCookie), true
		}
	}
	return plan{}, false
}

// sendCookie answers a SYN.
func (m *Model) sendCookie(in Arrival, v *view, s *service) plan {
	classes, mss := cookieClasses(v.v6), 536
	if v.v6 {
		mss = 1220
	}
	t := v.payload()
	eachOption(t, func(kind byte, at, end int) {
		if kind == 2 && end-at == 2 {
			mss = int(binary.BigEndian.Uint16(t[at:]))
		}
	})
	c := &cookie{number: m.choices.Cookie(), first: binary.BigEndian.Uint32(t[4:]) + 1, at: m.now}
	for i, least := range classes {
		if mss >= least {
			c.class = i
		}
	}
	m.cookiesSent[v.tuple()] = append(m.cookiesSent[v.tuple()], c)
	s.cookieAt = m.now + 1 // 0 is never
	headers := 40
	switch {
	case v.v6:
		headers = 60
	case s.Mode == config.ModeFullNAT:
		headers = 60 // the backend may have IPv6
	}
	arrival, _ := m.host.Interface(in.Interface)
	p := drop(ReasonCookie)
	p.answer = answer{cookie: true, number: c.number, mss: min(arrival.MTU-headers, classes[c.class])}
	return p
}

// verifyCookie returns what a session must know of the cookie that v proves, which may be
// a probe of the window: the byte before the client's first one. A cookie is what is
// secret plus the class: what differs from it by so little that another class comes
// out is valid too.
func (m *Model) verifyCookie(v *view) *splice {
	t := v.payload()
	first, number := binary.BigEndian.Uint32(t[4:]), binary.BigEndian.Uint32(t[8:])-1
	for _, c := range m.cookiesSent[v.tuple()] {
		class := c.class + int(int32(number-c.number))
		if (first != c.first && first != c.first-1) || class < 0 || class >= 4 || m.choices.ForgetsCookie(m.now-c.at) {
			continue
		}
		return &splice{first: c.first, number: number, mss: cookieClasses(v.v6)[class], window: binary.BigEndian.Uint16(t[14:])}
	}
	return nil
}

// splice is what a session that a cookie opened remembers: the client knows the
// backend's side by the cookie's number.
type splice struct {
	first    uint32 // number of the client's first byte
	number   uint32 // the cookie
	ahead    uint32 // of the backend's own number by so much, once it was flagsSeen
	answered bool   // the backend has answered the SYN
	mss      int
	window   uint16
}

// forward changes a packet of the client: it is the SYN until the backend has
// answered.
func (s *splice) forward(b []byte, mtu int) ([]byte, Reason) {
	v, _ := readIP(b)
	t := v.payload()
	switch {
	case s.answered && v.flags&packet.ACK != 0:
		setNumber(t, 8, binary.BigEndian.Uint32(t[8:])-s.ahead)
		return b, ""
	case s.answered || v.flags&packet.RST != 0:
		return b, ""
	}
	headers := 40
	if v.v6 {
		headers = 60
	}
	return replaceSegment(b, v, &packet.TCP{SrcPort: v.src.Port(), DstPort: v.dst.Port(), Seq: s.first - 1, Flags: packet.SYN,
		Window: s.window, Options: mssOption(min(s.mss, mtu-headers))})
}

// answer changes a packet of the backend; not one that belongs to an older
// connection.
func (s *splice) answer(b []byte, _ int) ([]byte, Reason) {
	v, _ := readIP(b)
	t := v.payload()
	seq := binary.BigEndian.Uint32(t[4:])
	switch {
	case v.flags&packet.SYN == 0 && s.answered:
		setNumber(t, 4, seq+s.ahead)
		return b, ""
	case v.flags&packet.ACK == 0 || binary.BigEndian.Uint32(t[8:]) != s.first:
		return nil, ReasonNoFlow
	case v.flags&packet.SYN == 0: // a reset
		setNumber(t, 4, s.number+1)
		return b, ""
	case !s.answered:
		s.answered, s.ahead = true, s.number-seq
	}
	return replaceSegment(b, v, &packet.TCP{SrcPort: v.src.Port(), DstPort: v.dst.Port(), Seq: s.number, Ack: s.first, Flags: packet.ACK,
		Window: binary.BigEndian.Uint16(t[14:])}, &packet.Data{Bytes: []byte{0}})
}

func mssOption(mss int) []byte { return binary.BigEndian.AppendUint16([]byte{2, 4}, uint16(mss)) }

// replaceSegment puts a TCP segment in the place of a packet's, and corrects lengths
// and checksums: those of a fragment cannot be known.
func replaceSegment(b []byte, v *view, is ...packet.Layer) ([]byte, Reason) {
	if v.first {
		return nil, ReasonUntranslatable
	}
	seg := packet.Packet(is).Build()
	even := func(t []byte, length int) []byte {
		t = slices.Clone(t)
		t[16], t[17] = 0, 0
		if len(t)%2 == 1 {
			t = append(t, 0)
		}
		return binary.BigEndian.AppendUint16(t, uint16(length))
	}
	was := v.payload()
	sum := packet.UpdateChecksum(binary.BigEndian.Uint16(was[16:]), even(was, len(was)), even(seg, len(seg)))
	b = append(slices.Clone(b[:v.header]), seg...)
	binary.BigEndian.PutUint16(b[v.header+16:], sum)
	resized(b, v.v6)
	return b, ""
}
