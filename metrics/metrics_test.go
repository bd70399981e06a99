// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/cluster"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/health"
	"github.com/sluice-lb/sluice/metrics"
	"github.com/sluice-lb/sluice/pcp"
)

var update = flag.Bool("update", false, "rewrite testdata/metrics.txt")

type fixed struct {
	name     string
	counters *datapath.Counters
	err      error
}

func (f fixed) Name() string { return f.name }

func (f fixed) Counters(context.Context) (*datapath.Counters, error) { return f.counters, f.err }

type statuses []health.Status

func (s statuses) Snapshot() []health.Status { return s }

type asked struct{}

func (asked) Counts() map[pcp.Count]uint64 {
	return map[pcp.Count]uint64{{Opcode: "map", Result: "success"}: 20, {Opcode: "other", Result: "unsupp-version"}: 3}
}

func (asked) Use() map[string]int { return map[string]int{"office": 12, "v6only": 0} }

type listens struct{}

func (listens) Refused() uint64    { return 17 }
func (listens) Expires() time.Time { return time.Unix(1_800_000_000, 0) }

func sources() metrics.Sources {
	since := time.Unix(1_700_000_000, 500_000_000)
	return metrics.Sources{
		Version: "v1.2.3",
		Datapaths: []metrics.Datapath{
			fixed{name: "ebpf", counters: &datapath.Counters{
				Services: []datapath.ServiceCounters{{Name: "web", Connections: 1000, Packets: 12_345_678_901, Bytes: 9_876_543_210_123, Refused: 7, Active: 42,
					Backends: []datapath.BackendCounters{
						{Name: "a", Connections: 600, Packets: 7_000_000_000, Bytes: 5_000_000_000_000, Active: 30},
						{Name: `odd "name" \`, Connections: 400, Active: -1},
					}}},
				NAT:     []datapath.RuleCounters{{Name: "office", Packets: 5, Bytes: 500}},
				Reasons: []datapath.ReasonCounter{{Family: "ipv4", Action: "drop", Reason: "table-full", Packets: 3}, {Family: "ipv6", Action: "forward", Reason: "ok", Packets: 9}},
				Tables:  []datapath.TableUse{{Name: "flows", Used: 100, Size: 65536, Bytes: 1 << 24}},
				Missed:  3,
			}},
			fixed{name: "nftables", counters: &datapath.Counters{
				Services: []datapath.ServiceCounters{{Name: "sip", Active: -1}},
				Rules:    []datapath.RuleCounters{{Name: "rule-1", Packets: 8, Bytes: 800}},
			}},
			fixed{name: "broken", err: errors.New("no answer")},
		},
		Health: statuses{
			{Service: "web", Backend: "a", Check: config.CheckHTTP, Up: true, Known: true, Since: since, Probes: 100, Failures: 1, Latency: 3 * time.Millisecond},
			{Service: "web", Backend: "b", Check: config.CheckHTTP, Since: since},
		},
		PCP:     asked{},
		Cluster: fixedCluster{},
		Announcements: func() (map[announce.State]int, map[announce.State]uint64) {
			return map[announce.State]int{announce.Announced: 3, announce.Withdrawn: 1}, map[announce.State]uint64{announce.Announced: 5, announce.Withdrawn: 2}
		},
		Addresses: func() map[string]int { return map[string]int{"held": 5, "foreign": 1} },
		API:       listens{},
		LastApply: func() metrics.Apply {
			return metrics.Apply{Revision: 12, At: since, Err: errors.New("refused"), Changes: []*datapath.Change{{Datapath: "ebpf", Duration: 1500 * time.Microsecond}}}
		},
	}
}

// TestPage compares the page with testdata/metrics.txt.
func TestPage(t *testing.T) {
	w := httptest.NewRecorder()
	metrics.Handler(sources()).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	body, _ := io.ReadAll(w.Result().Body)
	var lines []string
	for line := range strings.Lines(strings.ReplaceAll(string(body), runtime.Version(), "GO")) {
		if regexp.MustCompile(`^(# \w+ )?sluice_`).MatchString(line) {
			lines = append(lines, line)
		}
	}
	got := strings.Join(lines, "")
	const file = "testdata/metrics.txt"
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestLint(t *testing.T) {
	problems, err := testutil.CollectAndLint(metrics.New(sources()))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if n := testutil.CollectAndCount(metrics.New(sources())); n < 30 {
		t.Errorf("%d samples", n)
	}
}

// TestNothing: a gateway that has just begun has a page too.
func TestNothing(t *testing.T) {
	if n := testutil.CollectAndCount(metrics.New(metrics.Sources{LastApply: func() metrics.Apply { return metrics.Apply{} }})); n != 2 {
		t.Errorf("%d samples, want build_info and apply_revision", n)
	}
}

// BenchmarkPage: the page of 10,000 services with 4 checked backends each.
func BenchmarkPage(b *testing.B) {
	c, states := &datapath.Counters{}, statuses{}
	for i := range 10_000 {
		s := datapath.ServiceCounters{Name: fmt.Sprint("service-", i)}
		for j := range 4 {
			s.Backends = append(s.Backends, datapath.BackendCounters{Name: fmt.Sprint("backend-", j)})
			states = append(states, health.Status{Service: s.Name, Backend: s.Backends[j].Name, Check: config.CheckTCP, Known: true})
		}
		c.Services = append(c.Services, s)
	}
	h := metrics.Handler(metrics.Sources{Datapaths: []metrics.Datapath{fixed{name: "ebpf", counters: c}}, Health: states})
	for b.Loop() {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		b.ReportMetric(float64(w.Body.Len())/1e6, "MB")
	}
}

// fixedCluster is a connection to a store.
type fixedCluster struct{}

func (fixedCluster) Status() cluster.Status {
	return cluster.Status{Settings: cluster.Settings{Store: &config.ClusterStore{}}, Connected: true, Document: 18, InForce: 17, Counts: cluster.Counts{Connections: 3, Failures: 2, Refused: 1}}
}

func (fixedCluster) Peers() map[string]cluster.Peer {
	return map[string]cluster.Peer{"n1": {Live: true, Revision: 17}, "n2": {Live: true, Revision: 18, Drains: true}, "n3": {}}
}
