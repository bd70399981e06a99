// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Verify checks every length and checksum of a frame's packet as its receivers would, from the bytes alone. It covers
// IPv4 headers, TCP, UDP, ICMP and ICMPv6 in whole packets, and the available part of the packet inside an ICMP
// error. Payload checksums of fragments cannot be checked. A UDP checksum of zero is correct in IPv4. In IPv6 it is
// wrong (RFC 8200 §8.1), except for GUE tunnels (RFC 6935). Frames that are not IP are accepted.
func Verify(frame []byte) error {
	b := frame
	if len(b) < 14 {
		return fmt.Errorf("frame of %d bytes: shorter than an Ethernet header", len(b))
	}
	kind := binary.BigEndian.Uint16(b[12:])
	b = b[14:]
	for (kind == TypeVLAN || kind == TypeQinQ) && len(b) >= 4 {
		kind = binary.BigEndian.Uint16(b[2:])
		b = b[4:]
	}
	switch kind {
	case TypeIPv4:
		return verify4(b, false)
	case TypeIPv6:
		return verify6(b, false)
	}
	return nil
}

var errShort = errors.New("shorter than its header")

func verify4(b []byte, inner bool) error {
	if len(b) < 20 {
		return fmt.Errorf("ip4: %w", errShort)
	}
	size, length := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	switch {
	case b[0]>>4 != 4 || size < 20 || size > len(b):
		return fmt.Errorf("ip4: version and header length %#x are impossible", b[0])
	case Checksum(b[:size]) != 0:
		return fmt.Errorf("ip4: header checksum %#x is wrong", binary.BigEndian.Uint16(b[10:]))
	case length < size || length > len(b) && !inner:
		return fmt.Errorf("ip4: total length %d of %d bytes", length, len(b))
	}
	whole := length <= len(b)
	b = b[:min(length, len(b))]
	if fragment := binary.BigEndian.Uint16(b[6:]); fragment&0x3fff != 0 {
		return nil
	}
	return verifyPayload(b[9], netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), b[size:], whole, inner)
}

func verify6(b []byte, inner bool) error {
	if len(b) < 40 || b[0]>>4 != 6 {
		return fmt.Errorf("ip6: %w", errShort)
	}
	length := 40 + int(binary.BigEndian.Uint16(b[4:]))
	if length > len(b) && !inner {
		return fmt.Errorf("ip6: payload length %d of %d bytes", length-40, len(b)-40)
	}
	whole := length <= len(b)
	b = b[:min(length, len(b))]
	src, dst := netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	next, b := b[6], b[40:]
	const auth = 51
	for slices.Contains([]byte{protoHopByHop, protoRouting, protoDestOpts, protoFragment, auth}, next) && len(b) >= 8 {
		if next == protoFragment && binary.BigEndian.Uint16(b[2:])&^6 != 0 {
			return nil
		}
		size := 8
		switch next {
		case protoFragment:
		case auth:
			size = 4 * (int(b[1]) + 2) // RFC 4302 §2.2
		default:
			size += 8 * int(b[1])
		}
		if size > len(b) {
			if inner {
				return nil
			}
			return fmt.Errorf("extension header %d: %w", next, errShort)
		}
		if next == protoRouting && b[3] > 0 {
			return nil // the destination of the pseudo header is inside the routing header
		}
		next, b = b[0], b[size:]
	}
	return verifyPayload(next, src, dst, b, whole, inner)
}

func verifyPayload(protocol byte, src, dst netip.Addr, b []byte, whole, inner bool) error {
	switch protocol {
	case protoTCP:
		if whole && TransportChecksum(src, dst, protocol, b) != 0 {
			return errors.New("tcp: checksum is wrong")
		}
	case protoUDP:
		return verifyUDP(src, dst, b, whole, inner)
	case protoICMP, protoICMPv6:
		if len(b) < 8 {
			return nil
		}
		v6 := protocol == protoICMPv6
		if whole && (v6 && TransportChecksum(src, dst, protocol, b) != 0 || !v6 && Checksum(b) != 0) {
			return errors.New("icmp: checksum is wrong")
		}
		if !isICMPError(v6, b[0]) || inner || len(b) < 9 {
			return nil
		}
		return verifyInner(v6, b)
	case protoIPv4:
		return verify4(b, inner)
	case protoIPv6:
		return verify6(b, inner)
	}
	return nil
}

func verifyUDP(src, dst netip.Addr, b []byte, whole, inner bool) error {
	switch {
	case len(b) < 8 || !whole:
		return nil
	case int(binary.BigEndian.Uint16(b[4:])) != len(b):
		return fmt.Errorf("udp: length %d of %d bytes", binary.BigEndian.Uint16(b[4:]), len(b))
	case binary.BigEndian.Uint16(b[6:]) == 0:
		if dst.Is6() && binary.BigEndian.Uint16(b[2:]) != PortGUE && !inner { // a translator cannot compute the checksum of a quoted packet
			return errors.New("udp: no checksum over IPv6")
		}
	case TransportChecksum(src, dst, protoUDP, b) != 0:
		return errors.New("udp: checksum is wrong")
	}
	return nil
}

// verifyInner checks the packet inside an ICMP error. After a correct translation it has the error's own family.
func verifyInner(v6 bool, b []byte) error {
	m := ICMP{V6: v6, Type: b[0]}
	body := b[8:]
	if position, unit := m.lengthByte(); unit > 0 && b[position] != 0 {
		n := int(b[position]) * unit
		if n+4 > len(body) {
			return fmt.Errorf("icmp: extension length %d of %d bytes", n, len(body))
		}
		if Checksum(body[n:]) != 0 && binary.BigEndian.Uint16(body[n+2:]) != 0 {
			return errors.New("icmp: extension checksum is wrong")
		}
		body = body[:n]
	}
	check := verify4
	if v6 {
		check = verify6
	}
	if err := check(body, true); err != nil {
		return fmt.Errorf("packet inside the icmp error: %w", err)
	}
	return nil
}
