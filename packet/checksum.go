// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
)

// sum16 adds the 16-bit words of b to s without folding (RFC 1071). An odd last byte counts as a high half.
func sum16(s uint32, b []byte) uint32 {
	for ; len(b) >= 2; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
		if s >= 1<<31 {
			s = s>>16 + s&0xffff
		}
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	return s
}

func fold(s uint32) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// Checksum returns the Internet checksum of b (RFC 1071). It is 0 for a header with a correct checksum.
func Checksum(b []byte) uint16 { return ^fold(sum16(0, b)) }

// TransportChecksum returns the checksum of a TCP, UDP or ICMPv6 segment with its pseudo header (RFC 9293 §3.1, RFC
// 8200 §8.1). It is 0 for a correct segment.
func TransportChecksum(src, dst netip.Addr, protocol uint8, segment []byte) uint16 {
	var s uint32
	if dst.Is4() || src.Is4() {
		s = sum16(sum16(0, address4(src)), address4(dst))
	} else {
		s = sum16(sum16(0, address6(src)), address6(dst))
	}
	n := uint32(len(segment))
	s += n>>16 + n&0xffff + uint32(protocol)
	return ^fold(sum16(s, segment))
}

// UpdateChecksum returns the checksum sum after the words of after replace the words of before (RFC 1624 equation 3).
// Both have an even length, which may differ.
func UpdateChecksum(sum uint16, before, after []byte) uint16 {
	s := uint32(^sum)
	for ; len(before) >= 2; before = before[2:] {
		s += uint32(^binary.BigEndian.Uint16(before))
	}
	s = uint32(fold(s))
	return ^fold(sum16(s, after))
}

// castagnoli is the table of SCTP's checksum (RFC 9260 appendix A).
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sctpChecksum returns the CRC32c of an SCTP packet with a zero checksum field, in wire order.
func sctpChecksum(segment []byte) uint32 {
	c := crc32.Update(0, castagnoli, segment[:8])
	c = crc32.Update(c, castagnoli, make([]byte, 4))
	c = crc32.Update(c, castagnoli, segment[12:])
	return binary.LittleEndian.Uint32(binary.BigEndian.AppendUint32(nil, c))
}
