// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/load"
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

// BenchmarkApply measures the figures of docs/internals/nftables.md: the first apply of 10,000 services, and a
// change of one backend.
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
	b.Run("one-backend-of-a-new-file", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			b.StopTimer()
			fresh := many(services)
			fresh.Services[services/2].Backends[1].Port = uint16(2 + i)
			b.StartTimer()
			t.applySnapshot(t.snapshot(fresh))
		}
	})
	b.Run("counters", func(b *testing.B) {
		for b.Loop() {
			if _, err := t.d.Counters(ctx); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("restart", func(b *testing.B) {
		for b.Loop() {
			d := t.open()
			change, err := d.Apply(ctx, t.snapshot(c))
			if err != nil {
				b.Fatal(err)
			}
			if change.Elements.Added > 10 {
				b.Fatalf("restart changed %+v", change)
			}
		}
	})
}

// BenchmarkPacket sends b.N packets from one CPU through the gateway and reports the time per packet. It uses 1
// and 10,000 services, one established flow, and 20,000 flows that are opened first. Only the first packet of a
// flow traverses rules.
func BenchmarkPacket(b *testing.B) {
	labtest.Require(b, labtest.BPF)
	const gatewayMAC = "02:00:00:00:00:01"
	t := newBench(b, lab.Topology{
		Nodes: []lab.NodeSpec{{Name: "client"}, {Name: "gateway", Forward: true}, {Name: "server", Addresses: []string{"10.0.2.3/32", "10.0.2.4/32", "10.0.2.5/32"}}},
		Links: []lab.LinkSpec{
			{
				A: lab.End{Node: "client", Iface: "eth0", Addresses: []string{"10.0.1.2/24"}},
				B: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"10.0.1.1/24"}, MAC: gatewayMAC, GRO: true},
			},
			{
				A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.2.1/24"}},
				B: lab.End{Node: "server", Iface: "eth0", Addresses: []string{"10.0.2.2/24"}},
			},
		},
	})
	for _, s := range []string{"10.0.2.2", "10.0.2.3", "10.0.2.4", "10.0.2.5"} { // resolves the neighbours
		if c, err := t.dialFor(trafficTimeout, "tcp", "gateway", "", s+":1"); err == nil {
			c.Close()
		}
	}
	sink, err := load.NewSink(load.SinkOptions{})
	if err != nil {
		b.Fatal(err)
	}
	defer sink.Close()
	if err := sink.Attach(t.lab.Node("server"), "eth0"); err != nil {
		b.Fatal(err)
	}
	mac, err := net.ParseMAC(gatewayMAC)
	if err != nil {
		b.Fatal(err)
	}
	for _, services := range []int{1, 10000} {
		c := many(services)
		for i := range c.Services {
			c.Services[i].Protocol = flow.UDP
		}
		t.apply(c)
		for name, flows := range map[string]int{"one-flow": 1, "many-flows": 20000} {
			b.Run(fmt.Sprintf("%s/%d-services", name, services), func(b *testing.B) {
				before, err := sink.Read()
				if err != nil {
					b.Fatal(err)
				}
				if err := t.flush(); err != nil {
					b.Fatal(err)
				}
				sender, err := load.NewSender(t.lab.Node("client"), load.PacketSpec{
					Source: load.Range{First: addr("10.64.0.1"), Count: flows, Ports: flow.Ports{First: 1024, Last: 1024}},
					Dest:   load.Range{First: addr("198.18.0.0"), Count: services, Ports: flow.Ports{First: 80, Last: 80}},
					Flows:  flows, Interface: "eth0", DestMAC: mac, Limit: uint64(b.N),
				}, []int{0})
				if err != nil {
					b.Fatal(err)
				}
				defer sender.Close()
				b.ResetTimer()
				if err := sender.Run(context.Background(), nil); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				after, err := sink.Read()
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(after.Packets-before.Packets)/float64(b.N), "arrived/packet")
			})
		}
	}
}

// flush empties the gateway's connection table.
func (b *bench) flush() error {
	return b.gateway.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
}
