// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/sick"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/trace"
)

// TestProfile sends packets through a router with a thousand rules in a row, and
// wants the rules to be the largest part of its network stack.
func TestProfile(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, sick.Topology("traceprof"))
	if err := sick.ManyRules(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	ns, err := conntrack.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	sent := make(chan error, 1)
	go func() {
		// Some seconds of packets.
		err := l.Node("client").Do(func() error { return flood(60_000) })
		cancel()
		sent <- err
	}()
	p, err := trace.TakeProfile(ctx, 0, []conntrack.Namespace{ns})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Phases {
		t.Logf("%-20s %5.1f %% %6.2f µs", s.Phase, 100*s.Share, s.MicrosPerPacket)
	}
	if p.Counted != "forwarded packets" || p.Packets < 50_000 {
		t.Errorf("%d %s counted of 60000", p.Packets, p.Counted)
	}
	for _, s := range p.Phases {
		if s.Network && s.Phase != "rules" && s.Samples > p.Samples {
			t.Errorf("phase %s has %d of %d samples", s.Phase, s.Samples, p.Samples)
		}
	}
	rules, conntracking := p.Share("rules"), p.Share("conntrack lookup")
	if rules < 0.05 || rules < conntracking {
		t.Errorf("rules have %.3f of the time, conntrack %.3f: a thousand rules in a row must show", rules, conntracking)
	}
	if !strings.Contains(p.Folded(), ";nft_do_chain") {
		t.Error("no stack goes through nft_do_chain")
	}
	if time.Duration(p.Samples)*time.Second/trace.SamplesPerSecond > 2*time.Duration(p.CPUs)*p.Window {
		t.Error(fmt.Errorf("%d samples in %s on %d CPUs are too many", p.Samples, p.Window, p.CPUs))
	}
}
