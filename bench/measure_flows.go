// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/load"
)

// clientLoad selects the connections of a row's clients.
type clientLoad struct {
	dest   netip.AddrPort
	source load.Range
	// once uses no source endpoint twice. Otherwise each one is used before the measurement, and again in it.
	once bool
	// bypass routes the server's answers around the gateway.
	bypass bool
}

// flowRates are the results of a measurement of connections.
type flowRates struct {
	perSecond float64 // connections completed per second of CPU time
	counts    load.FlowCounts
	elsewhere float64 // share of the connections that another CPU handled
}

// manyClients is a source range of 100,000 endpoints. A reused endpoint finds the previous connection in TIME_WAIT.
func manyClients(v6 bool) load.Range { return clientsOf(v6, 100_000) }

// measureFlows makes connections during the trial. It fails if a share above mostFaulty fails or needs a repetition.
func (n *network) measureFlows(t *Trial, c clientLoad) (flowRates, error) {
	client, server, err := n.flowEnds(t, c)
	if err != nil {
		return flowRates{}, err
	}
	defer server.Close()
	defer client.Close()
	for try := 1; ; try++ {
		out, err := observeFlows(t, client, c.once)
		if err == nil {
			err = out.faults(c.once, client.Spec().Connections)
		}
		if err != nil || out.elsewhere < maxElsewhere {
			return out, err
		}
		if try == maxTries || c.once {
			t.Note("%s: %.0f %% of the connections were handled by another CPU: the figure is not that of one CPU", t.Point.Name, out.elsewhere*100)
			return out, nil
		}
	}
}

// observeFlows makes connections once and measures.
func observeFlows(t *Trial, client *load.Client, once bool) (flowRates, error) {
	ctx, stop := context.WithCancel(t)
	defer stop()
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- client.Run(ctx, started) }()
	<-started
	var out flowRates
	var err error
	if !once {
		err = warmFlows(ctx, client)
	}
	if err == nil {
		err = t.withYardstick(ctx, func() error { return out.observe(ctx, t, client) })
	}
	stop()
	return out, errors.Join(err, <-done)
}

func (n *network) flowEnds(t *Trial, c clientLoad) (*load.Client, *load.Server, error) {
	o := load.ServerOptions{}
	spec := load.FlowSpec{
		Source: c.source, Dest: c.dest, Interface: "eth0", DestMAC: wanMAC,
	}
	if c.bypass {
		o.ReplyBy, spec.Returns = "ret0", []string{"ret0"}
	}
	server, err := load.NewServer(n.server, "eth0", o)
	if err != nil {
		return nil, nil, err
	}
	client, err := load.NewClient(n.client, spec, []int{t.CPU})
	if err != nil {
		server.Close()
		return nil, nil, err
	}
	return client, server, nil
}

// warmFlows waits until every source endpoint was used once, between a tenth of a second and five seconds.
func warmFlows(ctx context.Context, client *load.Client) error {
	all := uint64(client.Spec().Connections)
	for i := range 500 {
		c, err := client.Read()
		if err != nil || i >= 10 && c.Started >= all {
			return err
		}
		if err := wait(ctx, 10); err != nil {
			return err
		}
	}
	return nil
}

func (r *flowRates) observe(ctx context.Context, t *Trial, client *load.Client) error {
	cpus, err := client.ByCPU()
	if err != nil {
		return err
	}
	begin := client.CPUTime()
	a, err := client.Read()
	if err != nil {
		return err
	}
	if err := t.window(ctx, client.CPUTime); err != nil {
		return err
	}
	b, err := client.Read()
	if err != nil {
		return err
	}
	r.perSecond = float64(b.Completed-a.Completed) / (client.CPUTime() - begin).Seconds()
	r.counts = b
	if b.Completed == a.Completed {
		return fmt.Errorf("no connection completed: %+v", b)
	}
	after, err := client.ByCPU()
	if err != nil {
		return err
	}
	r.elsewhere = otherCPUShare(cpus, after, t.CPU)
	return nil
}

// mostFaulty is the share of connections that may fail or need a repetition. A gateway that refuses connections is
// otherwise measured by the retransmission timer of its clients.
const mostFaulty = 0.001

// faults returns an error if too many connections failed or were repeated, or if endpoints that are used once were
// used again.
func (r *flowRates) faults(once bool, endpoints int) error {
	c := r.counts
	if once && c.Started > uint64(endpoints) {
		return fmt.Errorf("%s connections from %s source endpoints, each of which is used once", load.Count(c.Started), load.Count(uint64(endpoints)))
	}
	if float64(c.Errors()+c.Repeated()) <= mostFaulty*float64(c.Started) {
		return nil
	}
	return fmt.Errorf("of %s connections %s failed (connect %d, response %d, close %d, reset %d), and %s packets were sent again: more than %g %%",
		load.Count(c.Started), load.Count(c.Errors()), c.GaveUpSYN, c.GaveUpReq, c.GaveUpFIN, c.Resets, load.Count(c.Repeated()), mostFaulty*100)
}
