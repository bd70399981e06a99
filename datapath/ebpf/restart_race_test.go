// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestRaceForClosedFlow opens and resets connections from few tuples on two CPUs. Both CPUs also end
// random flows and sweep the tables, as the sweeper does. Afterwards each tuple has at most one flow,
// every charge is released, and the free lists contain exactly the free entries.
func TestRaceForClosedFlow(t *testing.T) {
	const tuples = 3
	for _, r := range reusedServices {
		t.Run(r.name, func(t *testing.T) {
			r.service += ", limits: {connections-per-client: 1000}"
			e := raceIn(t, "wan0", r.yaml())
			before := e.load().Flows
			for range 10 {
				e.run(50, e.frames(r, 0, tuples), e.frames(r, 0, tuples))
				if err := e.Advance(2 * time.Second); err != nil { // frees the entries of ended flows
					t.Fatal(err)
				}
			}
			for i := range tuples {
				send(t, e.subject, "wan0", r.segment(4000+i, "R"))
			}
			if n := counted(t, e.d, "table-full"); n != 0 {
				t.Errorf("%d packets found the table full", n)
			}
			e.check()
			t.Logf("%d connections", e.load().Flows-before)
			for range 3 {
				if err := e.Advance(301 * time.Second); err != nil {
					t.Fatal(err)
				}
			}
			if live := e.check(); live != 0 {
				t.Errorf("%d entries are live after all timeouts", live)
			}
			held{}.want(t, e.subject, "all flows ended")
		})
	}
}

// tableRace runs packets of an interface, and sweeps, on two CPUs.
type tableRace struct {
	t     *testing.T
	iface string
	*subject
}

func raceIn(t *testing.T, iface, yaml string) *tableRace {
	t.Helper()
	if runtime.NumCPU() < 2 {
		labtest.Lacks(t, "only one CPU")
	}
	e := &tableRace{t, iface, changing(t, yaml)}
	if err := e.d.loadOnDemand(e.d.switches, "sweep_end"); err != nil {
		t.Fatal(err)
	}
	return e
}

func (e *tableRace) load() wire.Load {
	return e.d.t.ServiceLoads.Values[e.d.t.IDs.Known[ids.KeyOf(ids.Service, "web")]]
}

// TestRaceForClient opens and resets one connection of a client at a time on each of two CPUs. The client
// often has no connection, so that its counter is deleted and created again all the time. Afterwards
// the client has no connection, and may open one.
func TestRaceForClient(t *testing.T) {
	r := reusedServices[0]
	r.service += ", limits: {connections-per-client: 2}"
	e := raceIn(t, "wan0", r.yaml())
	for range 20 {
		e.run(0, e.frames(r, 0, 1), e.frames(r, 1, 1))
		e.check()
		before := e.load().Flows
		send(t, e.subject, "wan0", r.segment(4000, "S"))
		send(t, e.subject, "wan0", r.segment(4000, "R"))
		if e.load().Flows != before+1 {
			t.Fatal("the client has no connection and cannot open one")
		}
	}
}

// frames returns a SYN, an ACK and a reset of each tuple.
func (e *tableRace) frames(r reused, first, tuples int) (frames [][]byte) {
	for i := range tuples {
		for _, flags := range []string{"S", "A", "R"} {
			frames = append(frames, e.frame("wan0", r.segment(4000+first+i, flags)))
		}
	}
	return frames
}

// run sends frames[n] 400 times on CPU n. Both CPUs also sweep, and end a random flow in every endEvery-th
// round; 0 means never. It ends fewer flows of a tuple than the two buckets of the tuple have slots: a
// dead entry keeps its slot for a second.
func (e *tableRace) run(endEvery int, frames ...[][]byte) {
	e.t.Helper()
	const steps, sweepEvery = 400, 100
	xdp, sweepAll, sweepEnd := e.d.programs.Programs["sluice_xdp"], e.d.programs.Programs["sweep_all"], e.d.onDemand["sweep_end"].Programs["sweep_end"]
	var handle netns.NsHandle
	if err := e.inside(func() (err error) { handle, err = netns.Get(); return err }); err != nil {
		e.t.Fatal(err)
	}
	defer handle.Close()
	var both errgroup.Group
	for cpu := range frames {
		both.Go(func() error {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			var set unix.CPUSet
			set.Set(cpu)
			err := errors.Join(netns.Set(handle), unix.SchedSetaffinity(0, &set))
			var c caller
			for step := range steps {
				for _, frame := range frames[cpu] {
					o := &ebpf.RunOptions{Data: frame, DataOut: c.room(len(frame)), Context: xdpContext{DataEnd: uint32(len(frame)), Ingress: uint32(e.ifaces[e.iface])}}
					if _, failed := c.run(xdp, o); failed != nil {
						return failed
					}
				}
				if endEvery != 0 && step%endEvery == 0 {
					v6 := uint32(rand.IntN(2))
					used := []*wire.Stock{&e.d.t.Stock4.Values[0], &e.d.t.Stock6.Values[0]}[v6].Fresh
					victim := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, rand.Uint32N(used+1)), v6)
					_, failed := sweepEnd.Run(&ebpf.RunOptions{Context: victim})
					err = errors.Join(err, failed)
				}
				if step%sweepEvery == 0 {
					_, failed := sweepAll.Run(&ebpf.RunOptions{Context: make([]byte, 8)})
					err = errors.Join(err, failed)
				}
			}
			return err
		})
	}
	if err := both.Wait(); err != nil {
		e.t.Fatal(err)
	}
}

// primaries returns the number of live flows, and how many hold a part of the quota of
// handshakes. Each must have its own client port, and an entry for the replies that leads back to it.
func (e *tableRace) primaries() (live, halfOpen int) {
	e.t.Helper()
	found := map[uint16]bool{}
	for i := range e.d.t.Entries(0) {
		entry, ok := e.d.t.Primary(i)
		if !ok {
			continue
		}
		port := entry.Key.Source.Port()
		if found[port] {
			e.t.Errorf("port %d has two live flows", port)
		}
		at := uint32(i)
		if i >= len(e.d.t.Flows4.Values) {
			at -= uint32(len(e.d.t.Flows4.Values))
		}
		if entry.Twin != wire.NoEntry && e.d.t.Twin(entry).Twin != at {
			e.t.Errorf("port %d: the entry for replies is %+v", port, e.d.t.Twin(entry))
		}
		found[port] = true
		if entry.Flags&wire.EntryHalfOpen != 0 {
			halfOpen++
		}
	}
	return len(found), halfOpen
}

// check compares the tables and counters with each other, while nothing runs and all connections are
// closed. It returns the number of live entries.
func (e *tableRace) check() (live int) {
	e.t.Helper()
	flows, halfOpen := e.primaries()
	if l, c := e.load(), e.d.t.Control.Values[0]; l.Active != 0 || c.HalfOpen != uint32(halfOpen) {
		e.t.Errorf("%d connections are counted as open, want 0; and %d handshakes, want %d", l.Active, c.HalfOpen, halfOpen)
	}
	for n := range e.d.t.BackendLoads.Values {
		if active := e.d.t.BackendLoads.Values[n].Active; active != 0 {
			e.t.Errorf("backend %d has %d open connections, want 0", n, active)
		}
	}
	each[wire.ClientKey](e.d.t.Maps["clients"], func(c *wire.Client) {
		if c.Flows&wire.ClientCount != 0 {
			e.t.Errorf("a client has %d open connections, want 0", c.Flows&wire.ClientCount)
		}
	})
	live = e.checkStocks()
	if live != flows && live != 2*flows {
		e.t.Errorf("%d entries are live, want %d or, with entries for replies, %d", live, flows, 2*flows)
	}
	return live
}

// checkStocks checks the free lists of both tables and returns the number of live entries.
func (e *tableRace) checkStocks() (live int) {
	e.t.Helper()
	return checkStock(e.t, "flows4", e.d.t.Stock4.Values[0], func(i uint32) (uint8, uint32) {
		f := &e.d.t.Flows4.Values[i]
		return f.Key.State, f.Meta.Twin
	}) + checkStock(e.t, "flows6", e.d.t.Stock6.Values[0], func(i uint32) (uint8, uint32) {
		f := &e.d.t.Flows6.Values[i]
		return f.Key.State, f.Meta.Twin
	})
}

// checkStock checks that the free list has exactly the free entries of a table, each once. It
// returns the number of live entries. entry returns the state of an entry, and its link.
func checkStock(t *testing.T, table string, stock wire.Stock, entry func(uint32) (state uint8, link uint32)) (live int) {
	t.Helper()
	const free = 0
	listed := make([]bool, min(stock.Fresh, stock.Room))
	for at := uint32(stock.Top); at != 0; {
		i := at - 1
		if int(i) >= len(listed) || listed[i] {
			t.Fatalf("%s: the free list has entry %d twice, or it was never used", table, i)
		}
		listed[i] = true
		var state uint8
		if state, at = entry(i); state != free {
			t.Errorf("%s: the free list has entry %d in state %d", table, i, state)
		}
	}
	for i, on := range listed {
		state, _ := entry(uint32(i))
		if state == free && !on {
			t.Errorf("%s: entry %d is lost: it is free and not on the list", table, i)
		}
		if state == wire.EntryLive {
			live++
		}
	}
	return live
}
