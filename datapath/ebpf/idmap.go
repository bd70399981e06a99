// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

var idSpec = &ebpf.MapSpec{
	Name: "sluice_ids", Type: ebpf.Hash, KeySize: idNameLen + 1, ValueSize: 4, MaxEntries: 1 << 17, Flags: 1, // BPF_F_NO_PREALLOC
}

// idMap is the pinned map of ids.
type idMap struct{ *ebpf.Map }

// Delete implements idStore.
func (m idMap) Delete(key any) error {
	err := m.Map.Delete(key)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

func loadIDs(m *ebpf.Map) (*ids, error) {
	t := newIDs()
	t.store = idMap{m}
	var k idKey
	var v uint32
	it := m.Iterate()
	for it.Next(&k, &v) {
		t.note(k, v)
	}
	return t, it.Err()
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
		case state == EntryFree || state == EntryLoose:
		case kind == KindBinding:
			sources[uint32(zone)] = true
		case flags&EntryPrimary == 0:
		case flags&EntryNAT != 0:
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
		for class := range uint32(PortClasses) {
			t.ports.values[id*PortClasses+class] = wirePortMap{}
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

// runsHeld tells which places of the map of runs the rules and backends in force use.
func (t *tables) runsHeld() []bool {
	held := make([]bool, len(t.runs.values))
	hold := func(first, count uint16) {
		for i := int(first); i < min(int(first)+int(count), len(held)); i++ {
			held[i] = true
		}
	}
	for _, r := range t.rules.values {
		if r.Active != 0 {
			hold(r.Pool, r.PoolLen)
			hold(r.Pool6, r.Pool6Len)
		}
	}
	for _, b := range t.backends.values {
		if b.PoolLen > 0 && t.services.values[b.Service].Active != 0 {
			hold(b.Pool, b.PoolLen)
		}
	}
	return held
}
