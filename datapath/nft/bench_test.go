// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
)

// many is a configuration of n services with four backends each.
func many(n int) *config.Config {
	c := &config.Config{Services: make([]config.Service, n)}
	for i := range c.Services {
		vip := netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
		s := config.Service{
			Name: fmt.Sprintf("service-%05d", i), Protocol: flow.TCP, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
			Listen: []config.Listen{{Address: vip, Ports: []flow.Ports{{First: 80, Last: 80}}}},
		}
		for k := range 4 {
			a := netip.AddrFrom4([4]byte{10, 0, 2, byte(2 + k)})
			s.Backends = append(s.Backends, config.Backend{Name: string(rune('a' + k)), Address: a, Port: uint16(1024 + i), Weight: 1, Priority: 1})
		}
		c.Services[i] = s
	}
	return c
}

// BenchmarkApply measures what the promises of docs/nftables.md say: all of
// 10,000 services from nothing, and one backend of them changed.
func BenchmarkApply(b *testing.B) {
	const services = 10000
	t := newBench(b, lab.Balancer())
	ctx := context.Background()
	c := many(services)
	b.Run("from-nothing", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			if err := t.d.Remove(ctx); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			t.applySnapshot(t.snapshot(c))
		}
	})
	b.Run("nothing-changed", func(b *testing.B) {
		for b.Loop() {
			t.applySnapshot(t.snapshot(c))
		}
	})
	b.Run("one-backend", func(b *testing.B) {
		down := datapath.Up
		for b.Loop() {
			b.StopTimer()
			s := t.snapshot(c)
			down = datapath.Down - down
			s.Services[services/2].State[1] = down
			b.StartTimer()
			t.applySnapshot(s)
		}
	})
	b.Run("restart", func(b *testing.B) {
		for b.Loop() {
			d := t.open()
			change, err := d.Apply(ctx, t.snapshot(c))
			if err != nil {
				b.Fatal(err)
			}
			if change.Slots > 1 || change.Elements.Added > 10 {
				b.Fatalf("restart changed %+v", change)
			}
		}
	})
}
