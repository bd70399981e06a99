// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// putServices writes changed scheduler tables into free regions and then switches the services to
// them.
func (d *Datapath) putServices(want *compile.Desired) error {
	fresh, again := map[uint32]table.Region{}, map[uint16]bool{}
	gaps := d.freeRegions()
	for id, w := range want.Services {
		now := d.regions[id]
		if _, known := d.regions[id]; !known || !d.slotsEqual(now, want.Slots[id]) {
			r, ok := firstFit(gaps, uint32(len(want.Slots[id])))
			if !ok {
				return fmt.Errorf("service %s: its scheduler table of %d slots does not fit in the %d slots; use a scheduler without a hash, or make larger tables: %s",
					want.Names.Service[id], len(want.Slots[id]), d.t.Slots*4, wire.WayOut)
			}
			d.writeSlots(r, want.Slots[id])
			fresh[id] = r
			now = r
		}
		d.noteProxy(w.Flags)
		w.Slots = now.Word()
		v := &d.t.Services.Values[id]
		if v.Active == 0 {
			l := &d.t.ServiceLoads.Values[id] // Active is kept, because flows that have not ended still count
			l.Flows, l.Packets, l.Bytes, l.Refused = 0, 0, 0, 0
			l.Tat, l.ResetTat, l.Sequence, l.Cookie = 0, 0, 0, 0
			again[uint16(id)] = true
		}
		if v.Active != 0 { // putLists writes the new lists
			w.Allow, w.Deny = v.Allow, v.Deny
		}
		slots := w.Slots
		w.Slots = v.Slots
		*v = w
		atomic.StoreUint64(&v.Slots, slots)
	}
	for id, r := range fresh {
		d.regions[id] = r
	}
	return d.resetBackends(again)
}

// noteFamilies records that flows between the address families may exist. Later programs keep the
// code for them after their service or rule is removed.
func (d *Datapath) noteFamilies(s wire.Switches) {
	if s.FamilyChange {
		atomic.OrUint32(&d.t.Control.Values[0].Spliced, wire.SplicedFamilies)
	}
}

// noteProxy records that flows with a PROXY header may exist. Later programs keep the code for them
// after their service is removed.
func (d *Datapath) noteProxy(flags uint16) {
	if flags&wire.ServiceProxy != 0 {
		atomic.OrUint32(&d.t.Control.Values[0].Spliced, wire.SplicedProxy)
	}
}

// putLists switches services to the new source lists. It runs after the lists and programs are in
// place, so that no client is refused because of a missing list.
func (d *Datapath) putLists(want *compile.Desired) {
	for id, w := range want.Services {
		v := &d.t.Services.Values[id]
		atomic.StoreUint64(&v.Allow, w.Allow)
		atomic.StoreUint64(&v.Deny, w.Deny)
	}
}

func (d *Datapath) slotsEqual(r table.Region, slots []uint16) bool {
	if int(r.Count) != len(slots) {
		return false
	}
	for i, s := range slots {
		if d.t.Slot(r.First+uint32(i)) != s {
			return false
		}
	}
	return true
}

func (d *Datapath) writeSlots(r table.Region, slots []uint16) {
	for i := 0; i < len(slots); i += 4 {
		var word uint64
		for k := 0; k < 4 && i+k < len(slots); k++ {
			word |= uint64(slots[i+k]) << (k * 16)
		}
		d.t.SlotWords.Values[int(r.First)/4+i/4] = word
	}
}

// freeRegions lists the free parts of the slots map, between the tables in force.
func (d *Datapath) freeRegions() []table.Region {
	taken := make([]table.Region, 0, len(d.regions))
	for _, r := range d.regions {
		if r.Count > 0 {
			taken = append(taken, r)
		}
	}
	slices.SortFunc(taken, func(a, b table.Region) int { return cmp.Compare(a.First, b.First) })
	var free []table.Region
	at := uint32(0)
	for _, r := range taken {
		if r.First > at {
			free = append(free, table.Region{First: at, Count: r.First - at})
		}
		at = max(at, r.First+wholeWords(r.Count))
	}
	if end := d.t.Slots * 4; end > at {
		free = append(free, table.Region{First: at, Count: end - at})
	}
	return free
}

// wholeWords rounds a number of slots up to the words that hold them.
func wholeWords(slots uint32) uint32 { return (slots + 3) / 4 * 4 }

// firstFit allocates a scheduler table in the first sufficient gap.
func firstFit(gaps []table.Region, count uint32) (table.Region, bool) {
	for i := range gaps {
		if g := &gaps[i]; g.Count >= wholeWords(count) {
			r := table.Region{First: g.First, Count: count}
			g.First += wholeWords(count)
			g.Count -= wholeWords(count)
			return r, true
		}
	}
	return table.Region{}, false
}

// putDirects writes the table of direct listeners. It clears an entry's key first and writes the
// key last. Meanwhile packets take the full path.
func (d *Datapath) putDirects(want map[uint32]wire.Direct) {
	for i := range d.t.Directs.Values {
		v := &d.t.Directs.Values[i]
		w := want[uint32(i)]
		if *v == w {
			continue
		}
		atomic.StoreUint64(&v.Key, 0)
		key := w.Key
		w.Key = 0
		*v = w
		atomic.StoreUint64(&v.Key, key)
	}
}
