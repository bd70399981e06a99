// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// TestConditions causes faults in real namespaces and expects the checks to find and name each fault. It then applies
// the remedy, with the commands exactly as printed, and expects the same checks to pass.
func TestConditions(t *testing.T) {
	needs(t)
	for _, tool := range []string{"conntrack", "iptables-legacy", "iptables-nft", "tc", "prlimit"} {
		labtest.Require(t, labtest.Tool(tool))
	}
	t.Run("router", func(t *testing.T) { // while no other test has changed settings of the host
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		giveBack, err := faults.Borrow(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := giveBack(); err != nil {
				t.Error(err)
			}
		})
		for _, c := range slices.Concat(faults.Conditions(), faults.PathConditions()) {
			t.Run(c.Name, func(t *testing.T) {
				t.Parallel()
				testCondition(t, c)
			})
		}
	})
	for _, c := range faults.HostConditions() {
		t.Run(c.Name, func(t *testing.T) { testCondition(t, c) })
	}
}

// TestHealthyConditions wants no warning for routers that look faulty to simple rules.
func TestHealthyConditions(t *testing.T) {
	needs(t)
	for _, c := range faults.HealthyConditions() {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			l := labtest.New(t, faults.Topology("healthy"))
			for _, step := range []func(context.Context, *lab.Lab) error{faults.ResolveNeighbours, c.Fault} {
				if err := step(ctx, l); err != nil {
					t.Fatal(err)
				}
			}
			for _, f := range watched(ctx, t, l, c.Traffic).Findings {
				if f.Verdict >= doctor.Warn && f.Namespace != "" {
					t.Errorf("false alarm: %s %s", f.Check, said(f))
				}
			}
		})
	}
}

func testCondition(t *testing.T, c faults.Condition) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	l := labtest.New(t, faults.Topology("remedy"))
	for key, value := range c.Host {
		if value == "" {
			value = hostSysctl(t, key)
		}
		if err := l.HostSysctl(ctx, key, value); err != nil {
			labtest.Lacks(t, "host-wide settings cannot be changed: %v", err)
		}
	}
	step := func(do func(context.Context, *lab.Lab) error) {
		t.Helper()
		if do == nil {
			return
		}
		if err := do(ctx, l); err != nil {
			t.Fatal(err)
		}
	}
	step(faults.ResolveNeighbours)
	step(c.Fault)
	r := watched(ctx, t, l, c.Traffic)
	for _, w := range c.Wants {
		f := finding(r, w.Check)
		if f.Verdict.String() != w.Verdict || !strings.Contains(said(f), w.Words) {
			t.Errorf("%s: %s, want %s and %q in\n%s", w.Check, f.Verdict, w.Verdict, w.Words, said(f))
		}
	}
	if t.Failed() {
		for _, f := range r.Findings {
			t.Log(f.Check, f.Verdict, f.Summary)
		}
	}
	if t.Failed() {
		return
	}
	runRemedy(ctx, t, l, c, finding(r, c.Wants[0].Check))
	step(c.Cure)
	traffic := c.Traffic
	if c.After != nil {
		traffic = c.After
	}
	r = watched(ctx, t, l, traffic)
	for _, w := range c.Wants {
		if w.Check == c.Lasts {
			continue
		}
		if f := finding(r, w.Check); f.Verdict >= doctor.Warn || f.Verdict == doctor.Unknown || w.Verdict == "info" && f.Verdict != doctor.OK {
			t.Errorf("%s after the remedy: %s\n%s", w.Check, f.Verdict, said(f))
		}
	}
}

// runRemedy runs the commands of a finding's remedy as printed. Connections that worked before must work afterwards.
func runRemedy(ctx context.Context, t *testing.T, l *lab.Lab, c faults.Condition, f doctor.Finding) {
	t.Helper()
	commands := remedyCommands(t, f)
	script := strings.Join(commands, "\n")
	if c.Do == "" && script != "" || !regexp.MustCompile(c.Do).MatchString(script) {
		t.Fatalf("the commands of %s are %q, want %q", f.Check, script, c.Do)
	}
	if script == "" {
		return
	}
	beside, err := faults.StartOtherTraffic(ctx, l)
	if err != nil {
		t.Fatal(err)
	}
	worked := beside.Working(ctx)
	cmd := l.Node("gateway").Command(ctx, "sh", "-ec", script)
	if c.OnHost {
		cmd = exec.CommandContext(ctx, "sh", "-ec", script)
	}
	cmd.Dir = t.TempDir()
	if strings.Contains(script, "sluice ") {
		cmd.Env = append(os.Environ(), "PATH="+sluiceDir(t)+":"+os.Getenv("PATH"))
	}
	text, err := cmd.CombinedOutput()
	if t.Logf("answered before the remedy: %q\n$ %s\n%s", worked, script, text); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, 10*time.Second, "answers after the remedy", func() error { return beside.Stopped(ctx, worked) })
}

// program is the directory of the sluice binary that some remedies run. The first remedy that needs it builds it.
var program struct {
	once sync.Once
	dir  string
	err  error
}

// sluiceDir returns the directory of the sluice binary. The first call builds it.
func sluiceDir(t *testing.T) string {
	t.Helper()
	labtest.Require(t, labtest.Tool("go"))
	program.once.Do(func() {
		if program.dir, program.err = os.MkdirTemp("", "doctor"); program.err != nil {
			return
		}
		text, err := exec.Command("go", "build", "-o", filepath.Join(program.dir, "sluice"), "github.com/sluice-lb/sluice/cmd/sluice").CombinedOutput()
		if err != nil {
			program.err = fmt.Errorf("build: %w: %s", err, text)
		}
	})
	if program.err != nil {
		t.Fatal(program.err)
	}
	return program.dir
}

// TestMain removes the program that remedies ran.
func TestMain(m *testing.M) {
	code := m.Run()
	if program.dir != "" {
		os.RemoveAll(program.dir)
	}
	os.Exit(code)
}

// remedyCommands returns the commands of a finding's remedy. A remedy without commands cannot be tried, and must
// describe its risk in a sentence.
func remedyCommands(t *testing.T, f doctor.Finding) []string {
	t.Helper()
	switch {
	case f.Remedy == nil:
		return nil
	case len(f.Remedy.Commands) == 0 && f.Remedy.Risk == "" && f.Verdict >= doctor.Warn:
		t.Errorf("%s: the remedy has neither commands nor a risk: %s", f.Check, f.Remedy.Do)
	}
	return f.Remedy.Commands
}

func finding(r *doctor.Report, check string) doctor.Finding {
	return r.Findings[slices.IndexFunc(r.Findings, func(f doctor.Finding) bool { return f.Check == check })]
}

// said is all that a finding says.
func said(f doctor.Finding) string {
	text := f.Summary + "\n"
	for _, e := range f.Evidence {
		text += fmt.Sprintf("%s: %s (%s)\n", e.What, e.Value, e.Source)
	}
	if f.Remedy != nil {
		text += f.Remedy.Do + "\n" + strings.Join(f.Remedy.Commands, "\n")
	}
	return text
}

func hostSysctl(t *testing.T, key string) string {
	t.Helper()
	text, err := exec.Command("sysctl", "-n", key).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// watched examines the router while traffic passes.
func watched(ctx context.Context, t *testing.T, l *lab.Lab, traffic func(context.Context, *lab.Lab) error) *doctor.Report {
	t.Helper()
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, err := doctor.Examine(ctx, observe.NewLive([]netdev.Namespace{ns}), observe.Options{
		Window: 100 * time.Millisecond,
		During: func(ctx context.Context) error {
			if traffic == nil {
				return nil
			}
			return traffic(ctx, l)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}
