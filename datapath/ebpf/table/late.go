// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// late lists large maps that few configurations use. adjusts has room for a quarter of all entries with 16 to 32
// bytes each; the others have 140 bytes per client. They are created with leastLate elements, and replaced before the
// first load of a program that uses them. Nothing is copied, because no program has written to the small map.
var late = map[string]struct {
	used func(wire.Switches) bool
	most func(*Tables) uint32
}{
	"adjusts":      {func(s wire.Switches) bool { return s.Edits }, func(t *Tables) uint32 { return (t.Entries4 + t.Entries6) / 4 }},
	"client_rates": {func(s wire.Switches) bool { return s.Rates }, func(t *Tables) uint32 { return t.Clients }},
	"stickies":     {func(s wire.Switches) bool { return s.Persistence }, func(t *Tables) uint32 { return t.Clients }},
}

const leastLate = 64

// lateMap is the current state of a late map.
type lateMap struct {
	most     uint32
	now      atomic.Pointer[ebpf.Map]
	outgrown *ebpf.Map // the previous map
}

// Late returns the current map with that name.
func (t *Tables) Late(name string) *ebpf.Map {
	if m := t.late[name]; m != nil {
		return m.now.Load()
	}
	return nil
}

// newPath returns the pin path of a larger map before it replaces the first.
func (t *Tables) newPath(name string) string { return filepath.Join(t.Dir, name+"-new") }

// openLate adopts the late maps of either size, or creates small ones.
func (t *Tables) openLate(spec *ebpf.CollectionSpec) error {
	t.late = map[string]*lateMap{}
	for name, l := range late {
		if err := os.Remove(t.newPath(name)); err != nil && !errors.Is(err, fs.ErrNotExist) { // left by a killed process
			return err
		}
		own := &lateMap{most: max(l.most(t), leastLate)}
		s, path := spec.Maps[name], filepath.Join(t.Dir, name)
		s.MaxEntries = leastLate
		if m, err := ebpf.LoadPinnedMap(path, nil); err == nil {
			if m.MaxEntries() == own.most {
				s.MaxEntries = own.most
			}
			m.Close()
		}
		m, _, err := openOrPin(path, s)
		if err != nil {
			return err
		}
		own.now.Store(m)
		t.late[name] = own
	}
	return nil
}

// replaceLate enlarges the late maps that programs with these switches use. It sets the sizes of all late maps in the
// spec, and adds the maps to the replacements for loading the programs.
func (t *Tables) replaceLate(s wire.Switches, spec *ebpf.CollectionSpec, replace map[string]*ebpf.Map) error {
	for name, own := range t.late {
		if late[name].used(s) {
			if err := t.replaceSmall(name, own, spec.Maps[name]); err != nil {
				return err
			}
		}
		m := own.now.Load()
		spec.Maps[name].MaxEntries, replace[name] = m.MaxEntries(), m
	}
	return nil
}

// replaceSmall replaces the small map by one of full size. Programs with the small map do not use it.
func (t *Tables) replaceSmall(name string, own *lateMap, spec *ebpf.MapSpec) error {
	small := own.now.Load()
	if small.MaxEntries() == own.most {
		return nil
	}
	spec = spec.Copy()
	spec.MaxEntries = own.most
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return fmt.Errorf("map %s: %w", name, err)
	}
	if err = m.Pin(t.newPath(name)); err == nil {
		err = os.Rename(t.newPath(name), filepath.Join(t.Dir, name))
	}
	if err != nil {
		return errors.Join(err, m.Close())
	}
	own.outgrown = small // another load may be using it
	own.now.Store(m)
	return nil
}

func (t *Tables) closeLate() (err error) {
	for _, own := range t.late {
		err = errors.Join(err, own.outgrown.Close())
		if m := own.now.Swap(nil); m != nil {
			err = errors.Join(err, m.Close())
		}
	}
	t.late = nil
	return err
}
