// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/load"
	"github.com/sluice-lb/sluice/model/golden"
)

// many returns a configuration of n services with four backends each.
func many(n int, protocol flow.Protocol) *config.Config {
	c := &config.Config{Services: make([]config.Service, n), Tables: config.Tables{Flows: 1 << 16, Flows6: 4096}}
	for i := range c.Services {
		s := config.Service{
			Name: fmt.Sprintf("service-%05d", i), Protocol: protocol, Mode: config.ModeDNAT, Scheduler: config.SchedulerRR,
			Listen: []config.Listen{{Address: netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), Ports: []flow.Ports{{First: 80, Last: 80}}}},
		}
		for k := range 4 {
			s.Backends = append(s.Backends, config.Backend{Name: string(rune('a' + k)), Address: netip.AddrFrom4([4]byte{10, 0, 2, byte(2 + k)}),
				Port: uint16(1024 + i), Weight: 1, Priority: 1})
		}
		c.Services[i] = s
	}
	return c
}

func mustApply(b testing.TB, d *Datapath, s *datapath.Snapshot) {
	b.Helper()
	if _, err := d.Apply(context.Background(), s); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkApply measures four applies of 10,000 services: the first one, one without a change, one backend that
// fails or returns, and the adoption by a new process.
func BenchmarkApply(b *testing.B) {
	const services = 10000
	labtest.Require(b, labtest.Root, labtest.BPF)
	l := labtest.New(b, lab.Balancer())
	c, pins := many(services, flow.TCP), pinsOf(b)
	d := openIn(b, l.Node("gateway"), pins)
	defer func() { d.Remove(context.Background()); d.Close() }()
	b.Run("from-nothing", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			if err := d.Remove(context.Background()); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			mustApply(b, d, golden.Snapshot(c))
		}
	})
	b.Run("nothing-changed", func(b *testing.B) {
		for b.Loop() {
			mustApply(b, d, golden.Snapshot(c))
		}
	})
	b.Run("one-backend", func(b *testing.B) {
		down := datapath.Up
		for b.Loop() {
			s := golden.Snapshot(c)
			down = datapath.Down - down
			s.Services[services/2].State[1] = down
			mustApply(b, d, s)
		}
	})
	b.Run("restart", func(b *testing.B) {
		for b.Loop() {
			again := openIn(b, l.Node("gateway"), pins)
			mustApply(b, again, golden.Snapshot(c))
			if err := again.Close(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkServices compares packets through 10,000 services with packets through one, alternating, on XDP. SYNs
// look up their service each time, and packets of 20,000 flows do so once. The time is CPU time, which on veth
// covers the whole path. The best round counts.
func BenchmarkServices(b *testing.B) {
	labtest.Require(b, labtest.Root, labtest.BPF)
	sizes := []int{1, 10000}
	var send []func(flags string) float64
	for _, services := range sizes {
		send = append(send, throughServices(b, services, 20000))
	}
	best := map[string][]float64{"syn": {math.Inf(1), math.Inf(1)}, "ack": {math.Inf(1), math.Inf(1)}}
	for b.Loop() {
		for flags, t := range best {
			for i := range sizes {
				t[i] = min(t[i], send[i](flags))
			}
		}
	}
	for flags, t := range best {
		b.ReportMetric(t[0], flags+"-1-ns")
		b.ReportMetric(t[1], flags+"-10000-ns")
		b.ReportMetric(t[1]/t[0], flags+"-ratio")
	}
}

// throughServices builds a gateway with a number of services. The returned function sends packets of a number of
// flows for a moment and returns the nanoseconds per packet.
func throughServices(b *testing.B, services, flows int) func(flags string) float64 {
	b.Helper()
	l := labtest.New(b, lab.Topology{
		Name:  "services",
		Nodes: []lab.NodeSpec{{Name: "client"}, {Name: "gateway", Forward: true}, {Name: "server", Addresses: []string{"10.0.2.3/32", "10.0.2.4/32", "10.0.2.5/32"}}},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "client", Iface: "eth0", Addresses: []string{"10.0.1.2/24"}, GRO: true},
				B: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"10.0.1.1/24"}, GRO: true}},
			{A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.2.1/24"}, GRO: true},
				B: lab.End{Node: "server", Iface: "eth0", Addresses: []string{"10.0.2.2/24"}, GRO: true}},
		},
	})
	gw := l.Node("gateway")
	d := openIn(b, gw, pinsOf(b))
	b.Cleanup(func() { d.Remove(context.Background()); d.Close() })
	c := many(services, flow.TCP)
	c.Attach = config.AttachXDP
	for i := range c.Services {
		c.Services[i].Scheduler = config.SchedulerSourceHash
	}
	mustApply(b, d, golden.Snapshot(c))
	err := gw.Do(func() error {
		server, err := l.Node("server").Interface("eth0")
		if err != nil {
			return err
		}
		lan, err := netlink.LinkByName("lan0")
		for i := range 4 {
			err = errors.Join(err, netlink.NeighSet(&netlink.Neigh{LinkIndex: lan.Attrs().Index, IP: net.IPv4(10, 0, 2, byte(2+i)),
				HardwareAddr: server.HardwareAddr, State: netlink.NUD_PERMANENT}))
		}
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	sink, err := load.NewSink(load.SinkOptions{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { sink.Close() })
	if err := sink.Attach(l.Node("server"), "eth0"); err != nil {
		b.Fatal(err)
	}
	mac, err := gw.Interface("wan0")
	if err != nil {
		b.Fatal(err)
	}
	return func(flags string) float64 {
		sender, err := load.NewSender(l.Node("client"), load.PacketSpec{
			Source: load.Range{First: netip.MustParseAddr("10.0.1.2"), Ports: flow.Ports{First: 1024, Last: uint16(1023 + flows)}},
			Dest:   load.Range{First: netip.MustParseAddr("198.18.0.0"), Count: services, Ports: flow.Ports{First: 80, Last: 80}},
			Flows:  flows, Shuffled: true, Protocol: flow.TCP, Flags: flags, Interface: "eth0", DestMAC: mac.HardwareAddr,
		}, []int{0})
		if err != nil {
			b.Fatal(err)
		}
		defer sender.Close()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- sender.Run(ctx, nil) }()
		at := func(packets uint64) (uint64, time.Duration) {
			for {
				if got, err := sink.Read(); err != nil || got.Packets >= packets {
					return got.Packets, sender.CPUTime()
				}
				select {
				case err := <-ended:
					b.Fatalf("sending ended: %v", err)
				case <-time.After(time.Millisecond):
				}
			}
		}
		start, err := sink.Read()
		if err != nil {
			b.Fatal(err)
		}
		first, before := at(start.Packets + uint64(4*flows)) // every flow exists
		last, after := at(first + 500_000)
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			b.Fatal(err)
		}
		return float64((after - before).Nanoseconds()) / float64(last-first)
	}
}
