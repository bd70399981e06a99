// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Attrs builds netlink attributes. Numbers are big-endian, as nf_tables requires.
type Attrs []byte

// Bytes appends an attribute with a raw value.
func (a *Attrs) Bytes(kind uint16, value []byte) {
	b := binary.NativeEndian.AppendUint16(*a, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	*a = b
}

// Raw appends an attribute with the bytes of a string, without a final NUL.
func (a *Attrs) Raw(kind uint16, value string) {
	b := binary.NativeEndian.AppendUint16(*a, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	*a = b
}

// String appends a NUL-terminated string.
func (a *Attrs) String(kind uint16, value string) {
	b := binary.NativeEndian.AppendUint16(*a, uint16(4+len(value)+1))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	b = append(b, 0)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	*a = b
}

// Uint8 appends one byte.
func (a *Attrs) Uint8(kind uint16, v uint8) { a.Bytes(kind, []byte{v}) }

// Uint16 appends a big-endian 16-bit number.
func (a *Attrs) Uint16(kind uint16, v uint16) {
	a.Bytes(kind, []byte{byte(v >> 8), byte(v)})
}

// Uint32 appends a big-endian 32-bit number.
func (a *Attrs) Uint32(kind uint16, v uint32) {
	b := binary.NativeEndian.AppendUint16(*a, 8)
	b = binary.NativeEndian.AppendUint16(b, kind)
	*a = binary.BigEndian.AppendUint32(b, v)
}

// Uint64 appends a big-endian 64-bit number.
func (a *Attrs) Uint64(kind uint16, v uint64) {
	b := binary.NativeEndian.AppendUint16(*a, 12)
	b = binary.NativeEndian.AppendUint16(b, kind)
	*a = binary.BigEndian.AppendUint64(b, v)
}

// Nest opens a nested attribute. Pass its result to Close.
func (a *Attrs) Nest(kind uint16) int {
	start := len(*a)
	*a = binary.NativeEndian.AppendUint16(*a, 0)
	*a = binary.NativeEndian.AppendUint16(*a, kind|unix.NLA_F_NESTED)
	return start
}

// Close ends the nested attribute that Nest opened.
func (a *Attrs) Close(start int) {
	binary.NativeEndian.PutUint16((*a)[start:], uint16(len(*a)-start))
}

// NextAttr splits the first attribute off b. kind excludes the flags; nested is the flag NLA_F_NESTED. ok is false at
// the end.
func NextAttr[T ~string | ~[]byte](b T) (kind uint16, nested bool, value, rest T, ok bool) {
	if len(b) < 4 {
		return
	}
	n := int(binary.NativeEndian.Uint16([]byte(b[:2])))
	k := binary.NativeEndian.Uint16([]byte(b[2:4]))
	if n < 4 || n > len(b) {
		return
	}
	value = b[4:n]
	rest = b[min((n+3)&^3, len(b)):]
	return k &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER), k&unix.NLA_F_NESTED != 0, value, rest, true
}

// contains reports whether every attribute of want occurs in have with the same value. have may contain further
// attributes in another order, as in the kernel's reports of expressions. Attributes of the same kind are a list and
// must be equal in number and order.
func contains(have, want string) bool {
	var seen [64]uint8 // number of compared attributes of each kind
	for {
		kind, nested, value, rest, ok := NextAttr(want)
		if !ok {
			break
		}
		want = rest
		if int(kind) >= len(seen) {
			return false
		}
		v, ok := nthAttribute(have, kind, seen[kind])
		if seen[kind]++; !ok || v != value && !(nested && contains(v, value)) {
			return false
		}
	}
	for kind, n := range seen {
		if n > 1 || kind == unix.NFTA_LIST_ELEM && n > 0 {
			if _, more := nthAttribute(have, uint16(kind), n); more {
				return false
			}
		}
	}
	return true
}

// nthAttribute returns the value of the n-th attribute of a kind, counted from 0.
func nthAttribute(b string, kind uint16, n uint8) (string, bool) {
	for {
		k, _, v, rest, ok := NextAttr(b)
		if !ok {
			return "", false
		}
		if k == kind {
			if n == 0 {
				return v, true
			}
			n--
		}
		b = rest
	}
}
