// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"iter"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// Entry is one direction of a flow from either table.
type Entry struct {
	Key              flow.Tuple
	Packets, Bytes   uint64
	Twin, Seen       uint32
	Flags, Heard     uint8
	Owner, Backend   uint16
	live, isFlow, v6 bool
}

func FromFlow4(e *wire.Flow4) Entry {
	return Entry{Key: wire.TupleOf(wire.Addr4From(e.Key.Saddr), wire.Addr4From(e.Key.Daddr), e.Key.Sport, e.Key.Dport, e.Key.L4Proto),
		Packets: e.Packets, Bytes: e.Bytes, Twin: e.Meta.Twin, Seen: e.Meta.Seen, Flags: e.Meta.Flags, Heard: e.Meta.Heard,
		Owner: e.Meta.Owner, Backend: e.Meta.Backend, live: e.Key.State == wire.EntryLive,
		isFlow: e.Key.Kind == wire.KindFlow}
}

func FromFlow6(e *wire.Flow6) Entry {
	return Entry{Key: wire.TupleOf(wire.AddrFrom(e.Key.Saddr, true), wire.AddrFrom(e.Key.Daddr, true), e.Key.Sport, e.Key.Dport, e.Key.L4Proto),
		Packets: e.Packets, Bytes: e.Bytes, Twin: e.Meta.Twin, Seen: e.Meta.Seen, Flags: e.Meta.Flags, Heard: e.Meta.Heard,
		Owner: e.Meta.Owner, Backend: e.Meta.Backend, live: e.Key.State == wire.EntryLive,
		isFlow: e.Key.Kind == wire.KindFlow, v6: true}
}

func (t *Tables) Twin(s Entry) Entry {
	if s.Twin == wire.NoEntry {
		return Entry{Key: s.Key.Reverse(), Seen: s.Seen, Heard: s.Heard & wire.HeardFIN} // one entry represents both directions
	}
	if s.v6 != (s.Flags&wire.EntryCross != 0) {
		if int(s.Twin) < len(t.Flows6.Values) {
			return FromFlow6(&t.Flows6.Values[s.Twin])
		}
	} else if int(s.Twin) < len(t.Flows4.Values) {
		return FromFlow4(&t.Flows4.Values[s.Twin])
	}
	return Entry{}
}

// Primary returns entry i of the concatenated tables if it is the opening direction of a live flow.
func (t *Tables) Primary(i int) (Entry, bool) {
	const live, isFlow = wire.EntryLive, wire.KindFlow
	if i < len(t.Flows4.Values) {
		e := &t.Flows4.Values[i]
		if e.Key.State != live || e.Key.Kind != isFlow || e.Meta.Flags&wire.EntryPrimary == 0 {
			return Entry{}, false
		}
		return FromFlow4(e), true
	}
	e := &t.Flows6.Values[i-len(t.Flows4.Values)]
	if e.Key.State != live || e.Key.Kind != isFlow || e.Meta.Flags&wire.EntryPrimary == 0 {
		return Entry{}, false
	}
	return FromFlow6(e), true
}

// Entries returns the numbers of the allocated entries of both tables from first on, used or not. It skips entries
// that the tables have not grown to: scanning the maximum of a large machine would dominate every request.
func (t *Tables) Entries(first int) iter.Seq[int] {
	return func(yield func(int) bool) {
		four := len(t.Flows4.Values)
		for i := first; i < len(t.Flows4.Shown()); i++ {
			if !yield(i) {
				return
			}
		}
		for i := max(first, four); i < four+len(t.Flows6.Shown()); i++ {
			if !yield(i) {
				return
			}
		}
	}
}

// Primaries calls yield for the opening direction of every live flow.
func (t *Tables) Primaries(yield func(Entry) bool) {
	for i := range t.Entries(0) {
		if s, ok := t.Primary(i); ok && !yield(s) {
			return
		}
	}
}

// Bare reports whether an interface has no hardware address, so that its frames have no headers.
func (t *Tables) Bare(ifindex uint32) (bool, error) {
	var own wire.InterfaceAddr
	if err := t.Maps["interfaces"].Lookup(ifindex, &own); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, fmt.Errorf("map interfaces: %w", err)
	}
	return own.Mtu != 0 && own.Mac == [6]uint8{}, nil
}

// HopOf returns the next hop of a plan.
func (t *Tables) HopOf(w *wire.Work) (wire.Hop, error) {
	h := wire.Hop(w.Hop)
	if w.Plan.Hop != 0 {
		if err := t.Maps["hops"].Lookup(uint32(w.Plan.Hop), &h); err != nil {
			return h, fmt.Errorf("map hops: %w", err)
		}
	}
	return h, nil
}

// Region of the slots map.
type Region struct{ First, Count uint32 }

func RegionOf(word uint64) Region { return Region{uint32(word >> 32), uint32(word)} }

func (r Region) Word() uint64 { return uint64(r.First)<<32 | uint64(r.Count) }

func (t *Tables) Slot(at uint32) uint16 { return uint16(t.SlotWords.Values[at/4] >> (at % 4 * 16)) }
