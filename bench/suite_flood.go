// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/load"
)

// Sizes of the flood: many more sources than the tables of any row have room for.
const (
	floodSources   = 1_000_000
	floodConntrack = 1 << 18
	// heldRate is the requests per second over the connections that must survive.
	heldRate = 20_000
	// A request on an open connection is sent up to heldTries times before the connection counts as lost. The flood
	// fills the queues between the nodes, so a lost packet does not imply a lost connection.
	heldTries, heldTimeout = 40, 50 * time.Millisecond
)

func floodSuite() Suite {
	s := Suite{
		Name: "flood", Title: "Open connections through a flood of SYNs",
		About: "10,000 connections are opened and then ask for a page in turn, 20,000 requests a second where the asking CPU finds the time " +
			"(asked), from one CPU; another CPU sends SYNs " +
			"of 1,000,000 endpoints to the same address as fast as it goes, none of which is ever followed by an ACK. Tables have room " +
			"for 65,536 flows (eBPF) and 262,144 entries (connection tracking). Lost are open connections that were reset or " +
			"answered to none of 40 tries, 2 s; each is asked again after the flood, so that none is lost unseen.",
		Seconds: 30, MaxReps: 1,
		Points: []Point{{Name: "10,000 open", Value: 10_000}},
		Metrics: []Metric{
			{Name: "lost", Unit: "connections", LowerIsBetter: true, Absolute: true}, {Name: "flood", Unit: "Mpps", Digits: 2},
			{Name: "asked", Unit: "% of 20,000/s", Digits: 1}, {Name: "answered", Unit: "% of requests", Digits: 2, Absolute: true},
		},
		NotShown: []string{
			"New connections during the flood: a gateway that is full refuses them, which is what keeps the open ones.",
			"A flood that fills the line: here the CPU of the flood is the limit.",
			"A gateway that forgets a connection and makes it anew with another port: the server end answers every packet.",
		},
	}
	kernel := func(name, about string, dest netip.Addr, set setup) Row {
		return gatewayRow(name, about, 0, set, func(t *Trial, n *network) error { return n.reportFlood(t, dest) })
	}
	s.Rows = []Row{
		kernel("iptables DNAT", "one rule", vip4, iptablesRule("PREROUTING", "-d", vip4.String(), "-p", "tcp", "--dport", "80", "-j", "DNAT", "--to-destination", server4.String()+":80")),
		kernel("nft masquerade", "one address", server4, nftMasquerade),
	}
	for _, r := range []struct{ mode, path, attach string }{
		{"dnat", "nftables", ""}, {"dnat", "ebpf", "xdp"}, {"fullnat", "ebpf", "xdp"}, {"snat", "ebpf", "xdp"}, {"dnat", "ebpf", "tc"}, {"snat", "ebpf", "tc"},
	} {
		name := "sluice " + r.path + " " + r.mode
		if r.attach != "" {
			name += " (" + r.attach + ")"
		}
		dest, yaml := vip4, service{mode: r.mode, protocol: "tcp", attach: r.attach, port: 80, vip: vip4, backend: server4}.yaml
		if r.mode == "snat" {
			dest, yaml = server4, snatYAML(r.attach)
		}
		s.Rows = append(s.Rows, sluiceRow(name, "one service or rule", r.path, yaml, func(t *Trial, n *network) error { return n.reportFlood(t, dest) }))
	}
	return s
}

// reportFlood opens the connections and counts them after a flood of the trial's duration. They send requests during
// the flood.
func (n *network) reportFlood(t *Trial, dest netip.Addr) error {
	if err := t.setConntrackMax(floodConntrack); err != nil {
		return err
	}
	// The client's kernel owns the flood's addresses and would reset the answers.
	if err := command(t, n.client, "table ip quiet { chain out { type filter hook output priority 0; tcp flags & rst == rst drop; }\n}\n", "nft", "-f", "-"); err != nil {
		return err
	}
	cpus, err := load.CPUs()
	if err != nil {
		return err
	}
	server, err := load.NewServer(n.server, "eth0", load.ServerOptions{})
	if err != nil {
		return err
	}
	defer server.Close()
	client, err := load.NewClient(n.client, load.FlowSpec{
		Source: clientsOf(false, t.Point.Value), Dest: addrPort(dest, 80), Interface: "eth0", DestMAC: wanMAC,
		Hold: true, Requests: 65535, Rate: heldRate, Timeout: heldTimeout, Tries: heldTries,
	}, []int{cpus[(slices.Index(cpus, t.CPU)+1)%len(cpus)]})
	if err != nil {
		return err
	}
	defer client.Close()
	sources := load.Range{First: netip.AddrFrom4([4]byte{10, 72, 0, 1}), Count: 250, Ports: flow.Ports{First: 1024, Last: 5023}}
	flood, err := load.NewSender(n.client, load.PacketSpec{
		Source: sources, Dest: singleEndpoint(dest, 80), Flows: floodSources, Protocol: flow.TCP, Flags: "syn", Shuffled: true, Interface: "eth0", DestMAC: wanMAC,
	}, []int{t.CPU})
	if err != nil {
		return err
	}
	defer flood.Close()
	ctx, stop := context.WithCancel(t)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx, nil) }()
	err = n.floodHeld(ctx, t, client, flood)
	stop()
	return errors.Join(err, <-done)
}

func (n *network) floodHeld(ctx context.Context, t *Trial, client *load.Client, flood *load.Sender) error {
	all := uint64(t.Point.Value)
	var open load.FlowCounts
	for deadline := time.Now().Add(20 * time.Second); open.Established < all || open.Responses < all; {
		var err error
		if open, err = client.Read(); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d of %d connections opened, %d answered before the flood", open.Established, all, open.Responses)
		}
		if err := wait(ctx, 10); err != nil {
			return err
		}
	}
	began := time.Now()
	c, err := client.Read()
	if err != nil {
		return err
	}
	var mpps float64
	err = t.withProfile("", func() (err error) {
		mpps, err = floodFor(ctx, t.Duration(), flood)
		return err
	})
	if err != nil {
		return err
	}
	took := time.Since(began)
	end, err := client.Read()
	if err != nil {
		return err
	}
	// The requesting CPU catches up, so that every connection sends a request. The last requests are then answered or
	// have timed out.
	if err := wait(ctx, int((heldTries+20)*heldTimeout/time.Millisecond)); err != nil {
		return err
	}
	after, err := client.Read()
	if err != nil {
		return err
	}
	asked := float64(end.Requests - c.Requests)
	if again := after.Requests - end.Requests; again < all {
		return fmt.Errorf("after the flood %d requests were sent over %d connections: not all were looked at", again, all)
	}
	t.Report("lost", float64(after.GaveUpReq+after.Resets-c.GaveUpReq-c.Resets))
	t.Report("flood", mpps)
	t.Report("asked", 100*asked/took.Seconds()/heldRate)
	if asked > 0 {
		t.Report("answered", 100*float64(end.Responses-c.Responses)/asked)
	}
	return nil
}

// floodFor sends for a wall-clock duration and returns the packets per microsecond of the flood's CPU time.
func floodFor(ctx context.Context, d time.Duration, flood *load.Sender) (float64, error) {
	ctx, stop := context.WithCancel(ctx)
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- flood.Run(ctx, started) }()
	<-started
	begin := flood.CPUTime()
	err := wait(ctx, int(d/time.Millisecond))
	used := flood.CPUTime() - begin
	stop()
	return float64(flood.Sent()) / float64(used.Microseconds()), errors.Join(err, <-done)
}
