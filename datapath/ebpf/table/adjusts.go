// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
)

// The map adjusts has room for a quarter of all entries, and takes 16 to 32 bytes for each from the
// start: 67 MB on a machine with 24 GB. Only programs that edit TCP headers write it.
// It is made with leastAdjusts, and replaced before the first such programs are loaded. Nothing is
// copied: programs that do not edit have written nothing.
const leastAdjusts = 64

func (t *Tables) mostAdjusts() uint32 { return max((t.Entries4+t.Entries6)/4, leastAdjusts) }

// Adjusts is the map adjusts as it is now.
func (t *Tables) Adjusts() *ebpf.Map { return t.adjusts.Load() }

// adjustsBeside is where a larger one is pinned before it takes the place of the first.
func (t *Tables) adjustsBeside() string { return filepath.Join(t.Dir, "adjusts-new") }

// openAdjusts adopts the map, of either size, or makes a small one.
func (t *Tables) openAdjusts(spec *ebpf.MapSpec) error {
	if err := os.Remove(t.adjustsBeside()); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a process that was killed
		return err
	}
	path := filepath.Join(t.Dir, "adjusts")
	spec.MaxEntries = leastAdjusts
	if m, err := ebpf.LoadPinnedMap(path, nil); err == nil {
		if m.MaxEntries() == t.mostAdjusts() {
			spec.MaxEntries = t.mostAdjusts()
		}
		m.Close()
	}
	m, _, err := pinned(path, spec)
	if err == nil {
		t.adjusts.Store(m)
	}
	return err
}

// widenAdjusts puts a map of full size in the place of the small one. Programs that hold that one
// do not use it.
func (t *Tables) widenAdjusts(spec *ebpf.MapSpec) error {
	small := t.adjusts.Load()
	if small == nil || small.MaxEntries() == t.mostAdjusts() {
		return nil
	}
	spec = spec.Copy()
	spec.MaxEntries = t.mostAdjusts()
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return fmt.Errorf("map %s: %w", spec.Name, err)
	}
	if err = m.Pin(t.adjustsBeside()); err == nil {
		err = os.Rename(t.adjustsBeside(), filepath.Join(t.Dir, "adjusts"))
	}
	if err != nil {
		return errors.Join(err, m.Close())
	}
	t.outgrown = small // programs may be loaded with it at this moment
	t.adjusts.Store(m)
	return nil
}

func (t *Tables) closeAdjusts() error {
	err := t.outgrown.Close()
	if m := t.adjusts.Swap(nil); m != nil {
		err = errors.Join(err, m.Close())
	}
	t.outgrown = nil
	return err
}
