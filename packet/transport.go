// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// TCPFlags are the flag bits of a TCP header (RFC 9293 §3.1).
type TCPFlags uint8

// TCP flags, from the lowest bit.
const (
	FIN TCPFlags = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
	ECE
	CWR
)

const flagLetters = "FSRPAUEC"

// String renders the flags as letters: "SA" is SYN and ACK.
func (f TCPFlags) String() string {
	var b strings.Builder
	for i := range flagLetters {
		if f&(1<<i) != 0 {
			b.WriteByte(flagLetters[i])
		}
	}
	return b.String()
}

// TCP is the header tcp(sport,dport,flags,seq,ack,win,urg,opts,doff,sum,cut).
type TCP struct {
	SrcPort, DstPort uint16
	Flags            TCPFlags
	Seq, Ack         uint32
	Window           uint16 // default in texts: 65535
	Urgent           uint16
	Reserved         uint8  // Four bits.
	Options          []byte // Padded with zeros (end of list) to a multiple of four bytes.
	DataOffset       Forced // in 32-bit words
	Checksum         Forced
	// Cut, if not 0, is the number of bytes present of the header (8 to 19): ICMP errors may contain only a part.
	Cut uint8
}

// Name implements Layer.
func (*TCP) Name() string { return "tcp" }

func (t *TCP) fields() []field {
	return []field{
		shownField("sport", &t.SrcPort), shownField("dport", &t.DstPort),
		{key: "flags", show: func() string {
			if t.Flags == 0 {
				return ""
			}
			return "flags=" + t.Flags.String()
		}, set: t.setFlags},
		number("seq", &t.Seq, 0), number("ack", &t.Ack, 0), number("win", &t.Window, 65535), number("urg", &t.Urgent, 0),
		hexNumber("res", &t.Reserved, 0),
		{key: "opts", show: func() string {
			if len(t.Options) == 0 {
				return ""
			}
			return "opts=" + showTCPOptions(t.Options)
		}, set: func(s string, _ bool) (err error) { t.Options, err = readTCPOptions(s); return err }},
		force("doff", &t.DataOffset, 10), force("sum", &t.Checksum, 16), number("cut", &t.Cut, 0),
	}
}

func (t *TCP) setFlags(s string, _ bool) error {
	t.Flags = 0
	for _, c := range s {
		i := strings.IndexRune(flagLetters, c)
		if i < 0 {
			return fmt.Errorf("%q: flags are letters of %s", s, flagLetters)
		}
		t.Flags |= 1 << i
	}
	return nil
}

func (t *TCP) encode(payload []byte, at encoding) []byte {
	words := 5 + (len(t.Options)+3)/4
	b := make([]byte, words*4, words*4+len(payload))
	binary.BigEndian.PutUint16(b, t.SrcPort)
	binary.BigEndian.PutUint16(b[2:], t.DstPort)
	binary.BigEndian.PutUint32(b[4:], t.Seq)
	binary.BigEndian.PutUint32(b[8:], t.Ack)
	b[12] = byte(t.DataOffset.valueOr(uint32(words)))<<4 | t.Reserved&15
	b[13] = byte(t.Flags)
	binary.BigEndian.PutUint16(b[14:], t.Window)
	binary.BigEndian.PutUint16(b[18:], t.Urgent)
	copy(b[20:], t.Options)
	if t.Cut != 0 {
		return b[:min(int(t.Cut), len(b))]
	}
	b = append(b, payload...)
	binary.BigEndian.PutUint16(b[16:], uint16(t.Checksum.valueOr(uint32(TransportChecksum(at.src, at.dst, protoTCP, b)))))
	return b
}

// TCP option kinds (IANA "TCP Option Kind Numbers"); TOA is the address option of
// IPVS and DPVS deployments.
const (
	optEnd, optNop, optMSS, optScale = 0, 1, 2, 3
	optSackOK, optTimestamps, optTOA = 4, 8, 254
)

// showTCPOptions renders options as [mss:1460;nop;ws:7]; bytes that do not parse
// end the list as hexadecimal.
func showTCPOptions(b []byte) string {
	var out []string
	for len(b) > 0 {
		n := 1
		if b[0] != optEnd && b[0] != optNop {
			if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
				out = append(out, "0x"+hex.EncodeToString(b))
				break
			}
			n = int(b[1])
		}
		out = append(out, showTCPOption(b[:n]))
		b = b[n:]
	}
	return "[" + strings.Join(out, ";") + "]"
}

func showTCPOption(o []byte) string {
	switch {
	case o[0] == optEnd:
		return "eol"
	case o[0] == optNop:
		return "nop"
	case o[0] == optMSS && len(o) == 4:
		return fmt.Sprintf("mss:%d", binary.BigEndian.Uint16(o[2:]))
	case o[0] == optScale && len(o) == 3:
		return fmt.Sprintf("ws:%d", o[2])
	case o[0] == optSackOK && len(o) == 2:
		return "sackok"
	case o[0] == optTimestamps && len(o) == 10:
		return fmt.Sprintf("ts:%d:%d", binary.BigEndian.Uint32(o[2:]), binary.BigEndian.Uint32(o[6:]))
	case o[0] == optTOA && (len(o) == 8 || len(o) == 20):
		a, _ := netip.AddrFromSlice(o[4:])
		return "toa:" + netip.AddrPortFrom(a, binary.BigEndian.Uint16(o[2:])).String()
	}
	return "0x" + hex.EncodeToString(o)
}

func readTCPOptions(s string) ([]byte, error) {
	s, ok := strings.CutPrefix(s, "[")
	s, closed := strings.CutSuffix(s, "]")
	if !ok || !closed {
		return nil, fmt.Errorf("%q: write options in brackets, separated by semicolons", s)
	}
	var b []byte
	for o := range strings.SplitSeq(s, ";") {
		if o == "" {
			continue
		}
		more, err := readTCPOption(o)
		if err != nil {
			return nil, err
		}
		b = append(b, more...)
	}
	return b, nil
}

func readTCPOption(s string) ([]byte, error) {
	name, value, _ := strings.Cut(s, ":")
	num := func(v string, bits int) uint64 {
		n, err := strconv.ParseUint(v, 10, bits)
		if err != nil {
			n = ^uint64(0)
		}
		return n
	}
	bad := fmt.Errorf("tcp option %q: not mss:N, ws:N, sackok, ts:N:N, toa:ADDR:PORT, nop, eol or hexadecimal", s)
	switch {
	case name == "eol":
		return []byte{optEnd}, nil
	case name == "nop":
		return []byte{optNop}, nil
	case name == "sackok":
		return []byte{optSackOK, 2}, nil
	case name == "mss":
		if n := num(value, 16); n <= 65535 {
			return []byte{optMSS, 4, byte(n >> 8), byte(n)}, nil
		}
	case name == "ws":
		if n := num(value, 8); n <= 255 {
			return []byte{optScale, 3, byte(n)}, nil
		}
	case name == "ts":
		v, e, _ := strings.Cut(value, ":")
		if a, b := num(v, 32), num(e, 32); a <= 1<<32-1 && b <= 1<<32-1 {
			o := binary.BigEndian.AppendUint32([]byte{optTimestamps, 10}, uint32(a))
			return binary.BigEndian.AppendUint32(o, uint32(b)), nil
		}
	case name == "toa":
		if ap, err := netip.ParseAddrPort(value); err == nil {
			a := ap.Addr().AsSlice()
			return append([]byte{optTOA, byte(4 + len(a)), byte(ap.Port() >> 8), byte(ap.Port())}, a...), nil
		}
	case strings.HasPrefix(name, "0x"):
		return parseHex(name)
	}
	return nil, bad
}

// UDP is the header udp(sport,dport,len,sum); sum=0 sends no checksum.
type UDP struct {
	SrcPort, DstPort uint16
	Length           Forced
	Checksum         Forced
}

// Name implements Layer.
func (*UDP) Name() string { return "udp" }

func (u *UDP) fields() []field {
	return []field{shownField("sport", &u.SrcPort), shownField("dport", &u.DstPort), force("len", &u.Length, 10), force("sum", &u.Checksum, 16)}
}

func (u *UDP) encode(payload []byte, at encoding) []byte {
	b := make([]byte, 8, 8+len(payload))
	binary.BigEndian.PutUint16(b, u.SrcPort)
	binary.BigEndian.PutUint16(b[2:], u.DstPort)
	binary.BigEndian.PutUint16(b[4:], uint16(u.Length.valueOr(uint32(8+len(payload)))))
	b = append(b, payload...)
	sum := TransportChecksum(at.src, at.dst, protoUDP, b)
	if sum == 0 {
		sum = 0xffff // RFC 768: zero means no checksum
	}
	binary.BigEndian.PutUint16(b[6:], uint16(u.Checksum.valueOr(uint32(sum))))
	return b
}

// SCTP is the common header sctp(sport,dport,tag,sum); chunks are data.
type SCTP struct {
	SrcPort, DstPort uint16
	Tag              uint32
	Checksum         Forced
}

// Name implements Layer.
func (*SCTP) Name() string { return "sctp" }

func (s *SCTP) fields() []field {
	return []field{shownField("sport", &s.SrcPort), shownField("dport", &s.DstPort), number("tag", &s.Tag, 0), force("sum", &s.Checksum, 16)}
}

func (s *SCTP) encode(payload []byte, _ encoding) []byte {
	b := make([]byte, 12, 12+len(payload))
	binary.BigEndian.PutUint16(b, s.SrcPort)
	binary.BigEndian.PutUint16(b[2:], s.DstPort)
	binary.BigEndian.PutUint32(b[4:], s.Tag)
	b = append(b, payload...)
	binary.BigEndian.PutUint32(b[8:], s.Checksum.valueOr(sctpChecksum(b)))
	return b
}

// GUE is the header of Generic UDP Encapsulation, variant 0 without optional fields: gue(proto,first,flags). The
// payload is an IP packet.
type GUE struct {
	First    uint8  // Version, control bit and header length; 0 in packets from Sluice.
	Protocol Forced // of the payload
	Flags    uint16
}

// PortGUE is the UDP port of GUE (IANA "gue").
const PortGUE = 6080

// Name implements Layer.
func (*GUE) Name() string { return "gue" }

func (g *GUE) fields() []field {
	return []field{hexNumber("first", &g.First, 0), force("proto", &g.Protocol, 10), hexNumber("flags", &g.Flags, 0)}
}

func (g *GUE) encode(payload []byte, at encoding) []byte {
	b := make([]byte, 4, 4+len(payload))
	b[0] = g.First
	b[1] = byte(g.Protocol.valueOr(protocolOf(at.next, family4)))
	binary.BigEndian.PutUint16(b[2:], g.Flags)
	return append(b, payload...)
}
