// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/load"
)

const (
	growingFlows = 100000 // of each family
	growingYAML  = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [7]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 9}]}
  - {name: web6, listen: [{address: "2001:db8::20", ports: [7]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: "fd00:2::2", port: 9}]}
  - {name: echo, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103],
     scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
timeouts: {udp: 1h}
tables: {flows: 110000, flows6: 110000}
`
)

// TestTablesGrow opens 100,000 flows in each table while connections are open. A table begins with room for a
// third. No flow is refused, no connection breaks, and each flow keeps its entry. The next process adopts the
// tables with their size.
func TestTablesGrow(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	mirror(t, l.Node("s1"), ":8080")
	mirror(t, l.Node("s2"), ":8080")
	pins := pinsOf(t)
	d := openIn(t, l.Node("gateway"), pins)
	apply(t, d, config.AttachXDP, growingYAML)
	rooms := func() [2]uint32 {
		return [2]uint32{atomic.LoadUint32(&d.t.Stock4.Values[0].Room), atomic.LoadUint32(&d.t.Stock6.Values[0].Room)}
	}
	first := rooms()
	if max(first[0], first[1]) > growingFlows {
		t.Fatalf("the tables have room for %d entries before there is a flow: the test tests nothing", first)
	}
	var conns []net.Conn
	for range 20 {
		conns = append(conns, transfer(t, l.Node("client"), "192.0.2.10:80"))
	}
	all := func() {
		t.Helper()
		for i, c := range conns {
			if err := patientTrip(c); err != nil {
				t.Fatalf("connection %d: %v\n%s", i, err, describeReasons(d))
			}
		}
	}
	all()
	before := flowsOf(t, d)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var senders errgroup.Group
	for source, dest := range map[string]string{"198.18.0.0": "192.0.2.10", "2001:db8:1::": "2001:db8::20"} {
		sender, err := load.NewSender(l.Node("client"), load.PacketSpec{
			Source: load.Range{First: netip.MustParseAddr(source), Count: growingFlows / 50000, Ports: flow.Ports{First: 10000, Last: 59999}},
			Dest:   load.Range{First: netip.MustParseAddr(dest), Ports: flow.Ports{First: 7, Last: 7}}, Protocol: flow.UDP, Interface: "eth0", Rate: 50000,
		}, []int{0})
		if err != nil {
			t.Fatal(err)
		}
		defer sender.Close()
		senders.Go(func() error { return sender.Run(ctx, nil) })
	}
	labtest.Eventually(t, 2*time.Minute, "all flows", func() error { // the links may lose a few datagrams, which are sent again
		all()
		if n := len(flowsOf(t, d)) - len(before); n != 2*growingFlows {
			return fmt.Errorf("%d flows: %s", n, describeReasons(d))
		}
		return nil
	})
	cancel()
	if err := senders.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if full := counted(t, d, "table-full"); full > 0 {
		t.Errorf("%d packets met a full table", full)
	}
	checkIndex(t, d)
	room, index := rooms(), d.t.Control.Values[0].Index4
	t.Logf("room for %d entries of IPv4 and IPv6, then %d", first, room)
	// The same state as after a kill of the process while it filled another index.
	next := uint32(len(d.t.Index4.Values)/2) * uint32(min(index>>32^1, 1))
	d.growMu.Lock()
	err := d.t.Index4.Add(slices.Values([]uint32{next >> wire.IndexPartBits}))
	d.t.Control.Values[0].NextIndex4 = uint64(next)<<32 | 1000
	d.growMu.Unlock()
	if err = errors.Join(err, d.Close()); err != nil {
		t.Fatal(err)
	}
	all()
	d = openIn(t, l.Node("gateway"), pins)
	apply(t, d, config.AttachXDP, growingYAML)
	if now := rooms(); now != room || d.t.Control.Values[0].Index4 != index {
		t.Errorf("the next process has room for %d entries and index %#x, not %d and %#x", now, d.t.Control.Values[0].Index4, room, index)
	}
	all()
	checkIndex(t, d)
	after := flowsOf(t, d)
	if len(after) != 2*growingFlows+len(before) {
		t.Errorf("%d flows in the next process, not %d", len(after), 2*growingFlows+len(before))
	}
	for tuple, f := range before {
		if g, ok := after[tuple]; !ok || g.Reply != f.Reply || g.Backend != f.Backend {
			t.Errorf("flow %v was %+v, is %+v", tuple, f, g)
		}
	}
	if err := d.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	d.Close()
}

// checkIndex checks that each entry in use has its slots in the indexes in force, and that no other slots exist.
func checkIndex(t *testing.T, d *Datapath) {
	t.Helper()
	want := [2]int{}
	note := func(family int, key, state, flags uint8) {
		const ownBinding = wire.EntryPrimary | wire.EntryNAT | wire.EntryPort
		if state == wire.EntryFree || state == wire.EntryReturning {
			return
		}
		if want[family]++; key == wire.KindFlow && flags&ownBinding == ownBinding {
			want[family]++ // slot of its binding
		}
	}
	for i := range d.t.Flows4.Values {
		e := &d.t.Flows4.Values[i]
		note(0, e.Key.Kind, e.Key.State, e.Meta.Flags)
	}
	for i := range d.t.Flows6.Values {
		e := &d.t.Flows6.Values[i]
		note(1, e.Key.Kind, e.Key.State, e.Meta.Flags)
	}
	have := [2]int{}
	for family, index := range [][]wire.Bucket{d.t.Index4.Values, d.t.Index6.Values} {
		for i := range index {
			for _, slot := range index[i].Slots {
				have[family] += int(min(slot, 1))
			}
		}
	}
	if want != have {
		t.Errorf("%d slots of the indexes are taken, want %d", have, want)
	}
	if c := d.t.Control.Values[0]; c.NextIndex4|c.NextIndex6 != 0 {
		t.Errorf("indexes %#x and %#x are to take the place of %#x and %#x still", c.NextIndex4, c.NextIndex6, c.Index4, c.Index6)
	}
}

// TestIndexIsFilledWhileFlowsComeAndGo repeatedly activates an index of another size while flows of a snat rule
// open and end. These flows have slots for themselves and for their bindings. There are fewer endpoints than the
// table has room for, so that the table is never full.
func TestIndexIsFilledWhileFlowsComeAndGo(t *testing.T) {
	l := labFor(t, lab.Office(), config.AttachXDP)
	d := gateway(t, l.Node("gateway"), config.AttachXDP, `
nat: [{name: office, type: snat, source: [10.1.10.0/24], out: wan0, to: [211.155.226.121]}]
timeouts: {udp: 1s, force: true}
tables: {flows: 65536, flows6: 4096}
`)
	sender, err := load.NewSender(l.Node("pc"), load.PacketSpec{
		Source: load.Range{First: netip.MustParseAddr("10.1.10.100"), Count: 100, Ports: flow.Ports{First: 1024, Last: 1323}},
		Dest:   load.Range{First: netip.MustParseAddr("203.0.113.10"), Ports: flow.Ports{First: 9, Last: 9}}, Protocol: flow.UDP, Shuffled: true, Interface: "eth0", Rate: 20000,
	}, []int{0})
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- sender.Run(ctx, nil) }()
	labtest.Eventually(t, patience, "flows that die", func() error {
		if entries := d.t.Flows4.Values; !slices.ContainsFunc(entries, func(e wire.Flow4) bool { return e.Key.State == wire.EntryDead }) {
			return errors.New("none yet")
		}
		return nil
	})
	d.growMu.Lock() // the tables stay as they are
	defer d.growMu.Unlock()
	had := d.t.Control.Values[0].Index4
	for i := range 20 {
		err := d.t.Reindex4(uint32(had)+uint32(i)*100, func(r *wire.Reindex) error {
			_, err := d.programs.Programs["fill_index"].Run(&ebpf.RunOptions{Context: r, ContextOut: r})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if now := d.t.Control.Values[0].Index4; uint32(now) == uint32(had) {
		t.Errorf("index %#x is in force still", now)
	}
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if full := counted(t, d, "table-full"); full > 0 {
		stock := &d.t.Stock4.Values[0]
		t.Errorf("%d flows were refused; of %d entries %d have been in use", full, stock.Room, stock.Fresh)
	}
	labtest.Eventually(t, patience, "the end of all flows", func() error {
		if n := len(flowsOf(t, d)); n > 0 {
			return fmt.Errorf("%d flows", n)
		}
		for i := range d.t.Flows4.Values {
			if s := d.t.Flows4.Values[i].Key.State; s != wire.EntryFree {
				return fmt.Errorf("entry %d in state %d", i, s)
			}
		}
		return nil
	})
	checkIndex(t, d)
}

// TestTableThatCannotGrow lets the kernel refuse a larger table. A warning reports it.
func TestTableThatCannotGrow(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	d := gateway(t, l.Node("gateway"), config.AttachTC, growingYAML)
	d.growMu.Lock()
	d.t.Maps["flows4"].Close()
	atomic.StoreUint32(&d.t.Stock4.Values[0].Fresh, d.t.Entries4)
	d.growMu.Unlock()
	labtest.Eventually(t, patience, "a warning", func() error {
		if all := strings.Join(d.Warnings(), "\n"); !strings.Contains(all, "a flow table does not grow") || !strings.Contains(all, "flows4") {
			return fmt.Errorf("warnings: %s", all)
		}
		return nil
	})
}
