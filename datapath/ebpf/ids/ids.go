// SPDX-License-Identifier: Apache-2.0

package ids

import (
	"crypto/sha256"
	"fmt"
	"slices"
)

// Ids of services, backends, rules, sets and pool addresses are stable across snapshots and processes, because flows
// refer to them. A pinned map stores the id by kind and name. An unused name keeps its id for a later return. Another
// name takes the id only if ids run short and nothing refers to it (spare).

type Kind byte

const (
	Service Kind = iota + 1
	Backend
	Source // Rule that translates sources.
	Prefix // Stateless rule.
	Set
	Pool
	Meta // Words of the tables: hash keys, sizes, layout.
	List // List of interfaces.
)

func (k Kind) String() string {
	return [...]string{Service: "services", Backend: "backends", Source: "rules that translate sources", Prefix: "rules without state",
		Set: "sets and prefixes of the firewall", Pool: "pool addresses", Meta: "words", List: "lists of interfaces"}[k]
}

const NameLen = 127

type Key struct {
	Kind Kind
	Name [NameLen]byte
}

// KeyOf shortens a long name and appends its hash.
func KeyOf(kind Kind, name string) Key {
	k := Key{Kind: kind}
	if len(name) > NameLen {
		sum := sha256.Sum256([]byte(name))
		name = name[:NameLen-17] + fmt.Sprintf("~%x", sum[:8])
	}
	copy(k.Name[:], name)
	return k
}

// IDs is the content of the map.
type IDs struct {
	Store   Store
	Known   map[Key]uint32
	Used    map[Kind]map[uint32]bool
	InForce map[Key]bool // used by the active snapshot; nil before the first apply of this process
}

// Store keeps ids across processes.
type Store interface {
	Put(key, value any) error
	// Delete removes a key; a missing key is not an error.
	Delete(key any) error
}

func New() *IDs { return &IDs{Known: map[Key]uint32{}, Used: map[Kind]map[uint32]bool{}} }

func (t *IDs) Note(k Key, v uint32) {
	t.Known[k] = v
	if t.Used[k.Kind] == nil {
		t.Used[k.Kind] = map[uint32]bool{}
	}
	t.Used[k.Kind][v] = true
}

// Draft is a set of ids for a snapshot that is not active yet.
type Draft struct {
	From  *IDs
	Fresh map[Key]uint32
	Want  map[Key]bool
	next  map[Kind]uint32
	Short bool              // Not enough ids: some names have none.
	last  bool              // No id can be released: a shortage is an error.
	spare map[Kind][]uint32 // Ids of other names, the best candidates first.
}

func (t *IDs) Draft() *Draft {
	return &Draft{From: t, Fresh: map[Key]uint32{}, Want: map[Key]bool{}, next: map[Kind]uint32{}}
}

// ID returns the id of a name, or a free one below limit if it is new.
func (d *Draft) ID(kind Kind, name string, limit uint32, busy func(uint32) bool) (uint32, error) {
	k := KeyOf(kind, name)
	d.Want[k] = true
	if v, ok := d.From.Known[k]; ok {
		return v, nil
	}
	if v, ok := d.Fresh[k]; ok {
		return v, nil
	}
	for v := d.next[kind]; v < limit; v++ {
		if d.From.Used[kind][v] || busy != nil && busy(v) {
			continue
		}
		d.Fresh[k] = v
		d.next[kind] = v + 1
		return v, nil
	}
	d.next[kind] = max(d.next[kind], limit) // the next search starts behind the limit
	if list := d.spare[kind]; len(list) > 0 {
		d.spare[kind] = list[1:]
		d.Fresh[k] = list[0]
		return list[0], nil
	}
	if d.last {
		return 0, fmt.Errorf("no number is left for %q: there are %d %s, and those that left keep theirs until their flows have ended", name, limit, kind)
	}
	d.Short = true
	d.next[kind]++
	d.Fresh[k] = d.next[kind] // no other name uses the id
	return d.Fresh[k], nil
}

// Known reports whether a name has an id, used or not.
func (d *Draft) Known(kind Kind, name string) bool {
	_, ok := d.From.Known[KeyOf(kind, name)]
	return ok
}

// Spare returns a draft that may reassign the ids of unused names without references. Names outside the active
// snapshot are first: during a change, packets still use the previous state. Among the names of the active snapshot
// only sets can lose their id without harm.
func (t *IDs) Spare(want map[Key]bool, referred map[Kind]map[uint32]bool) *Draft {
	d := t.Draft()
	d.last, d.spare = true, map[Kind][]uint32{}
	var inForce []uint32 // bit numbers of address sets
	for k, v := range t.Known {
		switch {
		case want[k] || k.Kind == Meta:
		case !t.InForce[k] && !referred[k.Kind][v]:
			d.spare[k.Kind] = append(d.spare[k.Kind], v)
		case k.Kind == Set:
			inForce = append(inForce, v)
		}
	}
	for _, list := range d.spare {
		slices.Sort(list) // consecutive ids need no list of their own
	}
	d.spare[Set] = append(d.spare[Set], inForce...)
	return d
}

// Keep writes the new ids and deletes their former names.
func (d *Draft) Keep() error {
	type number struct {
		Kind
		id uint32
	}
	taken := map[number]bool{}
	for k, v := range d.Fresh {
		if _, known := d.From.Known[k]; !known && k.Kind != Meta && d.From.Used[k.Kind][v] {
			taken[number{k.Kind, v}] = true
		}
	}
	for k, v := range d.From.Known {
		if len(taken) == 0 {
			break
		}
		if !taken[number{k.Kind, v}] {
			continue
		}
		if err := d.From.Store.Delete(&k); err != nil {
			return fmt.Errorf("ids: %w", err)
		}
		delete(d.From.Known, k)
	}
	for k, v := range d.Fresh {
		if err := d.From.Store.Put(&k, v); err != nil {
			return fmt.Errorf("ids: %w", err)
		}
		d.From.Note(k, v)
	}
	return nil
}
