// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"maps"

	"github.com/cilium/ebpf"
)

// Content reads a whole map.
func Content[K comparable, V any](m *ebpf.Map) (map[K]V, error) {
	all := map[K]V{}
	keys, values := make([]K, 4096), make([]V, 4096)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i, k := range keys[:n] {
			all[k] = values[i]
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) { // the previous part was the last
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("map %s: %w", m, err)
		}
	}
}

// Equalise makes a map equal to want. It adds and changes entries before it deletes others.
func Equalise[K comparable, V comparable](m *ebpf.Map, want map[K]V, merge func(old V, v *V)) error {
	have, err := Content[K, V](m)
	if err != nil {
		return err
	}
	for k, v := range want {
		old, ok := have[k]
		if ok && merge != nil {
			merge(old, &v)
		}
		if ok && old == v {
			continue
		}
		if err := m.Put(&k, &v); err != nil {
			return fmt.Errorf("map %s: %w", m, err)
		}
	}
	for k := range have {
		if _, ok := want[k]; ok {
			continue
		}
		if err := m.Delete(&k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("map %s: %w", m, err)
		}
	}
	return nil
}

// Add writes the entries that did not exist.
func Add[K, V comparable](m *ebpf.Map, want, had map[K]V) error {
	for k, v := range want {
		if _, ok := had[k]; ok {
			continue
		}
		if err := m.Put(&k, &v); err != nil {
			return fmt.Errorf("map %s: %w", m, err)
		}
	}
	return nil
}

func Verify[K comparable, V comparable](m *ebpf.Map, want map[K]V) error {
	have, err := Content[K, V](m)
	if err != nil {
		return err
	}
	if !maps.Equal(have, want) {
		return fmt.Errorf("map %s: the kernel does not hold the written entries", m)
	}
	return nil
}

// PutChanges writes entries of a map; the zero value deletes an entry.
func PutChanges[K, V comparable](m *ebpf.Map, changes map[K]V) error {
	var none V
	for k, v := range changes {
		var err error
		if v != none {
			err = m.Put(&k, &v)
		} else if err = m.Delete(&k); errors.Is(err, ebpf.ErrKeyNotExist) {
			err = nil
		}
		if err != nil {
			return fmt.Errorf("map %s: %w", m, err)
		}
	}
	return nil
}

// SameChanges verifies the entries written by PutChanges.
func SameChanges[K, V comparable](m *ebpf.Map, changes map[K]V) error {
	for k, v := range changes {
		var held V
		if err := m.Lookup(&k, &held); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("map %s: %w", m, err)
		}
		if held != v {
			return fmt.Errorf("map %s: the kernel does not hold the written entries", m)
		}
	}
	return nil
}
