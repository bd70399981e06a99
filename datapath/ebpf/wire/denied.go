// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"cmp"
	"encoding/binary"
	"net/netip"
)

// DeniedGroup is a family and prefix length of denied sources.
type DeniedGroup struct{ Family, Length uint8 }

// DeniedPrefix is the masked address of a denied prefix as two numbers. An IPv4 address is the first.
type DeniedPrefix [2]uint64

// Compare orders prefixes by address.
func (p DeniedPrefix) Compare(o DeniedPrefix) int {
	return cmp.Or(cmp.Compare(p[0], o[0]), cmp.Compare(p[1], o[1]))
}

// DeniedOf returns the group and the masked address of a prefix.
func DeniedOf(p netip.Prefix) (DeniedGroup, DeniedPrefix) {
	a := p.Masked().Addr()
	g := DeniedGroup{Family: uint8(FamilyOf(a)), Length: uint8(p.Bits())}
	if a.Is4() {
		b := a.As4()
		return g, DeniedPrefix{uint64(binary.BigEndian.Uint32(b[:]))}
	}
	b := a.As16()
	return g, DeniedPrefix{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}
