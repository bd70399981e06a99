// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// TestProfile sends packets through a router with a thousand rules in a row. The rules must be the largest part
// of its network stack.
func TestProfile(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, faults.Topology("traceprof"))
	if err := faults.ManyRules(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	const batch = 1000
	sent := uint64(0)
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- l.Node("client").Do(func() error {
			for {
				select {
				case <-end:
					return nil
				default:
				}
				sent += batch
				if err := flood(batch); err != nil {
					return err
				}
			}
		})
	}()
	p, err := trace.TakeProfile(t.Context(), 3*time.Second, []netdev.Namespace{ns})
	close(end)
	if err := errors.Join(err, <-ended); err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Phases {
		t.Logf("%-20s %5.1f %% %6.2f µs", s.Phase, 100*s.Share, s.MicrosPerPacket)
	}
	// The number of packets in the window depends on the load of the machine.
	if p.Counted != "forwarded packets" || p.Packets == 0 || p.Packets > sent {
		t.Errorf("%d %s counted of %d", p.Packets, p.Counted, sent)
	}
	// Other programs share the total time.
	for _, s := range p.Phases {
		if s.Network && s.Phase != "rules" && s.Share > p.Share("rules") {
			t.Errorf("rules have %.3f of the time, %s has %.3f: a thousand rules in a row must show", p.Share("rules"), s.Phase, s.Share)
		}
	}
	if !strings.Contains(p.Folded(), ";nft_do_chain") {
		t.Error("no stack goes through nft_do_chain")
	}
	if time.Duration(p.Samples)*time.Second/trace.SamplesPerSecond > 2*time.Duration(p.CPUs)*p.Window {
		t.Error(fmt.Errorf("%d samples in %s on %d CPUs are too many", p.Samples, p.Window, p.CPUs))
	}
}
