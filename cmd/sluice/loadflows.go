// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/load"
)

type loadFlowsFlags struct {
	loadBounds
	spec         load.FlowSpec
	from, to     string
	source, dest string
}

// flowsReport is the output of load flows.
type flowsReport struct {
	Spec        load.FlowSpec   `json:"spec"`
	Took        time.Duration   `json:"took_ns"`
	Counts      load.FlowCounts `json:"counts"`
	Open        uint64          `json:"open"`
	Unbegun     uint64          `json:"unbegun"` // flows that were due at the rate but not started
	Connections float64         `json:"connections_per_second"`
	Requests    float64         `json:"requests_per_second"`
	Errors      uint64          `json:"errors"`
	Connect     load.Latency    `json:"connect"`
	Response    load.Latency    `json:"response"`
}

func newLoadFlows(a *app) *cobra.Command {
	var f loadFlowsFlags
	cmd := &cobra.Command{
		Use:   "flows --from PLACE --source RANGE --dest ADDRESS:PORT --to PLACE",
		Short: "Make whole TCP connections with an HTTP request and response each",
		Long: "flows runs XDP programs at both ends that answer each packet with the next one: no TCP stack, and nearly all the\n" +
			"CPU is the gateway's. What is lost is sent again by a timer. With --rate the schedule is held whatever the\n" +
			"gateway does, and a slow gateway shows as latency; latency counts from when a connection was due.",
		Example: "  sluice lab up balancer\n" +
			"  sluice load flows --from client/eth0 --source 10.64.0.0/30 \\\n      --dest 10.0.2.2:80 --to s1/eth0\n" +
			"  sluice load flows --from client/eth0 --source 10.64.0.0/27 \\\n      --dest 10.0.2.2:80 --to s1/eth0 --connections 1000000 --hold \\\n      --requests 100 --rate 200000",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runLoadFlows(cmd, a, &f) },
	}
	f.flags(cmd, "connections (with --hold: connections and requests)")
	fl := cmd.Flags()
	fl.StringVar(&f.from, "from", "", "where the clients are: [[LAB/]NODE/]INTERFACE")
	fl.StringVar(&f.to, "to", "", "where the servers are; they answer for every address")
	fl.StringVar(&f.source, "source", "", "source addresses, with ports (default 1024-65535)")
	fl.StringVar(&f.dest, "dest", "", "the service")
	fl.IntVar(&f.spec.Connections, "connections", 0, "connections at once; 0: all endpoints of the source range")
	fl.IntVar(&f.spec.Requests, "requests", 1, "requests of each connection")
	fl.BoolVar(&f.spec.Hold, "hold", false, "keep connections open; each turn opens one or makes one request on it")
	fl.IntVar(&f.spec.ResponseSize, "response", load.DefaultResponse, "bytes of an HTTP response, headers included")
	fl.Float64Var(&f.spec.Rate, "rate", 0, "turns a second, open-loop; 0: a new one when another ended")
	fl.DurationVar(&f.spec.Timeout, "timeout", 200*time.Millisecond, "time after which a packet is sent again")
	fl.IntVar(&f.spec.Tries, "tries", 6, "times that a packet is sent before the connection is given up")
	offerFrom(cmd, "from", listInterfaces)
	offerFrom(cmd, "to", listInterfaces)
	for _, name := range []string{"from", "to", "source", "dest"} {
		_ = cmd.MarkFlagRequired(name) // MarkFlagRequired fails for unknown names only
	}
	return cmd
}

func runLoadFlows(cmd *cobra.Command, a *app, f *loadFlowsFlags) error {
	places, err := parseLoadPlaces(f.from, f.to)
	if err == nil {
		f.spec.Source, err = load.ParseRange(f.source)
	}
	if err == nil {
		f.spec.Dest, err = netip.ParseAddrPort(f.dest)
	}
	var cpus []int
	if err == nil {
		cpus, err = f.list()
	}
	if err == nil {
		err = cmp.Or(f.check(), f.spec.Validate())
	}
	if err != nil {
		return usageError(cmd, "%w", err)
	}
	if err := mayLoad(f.own, places...); err != nil {
		return err
	}
	from, to := places[0], places[1]
	if err := from.prepare(); err != nil {
		return err
	}
	f.spec.Interface, f.spec.Limit = from.iface, f.count
	server, err := load.NewServer(to, to.iface, load.ServerOptions{ResponseSize: f.spec.ResponseSize})
	if err != nil {
		return err
	}
	defer server.Close()
	client, err := load.NewClient(from, f.spec, cpus)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := f.context(cmd.Context())
	defer cancel()
	var last load.FlowCounts
	err = runWithProgress(ctx, client.Run, func(second int) {
		n, err := client.Read()
		if err != nil {
			return
		}
		a.progress("%3d s  %s connections/s  %s requests/s  %s open  %s repeated  %s errors", second,
			load.Count(n.Completed-last.Completed), load.Count(n.Responses-last.Responses), load.Count(n.Open()),
			load.Count(n.Repeated()), load.Count(n.Errors()))
		last = n
	})
	if err != nil {
		return err
	}
	return f.report(a, client)
}

func (f *loadFlowsFlags) report(a *app, client *load.Client) error {
	n, err := client.Read()
	if err != nil {
		return err
	}
	connect, err := client.ConnectLatency()
	if err != nil {
		return err
	}
	response, err := client.ResponseLatency()
	if err != nil {
		return err
	}
	if err := f.saveHistogram(response, "time to the response, "+load.Count(response.Count())+" requests"); err != nil {
		return err
	}
	took := client.Took()
	r := flowsReport{
		Spec: client.Spec(), Took: took, Counts: n, Open: n.Open(), Unbegun: client.Unbegun(), Errors: n.Errors(),
		Connections: perSecond(n.Completed, took), Requests: perSecond(n.Responses, took),
		Connect: connect.Latency(), Response: response.Latency(),
	}
	if err := a.print(r, r.write); err != nil {
		return err
	}
	if n.Started > 0 && r.Connect.Count == 0 {
		return noSuccessError("no connection was made")
	}
	return nil
}

func (r flowsReport) write(w io.Writer) error {
	n := r.Counts
	fmt.Fprintf(w, "connections  %s completed in %s: %s a second; %s open\n", load.Count(n.Completed), r.Took.Round(time.Millisecond), rate(r.Connections), load.Count(r.Open))
	fmt.Fprintf(w, "requests     %s answered: %s a second\n", load.Count(n.Responses), rate(r.Requests))
	fmt.Fprintf(w, "connect      %s\n", latencyLine(r.Connect))
	fmt.Fprintf(w, "response     %s\n", latencyLine(r.Response))
	fmt.Fprintf(w, "sent again   %s SYN, %s requests, %s FIN; %s late duplicates\n", load.Count(n.RepeatedSYN), load.Count(n.RepeatedReq), load.Count(n.RepeatedFIN), load.Count(n.Stray))
	fmt.Fprintf(w, "errors       %s: %s no connection, %s no response, %s not closed, %s reset; %s responses of a wrong length, %s ICMP errors\n",
		load.Count(r.Errors), load.Count(n.GaveUpSYN), load.Count(n.GaveUpReq), load.Count(n.GaveUpFIN), load.Count(n.Resets), load.Count(n.WrongLength), load.Count(n.Unreachable))
	writeBehind(w, "behind       %s turns were due and not begun", r.Unbegun, n.Started+n.Requests)
	if n.Overdue > 0 {
		fmt.Fprintf(w, "overdue      %s turns found their connection still busy: more connections are needed for this rate\n", load.Count(n.Overdue))
	}
	return nil
}
