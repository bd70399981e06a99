// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
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

var idSpec = &ebpf.MapSpec{
	Name: "sluice_ids", Type: ebpf.Hash, KeySize: idNameLen + 1, ValueSize: 4, MaxEntries: 1 << 17, Flags: 1, // BPF_F_NO_PREALLOC
}

// ids is the content of the map.
type ids struct {
	m       *ebpf.Map
	known   map[idKey]uint32
	used    map[idKind]map[uint32]bool
	inForce map[idKey]bool // wanted by the snapshot in force; nil before this process has applied one
}

func loadIDs(m *ebpf.Map) (*ids, error) {
	t := &ids{m: m, known: map[idKey]uint32{}, used: map[idKind]map[uint32]bool{}}
	var k idKey
	var v uint32
	it := m.Iterate()
	for it.Next(&k, &v) {
		t.note(k, v)
	}
	return t, it.Err()
}

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

// spare is a draft that may give the ids of names that are not wanted to others, as far
// as nothing refers to them. Names that are not in force go first: while a change is
// made, packets still meet what was before, and only of a set that does no harm.
func (t *tables) spare(want map[idKey]bool) (*draft, error) {
	d := t.ids.draft()
	d.last, d.spare = true, map[idKind][]uint32{}
	referred, err := t.referred()
	if err != nil {
		return nil, err
	}
	var inForce []uint32 // sets
	for k, v := range t.ids.known {
		switch {
		case want[k] || k.Kind == idMeta:
		case !t.ids.inForce[k] && !referred[k.Kind][v]:
			d.spare[k.Kind] = append(d.spare[k.Kind], v)
		case k.Kind == idSet:
			inForce = append(inForce, v)
		}
	}
	for _, list := range d.spare {
		slices.Sort(list) // neighbours need no run of their own
	}
	d.spare[idSet] = append(d.spare[idSet], inForce...)
	return d, nil
}

// referred lists, for all kinds but sets, the ids that something in the tables refers to:
// what is in force, whoever put it there, flows, bindings, and ports that rest.
func (t *tables) referred() (map[idKind]map[uint32]bool, error) {
	services, backends, sources, prefixes := map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{}
	for id, r := range t.rules.values {
		if r.Active != 0 {
			sources[uint32(id)] = true
		}
	}
	for id, s := range t.services.values {
		if s.Active == 0 {
			continue
		}
		services[uint32(id)] = true
		for r, i := regionOf(s.Slots), uint32(0); i < r.count; i++ {
			backends[uint32(t.slot(r.first+i))] = true
		}
	}
	note := func(kind, state, zone, flags uint8, owner, backend uint16) {
		switch {
		case state == uint8(wireEntryStateENTRY_FREE) || state == uint8(wireEntryStateENTRY_LOOSE):
		case kind == uint8(wireEntryKindKIND_BINDING):
			sources[uint32(zone)] = true
		case flags&entryPrimary == 0:
		case flags&entryNAT != 0:
			sources[uint32(owner)] = true
		default:
			services[uint32(owner)], backends[uint32(backend)] = true, true
		}
	}
	for i := range t.flows4.values {
		e := &t.flows4.values[i]
		note(e.Key.Kind, e.Key.State, e.Key.Zone, e.Meta.Flags, e.Meta.Owner, e.Meta.Backend)
	}
	for i := range t.flows6.values {
		e := &t.flows6.values[i]
		note(e.Key.Kind, e.Key.State, e.Key.Zone, e.Meta.Flags, e.Meta.Owner, e.Meta.Backend)
	}
	err := errors.Join(
		eachIn(t.maps["sessions"], func(_ wireSessionKey, backend uint32) { backends[backend] = true }),
		eachIn(t.maps["reverses"], func(_ wireListenerKey, r wireReverse) { backends[uint32(r.Backend)] = true }),
		eachIn(t.maps["prefixes"], func(_ wirePrefixKey, p wirePrefix) { prefixes[uint32(p.Rule)] = true }))
	return map[idKind]map[uint32]bool{idService: services, idBackend: backends, idSource: sources, idPrefix: prefixes, idPool: t.addressesInUse()}, err
}

// eachIn calls f for what a map holds; for nothing of one that is not made yet.
func eachIn[K comparable, V any](m *ebpf.Map, f func(K, V)) error {
	if m == nil {
		return nil
	}
	all, err := content[K, V](m)
	for k, v := range all {
		f(k, v)
	}
	return err
}

// forgetOthers clears what the tables know of names whose numbers others get.
func (t *tables) forgetOthers(d *draft) error {
	for k, n := range d.fresh {
		if _, known := t.ids.known[k]; known || !t.ids.used[k.Kind][n] {
			continue
		}
		if err := t.forget(k.Kind, n); err != nil {
			return err
		}
	}
	return nil
}

// forget clears what the tables know of the name that had an id before, which nothing
// refers to any more.
func (t *tables) forget(kind idKind, id uint32) error {
	switch kind {
	case idPool:
		t.blocks.values[id] = wireBlockMap{} // it may have had other blocks, or ranges of ports
		for class := range uint32(portClasses) {
			t.ports.values[id*portClasses+class] = wirePortMap{}
		}
	case idService:
		t.loads.values[id] = wireLoad{}
	case idBackend:
		t.loadsB.values[id] = wireLoad{}
		if err := t.maps["backend_hops"].Put(id, wireBackendHop{}); err != nil {
			return fmt.Errorf("backend_hops: %w", err)
		}
		if err := t.maps["tallies"].Put(id, make([]wireTally, ebpf.MustPossibleCPU())); err != nil {
			return fmt.Errorf("tallies: %w", err)
		}
	}
	return nil
}

// addressesInUse lists the pool addresses that have ports that are used or rest, or
// belong to a rule or backend in force.
func (t *tables) addressesInUse() map[uint32]bool {
	busy := map[uint32]bool{}
	for i := range t.ports.values {
		if t.ports.values[i].Used != 0 {
			busy[uint32(i/3)] = true
		}
	}
	for place, held := range t.runsHeld() {
		if held {
			busy[uint32(t.runs.values[place])] = true
		}
	}
	return busy
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
		if err := d.from.m.Delete(&k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("ids: %w", err)
		}
		delete(d.from.known, k)
	}
	for k, v := range d.fresh {
		if err := d.from.m.Put(&k, v); err != nil {
			return fmt.Errorf("ids: %w", err)
		}
		d.from.note(k, v)
	}
	return nil
}
