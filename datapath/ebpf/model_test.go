// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model/judge"
)

// number reads the amount of work of a test from the environment.
func number(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	v := os.Getenv(variable)
	if v == "" {
		return otherwise
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("%s=%s: %v", variable, v, err)
	}
	return n
}

// TestModelAgrees sends random packet sequences through the programs and compares every outcome, the counters
// and the flows with the reference model. It repeats this while addresses, routes, neighbours and links of the
// host change. SLUICE_MODEL_PACKETS sets the packets per scenario, SLUICE_MODEL_SEED the seed.
//
// On TC, each scenario has only the features that it needs, as packet cases have on XDP. Elsewhere all features
// are on, so that most scenarios share programs. SLUICE_MODEL_PROGRAMS=exact gives each scenario its own
// programs everywhere.
func TestModelAgrees(t *testing.T) {
	agree(t, func(hook string) bool { return !strings.HasPrefix(hook, "tc") && !exactPrograms() }, judge.Options{Packets: number(t, "SLUICE_MODEL_PACKETS", 10000)},
		judge.Options{Packets: number(t, "SLUICE_MODEL_PACKETS", 4000), Host: true})
}

// TestModelAgreesAcrossReloads is TestModelAgrees with changes of the configuration between the packets. All
// features are on at all hooks unless SLUICE_MODEL_PROGRAMS=exact.
func TestModelAgreesAcrossReloads(t *testing.T) {
	agree(t, func(string) bool { return !exactPrograms() },
		judge.Options{Packets: number(t, "SLUICE_MODEL_PACKETS", 4000), Reloads: true})
}

func exactPrograms() bool { return os.Getenv("SLUICE_MODEL_PROGRAMS") == "exact" }

// agree runs each scenario on each hook with several orders, one after the other in the same programs.
func agree(t *testing.T, allOn func(hook string) bool, ways ...judge.Options) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	sideBySide(t, []string{"xdp", "tc", "tc-complete", "pair"}, func(t *testing.T, hook string, cpu int) {
		pool := poolOf(t, programKind{allOn: allOn(hook)})
		for _, sc := range judge.Scenarios() {
			t.Run(sc.Name, func(t *testing.T) {
				for _, o := range ways {
					s := newSubject(t, hook)
					s.programPool, s.cpu, s.here = pool, cpu, true
					o.PerReset, o.Seed = 10000, uint64(number(t, "SLUICE_MODEL_SEED", 1))
					o.NoShrink = os.Getenv("SLUICE_MODEL_SHRINK") == "no"
					agreesIn(t, s, sc, o)
				}
			})
		}
	})
}

func agreesIn(t *testing.T, s *subject, sc judge.Scenario, o judge.Options) {
	c, err := sc.Config()
	if err != nil {
		t.Fatal(err)
	}
	if err := refusal(c); err != nil {
		t.Skip(err)
	}
	if (sc.Name == "cookies" || sc.Name == "client-address") && s.hook == "tc-complete" {
		t.Skip("the kernel gives the sum of the card up as a tail grows, and the test run compares it all the same")
	}
	d, n, err := judge.Run(s, sc, o)
	if err != nil {
		t.Fatal(err)
	}
	if d != nil {
		t.Fatal(d)
	}
	if s.d.switches.Paired && sc.Name == "fullnat" && (s.byXDP == 0 || s.byXDP == n) {
		t.Errorf("of %d packets XDP has sent %d, and left the rest to TC", n, s.byXDP)
	}
	t.Logf("%d packets, %d by XDP before TC; the host changes: %v", n, s.byXDP, o.Host)
}

// TestPathsAgree sends the same sequences with and without the straight path. The full path must translate every
// packet in the same way.
func TestPathsAgree(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	pool := poolOf(t, programKind{full: true, allOn: true})
	sideBySide(t, []string{"xdp", "tc"}, func(t *testing.T, hook string, cpu int) {
		for _, sc := range judge.Scenarios() {
			c, err := sc.Config()
			if err != nil {
				t.Fatal(err)
			}
			if refusal(c) != nil {
				continue
			}
			t.Run(sc.Name, func(t *testing.T) {
				full := newSubject(t, hook)
				full.full, full.programPool, full.cpu = true, pool, cpu
				d, _, err := judge.Run(full, sc, judge.Options{Packets: 1000, PerReset: 500, Seed: 2})
				if err != nil {
					t.Fatal(err)
				}
				if d != nil {
					t.Fatal(d)
				}
			})
		}
	})
}
