// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/binary"
	"testing"
)

// TestText expects ICMP as type and code, and fragments as such instead of port 0.
func TestText(t *testing.T) {
	four := func(protocol byte, fragment uint16, l4 ...byte) []byte {
		b := make([]byte, 20, 64)
		b[0], b[9] = 0x45, protocol
		binary.BigEndian.PutUint16(b[4:], 7)
		binary.BigEndian.PutUint16(b[6:], fragment)
		copy(b[12:], []byte{192, 0, 2, 1, 198, 51, 100, 2})
		return append(b, l4...)
	}
	six := make([]byte, 56)
	six[0], six[6], six[40] = 0x60, ipv6Fragment, 17
	copy(six[8:], []byte{0x20, 1, 0xd, 0xb8})
	copy(six[24:], []byte{0x20, 1, 0xd, 0xb8})
	six[23], six[39] = 1, 2
	binary.BigEndian.PutUint16(six[42:], 1400)
	binary.BigEndian.PutUint32(six[44:], 9)
	for _, c := range []struct {
		data []byte
		want string
	}{
		{four(6, 0, 4, 0, 0, 80, 0, 0, 0, 0), "tcp 192.0.2.1:1024 -> 198.51.100.2:80"},
		{four(1, 0, 3, 4, 0, 0, 0, 0, 5, 0), "icmp 192.0.2.1 -> 198.51.100.2, type 3 code 4"},
		{four(1, 0, 8, 0, 0, 0, 0, 7, 0, 1), "icmp 192.0.2.1 -> 198.51.100.2, type 8 code 0"},
		{four(17, 185, 0, 0, 0, 0), "udp 192.0.2.1 -> 198.51.100.2, fragment at byte 1480 of datagram 7"},
		{four(17, 0x2000, 0, 7, 0, 9, 0, 0, 0, 0), "udp 192.0.2.1:7 -> 198.51.100.2:9"},
		{four(47, 0, 0, 0, 0, 0), "gre 192.0.2.1 -> 198.51.100.2"},
		{six, "udp 2001:db8::1 -> 2001:db8::2, fragment at byte 1400 of datagram 9"},
	} {
		s := &DropSample{Data: c.data, Packet: headerTuple(c.data)}
		if got := s.Text(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
	if got := (&DropSample{DropCount: DropCount{EthType: 0x0806}, Length: 42}).Text(); got != "ethertype 0x0806, 42 bytes" {
		t.Errorf("%q", got)
	}
}
