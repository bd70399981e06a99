// SPDX-License-Identifier: Apache-2.0

package table

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// Denied lists denied sources by group. The prefixes of a group are sorted and unique.
type Denied map[wire.DeniedGroup][]wire.DeniedPrefix

// A group first gets this many lines for 16 prefixes of IPv4 or 4 of IPv6. This suffices for nearly all hash keys.
// Each further attempt has a quarter more lines.
const (
	deniedSpace4, deniedSpace6 = 2, 3
	deniedAttempts             = 12
)

// deniedLine is a struct denied_line.
type deniedLine [8]uint64

// deniedImage returns the content of a table of denied sources; none without sources.
func (t *Tables) deniedImage(d Denied) (image []deniedLine, err error) {
	if len(d) == 0 {
		return nil, nil
	}
	groups := make([]wire.DeniedGroup, 0, len(d))
	for g := range d {
		groups = append(groups, g)
	}
	slices.SortFunc(groups, func(a, b wire.DeniedGroup) int { // the largest one first, as it contains most sources
		return cmp.Or(len(d[b])-len(d[a]), int(a.Family)-int(b.Family), int(a.Length)-int(b.Length))
	})
	image = make([]deniedLine, wire.DeniedLines)
	next := map[uint8]int{wire.Family4: wire.DeniedGroups4 * 8, wire.Family6: wire.DeniedGroups6 * 8}
	for _, g := range groups {
		prefixes, word := d[g], uint64(wire.DeniedPresent)|uint64(g.Length)
		if prefixes[0] == (wire.DeniedPrefix{}) {
			prefixes, word = prefixes[1:], word|wire.DeniedZero
		}
		if len(prefixes) > 0 {
			lines := t.deniedLines(g.Family == wire.Family6, prefixes)
			if lines == nil || len(image)+len(lines) >= 1<<wire.DeniedBits {
				return nil, fmt.Errorf("%d denied prefixes of length %d have no room in a table; aggregate them", len(prefixes), g.Length)
			}
			word |= uint64(len(lines)-wire.DeniedProbes+1)<<wire.DeniedCountShift | uint64(len(image))<<wire.DeniedFirstShift
			image = append(image, lines...)
		}
		image[next[g.Family]/8][next[g.Family]%8] = word
		next[g.Family]++
	}
	return image, nil
}

// deniedLines returns the lines of a group, or nothing if the prefixes find no room. The last lines are in reach of
// probes only.
func (t *Tables) deniedLines(v6 bool, prefixes []wire.DeniedPrefix) []deniedLine {
	count := len(prefixes)*deniedSpace4/16 + 1
	if v6 {
		count = len(prefixes)*deniedSpace6/4 + 1
	}
	for range deniedAttempts {
		lines := make([]deniedLine, count+wire.DeniedProbes-1)
		if t.placeDenied(lines, uint64(count), v6, prefixes) {
			return lines
		}
		count += count/4 + 1
	}
	return nil
}

// placeDenied writes prefixes into the lines of a group. It reports whether every prefix found room.
func (t *Tables) placeDenied(lines []deniedLine, count uint64, v6 bool, prefixes []wire.DeniedPrefix) bool {
	mix := func(key uint64) uint64 {
		key *= t.HashMultiplier
		return (key ^ key>>32) * t.HashMultiplier
	}
	for _, p := range prefixes {
		at, placed := uint64(0), false
		if v6 {
			p = wire.DeniedPrefix{bits.ReverseBytes64(p[0]), bits.ReverseBytes64(p[1])}
			at = (mix(mix(p[0])^p[1]) >> 32) * count >> 32
		} else {
			p[0] = uint64(bits.ReverseBytes32(uint32(p[0])))
			at = (mix(p[0]) >> 32) * count >> 32
		}
		for probe := uint64(0); probe < wire.DeniedProbes && !placed; probe++ {
			placed = lines[at+probe].put(p, v6)
		}
		if !placed {
			return false
		}
	}
	return true
}

// put writes a prefix into the first free place. It reports whether there was one.
func (l *deniedLine) put(p wire.DeniedPrefix, v6 bool) bool {
	for i := range l {
		switch {
		case v6 && i%2 == 0 && l[i] == 0 && l[i+1] == 0:
			l[i], l[i+1] = p[0], p[1]
			return true
		case !v6 && uint32(l[i]) == 0:
			l[i] |= p[0]
			return true
		case !v6 && l[i]>>32 == 0:
			l[i] |= p[0] << 32
			return true
		}
	}
	return false
}

// PutDenied replaces the table of denied sources atomically, unless it already has these sources.
func (t *Tables) PutDenied(d Denied) error {
	image, err := t.deniedImage(d)
	if err != nil {
		return err
	}
	outer := t.Maps[wire.MapDenied]
	if same, err := holdsDenied(outer, image); same || err != nil {
		return err
	}
	if image == nil {
		return outer.Delete(uint32(0))
	}
	spec, err := wire.Spec()
	if err != nil {
		return err
	}
	inner := spec.Maps[wire.MapDenied].InnerMap
	inner.MaxEntries = uint32(len(image))
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return fmt.Errorf("map %s: %d lines: %w", wire.MapDenied, len(image), err)
	}
	defer m.Close() // the outer map keeps a reference to the inner map
	words, err := MapMemory[deniedLine](m)
	if err != nil {
		return err
	}
	copy(words.Values, image)
	if err := errors.Join(words.Close(), outer.Put(uint32(0), m)); err != nil {
		return fmt.Errorf("map %s: %w", wire.MapDenied, err)
	}
	if same, err := holdsDenied(outer, image); !same || err != nil {
		return errors.Join(errors.New("denied sources: the map in the kernel differs from the written values"), err)
	}
	return nil
}

// holdsDenied reports whether the table in force has this content.
func holdsDenied(outer *ebpf.Map, image []deniedLine) (bool, error) {
	var m *ebpf.Map
	if err := outer.Lookup(uint32(0), &m); errors.Is(err, ebpf.ErrKeyNotExist) {
		return image == nil, nil
	} else if err != nil {
		return false, fmt.Errorf("map %s: %w", wire.MapDenied, err)
	}
	defer m.Close()
	if int(m.MaxEntries()) != len(image) {
		return false, nil
	}
	words, err := MapMemory[deniedLine](m)
	if err != nil {
		return false, err
	}
	same := bytes.Equal(words.raw[:len(image)*64], unsafe.Slice((*byte)(unsafe.Pointer(&image[0])), len(image)*64))
	return same, words.Close()
}
