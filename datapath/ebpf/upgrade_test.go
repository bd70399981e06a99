// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	labhost "github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// numbered is a stream of numbered datagrams to a target, and the nodes where they may arrive.
type numbered struct {
	t          *testing.T
	stream     *labhost.Stream
	collectors []*labhost.Collector
}

// startNumbered sends to target; addr is where the datagrams arrive, at any of the
// nodes.
func startNumbered(t *testing.T, from *lab.Node, target, addr string, nodes ...*lab.Node) *numbered {
	t.Helper()
	n := &numbered{t: t, stream: &labhost.Stream{From: from, Target: netip.MustParseAddrPort(target)}}
	for _, node := range nodes {
		c, err := labhost.Collect(node, node.Short(), addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Stop() })
		n.collectors = append(n.collectors, c)
	}
	if err := n.stream.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return n
}

// await returns after every flow has sent some more datagrams.
func (n *numbered) await(more uint32) {
	n.t.Helper()
	before := n.stream.Sent()
	labtest.Eventually(n.t, 30*time.Second, "more datagrams", func() error {
		for flow, now := range n.stream.Sent() {
			if now < before[flow]+more {
				return fmt.Errorf("flow %d: %d of %d", flow, now-before[flow], more)
			}
		}
		return nil
	})
}

func (n *numbered) arrivals() (all []labhost.Arrival) {
	for _, c := range n.collectors {
		all = append(all, c.Arrivals()...)
	}
	return all
}

// end stops the stream and waits until all datagrams have arrived, or until none arrives for the quiet time. It
// returns the missing numbers by flow. No datagram may arrive twice.
func (n *numbered) end(quiet time.Duration) (missing map[int][]uint32) {
	n.t.Helper()
	if err := n.stream.Stop(); err != nil {
		n.t.Fatal(err)
	}
	sent, total := n.stream.Sent(), 0
	for _, s := range sent {
		total += int(s)
	}
	for seen, since := 0, time.Now(); seen < total && time.Since(since) < quiet; time.Sleep(5 * time.Millisecond) {
		if now := len(n.arrivals()); now != seen {
			seen, since = now, time.Now()
		}
	}
	missing, twice := labhost.Missing(sent, n.arrivals())
	if twice > 0 {
		n.t.Errorf("%d datagrams to %s arrived twice", twice, n.stream.Target)
	}
	n.t.Logf("%d datagrams to %s on %d flows, lost by flow: %v", total, n.stream.Target, len(sent), missing)
	return missing
}

// mustStay checks that every flow reached one server and had one source there.
func mustStay(t *testing.T, arrivals []labhost.Arrival) {
	t.Helper()
	type meeting struct {
		server string
		from   netip.AddrPort
	}
	met := map[uint32]meeting{}
	for _, a := range arrivals {
		now := meeting{a.Server, a.From}
		if was, ok := met[a.Flow]; ok && was != now {
			t.Fatalf("flow %d, datagram %d: %v, before %v", a.Flow, a.Number, now, was)
		}
		met[a.Flow] = now
	}
}

// upgradeYAML has flows that depend on the table for their backend and port: round robin, and a source pool.
const upgradeYAML = `
services:
  - name: names
    listen: [{address: 192.0.2.10, ports: [53]}]
    protocol: udp
    mode: fullnat
    source-pool: [10.0.2.100-10.0.2.103]
    scheduler: rr
    backends: [{name: a, address: 10.0.2.2, port: 5353}, {name: b, address: 10.0.2.3, port: 5353}]
tables: {flows: 4096, flows6: 4096}
`

// otherConstants is the same gateway with programs with other constants: timeouts, and one more feature.
const otherConstants = upgradeYAML + `
timeouts: {udp: 7m, tcp-transitory: 5m}
firewall:
  rules: [{hook: ingress, action: drop, source: 198.51.100.0/24}]
`

// TestUpgradeUnderLoad replaces the programs repeatedly while numbered datagrams pass: by reloads that need
// other constants, and by a new process that adopts the tables.
func TestUpgradeUnderLoad(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			pins := pinsOf(t)
			open := func(yaml string) *Datapath {
				d := openIn(t, l.Node("gateway"), pins)
				apply(t, d, hook, yaml)
				return d
			}
			d := open(upgradeYAML)
			load := startNumbered(t, l.Node("client"), "192.0.2.10:53", ":5353", l.Node("s1"), l.Node("s2"))
			load.await(20)
			before := flowsOf(t, d)
			for i := range 10 {
				yaml := []string{otherConstants, upgradeYAML}[i%2]
				if i%3 < 2 {
					loaded := d.programs
					apply(t, d, hook, yaml)
					if d.programs == loaded {
						t.Fatal("the other configuration needs no other programs: the test tests nothing")
					}
				} else {
					if err := d.Close(); err != nil {
						t.Fatal(err)
					}
					load.await(5)
					d = open(yaml)
				}
				load.await(10)
			}
			if missing := load.end(patience); len(missing) > 0 {
				t.Errorf("datagrams are lost, by flow: %v", missing)
			}
			mustStay(t, load.arrivals())
			after := flowsOf(t, d)
			if len(before) != load.stream.Flows {
				t.Fatalf("%d flows of %d sockets", len(before), load.stream.Flows)
			}
			for tuple, f := range before {
				if g := after[tuple]; g.Reply != f.Reply || g.Backend != f.Backend || g.Owner != f.Owner || g.Packets[0] <= f.Packets[0] {
					t.Errorf("flow %v was %+v, is %+v", tuple, f, g)
				}
			}
			if err := d.Remove(context.Background()); err != nil {
				t.Error(err)
			}
			d.Close()
		})
	}
}

// openIn opens the datapath of a node with pins in dir.
func openIn(t testing.TB, n *lab.Node, dir string) *Datapath {
	t.Helper()
	var d *Datapath
	err := n.Do(func() (err error) {
		d, err = Open(Options{StateDir: t.TempDir(), Dir: dir, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func flowsOf(t *testing.T, d *Datapath) map[flow.Tuple]flow.Flow {
	t.Helper()
	all := map[flow.Tuple]flow.Flow{}
	if err := d.Flows(context.Background(), func(f flow.Flow) bool { all[f.Original] = f; return true }); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestOtherLayoutIsRefused finds tables of another version. They stay untouched, the error names a remedy, and
// the remedy works.
func TestOtherLayoutIsRefused(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labFor(t, lab.Balancer(), config.AttachTC)
	mirror(t, l.Node("s1"), ":8080")
	pins := pinsOf(t)
	d := openIn(t, l.Node("gateway"), pins)
	apply(t, d, config.AttachTC, oneServer)
	c := transfer(t, l.Node("client"), "192.0.2.10:80")
	key := ids.KeyOf(ids.Meta, "layout")
	if err := d.t.Maps["ids"].Put(&key, uint32(wire.Layout+1)); err != nil {
		t.Fatal(err)
	}
	d.Close()
	d = openIn(t, l.Node("gateway"), pins)
	_, err := d.Apply(context.Background(), snapshotOf(t, config.AttachTC, oneServer))
	if !errors.Is(err, table.ErrLayout) || !strings.Contains(err.Error(), "sluice stop --force") {
		t.Fatalf("tables of another layout: %v", err)
	}
	if err := roundTrip(c); err != nil {
		t.Errorf("a connection after the refusal: %v", err)
	}
	if err := d.Remove(context.Background()); err != nil {
		t.Fatal(err)
	}
	apply(t, d, config.AttachTC, oneServer)
	if err := roundTrip(transfer(t, l.Node("client"), "192.0.2.10:80")); err != nil {
		t.Errorf("a connection after the tables were made anew: %v", err)
	}
	if err := d.Remove(context.Background()); err != nil {
		t.Error(err)
	}
	d.Close()
}

// TestOtherSizesAreTold requests larger tables while flows are in the old ones.
func TestOtherSizesAreTold(t *testing.T) {
	l := labFor(t, lab.Balancer(), config.AttachTC)
	mirror(t, l.Node("s1"), ":8080")
	d := gateway(t, l.Node("gateway"), config.AttachTC, oneServer)
	c := transfer(t, l.Node("client"), "192.0.2.10:80")
	if w := d.Warnings(); len(w) > 0 {
		t.Errorf("without a difference: %v", w)
	}
	larger := strings.Replace(oneServer, "{flows: 4096, flows6: 4096}", "{flows: 8192, flows6: 4096, half-open: 7}", 1)
	change := apply(t, d, config.AttachTC, larger)
	for _, told := range []string{strings.Join(d.Warnings(), "\n"), strings.Join(change.Lines, "\n")} {
		if !strings.Contains(told, "tables.flows: 8192 is not in force") || !strings.Contains(told, "sluice stop --force") || strings.Contains(told, "flows6") {
			t.Errorf("told %q", told)
		}
	}
	if err := roundTrip(c); err != nil {
		t.Errorf("a connection after that: %v", err)
	}
	counters, err := d.Counters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range counters.Tables {
		if one.Name == "half-open" && one.Size != 7 {
			t.Errorf("the quota of handshakes needs no other table, but is %d", one.Size)
		}
	}
	if err := d.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	apply(t, d, config.AttachTC, larger)
	if w := d.Warnings(); len(w) > 0 {
		t.Errorf("after a new start: %v", w)
	}
}
