// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/binary"
	"fmt"

	"github.com/sluice-lb/sluice/flow"
)

// Text names the packet: "tcp 192.0.2.1:1024 -> 198.51.100.1:80", ICMP by type and code, a
// fragment that has no ports by its place in the datagram.
func (s *DropSample) Text() string {
	if !s.Packet.IsValid() {
		return fmt.Sprintf("ethertype %#04x, %d bytes", s.EthType, s.Length)
	}
	ends := fmt.Sprintf("%s -> %s", s.Packet.Source.Addr(), s.Packet.Dest.Addr())
	if protocol, offset, id, later := s.fragment(); later {
		return fmt.Sprintf("%s %s, fragment at byte %d of datagram %d", protocol, ends, offset, id)
	}
	if kind, code, there := s.ICMP(); there {
		return fmt.Sprintf("%s %s, type %d code %d", s.Packet.Protocol, ends, kind, code)
	}
	if !s.Packet.Protocol.HasPorts() {
		return fmt.Sprintf("%s %s", s.Packet.Protocol, ends)
	}
	return s.Packet.String()
}

const ipv6Fragment = 44 // next header, RFC 8200 section 4.5

// fragment returns the offset and the datagram of a fragment other than the first.
func (s *DropSample) fragment() (protocol flow.Protocol, offset int, id uint32, later bool) {
	if len(s.Data) <= s.L3Offset {
		return 0, 0, 0, false
	}
	b := s.Data[s.L3Offset:]
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		protocol, offset, id = flow.Protocol(b[9]), int(binary.BigEndian.Uint16(b[6:])&0x1fff)*8, uint32(binary.BigEndian.Uint16(b[4:]))
	case len(b) >= 48 && b[0]>>4 == 6 && b[6] == ipv6Fragment:
		protocol, offset, id = flow.Protocol(b[40]), int(binary.BigEndian.Uint16(b[42:])&^7), binary.BigEndian.Uint32(b[44:])
	}
	return protocol, offset, id, offset > 0
}
