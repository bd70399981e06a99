// SPDX-License-Identifier: Apache-2.0

package model

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/packet"
)

// SYN cookies (RFC 4987 §3.6): a service with SYN cookies stores no state for a SYN while half-open
// connections use half of their quota or more. A datapath computes its cookies from a secret. The
// model stores the issued cookies.

// cookie is an issued SYN cookie.
type cookie struct {
	number uint32 // Initial sequence number of the service.
	first  uint32 // Sequence number of the client's first byte.
	class  int    // Index of the client's MSS in cookieMSS.
	at     time.Duration
}

// cookieLife is the maximum age of a cookie in the kernel (MAX_SYNCOOKIE_AGE periods of one
// minute).
const cookieLife = 2 * time.Minute

// cookieMSS lists the MSS classes of IPv4 and IPv6 (msstab in Linux), in bytes.
var cookieMSS = [2][4]int{{536, 1300, 1440, 1460}, {1220, 1420, 1440, 8940}}

func cookieClasses(v6 bool) [4]int {
	if v6 {
		return cookieMSS[1]
	}
	return cookieMSS[0]
}

// underPressure reports whether half-open connections use half of their quota. Without a configured
// quota the result is false.
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

// cookies handles a SYN or the proof of a cookie for a service with SYN cookies. The result false
// continues with the full path, where a valid proof acts as the SYN.
func (m *Model) cookies(in Arrival, v *view, s *service) (plan, bool) {
	open := v.flags & tcpOpening
	if !s.SYNCookies || v.protocol != flow.TCP || v.first || v.later || len(s.table) == 0 || s.checkSets(m, v) != "" {
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

// sendCookie answers a SYN with a cookie.
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
	s.cookieAt = m.now + 1 // 0 means never
	headers := 40
	switch {
	case v.v6:
		headers = 60
	case s.Mode == config.ModeFullNAT:
		headers = 60 // the backend may have an IPv6 address
	}
	arrival, _ := m.host.Interface(in.Interface)
	p := drop(ReasonCookie)
	p.answer = errorReply{cookie: true, number: c.number, mss: min(arrival.MTU-headers, classes[c.class])}
	return p
}

// verifyCookie returns the session state for a cookie that v proves, or nil. The proof may be a
// window probe with the byte before the client's first one. A datapath adds the class to a secret
// number. A nearby number with another class is therefore valid too.
func (m *Model) verifyCookie(v *view) *sequenceSplice {
	t := v.payload()
	first, number := binary.BigEndian.Uint32(t[4:]), binary.BigEndian.Uint32(t[8:])-1
	for _, c := range m.cookiesSent[v.tuple()] {
		class := c.class + int(int32(number-c.number))
		if (first != c.first && first != c.first-1) || class < 0 || class >= 4 || m.choices.ForgetsCookie(m.now-c.at) {
			continue
		}
		return &sequenceSplice{first: c.first, number: number, mss: cookieClasses(v.v6)[class], window: binary.BigEndian.Uint16(t[14:])}
	}
	return nil
}

// sequenceSplice is the state of a session that a cookie opened. The client acknowledges the cookie's
// number, and the backend has its own initial sequence number.
type sequenceSplice struct {
	first    uint32 // Sequence number of the client's first byte.
	number   uint32 // Initial sequence number in the cookie.
	ahead    uint32 // Cookie number minus the backend's number, after its SYN-ACK.
	answered bool   // The backend has answered the SYN.
	mss      int
	window   uint16
}

// forward edits a packet of the client. The packet becomes the SYN until the backend has answered.
func (s *sequenceSplice) forward(b []byte, mtu int) ([]byte, Reason) {
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

// editReply edits a packet of the backend. It drops packets of an older connection.
func (s *sequenceSplice) editReply(b []byte, _ int) ([]byte, Reason) {
	v, _ := readIP(b)
	t := v.payload()
	seq := binary.BigEndian.Uint32(t[4:])
	switch {
	case v.flags&packet.SYN == 0 && s.answered:
		setNumber(t, 4, seq+s.ahead)
		return b, ""
	case v.flags&packet.ACK == 0 || binary.BigEndian.Uint32(t[8:]) != s.first:
		return nil, ReasonNoFlow
	case v.flags&packet.SYN == 0: // a reset without SYN
		setNumber(t, 4, s.number+1)
		return b, ""
	case !s.answered:
		s.answered, s.ahead = true, s.number-seq
	}
	return replaceSegment(b, v, &packet.TCP{SrcPort: v.src.Port(), DstPort: v.dst.Port(), Seq: s.number, Ack: s.first, Flags: packet.ACK,
		Window: binary.BigEndian.Uint16(t[14:])}, &packet.Data{Bytes: []byte{0}})
}

func mssOption(mss int) []byte { return binary.BigEndian.AppendUint16([]byte{2, 4}, uint16(mss)) }

// replaceSegment replaces the TCP segment of a packet and updates lengths and checksums. It refuses
// a fragment, because the checksum covers unknown data.
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
	setIPLength(b, v.v6)
	return b, ""
}
