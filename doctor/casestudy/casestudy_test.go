// SPDX-License-Identifier: Apache-2.0

package casestudy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/casestudy"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/trace"
)

// tableMax is the setting of the whole host that the story changes.
const tableMax = "/proc/sys/net/netfilter/nf_conntrack_max"

// program builds sluice, which plays the client and the gateway.
func program(t *testing.T) string {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Conntrack, labtest.Tool("nft"), labtest.Tool("go"))
	if st, err := os.Stat(tableMax); err != nil || st.Mode()&0o200 == 0 {
		labtest.Lacks(t, "nf_conntrack_max can be written only in the host's first network namespace")
	}
	binary := filepath.Join(t.TempDir(), "sluice")
	build := exec.Command("go", "build", "-o", binary, "github.com/sluice-lb/sluice/cmd/sluice")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the client: %v\n%s", err, out)
	}
	return binary
}

// TestCaseStudy plays the story in small: the doctor names the full table first,
// three counts of the refused SYNs are equal, the tuned gateway refuses nothing,
// and neither does the eBPF datapath with the small table, which stays empty.
func TestCaseStudy(t *testing.T) {
	binary := program(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	r, err := casestudy.Play(ctx, casestudy.Options{Sluice: binary, Connections: 1500, Requests: 4000, CollapseFor: 4 * time.Second, Progress: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	if !r.FoundFirst {
		t.Errorf("the doctor did not name the full table first:\n%v", r.Conclusion)
	}
	// A full table sometimes drops connections without an answer, and refuses the answer later.
	i, answers := r.Identity, answersRefused(r.Drops)
	if syns := i.SYNs; answers > 0 && max(syns, i.Dropped)-min(syns, i.Dropped) <= answers {
		i.SYNs = i.Dropped
	}
	if !i.Exact() || i.Dropped == 0 {
		t.Errorf("the same packets were counted differently: %+v; every drop: %s", r.Identity, everyDrop(t, r.Drops))
	}
	runs := map[string]casestudy.Run{}
	for _, run := range r.Runs {
		runs[run.Name] = run
	}
	for _, name := range []string{"before", "after", "beyond"} {
		if run := runs[name]; run.Complete != 4000 || run.Failed != 0 || run.Refused != 0 {
			t.Errorf("%s: %d of 4000 complete, %d failed, %d refused; notes %q", name, run.Complete, run.Failed, run.Refused, r.Notes)
		}
	}
	if run := runs["collapse"]; run.Complete > 1100 {
		t.Errorf("collapse: %d requests complete with a table of 1000", run.Complete)
	}
	if after, beyond := runs["after"].Entries, runs["beyond"].Entries; after < 1000 || beyond != 0 {
		t.Errorf("%d entries after DNAT by nftables, %d after that by eBPF, want more than 1000 and none", after, beyond)
	}
	if flows := runs["beyond"].Flows; flows < 1000 || flows > 4000 {
		t.Errorf("sluice conns counts %d flows of the eBPF datapath after 4000 connections", flows)
	}
}

// TestDocker runs the case study with a port published by a real Docker daemon. The first line names the full
// table, the tuner's limit repairs it, and most of the request rate returns.
func TestDocker(t *testing.T) {
	if os.Getenv("SLUICE_DOCKER") == "" {
		t.Skip("SLUICE_DOCKER=1 starts a Docker daemon")
	}
	for _, tool := range []string{"dockerd", "docker", "iptables-nft", "nginx"} {
		labtest.Require(t, labtest.Tool(tool))
	}
	binary := program(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	r, err := casestudy.Play(ctx, casestudy.Options{Sluice: binary, Docker: true, Connections: 1500, Requests: 4000, CollapseFor: 4 * time.Second, Progress: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	if !r.FoundFirst {
		t.Errorf("the doctor did not name the full table first:\n%v", r.Conclusion)
	}
	if !r.Identity.Exact() || r.Identity.Dropped == 0 {
		t.Errorf("the same packets were counted differently: %+v; every drop: %s", r.Identity, everyDrop(t, r.Drops))
	}
	runs := map[string]casestudy.Run{}
	for _, run := range r.Runs {
		runs[run.Name] = run
	}
	before, after := runs["before"], runs["after"]
	for _, run := range []casestudy.Run{before, after, runs["beyond"]} {
		if run.Complete != 4000 || run.Failed != 0 || run.Refused != 0 {
			t.Errorf("%s: %d of 4000 complete, %d failed, %d refused; notes %q", run.Name, run.Complete, run.Failed, run.Refused, r.Notes)
		}
	}
	if beyond := runs["beyond"]; beyond.Entries > 100 || beyond.Flows < 1000 {
		t.Errorf("%d entries of connection tracking and %d flows with eBPF before the container", beyond.Entries, beyond.Flows)
	}
	if run := runs["collapse"]; run.Complete > 2000 || run.Refused == 0 {
		t.Errorf("collapse: %d requests complete with a table of 1000, %d refused", run.Complete, run.Refused)
	}
	if after.RequestsPerSecond < before.RequestsPerSecond/2 {
		t.Errorf("%.0f requests/s after the remedy, %.0f before the collapse", after.RequestsPerSecond, before.RequestsPerSecond)
	}
}

// everyDrop is what to read when the counts differ.
// answersRefused counts packets of the server's among those that the full table refused.
func answersRefused(r *trace.DropReport) (n uint64) {
	for _, c := range r.Groups {
		for _, p := range c.Places {
			if c.Cause.ID == "table-full" && p.Interface == "lan0" {
				n += p.Packets
			}
		}
	}
	return n
}

func everyDrop(t *testing.T, r *trace.DropReport) string {
	t.Helper()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestKilledCaseStudy kills the command at its worst moment. The host's limit is restored, and the next lab
// removes the rest.
func TestKilledCaseStudy(t *testing.T) {
	binary := program(t)
	limit := func() string {
		b, err := os.ReadFile(tableMax)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	// Take the command's lock, so that no other process changes the limit while it is read.
	restore, err := faults.Borrow(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	before := limit()
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "lab", "case-study", "--allow-host-sysctl", "--connections", "500", "--requests", "500")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, 5*time.Minute, "the small table", func() error {
		if now := limit(); now != "1000" {
			return fmt.Errorf("the limit is %s", now)
		}
		return nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	labtest.Eventually(t, time.Minute, "the old limit", func() error {
		if now := limit(); now != before {
			return fmt.Errorf("the limit is %s, was %s", now, before)
		}
		return nil
	})
	next := labtest.New(t, faults.Topology("afterkill"))
	records, err := lab.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range records {
		if r.Topology.Name == "casestudy" && !r.Live {
			t.Errorf("lab %s of the killed command is still there beside %s", r.ID, next.ID())
		}
	}
}
