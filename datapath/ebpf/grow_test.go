// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/load"
)

const (
	growingFlows = 300000
	growingYAML  = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [7]}], protocol: udp, mode: dnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 9}]}
  - {name: echo, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103],
     scheduler: rr, backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
timeouts: {udp: 1h}
tables: {flows: 330000, flows6: 4096}
`
)

// TestTablesGrow opens 300,000 flows in tables that begin with room for a sixth of them, with connections
// beside: no flow is refused, no connection breaks, and each flow keeps its place. The next process adopts
// the tables as large as they are.
func TestTablesGrow(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachXDP)
	mirror(t, l.Node("s1"), ":8080")
	mirror(t, l.Node("s2"), ":8080")
	pins := pinsOf(t)
	d := openIn(t, l.Node("gateway"), pins)
	apply(t, d, config.AttachXDP, growingYAML)
	first, began := atomic.LoadUint32(&d.t.Stock4.Values[0].Room), d.t.Use(0)[0].Bytes
	if first > 2*growingFlows/4 {
		t.Fatalf("the table has room for %d entries before there is a flow: the test tests nothing", first)
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
	sender, err := load.NewSender(l.Node("client"), load.PacketSpec{
		Source: load.Range{First: netip.MustParseAddr("198.18.0.0"), Count: growingFlows / 50000, Ports: flow.Ports{First: 10000, Last: 59999}},
		Dest:   load.Range{First: netip.MustParseAddr("192.0.2.10"), Ports: flow.Ports{First: 7, Last: 7}}, Protocol: flow.UDP, Interface: "eth0", Rate: 100000,
	}, []int{0})
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- sender.Run(ctx, nil) }()
	labtest.Eventually(t, 2*time.Minute, "all flows", func() error { // the links may lose a few: they are sent again
		all()
		if n := len(flowsOf(t, d)) - len(before); n != growingFlows {
			return fmt.Errorf("%d flows: %s", n, describeReasons(d))
		}
		return nil
	})
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if full := counted(t, d, "table-full"); full > 0 {
		t.Errorf("%d packets met a full table", full)
	}
	checkIndex(t, d)
	room, index := atomic.LoadUint32(&d.t.Stock4.Values[0].Room), d.t.Control.Values[0].Index4
	t.Logf("room for %d entries, then %d; %d bytes, then %d", first, room, began, d.t.Use(0)[0].Bytes)
	// As if the process had been killed while it filled another index.
	next := uint32(len(d.t.Index4.Values)/2) * uint32(min(index>>32^1, 1))
	d.growing.Lock()
	err = d.t.Index4.Add(slices.Values([]uint32{next >> wire.IndexPartBits}))
	d.t.Control.Values[0].NextIndex4 = uint64(next)<<32 | 1000
	d.growing.Unlock()
	if err = errors.Join(err, d.Close()); err != nil {
		t.Fatal(err)
	}
	all()
	d = openIn(t, l.Node("gateway"), pins)
	apply(t, d, config.AttachXDP, growingYAML)
	if now := atomic.LoadUint32(&d.t.Stock4.Values[0].Room); now != room || d.t.Control.Values[0].Index4 != index {
		t.Errorf("the next process has room for %d entries and index %#x, not %d and %#x", now, d.t.Control.Values[0].Index4, room, index)
	}
	all()
	checkIndex(t, d)
	after := flowsOf(t, d)
	if len(after) != growingFlows+len(before) {
		t.Errorf("%d flows in the next process, not %d", len(after), growingFlows+len(before))
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

// checkIndex checks that each entry of IPv4 that is in use has the slots that it should have, in the
// index in force, and that there is no other one.
func checkIndex(t *testing.T, d *Datapath) {
	t.Helper()
	want, have := 0, 0
	for i := range d.t.Flows4.Values {
		e := &d.t.Flows4.Values[i]
		if e.Key.State == wire.EntryFree || e.Key.State == wire.EntryReturning {
			continue
		}
		if want++; e.Key.Kind == wire.KindFlow && e.Meta.Flags&(wire.EntryPrimary|wire.EntryNAT|wire.EntryPort) == wire.EntryPrimary|wire.EntryNAT|wire.EntryPort {
			want++ // its binding's
		}
	}
	for i := range d.t.Index4.Values {
		for _, slot := range d.t.Index4.Values[i].Slots {
			have += int(min(slot, 1))
		}
	}
	if want != have {
		t.Errorf("%d slots of the index are taken, want %d", have, want)
	}
	index, next := d.t.Control.Values[0].Index4, d.t.Control.Values[0].NextIndex4
	if next != 0 {
		t.Errorf("index %#x is to take the place of %#x still", next, index)
	}
}

// TestIndexIsFilledWhileFlowsComeAndGo puts an index of another size in force again and again while flows of a
// snat rule, which have slots of their own and of their bindings, are opened and die.
func TestIndexIsFilledWhileFlowsComeAndGo(t *testing.T) {
	l := labFor(t, lab.Office(), config.AttachXDP)
	d := gateway(t, l.Node("gateway"), config.AttachXDP, `
nat: [{name: office, type: snat, source: [10.1.10.0/24], out: wan0, to: [211.155.226.121]}]
timeouts: {udp: 1s, force: true}
tables: {flows: 65536, flows6: 4096}
`)
	sender, err := load.NewSender(l.Node("pc"), load.PacketSpec{
		Source: load.Range{First: netip.MustParseAddr("10.1.10.100"), Count: 100, Ports: flow.Ports{First: 1024, Last: 2047}},
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
	d.growing.Lock() // the tables stay as they are
	defer d.growing.Unlock()
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
		t.Errorf("%d flows were refused", full)
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
