// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"crypto/sha256"
	"fmt"
	"slices"
)

// Ids of services, backends, rules, sets and pool addresses stay the same from
// one snapshot to the next and from one process to the next: flows refer to
// them. They are kept in a pinned map, id by kind and name. A name that is not wanted
// any more keeps its id, in case it comes back, until others need it and nothing refers
// to it (spare).

type idKind byte

const (
	idService idKind = iota + 1
	idBackend
	idSource // rule that translates sources
	idPrefix // stateless rule
	idSet
	idPool
	idMeta // words of the tables: hash keys, sizes, layout
	idList // list of interfaces
)

func (k idKind) String() string {
	return [...]string{idService: "services", idBackend: "backends", idSource: "rules that translate sources", idPrefix: "rules without state",
		idSet: "sets and prefixes of the firewall", idPool: "pool addresses", idMeta: "words", idList: "lists of interfaces"}[k]
}

const idNameLen = 127

type idKey struct {
	Kind idKind
	Name [idNameLen]byte
}

// idKeyOf cuts a name that is too long and adds its hash.
func idKeyOf(kind idKind, name string) idKey {
	k := idKey{Kind: kind}
	if len(name) > idNameLen {
		sum := sha256.Sum256([]byte(name))
		name = name[:idNameLen-17] + fmt.Sprintf("~%x", sum[:8])
	}
	copy(k.Name[:], name)
	return k
}

// ids is the content of the map.
type ids struct {
	store   idStore
	known   map[idKey]uint32
	used    map[idKind]map[uint32]bool
	inForce map[idKey]bool // wanted by the snapshot in force; nil before this process has applied one
}

// idStore keeps ids from one process to the next.
type idStore interface {
	Put(key, value any) error
	// Delete removes a key; one that is not there is no error.
	Delete(key any) error
}

func newIDs() *ids { return &ids{known: map[idKey]uint32{}, used: map[idKind]map[uint32]bool{}} }

func (t *ids) note(k idKey, v uint32) {
	t.known[k] = v
	if t.used[k.Kind] == nil {
		t.used[k.Kind] = map[uint32]bool{}
	}
	t.used[k.Kind][v] = true
}

// draft is a set of ids for a snapshot that is not in force yet.
type draft struct {
	from  *ids
	fresh map[idKey]uint32
	want  map[idKey]bool
	next  map[idKind]uint32
	short bool                // not enough ids: some are none
	last  bool                // nothing more can be given up: too few are an error
	spare map[idKind][]uint32 // ids that other names have, best first
}

func (t *ids) draft() *draft {
	return &draft{from: t, fresh: map[idKey]uint32{}, want: map[idKey]bool{}, next: map[idKind]uint32{}}
}

// id returns the id of a name, a free one below limit when it is new.
func (d *draft) id(kind idKind, name string, limit uint32, busy func(uint32) bool) (uint32, error) {
	k := idKeyOf(kind, name)
	d.want[k] = true
	if v, ok := d.from.known[k]; ok {
		return v, nil
	}
	if v, ok := d.fresh[k]; ok {
		return v, nil
	}
	for v := d.next[kind]; v < limit; v++ {
		if d.from.used[kind][v] || busy != nil && busy(v) {
			continue
		}
		d.fresh[k] = v
		d.next[kind] = v + 1
		return v, nil
	}
	d.next[kind] = max(d.next[kind], limit) // not looked at again
	if list := d.spare[kind]; len(list) > 0 {
		d.spare[kind] = list[1:]
		d.fresh[k] = list[0]
		return list[0], nil
	}
	if d.last {
		return 0, fmt.Errorf("no number is left for %q: there are %d %s, and those that left keep theirs until their flows have ended", name, limit, kind)
	}
	d.short = true
	d.next[kind]++
	d.fresh[k] = d.next[kind] // no other name has it
	return d.fresh[k], nil
}

// spare is a draft that may give the ids of names that are not wanted to others, unless something
// refers to them. Names that are not in force go first: while a change is made, packets still meet
// the previous state. Of names in force only a set can lose its id without harm.
func (t *ids) spare(want map[idKey]bool, referred map[idKind]map[uint32]bool) *draft {
	d := t.draft()
	d.last, d.spare = true, map[idKind][]uint32{}
	var inForce []uint32 // sets
	for k, v := range t.known {
		switch {
		case want[k] || k.Kind == idMeta:
		case !t.inForce[k] && !referred[k.Kind][v]:
			d.spare[k.Kind] = append(d.spare[k.Kind], v)
		case k.Kind == idSet:
			inForce = append(inForce, v)
		}
	}
	for _, list := range d.spare {
		slices.Sort(list) // neighbours need no run of their own
	}
	d.spare[idSet] = append(d.spare[idSet], inForce...)
	return d
}

// keep writes the new ids. One that another name had is taken from it.
func (d *draft) keep() error {
	type number struct {
		idKind
		id uint32
	}
	taken := map[number]bool{}
	for k, v := range d.fresh {
		if _, known := d.from.known[k]; !known && k.Kind != idMeta && d.from.used[k.Kind][v] {
			taken[number{k.Kind, v}] = true
		}
	}
	for k, v := range d.from.known {
		if len(taken) == 0 {
			break
		}
		if !taken[number{k.Kind, v}] {
			continue
		}
		if err := d.from.store.Delete(&k); err != nil {
			return fmt.Errorf("ids: %w", err)
		}
		delete(d.from.known, k)
	}
	for k, v := range d.fresh {
		if err := d.from.store.Put(&k, v); err != nil {
			return fmt.Errorf("ids: %w", err)
		}
		d.from.note(k, v)
	}
	return nil
}
