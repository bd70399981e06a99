// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath"
)

// shared are programs and their tables that subjects use one after the other: the verifier
// looks at those with the same constants once, and not once for each case.
type shared struct {
	t       *table.Tables
	loaded  map[wire.Switches]*ebpf.Collection
	syns    bool // some were sent on without a flow
	refused bool // some were refused, or another configuration has begun to count anew
	cleaner cleaner
}

// errOtherConstants: a configuration's constants are other ones than those of the programs that
// are there.
var errOtherConstants = errors.New("the configuration has constants of its own")

// programPool keeps shared programs for subjects that ask at the same time.
type programPool struct {
	dir string
	// allOn has every feature on, so that most cases have the same constants; full closes the
	// straight path.
	allOn, full bool
	// few loads no programs that differ from those which are there in other constants than hook,
	// rules and mappings.
	few bool

	mu   sync.Mutex
	free []*shared
	made int
}

// newProgramPool returns a pool whose programs and tables go with the test.
func newProgramPool(t *testing.T) *programPool {
	l := &programPool{dir: pinsOf(t)}
	t.Cleanup(func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// borrow gives a datapath tables and programs before it applies anything.
func (l *programPool) borrow(d *Datapath, snapshot *datapath.Snapshot) (*shared, error) {
	s, err := l.take(d.hz)
	if err != nil {
		return nil, err
	}
	if err := l.equip(s, d, snapshot); err != nil {
		l.give(s, nil)
		return nil, err
	}
	return s, nil
}

// equip gives a datapath the tables, and the programs that a snapshot needs.
func (l *programPool) equip(s *shared, d *Datapath, snapshot *datapath.Snapshot) error {
	h, err := readHost()
	if err != nil {
		return err
	}
	c, err := compile.Compile(snapshot, stateOf(s.t, snapshot), h)
	if err != nil { // more addresses, say, than these tables have room for
		return fmt.Errorf("%w: %w", errOtherConstants, err)
	}
	programs := s.loaded[c.Switches]
	if programs == nil {
		for other := range s.loaded {
			a, b := other, c.Switches
			if l.few && a.Attach == b.Attach && a.Rules == b.Rules && a.Mappings == b.Mappings {
				return errOtherConstants
			}
		}
		if programs, err = s.t.Program(c.Switches, false); err != nil {
			return err
		}
		s.loaded[c.Switches] = programs
	}
	if d.programs != programs {
		d.forgetMapper()
	}
	d.t, d.programs, d.switches = s.t, programs, c.Switches
	return nil
}

func (l *programPool) take(hz uint32) (*shared, error) {
	l.mu.Lock()
	if n := len(l.free); n > 0 {
		s := l.free[n-1]
		l.free = l.free[:n-1]
		l.mu.Unlock()
		return s, s.wipe()
	}
	l.made++
	dir := filepath.Join(l.dir, fmt.Sprintf("shared-%d", l.made))
	l.mu.Unlock()
	t, err := table.Open(dir, table.SizesFor(smallTables, 0, 0, 0), hz)
	if err != nil {
		return nil, err
	}
	t.Observed, t.AllOn, t.FullPath = true, l.allOn, l.full
	return &shared{t: t, loaded: map[wire.Switches]*ebpf.Collection{}, cleaner: newCleaner()}, nil
}

// give takes back what a datapath was lent, and closes that.
func (l *programPool) give(s *shared, d *Datapath) {
	if d != nil {
		if c, err := d.Counters(context.Background()); err == nil {
			s.refused = s.refused || slices.ContainsFunc(c.Services, func(s datapath.ServiceCounters) bool { return s.Refused > 0 })
			s.syns = slices.ContainsFunc(c.Reasons, func(r datapath.ReasonCounter) bool { return r.Reason == "syn" && r.Packets > 0 })
		}
		d.t, d.programs = nil, nil
		d.Close()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.free = append(l.free, s)
}

// close removes all that was lent and has come back.
func (l *programPool) close() (err error) {
	for _, s := range l.free {
		for _, c := range s.loaded {
			c.Close()
		}
		err = errors.Join(err, s.cleaner.close(), s.t.Close(), os.RemoveAll(s.t.Dir))
	}
	return err
}

// wipe makes the tables as they were when they were made.
func (s *shared) wipe() error {
	c, room4, room6 := &s.t.Control.Values[0], s.t.Stock4.Values[0].Room, s.t.Stock6.Values[0].Room
	index4, index6 := c.Index4, c.Index6
	for name, m := range s.t.Maps {
		if m.Type() == ebpf.ArrayOfMaps {
			continue
		}
		if name == "recent_syns" && !s.syns || name == "refused_syns" && !s.refused { // a million elements
			continue
		}
		if err := s.clear(name, m); err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
	}
	for _, parts := range []interface{ Clear() }{s.t.Flows4, s.t.Flows6, s.t.Index4, s.t.Index6, s.t.Owners} {
		parts.Clear()
	}
	c.Index4, c.Index6, s.t.Stock4.Values[0].Room, s.t.Stock6.Values[0].Room = index4, index6, room4, room6
	for _, name := range []string{"adjusts", "client_rates", "stickies"} {
		if err := s.clear(name, s.t.Late(name)); err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
	}
	for n := range s.t.Pool {
		s.t.Runs.Values[n] = uint64(n)
	}
	var err error
	s.syns, s.refused = false, false
	s.t.IDs, err = table.LoadIDs(s.t.Maps["ids"])
	return err
}

func (s *shared) clear(name string, m *ebpf.Map) error {
	switch m.Type() {
	case ebpf.Array, ebpf.PerCPUArray:
		if m.Flags()&unix.BPF_F_MMAPABLE != 0 {
			return s.cleaner.memory(m)
		}
		n := m.MaxEntries()
		if name == "tallies" || name == "backend_hops" { // by backends, of which no case has so many
			n = 1024
		}
		if m.Type() == ebpf.Array && n > 1024 {
			return s.cleaner.elements(m)
		}
		return zero(m, n)
	case ebpf.RingBuf:
		return drain(m)
	}
	var keys [][]byte
	var k, v []byte
	for it := m.Iterate(); it.Next(&k, &v); {
		if name != "ids" || ids.Kind(k[0]) != ids.Meta {
			keys = append(keys, slices.Clone(k))
		}
	}
	for _, k := range keys {
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return nil
}

// zero clears the first elements of an array that is not in this process's memory.
func zero(m *ebpf.Map, n uint32) error {
	perCPU := 1
	if m.Type() == ebpf.PerCPUArray {
		perCPU = ebpf.MustPossibleCPU()
	}
	keys := make([]uint32, n)
	for i := range keys {
		keys[i] = uint32(i)
	}
	of := reflect.SliceOf(reflect.ArrayOf(int(m.ValueSize()), reflect.TypeFor[byte]()))
	_, err := m.BatchUpdate(keys, reflect.MakeSlice(of, len(keys)*perCPU, len(keys)*perCPU).Interface(), nil)
	return err
}

// drain takes what nobody has read.
func drain(m *ebpf.Map) error {
	ring, err := ringbuf.NewReader(m)
	if err != nil {
		return err
	}
	defer ring.Close()
	ring.SetDeadline(time.Now())
	for {
		if _, err := ring.Read(); errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
