// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-lb/sluice/accelerate"
	"github.com/sluice-lb/sluice/doctor/faults"
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
	accelerating(t, run, n)
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

// TestAccelerateUnit runs the acceleration with the capabilities of its systemd unit, and with rules of iptables-legacy.
func TestAccelerateUnit(t *testing.T) {
	t.Parallel()
	labtest.Require(t, labtest.Root, labtest.Tool("setpriv"), labtest.Tool("iptables-legacy"))
	unit, err := os.ReadFile("../packaging/sluice-accelerate.service")
	if err != nil {
		t.Fatal(err)
	}
	_, names, _ := strings.Cut(string(unit), "\nCapabilityBoundingSet=")
	names, _, _ = strings.Cut(names, "\n")
	bounding := "-all"
	for _, name := range strings.Fields(names) {
		bounding += ",+" + strings.ToLower(strings.TrimPrefix(name, "CAP_"))
	}
	n := labtest.New(t, lab.Balancer()).Node("gateway")
	if out, err := n.Command(t.Context(), "iptables-legacy", "-t", "nat", "-A", "POSTROUTING", "-j", "MASQUERADE").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	run := n.Command(t.Context(), "setpriv", "--no-new-privs", "--bounding-set", bounding, "--inh-caps", "-all", binary, "accelerate", "--state-dir", n.StateDir())
	accelerating(t, run, n)
	if err := accelerate.Stop(t.Context(), n.StateDir()); err != nil {
		t.Fatal(err)
	}
	if err := run.Wait(); err != nil {
		t.Error(err)
	}
}

// accelerating starts an acceleration and waits until it answers.
func accelerating(t *testing.T, run *exec.Cmd, n *lab.Node) {
	t.Helper()
	run.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	run.Stdout, run.Stderr = os.Stderr, os.Stderr
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, patience, "the acceleration", func() error {
		_, err := accelerate.StatusOf(t.Context(), n.StateDir(), 0)
		return err
	})
}

// TestAccelerateDocker downloads a file from a container of a real engine, without and with acceleration.
func TestAccelerateDocker(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			h := startDocker(t, kind)
			want := strings.Repeat("0123456789abcdef", 1<<20)
			if err := h.engine.Image(h.ctx, "web", []string{"busybox"}, map[string]string{"/www/file": want}); err != nil {
				t.Fatal(err)
			}
			h.serve("-p", "8080:8080")
			download := func() error {
				out, err := h.lab.Node("client").Command(h.ctx, "curl", "-sS", "http://"+faults.Gateway+":8080/file").Output()
				if err != nil || string(out) != want {
					return fmt.Errorf("%w: %d bytes arrived, equal to the file: %t", err, len(out), string(out) == want)
				}
				return nil
			}
			labtest.Eventually(t, patience, "a download without acceleration", download)
			n := h.lab.Node("gateway")
			run := n.Command(t.Context(), binary, "accelerate", "--state-dir", n.StateDir())
			accelerating(t, run, n)
			labtest.Eventually(t, patience, "an accelerated download", func() error {
				if err := download(); err != nil {
					t.Fatal(err)
				}
				s, err := accelerate.StatusOf(t.Context(), n.StateDir(), 100)
				if err == nil && s.XDP+s.TC < 100 {
					err = fmt.Errorf("%+v", s)
				}
				return err
			})
			if err := accelerate.Stop(t.Context(), n.StateDir()); err != nil {
				t.Fatal(err)
			}
			if err := run.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}
