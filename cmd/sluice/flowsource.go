// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/flow"
)

// flowSources returns the flow tables in addition to the kernel's: the eBPF datapath's if a daemon
// runs here.
func (a *app) flowSources() []conntrack.Source {
	if _, err := os.Stat(a.paths.SocketPath()); err != nil {
		return nil
	}
	return []conntrack.Source{&daemonFlows{api.NewClient(a.paths.SocketPath())}}
}

// daemonFlows reads the eBPF datapath's flow table through the daemon, which knows the names of its
// ids.
type daemonFlows struct{ client *api.Client }

// Name implements conntrack.Source.
func (*daemonFlows) Name() string { return "ebpf" }

// Flows implements conntrack.Source.
func (d *daemonFlows) Flows(ctx context.Context, visit func(*flow.Flow) error) error {
	return d.client.EachFlow(ctx, url.Values{"datapath": {"ebpf"}}, func(w *api.Flow) error {
		f, err := flowOf(w)
		if err != nil {
			return err
		}
		return visit(&f)
	})
}

// flowOf decodes the wire form. The eBPF datapath keeps half-open connections separate and never
// evicts an established connection for another.
func flowOf(w *api.Flow) (flow.Flow, error) {
	p, err := flow.ParseProtocol(w.Protocol)
	if err != nil {
		return flow.Flow{}, err
	}
	return flow.Flow{
		Original: flow.Tuple{Protocol: p, Source: w.Client, Dest: w.Dest},
		Reply:    flow.Tuple{Protocol: p, Source: w.Replier, Dest: w.ReplyTo},
		Owner:    w.Owner, Backend: w.Backend, State: w.State, Datapath: w.Datapath,
		Replied: w.Packets[flow.Reply] > 0, Assured: !strings.HasPrefix(w.State, "SYN_"),
		Timeout: time.Duration(w.Timeout * float64(time.Second)),
		Counted: true, Packets: w.Packets, Bytes: w.Bytes,
	}, nil
}
