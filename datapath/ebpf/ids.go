// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"crypto/sha256"
	"fmt"

	"github.com/cilium/ebpf"
)

// Ids of services, backends, rules, sets and pool addresses stay the same from
// one snapshot to the next and from one process to the next: flows refer to
// them. They are kept in a pinned map, id by kind and name.

type idKind byte

const (
	idService idKind = iota + 1
	idBackend
	idSource // rule that translates sources
	idPrefix // stateless rule
	idSet
	idPool
	idMeta // words of the tables: hash keys, sizes, layout
)

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
	m     *ebpf.Map
	known map[idKey]uint32
	used  map[idKind]map[uint32]bool
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
	taken map[idKind]map[uint32]bool
}

func (t *ids) draft() *draft {
	return &draft{t, map[idKey]uint32{}, map[idKey]bool{}, map[idKind]uint32{}, map[idKind]map[uint32]bool{}}
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
	return 0, fmt.Errorf("more than %d of a kind: no number is left for %q", limit, name)
}

// keep writes the new ids.
func (d *draft) keep() error {
	for k, v := range d.fresh {
		if err := d.from.m.Put(&k, v); err != nil {
			return fmt.Errorf("ids: %w", err)
		}
		d.from.note(k, v)
	}
	return nil
}
