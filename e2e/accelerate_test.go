// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-lb/sluice/accelerate"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestAccelerateCommands plans, starts, shows and stops the acceleration by the commands of the program.
func TestAccelerateCommands(t *testing.T) {
	t.Parallel()
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	n := labtest.New(t, lab.Balancer()).Node("gateway")
	sluice := func(code int, args ...string) string {
		t.Helper()
		cmd := n.Command(t.Context(), binary, append(args, "--state-dir", n.StateDir())...)
		out, _ := cmd.CombinedOutput() // the exit code follows
		if got := cmd.ProcessState.ExitCode(); got != code {
			t.Fatalf("%s: exit code %d, want %d\n%s", args, got, code, out)
		}
		return string(out)
	}
	rules := func(text string) {
		t.Helper()
		cmd := n.Command(t.Context(), "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	if out := sluice(1, "accelerate", "stop"); !strings.Contains(out, "no acceleration is running") {
		t.Error(out)
	}
	rules("table ip f { chain c { type filter hook forward priority 0; ip ttl 5 drop; }; }\n")
	var plan accelerate.Plan
	if err := json.Unmarshal([]byte(sluice(1, "accelerate", "--dry-run", "--json")), &plan); err != nil || len(plan.Refused) != 1 || len(plan.Interfaces) == 0 {
		t.Errorf("%v, %+v", err, plan)
	}
	if out := sluice(1, "accelerate"); !strings.Contains(out, "rule ip f c handle") || !strings.Contains(out, "IP header") {
		t.Error(out)
	}
	rules("flush ruleset\n")
	if out := sluice(0, "accelerate", "--dry-run", "--interfaces", "lan0,wan0,nosuch0"); !strings.Contains(out, "wan0") || !strings.Contains(out, "it does not exist") || !strings.Contains(out, "would be accelerated") {
		t.Error(out)
	}
	run := n.Command(t.Context(), binary, "accelerate", "--state-dir", n.StateDir())
	run.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	run.Stdout, run.Stderr = os.Stderr, os.Stderr
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, patience, "the acceleration", func() error {
		_, err := accelerate.StatusOf(t.Context(), n.StateDir(), 0)
		return err
	})
	if out := sluice(0, "show", "accelerated"); !strings.Contains(out, "packets in XDP") || !strings.Contains(out, "wan0") {
		t.Error(out)
	}
	if out := sluice(1, "accelerate"); !strings.Contains(out, "running already") {
		t.Error(out)
	}
	sluice(0, "accelerate", "stop")
	if err := run.Wait(); err != nil {
		t.Error(err)
	}
}
