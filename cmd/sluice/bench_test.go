// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/load"
)

// TestBenchRefusesNonsense: selections that cannot be measured, or are empty, are usage errors.
func TestBenchRefusesNonsense(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"nosuch", `no suite "nosuch"`},
		{"latency --reps 0", "at least 1"},
		{"latency --reps -1", "at least 1"},
		{"latency --seconds -1", "more than 0"},
		{"latency --cpu 100000", "CPU 100000"},
		{"latency --rows nobody", "\n  nft DNAT\n"},
		{"latency --points nowhere", "\n  50 %\n"},
		{"latency --rows (", "--rows"},
		{"peers --cpu 0", "share all CPUs"},
	} {
		args := append([]string{"bench"}, strings.Fields(c.args)...)
		if code, out, stderr := sluiceCommand("", args...); code != exitUsage || out != "" || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: exit %d, %q, %q", c.args, code, out, stderr)
		} else if lines := strings.Split(stderr, "\n"); len(lines) > 2 && slices.ContainsFunc(lines, func(l string) bool { return len(l) > 80 }) {
			t.Errorf("%s: more than 80 columns: %s", c.args, stderr)
		}
	}
}

// TestBenchKnowsBeforeTheRun refuses files that it cannot compare with or write, before the run.
func TestBenchKnowsBeforeTheRun(t *testing.T) {
	dir := t.TempDir()
	other := filepath.Join(dir, "other.json")
	if err := os.WriteFile(other, []byte(`{"suite": "drop"}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for says, args := range map[string][]string{
		`other.json holds a run of "drop", not of flows`: {"--check", "--baseline", other},
		"--save " + dir + ": is a directory":             {"--save", dir},
		"--chart /nowhere/a.svg":                         {"--chart", "/nowhere/a.svg"},
	} {
		refused(t, says, append([]string{"bench", "flows", "--reps", "1", "--seconds", "0.001", "--rows", "kernel"}, args...)...)
	}
}

// TestBenchOnTheCPUsItMayUse: the last usable CPU is not the one with the highest number if the process may not
// use some.
func TestBenchOnTheCPUsItMayUse(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, first unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	cpus, err := load.CPUs()
	if err != nil || len(cpus) < 2 {
		t.Skipf("CPUs %v, %v: two are needed", cpus, err)
	}
	first.Set(cpus[0])
	if err := unix.SchedSetaffinity(0, &first); err != nil {
		t.Fatal(err)
	}
	defer unix.SchedSetaffinity(0, &before)
	if _, stderr, code := sluice(t, "bench", "flows", "--rows", "no such row"); code != exitUsage || !strings.Contains(stderr, "no row of flows matches") {
		t.Errorf("code %d, %s", code, stderr)
	}
}
