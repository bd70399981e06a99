// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// shared is a set of programs and tables that subjects use one after the other. The verifier then checks
// programs with the same constants once instead of once per case.
type shared struct {
	t       *table.Tables
	hook    string // hook of the programs; "tc" also with CHECKSUM_COMPLETE
	loaded  map[wire.Switches]*ebpf.Collection
	inUse   *ebpf.Collection // used by a subject
	syns    bool             // some SYNs were forwarded without a flow
	refused bool             // some SYNs were refused, or another configuration has restarted the counts
	cleaner cleaner
	// few: load no programs that differ from existing ones in other constants than hook, rules, mappings and the
	// quota of handshakes.
	few bool
}

// mostLoaded is the maximum number of loaded programs of all pools. Linux 6.18 frees each program in a work item
// and runs 1,024 items at once. If a process with more programs ends, these items wait for a later one for ever,
// and the machine loads no program any more (docs/internals/debugging.md).
const mostLoaded = 700

// keep stores programs for their next use. It closes unused programs, the least recently used first.
func (s *shared) keep(w wire.Switches, c *ebpf.Collection) {
	pools.Lock()
	defer pools.Unlock()
	n := len(c.Programs)
	for _, l := range pools.lately {
		n += len(l.of.loaded[l.Switches].Programs)
	}
	pools.lately = slices.DeleteFunc(pools.lately, func(l lately) bool {
		other := l.of.loaded[l.Switches]
		if n <= mostLoaded || other == l.of.inUse {
			return false
		}
		n -= len(other.Programs)
		other.Close()
		delete(l.of.loaded, l.Switches)
		return true
	})
	s.loaded[w] = c
	pools.lately = append(pools.lately, lately{s, w})
}

// use returns the programs with these constants, if they exist.
func (s *shared) use(w wire.Switches) *ebpf.Collection {
	pools.Lock()
	defer pools.Unlock()
	i := slices.Index(pools.lately, lately{s, w})
	if i < 0 {
		return nil
	}
	pools.lately = append(slices.Delete(pools.lately, i, i+1), lately{s, w})
	s.inUse = s.loaded[w]
	return s.inUse
}

// replaced closes the programs in use if a datapath has replaced them by others.
func (s *shared) replaced(d *Datapath) {
	c := s.inUse
	if d.programs == nil || d.programs == c {
		return
	}
	d.programs.Close()
	pools.Lock()
	defer pools.Unlock()
	pools.lately = slices.DeleteFunc(pools.lately, func(l lately) bool { return l.of == s && s.loaded[l.Switches] == c })
	maps.DeleteFunc(s.loaded, func(_ wire.Switches, other *ebpf.Collection) bool { return other == c })
}

// errOtherConstants: the constants of a configuration differ from those in the existing programs.
var errOtherConstants = errors.New("the configuration has constants of its own")

// programKind is the common property of all programs of a pool.
type programKind struct {
	// allOn has every feature on, so that most cases have the same constants; full disables the straight path.
	allOn, full bool
}

// programPool keeps shared programs for concurrent subjects.
type programPool struct {
	dir string
	programKind

	mu   sync.Mutex
	free map[string][]*shared // by hook
	made int
}

// pools are the pools of this process, which tests use one after the other. Most scenarios and cases repeat in
// other tests and on TC.
var pools struct {
	sync.Mutex
	dir    string // a bpffs
	byKind map[programKind]*programPool
	lately []lately // all loaded programs, the most recently used last
}

// lately refers to programs of shared tables.
type lately struct {
	of *shared
	wire.Switches
}

func TestMain(m *testing.M) {
	// Each packet leaves small objects behind, and the tests have little other memory: garbage collection took a
	// fifth of the time.
	debug.SetGCPercent(800)
	code := m.Run()
	if err := closePools(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// poolOf returns the pool of a kind of programs.
func poolOf(t testing.TB, kind programKind) *programPool {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF)
	pools.Lock()
	defer pools.Unlock()
	if pools.dir == "" {
		dir, err := os.MkdirTemp("", "sluice-pools-")
		if err == nil {
			err = unix.Mount("bpf", dir, "bpf", 0, "mode=0700")
		}
		if err != nil {
			t.Fatal(err)
		}
		pools.dir, pools.byKind = dir, map[programKind]*programPool{}
	}
	if pools.byKind[kind] == nil {
		pools.byKind[kind] = &programPool{dir: filepath.Join(pools.dir, fmt.Sprint("pool-", len(pools.byKind))), programKind: kind, free: map[string][]*shared{}}
	}
	return pools.byKind[kind]
}

// closePools removes all pools.
func closePools() (err error) {
	for _, l := range pools.byKind {
		err = errors.Join(err, l.close())
	}
	if pools.dir != "" {
		err = errors.Join(err, unix.Unmount(pools.dir, unix.MNT_DETACH), os.Remove(pools.dir))
	}
	return err
}

// borrow gives a datapath tables and programs for a hook before its first apply. With few, it gives existing
// programs or none.
func (l *programPool) borrow(d *Datapath, hook string, snapshot *datapath.Snapshot, few bool) (*shared, error) {
	if hook == "tc-complete" {
		hook = "tc"
	}
	s, err := l.take(d.hz, hook)
	if err != nil {
		return nil, err
	}
	s.few = few
	if err := l.equip(s, d, snapshot); err != nil {
		l.give(s, nil)
		return nil, err
	}
	return s, nil
}

// equip gives a datapath the tables, and the programs for a snapshot.
func (l *programPool) equip(s *shared, d *Datapath, snapshot *datapath.Snapshot) error {
	h, err := readHost()
	if err != nil {
		return err
	}
	c, err := compile.Compile(snapshot, stateOf(s.t, snapshot), h)
	if err != nil { // these tables are too small, for example for the number of addresses
		return fmt.Errorf("%w: %w", errOtherConstants, err)
	}
	s.replaced(d)
	programs := s.use(c.Switches)
	if programs == nil {
		for other := range s.loaded {
			a, b := other, c.Switches
			if s.few && a.XDP == b.XDP && a.TC == b.TC && a.Rules == b.Rules && a.Mappings == b.Mappings && a.HalfOpen == b.HalfOpen {
				return errOtherConstants
			}
		}
		if programs, err = s.t.Program(c.Switches, false); err != nil {
			return err
		}
		maps.DeleteFunc(programs.Maps, func(name string, m *ebpf.Map) bool { // each map has a file; the programs hold references
			if name != "works" {
				m.Close()
			}
			return name != "works"
		})
		s.keep(c.Switches, programs)
		s.use(c.Switches)
	}
	if d.programs != programs {
		d.forgetOnDemand()
	}
	d.t, d.programs, d.switches = s.t, programs, c.Switches
	return nil
}

func (l *programPool) take(hz uint32, hook string) (*shared, error) {
	l.mu.Lock()
	if n := len(l.free[hook]); n > 0 {
		s := l.free[hook][n-1]
		l.free[hook] = l.free[hook][:n-1]
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
	return &shared{t: t, hook: hook, loaded: map[wire.Switches]*ebpf.Collection{}, cleaner: newCleaner()}, nil
}

// give takes back the tables and programs of a datapath, and closes the datapath.
func (l *programPool) give(s *shared, d *Datapath) {
	if d != nil {
		if c, err := d.Counters(context.Background()); err == nil {
			s.refused = s.refused || slices.ContainsFunc(c.Services, func(s datapath.ServiceCounters) bool { return s.Refused > 0 })
			s.syns = slices.ContainsFunc(c.Reasons, func(r datapath.ReasonCounter) bool { return r.Reason == "syn" && r.Packets > 0 })
		}
		s.replaced(d)
		d.t, d.programs = nil, nil
		d.Close()
	}
	pools.Lock()
	s.inUse = nil
	pools.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.free[s.hook] = append(l.free[s.hook], s)
}

// close removes all returned tables and programs.
func (l *programPool) close() (err error) {
	for _, free := range l.free {
		for _, s := range free {
			for _, c := range s.loaded {
				c.Close()
			}
			err = errors.Join(err, s.cleaner.close(), s.t.Close(), os.RemoveAll(s.t.Dir))
		}
	}
	return err
}

// wipe sets the tables to their initial content.
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
		if name == "tallies" || name == "backend_hops" { // indexed by backends; no case has that many
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

// zero clears the first elements of an array that this process cannot map.
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

// drain discards unread records.
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
