// SPDX-License-Identifier: Apache-2.0

// Package oracle compares the eBPF datapath with the kernel's own forwarding. One gateway with the nftables datapath is
// the oracle. Other gateways have the eBPF datapath at XDP and at TC. Each gateway is in an equal network. Random steps
// change these networks and send packets. All gateways must send the same packets on every link, and deliver the same
// packets to their own sockets.
package oracle

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// Settings of the run, from the environment.
func number(t *testing.T, name string, otherwise uint64) uint64 {
	v := os.Getenv(name)
	if v == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		t.Fatalf("%s=%q: not a number", name, v)
	}
	return n
}

// perEpisode is how many steps are made in one pair of labs.
const perEpisode = 400

// mostFailures is how many differences are made smaller and reported.
const mostFailures = 5

// TestOracle makes random steps until SLUICE_ORACLE_STEPS or SLUICE_ORACLE_SECONDS are over, beginning with the seed
// SLUICE_ORACLE_SEED.
func TestOracle(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Conntrack, labtest.Tool("ip"))
	seed := number(t, "SLUICE_ORACLE_SEED", uint64(time.Now().UnixNano())%1e9)
	steps := number(t, "SLUICE_ORACLE_STEPS", 1e9)
	if os.Getenv("SLUICE_ORACLE_SECONDS") == "" {
		t.Skip("SLUICE_ORACLE_SECONDS is not set; make soak sets it")
	}
	end := time.Now().Add(time.Duration(number(t, "SLUICE_ORACLE_SECONDS", 60)) * time.Second)
	t.Logf("SLUICE_ORACLE_SEED=%d", seed)
	used := map[string]int{}
	done, begin := uint64(0), time.Now()
	failures, once := 0, uint64(0)
	for ; done < steps && time.Now().Before(end) && failures < mostFailures; seed++ {
		n, d := episode(t, seed, min(perEpisode, steps-done), end, used)
		done += n
		if d != nil {
			small, again := shrink(t, d)
			if !again {
				once++
				t.Logf("seed %d: a replay does not show this difference:\n%s", seed, d)
				continue
			}
			failures++
			t.Errorf("seed %d:\n%s\nto repeat: SLUICE_ORACLE_SEED=%d", seed, small, seed)
		}
	}
	t.Logf("%d steps in %v, %d differences that no replay shows", done, time.Since(begin).Round(time.Second), once)
	if once > 1+done/1000 {
		t.Error("more differences that no replay shows than a busy machine explains")
	}
	for _, e := range exceptions {
		t.Logf("exception %s: %d times", e.name, used[e.name])
	}
}

// TestScript replays the steps of the file SLUICE_ORACLE_SCRIPT, one a line.
func TestScript(t *testing.T) {
	name := os.Getenv("SLUICE_ORACLE_SCRIPT")
	if name == "" {
		t.Skip("SLUICE_ORACLE_SCRIPT names no file")
	}
	for _, world := range []string{"xdp", "tc"} {
		d, err := replay(t, script(t, name), true, world)
		if err != nil {
			t.Fatal(err)
		}
		if d != nil {
			t.Error(d)
		}
	}
}

// TestFixedDifferences replays scripts of differences that Sluice once had.
func TestFixedDifferences(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Conntrack, labtest.Tool("ip"))
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d scripts: %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			for again := true; ; again = false { // a busy machine causes differences that a second replay does not show
				d, err := replay(t, script(t, file), false, "xdp", "tc")
				if err != nil {
					t.Fatal(err)
				}
				if d == nil {
					return
				}
				if !again {
					t.Fatal(d)
				}
				t.Log(d)
			}
		})
	}
}

// script reads the steps of a file.
func script(t *testing.T, name string) (steps []string) {
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			steps = append(steps, line)
		}
	}
	return steps
}

// surveyed is how many of the last steps a survey prints after the changes in force.
const surveyed = 8

// episode makes random steps in new labs.
func episode(t *testing.T, seed, steps uint64, end time.Time, used map[string]int) (done uint64, d *difference) {
	r := newRun(t, "nftables", "xdp", "tc")
	defer r.close()
	r.used = used
	g := newGenerator(seed)
	for done < steps && time.Now().Before(end) {
		var err error
		if d, err = r.step(g.step()); err != nil {
			t.Errorf("seed %d, step %d:\n%s\n%v", seed, done, strings.Join(r.script, "\n"), err)
			return done, nil
		}
		done++
		if d != nil && os.Getenv("SLUICE_ORACLE_SURVEY") == "" {
			return done, d
		}
		if d != nil { // all differences of a run, each as it was found
			r.end(r.script[len(r.script)-1])
			d.script = append(slices.Concat(g.done...), d.script[max(0, len(d.script)-surveyed):]...)
			t.Logf("seed %d, step %d: %s", seed, done, d)
		}
	}
	return done, nil
}

// replay does the steps in new labs of the oracle and other worlds.
func replay(t testing.TB, script []string, verbose bool, worlds ...string) (*difference, error) {
	r := newRun(t, append([]string{"nftables"}, worlds...)...)
	defer r.close()
	r.slow, r.verbose = true, verbose
	for _, line := range script {
		if d, err := r.step(line); d != nil || err != nil {
			return d, err
		}
	}
	return nil, nil
}

// shrinkFor bounds how long a difference is made smaller.
const shrinkFor = 2 * time.Minute

// shrink leaves out steps as long as a difference stays. It returns false if the difference does not occur again.
func shrink(t testing.TB, d *difference) (*difference, bool) {
	best := d
	end := time.Now().Add(shrinkFor)
	fails := func(script []string) bool {
		if time.Now().After(end) {
			return false
		}
		e, err := replay(t, script, false, d.world)
		if err != nil || e == nil {
			return false
		}
		best = e
		return true
	}
	first, rest := d.script[:2], d.script[2:] // the beginning stays
	reproduced := false
	for n := 2; n < len(rest)*2; n *= 4 { // most differences take few steps
		if fails(append(first[:2:2], rest[max(0, len(rest)-n):]...)) {
			reproduced = true
			break
		}
	}
	if !reproduced && !fails(d.script) {
		return d, false
	}
	script := best.script[2:]
	for size := len(script) / 2; size > 0; size /= 2 {
		for from := 0; from+size < len(script); {
			fewer := append(append([]string(nil), script[:from]...), script[from+size:]...)
			if fails(append(first[:2:2], fewer...)) {
				script = best.script[2:]
			} else {
				from += size
			}
		}
	}
	return best, true
}
