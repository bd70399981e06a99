// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

var idSpec = &ebpf.MapSpec{
	Name: "sluice_ids", Type: ebpf.Hash, KeySize: ids.NameLen + 1, ValueSize: 4, MaxEntries: 1 << 17, Flags: 1, // BPF_F_NO_PREALLOC
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

func LoadIDs(m *ebpf.Map) (*ids.IDs, error) {
	t := ids.New()
	t.Store = idMap{m}
	var k ids.Key
	var v uint32
	it := m.Iterate()
	for it.Next(&k, &v) {
		t.Note(k, v)
	}
	return t, it.Err()
}

// Referred returns, for all kinds but sets, the ids with a reference in the tables. References are active objects of
// any process, flows, bindings, and resting ports.
func (t *Tables) Referred() (map[ids.Kind]map[uint32]bool, error) {
	services, backends, sources, prefixes := map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{}
	for id, r := range t.Rules.Values {
		if r.Active != 0 {
			sources[uint32(id)] = true
		}
	}
	for id, s := range t.Services.Values {
		if s.Active == 0 {
			continue
		}
		services[uint32(id)] = true
		for r, i := RegionOf(s.Slots), uint32(0); i < r.Count; i++ {
			backends[uint32(t.Slot(r.First+i))] = true
		}
	}
	note := func(kind, state, zone, flags uint8, owner, backend uint16) {
		switch {
		case state == wire.EntryFree || state == wire.EntryReturning:
		case kind == wire.KindBinding:
			sources[uint32(zone)] = true
		case flags&wire.EntryPrimary == 0:
		case flags&wire.EntryNAT != 0:
			sources[uint32(owner)] = true
		default:
			services[uint32(owner)], backends[uint32(backend)] = true, true
		}
	}
	for i := range t.Flows4.Shown() {
		e := &t.Flows4.Values[i]
		note(e.Key.Kind, e.Key.State, e.Key.Zone, e.Meta.Flags, e.Meta.Owner, e.Meta.Backend)
	}
	for i := range t.Flows6.Shown() {
		e := &t.Flows6.Values[i]
		note(e.Key.Kind, e.Key.State, e.Key.Zone, e.Meta.Flags, e.Meta.Owner, e.Meta.Backend)
	}
	err := errors.Join(
		eachIn(t.Maps["sessions"], func(_ wire.SessionKey, backend uint32) { backends[backend] = true }),
		eachIn(t.Maps["reverses"], func(_ wire.ListenerKey, r wire.Reverse) { backends[uint32(r.Backend)] = true }),
		eachIn(t.Maps["prefixes"], func(_ wire.PrefixKey, p wire.Prefix) { prefixes[uint32(p.Rule)] = true }))
	return map[ids.Kind]map[uint32]bool{ids.Service: services, ids.Backend: backends, ids.Source: sources, ids.Prefix: prefixes, ids.Pool: t.addressesInUse()}, err
}

// eachIn calls f for the elements of a map; a nil map, not created yet, has none.
func eachIn[K comparable, V any](m *ebpf.Map, f func(K, V)) error {
	if m == nil {
		return nil
	}
	all, err := Content[K, V](m)
	for k, v := range all {
		f(k, v)
	}
	return err
}

// ForgetOthers clears the state of former names with numbers that the draft reassigns.
func (t *Tables) ForgetOthers(d *ids.Draft) error {
	for k, n := range d.Fresh {
		if _, known := t.IDs.Known[k]; known || !t.IDs.Used[k.Kind][n] {
			continue
		}
		if err := t.forget(k.Kind, n); err != nil {
			return err
		}
	}
	return nil
}

// forget clears the state of an id's former name, which has no references any more.
func (t *Tables) forget(kind ids.Kind, id uint32) error {
	switch kind {
	case ids.Pool:
		t.Blocks.Values[id] = wire.BlockMap{} // the former name may have had other blocks, or port ranges
		for class := range uint32(wire.PortClasses) {
			t.Ports.Values[id*wire.PortClasses+class] = wire.PortMap{}
		}
	case ids.Service:
		t.ServiceLoads.Values[id] = wire.Load{}
	case ids.Backend:
		if err := t.keepTally(id); err != nil {
			return err
		}
		t.BackendLoads.Values[id] = wire.Load{}
		if err := t.Maps["backend_hops"].Put(id, wire.BackendHop{}); err != nil {
			return fmt.Errorf("backend_hops: %w", err)
		}
		if err := t.Maps["tallies"].Put(id, make([]wire.Tally, ebpf.MustPossibleCPU())); err != nil {
			return fmt.Errorf("tallies: %w", err)
		}
	}
	return nil
}

// keepTally moves the traffic of a former backend without flows to its service, so that the counters of the service
// never decrease.
func (t *Tables) keepTally(id uint32) error {
	var values []wire.Tally
	if err := t.Maps["tallies"].Lookup(id, &values); err != nil {
		return fmt.Errorf("tallies: %w", err)
	}
	l := &t.ServiceLoads.Values[t.Backends.Values[id].Service] // the programs add to it at the same time
	for _, v := range values {
		atomic.AddUint64(&l.Packets, v.Packets)
		atomic.AddUint64(&l.Bytes, v.Bytes)
	}
	return nil
}

// addressesInUse returns the pool addresses of active rules or backends, and the addresses with used or
// resting ports.
func (t *Tables) addressesInUse() map[uint32]bool {
	busy := map[uint32]bool{}
	for i := range t.Ports.Values {
		if t.Ports.Values[i].Used != 0 {
			busy[uint32(i/3)] = true
		}
	}
	for place, held := range t.RunsHeld() {
		if held {
			busy[uint32(t.Runs.Values[place])] = true
		}
	}
	return busy
}

// RunsHeld reports which places of the map of runs belong to active rules and backends.
func (t *Tables) RunsHeld() []bool {
	held := make([]bool, len(t.Runs.Values))
	hold := func(first, count uint16) {
		for i := int(first); i < min(int(first)+int(count), len(held)); i++ {
			held[i] = true
		}
	}
	for _, r := range t.Rules.Values {
		if r.Active != 0 {
			hold(r.Pool, r.PoolLen)
			hold(r.Pool6, r.Pool6Len)
		}
	}
	for _, b := range t.Backends.Values {
		if b.PoolLen > 0 && t.Services.Values[b.Service].Active != 0 {
			hold(b.Pool, b.PoolLen)
		}
	}
	return held
}
