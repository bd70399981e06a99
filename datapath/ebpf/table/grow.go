// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"iter"
	"sync/atomic"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// Flow tables start with 1/64 of their maximum number of entries. A table is doubled if half of its entries were ever
// used. It is also doubled if a burst of new flows could use up the free entries before the next check. Doubling adds
// parts to the entries, then fills an index of twice the size and activates it in place of the old one. No entry
// moves, and programs find and open flows meanwhile. Tables never shrink, because their peak use may recur.

const (
	firstShare = 64
	// least is the initial number of entries of a table, if its maximum allows. Three quarters must be left for the
	// growth.
	least       = 1 << 16
	partsAtOnce = 64 // parts added before the programs may use them
	fillAtOnce  = 1 << 16
)

// family holds the properties common to both flow tables.
type family struct {
	name    string
	v6      uint32
	entries uint32 // Maximum number.
	first   uint32 // Initial number.
	stock   *wire.Stock
	inForce *uint64 // words of control: see index4 there
	next    *uint64
	add     func(iter.Seq[uint32]) error
	index   *Parts[wire.Bucket]
}

func (t *Tables) families() [2]family {
	c := &t.Control.Values[0]
	return [2]family{
		{"flows4", 0, t.Entries4, initialEntries(t.Entries4), &t.Stock4.Values[0], &c.Index4, &c.NextIndex4, t.Flows4.Add, t.Index4},
		{"flows6", 1, t.Entries6, initialEntries(t.Entries6), &t.Stock6.Values[0], &c.Index6, &c.NextIndex6, t.Flows6.Add, t.Index6},
	}
}

// initialEntries returns the initial number of entries of a table with the given maximum.
func initialEntries(entries uint32) uint32 { return min(entries, max(least, entries/firstShare)) }

// indexParts returns the number of parts of the index for a table with so many entries.
func indexParts(entries uint32) uint32 { return parts(buckets(entries), wire.IndexPartBits) }

// parts returns the number of parts of 2^bits elements for n elements.
func parts(n uint32, bits int) uint32 { return uint32((uint64(n) + 1<<bits - 1) >> bits) }

// begin creates the first parts of empty tables, or all parts if whole. If a killed process was about to double a
// table, begin completes or undoes that step.
func (t *Tables) begin(whole bool) error {
	for _, f := range t.families() {
		if err := f.finishReindex(); err != nil {
			return err
		}
		if atomic.LoadUint32(&f.stock.Room) != 0 {
			continue
		}
		room := f.first
		if whole {
			room = f.entries
		}
		if err := f.index.Add(sequence(0, indexParts(room))); err != nil {
			return err
		}
		atomic.StoreUint64(f.inForce, uint64(buckets(room)))
		if err := f.addParts(room); err != nil {
			return err
		}
	}
	return nil
}

// finishReindex leaves one index: the next one if it is already active.
func (f *family) finishReindex() error {
	next := atomic.LoadUint64(f.next)
	if next == 0 {
		return nil
	}
	atomic.StoreUint64(f.next, 0)
	if err := f.index.Wait(); err != nil {
		return err
	}
	half := uint32(len(f.index.there)) / 2
	if atomic.LoadUint64(f.inForce)>>32 == 0 {
		return f.index.Drop(half, 2*half)
	}
	return f.index.Drop(0, half)
}

// addParts adds parts until there is room for so many entries.
func (f *family) addParts(room uint32) error {
	for first, last := uint32(0), parts(room, wire.PartBits); first < last; first += partsAtOnce {
		end := min(first+partsAtOnce, last)
		if err := f.add(sequence(first, end)); err != nil {
			return err
		}
		if now := uint32(min(uint64(end)<<wire.PartBits, uint64(room))); now > atomic.LoadUint32(&f.stock.Room) {
			atomic.StoreUint32(&f.stock.Room, now)
		}
	}
	return nil
}

// Grow doubles the tables that need it, with their indexes; fill runs the program fill_index.
func (t *Tables) Grow(fill func(*wire.Reindex) error) error {
	var errs []error
	for _, f := range t.families() {
		room, fresh := atomic.LoadUint32(&f.stock.Room), atomic.LoadUint32(&f.stock.Fresh)
		if room < f.entries && fresh > room-min(max(room/2, f.first/4*3), room) {
			room = uint32(min(uint64(room)*2, uint64(f.entries)))
			if err := f.addParts(room); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		if want := buckets(room); uint32(atomic.LoadUint64(f.inForce)) < want {
			if err := f.replaceIndex(want, fill); err != nil {
				errs = append(errs, fmt.Errorf("index of %s: %w", f.name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Reindex4 replaces the index of the IPv4 table by one with so many buckets, for tests.
func (t *Tables) Reindex4(buckets uint32, fill func(*wire.Reindex) error) error {
	f := t.families()[0]
	return f.replaceIndex(buckets, fill)
}

// replaceIndex replaces the active index by one with so many buckets.
func (f *family) replaceIndex(buckets uint32, fill func(*wire.Reindex) error) error {
	if err := f.finishReindex(); err != nil {
		return err
	}
	first := uint32(0) // number of the first part
	if atomic.LoadUint64(f.inForce)>>32 == 0 {
		first = uint32(len(f.index.there)) / 2
	}
	if err := f.index.Add(sequence(first, first+parts(buckets, wire.IndexPartBits))); err != nil {
		return errors.Join(err, f.index.Drop(first, first+parts(buckets, wire.IndexPartBits)))
	}
	next := uint64(first)<<wire.IndexPartBits<<32 | uint64(buckets)
	atomic.StoreUint64(f.next, next)
	if err := f.index.Wait(); err != nil { // from here on programs write both indexes
		return errors.Join(err, f.finishReindex())
	}
	for at, end := uint32(0), atomic.LoadUint32(&f.stock.Room); at < end; at += fillAtOnce {
		r := wire.Reindex{V6: f.v6, First: at, Count: min(fillAtOnce, end-at)}
		err := fill(&r)
		if err == nil && r.Failed > 0 {
			err = fmt.Errorf("%d entries found no place", r.Failed)
		}
		if err != nil {
			return errors.Join(err, f.finishReindex())
		}
	}
	atomic.StoreUint64(f.inForce, next)
	if err := f.index.Wait(); err != nil { // from here on programs search the new one
		return err
	}
	return f.finishReindex()
}
