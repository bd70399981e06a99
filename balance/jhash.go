// SPDX-License-Identifier: Apache-2.0

package balance

import "encoding/binary"

// jhashInit is JHASH_INITVAL of the kernel's include/linux/jhash.h.
const jhashInit = 0xdeadbeef

// JHash is Bob Jenkins' lookup3 as computed by the kernel and by nftables' jhash expression. The length of data must
// be a multiple of four bytes; nftables pads every field of a concatenation. Words are little-endian, as in the
// kernel on x86-64 and arm64.
func JHash(data []byte, seed uint32) uint32 {
	n := uint32(len(data))
	a := jhashInit + n + seed
	b, c := a, a
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(data[i:]) }
	for len(data) > 12 {
		a, b, c = a+word(0), b+word(4), c+word(8)
		a -= c
		a ^= rotateLeft(c, 4)
		c += b
		b -= a
		b ^= rotateLeft(a, 6)
		a += c
		c -= b
		c ^= rotateLeft(b, 8)
		b += a
		a -= c
		a ^= rotateLeft(c, 16)
		c += b
		b -= a
		b ^= rotateLeft(a, 19)
		a += c
		c -= b
		c ^= rotateLeft(b, 4)
		b += a
		data = data[12:]
	}
	switch len(data) {
	case 12:
		c += word(8)
		fallthrough
	case 8:
		b += word(4)
		fallthrough
	case 4:
		a += word(0)
	default:
		return c
	}
	c ^= b
	c -= rotateLeft(b, 14)
	a ^= c
	a -= rotateLeft(c, 11)
	b ^= a
	b -= rotateLeft(a, 25)
	c ^= b
	c -= rotateLeft(b, 16)
	a ^= c
	a -= rotateLeft(c, 4)
	b ^= a
	b -= rotateLeft(a, 14)
	c ^= b
	c -= rotateLeft(b, 24)
	return c
}

func rotateLeft(x uint32, k int) uint32 { return x<<k | x>>(32-k) }

// Slot reduces a hash to 0..size-1 by multiplication, as the kernel's
// reciprocal_scale does.
func Slot(hash uint32, size int) int {
	return int(uint64(hash) * uint64(uint32(size)) >> 32)
}
