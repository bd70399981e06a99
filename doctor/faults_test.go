// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// TestFaultyRouters wants the first line of the conclusion to name the illness of
// every faulty router.
func TestFaultyRouters(t *testing.T) {
	needs(t)
	for _, c := range faults.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			r := examine(t, c)
			first := r.Conclusion[0]
			if first.Check != c.Check {
				t.Errorf("the first line is not about %s (%s):\n%v", c.Check, c.Name, r.Conclusion)
			}
			if r.ExitCode() == 0 {
				t.Error("exit code 0 for a faulty router")
			}
			for _, f := range r.Findings {
				remedyCommands(t, f)
			}
		})
	}
}

// TestHealthyRouter wants no warning for a busy router with nothing wrong.
func TestHealthyRouter(t *testing.T) {
	needs(t)
	r := examine(t, faults.Healthy())
	for _, f := range r.Findings {
		if f.Verdict < doctor.Warn {
			continue
		}
		if f.Namespace == "" { // the machine's own state, which other programs make
			t.Logf("not the router's: %s %s", f.Check, f.Summary)
			continue
		}
		t.Errorf("false alarm: %s %s: %s %v", f.Check, f.Name, f.Summary, f.Evidence)
	}
}

func needs(t *testing.T) {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Conntrack, labtest.Tool("nft"), labtest.Tool("ethtool"))
}

// examine makes the router of the case and watches it while traffic passes.
func examine(t *testing.T, c faults.Case) *doctor.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	l := labtest.New(t, faults.Topology("doctor"))
	// A router without host-wide settings waits too, until no other test has changed one.
	restore, err := faults.Borrow(ctx, c.Host)
	if err != nil {
		labtest.Lacks(t, "host-wide settings cannot be changed: %v", err)
	}
	defer func() {
		if err := restore(); err != nil {
			t.Error(err)
		}
	}()
	if err := c.Setup(ctx, l); err != nil {
		t.Fatal(err)
	}
	return watch(ctx, t, l, c)
}

func watch(ctx context.Context, t *testing.T, l *lab.Lab, c faults.Case) *doctor.Report {
	t.Helper()
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	r, err := doctor.Examine(ctx, observe.NewLive([]netdev.Namespace{ns}), observe.Options{
		Window: 100 * time.Millisecond,
		During: func(ctx context.Context) error {
			_, err := c.Traffic(ctx, l)
			return err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := r.Write(&text, doctor.Style{}); err != nil {
		t.Fatal(err)
	}
	t.Log(text.String())
	return r
}
