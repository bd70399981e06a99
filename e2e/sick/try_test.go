// SPDX-License-Identifier: Apache-2.0

package sick

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/trial"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// TestTry tries the first remedy on hosts with one fault, where it heals and is kept, and on hosts with a second fault
// behind the first one, where it does not heal and is taken back.
func TestTry(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Tool("nft"), labtest.Tool("go"))
	program := filepath.Join(t.TempDir(), "sluice")
	if out, err := exec.Command("go", "build", "-o", program, "github.com/sluice-lb/sluice/cmd/sluice").CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	const silent = "nft -f - <<R\ntable inet mute { chain in { type filter hook input priority filter; tcp dport 443 drop; udp dport 53 drop; }; }\nR"
	for _, tc := range []struct {
		name, fault, second string
		want                trial.Verdict
		command             string // a part of the one that is tried
	}{
		{"no masquerade", source + "nft flush chain $chain", "", trial.Healed, "masquerade"},
		{"forwarding off, servers silent", "sysctl -qw net.ipv4.ip_forward=0", silent, trial.TookBack, "net.ipv4.ip_forward=1"},
		{"no masquerade, servers silent", source + "nft flush chain $chain", silent, trial.TookBack, "masquerade"},
		{"no default route", "ip route del default", "", trial.NotTried, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHost(t, router)
			defer h.stop()
			h.begin()
			h.sh("g", tc.fault)
			if tc.second != "" {
				h.sh("s", tc.second)
			}
			time.Sleep(300 * time.Millisecond)
			ns, err := netdev.NamespaceAt(h.lab.Node("g").Path())
			if err != nil {
				t.Fatal(err)
			}
			const state = "nft -s list ruleset; sysctl net.ipv4.ip_forward net.ipv4.conf; ip route show table all; ip rule"
			before, err := h.run("g", state)
			if err != nil {
				t.Fatal(err)
			}
			reader := observe.NewLive([]netdev.Namespace{ns})
			r, err := trial.Run(t.Context(), trial.Options{Namespaces: []netdev.Namespace{ns}, Journal: t.TempDir(), Program: program, Progress: t.Logf,
				Examine: func(ctx context.Context) (*doctor.Report, error) {
					return doctor.Examine(ctx, reader, observe.Options{Window: window})
				}})
			if err != nil {
				t.Fatal(err)
			}
			if r.Verdict != tc.want || !strings.Contains(strings.Join(r.Commands, "\n"), tc.command) {
				t.Fatalf("%s: %s; before %+v, after %+v; first line %s; tried %q", r.Verdict, r.Why, r.Before, r.After, r.Conclusion, r.Commands)
			}
			if after, err := h.run("g", state); err != nil || (after == before) == (tc.want == trial.Healed) {
				t.Errorf("after a trial that ended %s, the state has changed: %v (%v)\n%s", r.Verdict, after != before, err, after)
			}
			if r.Before.Concerns.Failed == 0 || tc.want == trial.Healed && r.After.Concerns.Answered == 0 || tc.want == trial.TookBack && r.After.Concerns.Failed == 0 {
				t.Errorf("before %+v, after %+v", r.Before, r.After)
			}
			if share := h.answered("out", 500*time.Millisecond); (share > 0.9) != (tc.want == trial.Healed) {
				t.Errorf("%.0f %% of the connections are answered after a trial that ended %s", 100*share, r.Verdict)
			}
		})
	}
}
