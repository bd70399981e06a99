// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/flow"
)

// side is one direction of a flow, taken from either table.
type side struct {
	key              flow.Tuple
	packets, bytes   uint64
	twin, seen       uint32
	flags, heard     uint8
	owner, backend   uint16
	live, isFlow, v6 bool
}

func side4(e *wireFlow4) side {
	return side{key: tupleOf(addr4From(e.Key.Saddr), addr4From(e.Key.Daddr), e.Key.Sport, e.Key.Dport, e.Key.L4Proto),
		packets: e.Packets, bytes: e.Bytes, twin: e.Meta.Twin, seen: e.Meta.Seen, flags: e.Meta.Flags, heard: e.Meta.Heard,
		owner: e.Meta.Owner, backend: e.Meta.Backend, live: e.Key.State == EntryLive,
		isFlow: e.Key.Kind == KindFlow}
}

func side6(e *wireFlow6) side {
	return side{key: tupleOf(addrFrom(e.Key.Saddr, true), addrFrom(e.Key.Daddr, true), e.Key.Sport, e.Key.Dport, e.Key.L4Proto),
		packets: e.Packets, bytes: e.Bytes, twin: e.Meta.Twin, seen: e.Meta.Seen, flags: e.Meta.Flags, heard: e.Meta.Heard,
		owner: e.Meta.Owner, backend: e.Meta.Backend, live: e.Key.State == EntryLive,
		isFlow: e.Key.Kind == KindFlow, v6: true}
}

func (t *tables) twin(s side) side {
	if s.twin == NoEntry {
		return side{key: s.key.Reverse(), seen: s.seen, heard: s.heard & HeardFIN} // one direction speaks for both
	}
	if s.v6 != (s.flags&EntryCross != 0) {
		if int(s.twin) < len(t.flows6.values) {
			return side6(&t.flows6.values[s.twin])
		}
	} else if int(s.twin) < len(t.flows4.values) {
		return side4(&t.flows4.values[s.twin])
	}
	return side{}
}

// primary returns entry i of both tables, one behind the other, when it is the
// opening direction of a live flow.
func (t *tables) primary(i int) (side, bool) {
	const live, isFlow = EntryLive, KindFlow
	if i < len(t.flows4.values) {
		e := &t.flows4.values[i]
		if e.Key.State != live || e.Key.Kind != isFlow || e.Meta.Flags&EntryPrimary == 0 {
			return side{}, false
		}
		return side4(e), true
	}
	e := &t.flows6.values[i-len(t.flows4.values)]
	if e.Key.State != live || e.Key.Kind != isFlow || e.Meta.Flags&EntryPrimary == 0 {
		return side{}, false
	}
	return side6(e), true
}

// entries is how many there are in both tables, used or not.
func (t *tables) entries() int { return len(t.flows4.values) + len(t.flows6.values) }

// primaries calls yield for the opening direction of every live flow.
func (t *tables) primaries(yield func(side) bool) {
	for i := range t.entries() {
		if s, ok := t.primary(i); ok && !yield(s) {
			return
		}
	}
}

// bare reports whether an interface has no hardware address, and its frames no headers then.
func (t *tables) bare(ifindex uint32) (bool, error) {
	var own wireInterfaceAddr
	if err := t.maps["interfaces"].Lookup(ifindex, &own); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, fmt.Errorf("map interfaces: %w", err)
	}
	return own.Mtu != 0 && own.Mac == [6]uint8{}, nil
}

// hopOf returns the next hop to which a plan sends.
func (t *tables) hopOf(w *wireWork) (wireHop, error) {
	h := wireHop(w.Hop)
	if w.Plan.Hop != 0 {
		if err := t.maps["hops"].Lookup(uint32(w.Plan.Hop), &h); err != nil {
			return h, fmt.Errorf("map hops: %w", err)
		}
	}
	return h, nil
}

// region of the slots map.
type region struct{ first, count uint32 }

func regionOf(word uint64) region { return region{uint32(word >> 32), uint32(word)} }

func (r region) word() uint64 { return uint64(r.first)<<32 | uint64(r.count) }

func (t *tables) slot(at uint32) uint16 { return uint16(t.slotMem.values[at/4] >> (at % 4 * 16)) }
