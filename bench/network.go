// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/load"
)

// Addresses of the benchmark's network.
var (
	vip4     = netip.MustParseAddr("192.0.2.10")
	vip6     = netip.MustParseAddr("2001:db8::10")
	clients4 = netip.MustParseAddr("10.64.0.1")
	clients6 = netip.MustParseAddr("fd00:64::1")
	server4  = netip.MustParseAddr("10.0.2.2")
	server6  = netip.MustParseAddr("fd00:2::2")
	wanMAC   = net.HardwareAddr{2, 0, 0, 0, 1, 1}
	lanMAC   = net.HardwareAddr{2, 0, 0, 0, 2, 1}
	clMAC    = net.HardwareAddr{2, 0, 0, 0, 1, 2}
	srvMAC   = net.HardwareAddr{2, 0, 0, 0, 2, 2}
)

// network is the network of the benchmark:
//
//	client eth0 ---- wan0 gateway lan0 ---- eth0 server
//	client ret0 ------------------------------ ret0 server   (direct server return)
//
// The client owns 10.64.0.0/12 and fd00:64::/64. The server owns 10.0.2.128/25, 10.1.0.0/16, fd00:2::/64 and
// fd00:3::/64. One node emulates all hosts of a side.
type network struct {
	*lab.Lab
	client, gateway, server *lab.Node
}

func topology() lab.Topology {
	return lab.Topology{
		Name:  "bench",
		About: "a client that plays many, a gateway, a server that plays many",
		Nodes: []lab.NodeSpec{
			{
				Name: "client", Owns: []string{"10.64.0.0/12", "fd00:64::/64"},
				Routes: []lab.Route{{To: "default", Via: "10.0.1.1"}, {To: "default6", Via: "fd00:1::1"}},
			},
			{
				Name: "gateway", Forward: true, Owns: []string{"10.0.2.96/27", "fd00:2::100/123"},
				Routes: []lab.Route{
					{To: "10.64.0.0/12", Via: "10.0.1.2"}, {To: "fd00:64::/64", Via: "fd00:1::2"},
					{To: "10.1.0.0/16", Via: "10.0.2.2"}, {To: "fd00:3::/64", Via: "fd00:2::2"},
				},
			},
			{
				Name: "server", Owns: []string{"10.0.2.128/25", "10.1.0.0/16", "fd00:3::/64"},
				Routes: []lab.Route{{To: "default", Via: "10.0.2.1"}, {To: "default6", Via: "fd00:2::1"}},
			},
		},
		Links: []lab.LinkSpec{
			{
				A: lab.End{Node: "client", Iface: "eth0", MAC: clMAC.String(), GRO: true, Addresses: []string{"10.0.1.2/24", "fd00:1::2/64"}},
				B: lab.End{Node: "gateway", Iface: "wan0", MAC: wanMAC.String(), GRO: true, Addresses: []string{"10.0.1.1/24", "fd00:1::1/64"}},
			},
			{
				A: lab.End{Node: "gateway", Iface: "lan0", MAC: lanMAC.String(), GRO: true, Addresses: []string{"10.0.2.1/24", "fd00:2::1/64"}},
				B: lab.End{Node: "server", Iface: "eth0", MAC: srvMAC.String(), GRO: true, Addresses: []string{"10.0.2.2/24", "fd00:2::2/64"}},
			},
			{
				A: lab.End{Node: "client", Iface: "ret0", GRO: true},
				B: lab.End{Node: "server", Iface: "ret0", GRO: true},
			},
		},
	}
}

// newNetwork builds the network; the trial's cleanup removes it.
func newNetwork(t *Trial) (*network, error) {
	l, err := lab.Up(t, topology())
	if err != nil {
		return nil, err
	}
	t.Cleanup(l.Down)
	return &network{l, l.Node("client"), l.Node("gateway"), l.Node("server")}, nil
}

// command runs a program in a node and returns an error with its output.
func command(ctx context.Context, n *lab.Node, stdin string, args ...string) error {
	cmd := n.Command(ctx, args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		words, _, _ := strings.Cut(string(bytes.TrimSpace(out)), "\n")
		return fmt.Errorf("%s: %w: %.200s", strings.Join(args[:min(len(args), 6)], " "), err, words)
	}
	return nil
}

// stream selects the packets that the client sends.
type stream struct {
	dest     load.Range
	flows    int
	size     int
	v6       bool
	proto    flow.Protocol
	flags    string
	rate     float64 // 0 means unlimited
	stamp    bool
	shuffled bool
	skip     int  // First tuple.
	open     bool // The gateway knows every flow, so none is sent beforehand.
	// returned counts the server's answers at the client.
	returned bool
	// reverse sends from the server to the client.
	reverse bool
	source  *load.Range // nil means the clients
}

// clientsOf returns source endpoints for a number of flows. The first 50,000 flows are ports of a few addresses, as
// behind a proxy or a NAT.
func clientsOf(v6 bool, flows int) load.Range {
	r := load.Range{First: clients4, Count: (flows + 49_999) / 50_000, Ports: flow.Ports{First: 1024, Last: uint16(1023 + min(flows, 50_000))}}
	if v6 {
		r.First = clients6
	}
	return r
}

// rates are the results of a stream.
type rates struct {
	pps float64 // packets received per second of CPU time
	// perSecond is the rate of received packets by wall-clock time; offered is the rate of sent packets.
	perSecond, offered float64

	lost    float64 // share of the sent packets that were not received
	latency *load.Histogram
	// elsewhere is the share of the received packets that another CPU handled.
	elsewhere float64
}

// measure sends a stream through the network for the trial's duration. Before that it sends every flow twice.
func (n *network) measure(t *Trial, s stream) (rates, error) {
	sink, err := load.NewSink(load.SinkOptions{Stamps: s.stamp})
	if err != nil {
		return rates{}, err
	}
	defer sink.Close()
	from, to, spec := n.ends(s)
	if s.returned {
		to = n.client
	}
	if err := sink.Attach(to, "eth0"); err != nil {
		return rates{}, err
	}
	sender, err := load.NewSender(from, spec, []int{t.CPU})
	if err != nil {
		return rates{}, err
	}
	defer sender.Close()
	return observeBest(t, s, sender, sink)
}

// observeBest repeats the measurement until one CPU has handled the packets.
func observeBest(t *Trial, s stream, sender *load.Sender, sink *load.Sink) (rates, error) {
	for try := 1; ; try++ {
		out, err := observePackets(t, s, sender, sink)
		if err != nil || out.elsewhere < maxElsewhere {
			return out, err
		}
		if try == maxTries {
			t.Note("%s: %.0f %% of the packets were handled by another CPU: the figure is not that of one CPU", t.Point.Name, out.elsewhere*100)
			return out, nil
		}
	}
}

// The kernel may move the receive side of a link to another CPU for as long as packets arrive. Two CPUs then share
// the work and the figure is meaningless, so the run is repeated.
const (
	maxElsewhere = 0.01 // share of packets on another CPU
	maxTries     = 6
)

// observePackets sends once and measures.
func observePackets(t *Trial, s stream, sender *load.Sender, sink *load.Sink) (rates, error) {
	ctx, stop := context.WithCancel(t)
	defer stop()
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- sender.Run(ctx, started) }()
	<-started
	var out rates
	err := func() error {
		// Send ten packets per flow, as in long flows: a datapath may have cached the flow by then (see remember in
		// bpf/datapath/flow/table.h). With very many flows send two each, to bound the warm-up.
		warm := uint64(max(2*s.flows, min(10*s.flows, 1_000_000)))
		if s.open {
			warm = 0
		}
		if err := warmUp(ctx, sender, warm, done); err != nil {
			return err
		}
		if s.stamp {
			// Time to make up for sends missed while the run began.
			if err := wait(ctx, 300); err != nil {
				return err
			}
			if err := sink.Reset(); err != nil {
				return err
			}
		}
		return t.withYardstick(ctx, func() error { return out.observe(ctx, t, sender, sink) })
	}()
	stop()
	if sendErr := <-done; sendErr != nil && !errors.Is(sendErr, context.Canceled) {
		err = errors.Join(err, sendErr)
	}
	if err == nil && s.stamp {
		out.latency, err = sink.Latency()
	}
	return out, err
}

func (n *network) ends(s stream) (from, to *lab.Node, spec load.PacketSpec) {
	spec = load.PacketSpec{
		Dest: s.dest, Flows: max(s.flows, 1), Size: s.size, Protocol: s.proto, Flags: s.flags,
		Rate: s.rate, Shuffled: s.shuffled, Skip: s.skip, Stamp: s.stamp, Interface: "eth0", DestMAC: wanMAC,
		Source: clientsOf(s.v6, max(s.flows, 1)),
	}
	from, to = n.client, n.server
	if s.reverse {
		from, to, spec.DestMAC = n.server, n.client, lanMAC
	}
	if s.source != nil {
		spec.Source = *s.source
	}
	return from, to, spec
}

// warmUp waits until the sender has sent the packets, between a tenth of a second and 20 seconds.
func warmUp(ctx context.Context, sender *load.Sender, packets uint64, done <-chan error) error {
	for i := 0; i < 2000 && (i < 10 || sender.Sent() < packets); i++ {
		select {
		case err := <-done:
			return fmt.Errorf("sender ended early: %w", errors.Join(err, ctx.Err()))
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

func (r *rates) observe(ctx context.Context, t *Trial, sender *load.Sender, sink *load.Sink) error {
	cpus, err := sink.ByCPU()
	if err != nil {
		return err
	}
	sent, begin, at := sender.Sent(), sender.CPUTime(), time.Now()
	a, err := sink.Read()
	if err != nil {
		return err
	}
	if err := t.window(ctx, sender.CPUTime); err != nil {
		return err
	}
	b, err := sink.Read()
	if err != nil {
		return err
	}
	// Rates use CPU time: other programs then lengthen a run but do not change its figure.
	arrived, offered, wall := float64(b.Packets-a.Packets), float64(sender.Sent()-sent), time.Since(at).Seconds()
	r.pps = arrived / (sender.CPUTime() - begin).Seconds()
	r.perSecond, r.offered = arrived/wall, offered/wall
	if offered > 0 {
		r.lost = max(0, 1-arrived/offered)
	}
	if r.pps == 0 {
		return fmt.Errorf("nothing arrived at the far end")
	}
	after, err := sink.ByCPU()
	r.elsewhere = otherCPUShare(cpus, after, t.CPU)
	return err
}

// otherCPUShare returns the share of the packets counted between two readings on other CPUs than cpu.
func otherCPUShare(before, after []uint64, cpu int) float64 {
	var all, here uint64
	for i := range after {
		n := after[i] - before[i]
		all += n
		if i == cpu {
			here = n
		}
	}
	if all == 0 {
		return 0
	}
	return 1 - float64(here)/float64(all)
}

// singleEndpoint returns a range of a single endpoint.
func singleEndpoint(a netip.Addr, port uint16) load.Range {
	return load.Range{First: a, Count: 1, Ports: flow.Ports{First: port, Last: port}}
}
