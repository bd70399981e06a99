// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
)

// putServices writes the scheduler tables that changed into free regions and
// then switches the services to them.
func (d *Datapath) putServices(want *desired) error {
	fresh := map[uint32]region{}
	gaps := d.gaps()
	for id, w := range want.services {
		now := d.regions[id]
		if _, known := d.regions[id]; !known || !d.slotsEqual(now, want.slots[id]) {
			r, ok := place(gaps, uint32(len(want.slots[id])))
			if !ok {
				return fmt.Errorf("service %s: its scheduler table of %d slots finds no room among %d; use a scheduler without a hash, or make larger tables: %s",
					want.names.service[id], len(want.slots[id]), d.t.slots*4, wayOut)
			}
			d.writeSlots(r, want.slots[id])
			fresh[id] = r
			now = r
		}
		d.noteProxy(w.Flags)
		w.Slots = now.word()
		v := &d.t.services.values[id]
		if v.Active == 0 {
			l := &d.t.loads.values[id] // but for Active: flows that have not ended yet still count
			l.Flows, l.Packets, l.Bytes, l.Refused = 0, 0, 0, 0
			l.Tat, l.ResetTat, l.Sequence, l.Cookie = 0, 0, 0, 0
		}
		if v.Active != 0 { // until putLists
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
	return nil
}

// noteProxy has later programs know how flows of a service with a PROXY header go on, whatever
// becomes of the service.
func (d *Datapath) noteProxy(flags uint16) {
	if flags&ServiceProxy != 0 {
		atomic.OrUint32(&d.t.control.values[0].Spliced, SplicedProxy)
	}
}

// putLists has services that were there before look at the lists of sources that are wanted
// from now on. It comes behind the lists, and the programs that look them up: nobody is
// refused because a list is not there yet.
func (d *Datapath) putLists(want *desired) {
	for id, w := range want.services {
		v := &d.t.services.values[id]
		atomic.StoreUint64(&v.Allow, w.Allow)
		atomic.StoreUint64(&v.Deny, w.Deny)
	}
}

func (d *Datapath) slotsEqual(r region, slots []uint16) bool {
	if int(r.count) != len(slots) {
		return false
	}
	for i, s := range slots {
		if d.t.slot(r.first+uint32(i)) != s {
			return false
		}
	}
	return true
}

func (d *Datapath) writeSlots(r region, slots []uint16) {
	for i := 0; i < len(slots); i += 4 {
		var word uint64
		for k := 0; k < 4 && i+k < len(slots); k++ {
			word |= uint64(slots[i+k]) << (k * 16)
		}
		d.t.slotMem.values[int(r.first)/4+i/4] = word
	}
}

// gaps lists the free parts of the slots map, between the tables in force.
func (d *Datapath) gaps() []region {
	taken := make([]region, 0, len(d.regions))
	for _, r := range d.regions {
		if r.count > 0 {
			taken = append(taken, r)
		}
	}
	slices.SortFunc(taken, func(a, b region) int { return cmp.Compare(a.first, b.first) })
	var free []region
	at := uint32(0)
	for _, r := range taken {
		if r.first > at {
			free = append(free, region{first: at, count: r.first - at})
		}
		at = max(at, r.first+wholeWords(r.count))
	}
	if end := d.t.slots * 4; end > at {
		free = append(free, region{first: at, count: end - at})
	}
	return free
}

// wholeWords rounds a number of slots up to the words that hold them.
func wholeWords(slots uint32) uint32 { return (slots + 3) / 4 * 4 }

// place takes room for a scheduler table out of the first gap that has it.
func place(gaps []region, count uint32) (region, bool) {
	for i := range gaps {
		if g := &gaps[i]; g.count >= wholeWords(count) {
			r := region{first: g.first, count: count}
			g.first += wholeWords(count)
			g.count -= wholeWords(count)
			return r, true
		}
	}
	return region{}, false
}

// putDirects makes the table equal to what is wanted. A key is taken away first and
// written last: in between its packets go the long way.
func (d *Datapath) putDirects(want map[uint32]wireDirect) {
	for i := range d.t.directs.values {
		v := &d.t.directs.values[i]
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
