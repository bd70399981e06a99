// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
)

// Fragments splits the IP packet of an untagged Ethernet frame into fragments with the identification id. Each
// carries at most size bytes of payload (a multiple of 8). IPv6 packets get a fragment header after the IPv6 header.
// A packet that is a fragment already keeps its identification.
func Fragments(frame []byte, size int, id uint32) ([][]byte, error) {
	if size < 8 || size%8 != 0 {
		return nil, fmt.Errorf("fragment size %d: not a positive multiple of 8", size)
	}
	if len(frame) < 34 {
		return nil, fmt.Errorf("frame of %d bytes: no IP packet", len(frame))
	}
	switch binary.BigEndian.Uint16(frame[12:]) {
	case TypeIPv4:
		return fragments4(frame, size, uint16(id)), nil
	case TypeIPv6:
		return fragments6(frame, size, id), nil
	}
	return nil, fmt.Errorf("frame of type %#x: not IP", frame[12:14])
}

func fragments4(frame []byte, size int, id uint16) [][]byte {
	end := 14 + int(frame[14]&15)*4
	payload := frame[end:]
	if n := int(binary.BigEndian.Uint16(frame[16:])) + 14 - end; n >= 0 && n < len(payload) {
		payload = payload[:n]
	}
	word := binary.BigEndian.Uint16(frame[20:])
	if word&0x3fff != 0 {
		id = binary.BigEndian.Uint16(frame[18:])
	}
	var out [][]byte
	for off := 0; off < len(payload); off += size {
		piece := payload[off:min(off+size, len(payload))]
		b := append(append([]byte(nil), frame[:end]...), piece...)
		ip := b[14:end]
		binary.BigEndian.PutUint16(ip[2:], uint16(len(b)-14))
		binary.BigEndian.PutUint16(ip[4:], id)
		v := word + uint16(off/8)
		if off+size < len(payload) {
			v |= 0x2000
		}
		binary.BigEndian.PutUint16(ip[6:], v)
		ip[10], ip[11] = 0, 0
		binary.BigEndian.PutUint16(ip[10:], Checksum(ip))
		out = append(out, b)
	}
	return out
}

func fragments6(frame []byte, size int, id uint32) [][]byte {
	const end = 54
	payload := frame[end:]
	if n := int(binary.BigEndian.Uint16(frame[18:])); n < len(payload) {
		payload = payload[:n]
	}
	next, begin, more := frame[20], uint16(0), uint16(0)
	if next == protoFragment && len(payload) >= 8 {
		word := binary.BigEndian.Uint16(payload[2:])
		next, begin, more, id = payload[0], word&^7, word&1, binary.BigEndian.Uint32(payload[4:])
		payload = payload[8:]
	}
	var out [][]byte
	for off := 0; off < len(payload); off += size {
		piece := payload[off:min(off+size, len(payload))]
		b := append([]byte(nil), frame[:end]...)
		header := make([]byte, 8)
		header[0] = next
		v := begin + uint16(off) | more
		if off+size < len(payload) {
			v |= 1
		}
		binary.BigEndian.PutUint16(header[2:], v)
		binary.BigEndian.PutUint32(header[4:], id)
		b = append(append(b, header...), piece...)
		b[20] = protoFragment
		binary.BigEndian.PutUint16(b[18:], uint16(len(b)-end))
		out = append(out, b)
	}
	return out
}
