// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"maps"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/sluice-lb/sluice/load"
)

// TestGuardedRows: every guarded suite, row and point exists.
func TestGuardedRows(t *testing.T) {
	for _, g := range guardedSuites {
		s, err := Find(g.suite)
		if err != nil {
			t.Fatal(err)
		}
		for _, selected := range [][2]string{{g.rows, g.points}, {g.quickRows, g.quickPoints}} {
			o := Options{Rows: withLimit(s, selected[0]), Points: regexp.MustCompile(selected[1])}
			rows := 0
			for _, r := range s.Rows {
				if r.Name != s.Limit && o.Rows.MatchString(r.Name) {
					rows++
				}
			}
			if selected[0] != "" && rows == 0 {
				t.Errorf("%s: no row matches %q", g.suite, selected[0])
			}
			if err := o.Validate(s); err != nil {
				t.Errorf("%s: %v", g.suite, err)
			}
		}
	}
}

// TestGuardTakes: a row below the minimum of its share, or a failed row, is measured again. Its best try counts.
func TestGuardTakes(t *testing.T) {
	run := func(rate float64) *Result {
		r := &Result{Suite: "flows", Limit: "limit", Metrics: []Metric{kflows}}
		r.Rows = []ResultRow{
			{Name: "limit", Cells: []Cell{{Point: "HTTP", Metric: "flows", Relative: 100}}},
			{Name: "a", Cells: []Cell{{Point: "HTTP", Metric: "flows", Relative: rate}}},
			{Name: "b", Absent: map[string]string{"HTTP": failed + "refused"}},
			{Name: "c", Absent: map[string]string{"HTTP": "no such tool"}},
		}
		return r
	}
	o := GuardOptions{Least: 0.85, Committed: Shares{"flows / a / HTTP / flows": 0.6}}
	g := &Guarded{Measured: Shares{}}
	broken := map[string]string{}
	if again := g.addShares(run(30), o, broken); len(again) != 2 || again[0] != "a" || again[1] != "b" || len(broken) != 1 {
		t.Errorf("measured again: %q; broken: %q", again, broken)
	}
	if again := g.addShares(run(52), o, broken); len(again) != 1 {
		t.Errorf("measured again: %q, want b alone", again)
	}
	if got := g.Measured["flows / a / HTTP / flows"]; got != 0.52 {
		t.Errorf("share %g, want the best one", got)
	}
}

// TestGuardForgets: a row that is low in one try does not fail if there is no time to measure it again.
func TestGuardForgets(t *testing.T) {
	o := GuardOptions{Least: 0.5, Committed: Shares{"flows / a": 0.6, "flows / b": 0.6, "drop / c": 0.6}}
	g := &Guarded{Measured: Shares{"flows / a": 0.2, "flows / b": 0.5, "drop / c": 0.2}, Failed: []string{"flows: a: failed"}}
	g.forget("flows", o)
	if want := (Shares{"flows / b": 0.5, "drop / c": 0.2}); !maps.Equal(g.Measured, want) || len(g.Failed) != 0 || len(g.Skipped) != 1 {
		t.Errorf("%+v, want %v measured", g, want)
	}
}

// TestSharesAreKept: saving shares keeps the shares of rows that were not measured.
func TestSharesAreKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shares.json")
	for _, s := range []Shares{{"a": 0.5, "b": 0.25}, {"b": 0.75}} {
		if err := s.Save(path); err != nil {
			t.Fatal(err)
		}
	}
	got, err := LoadShares(path)
	if want := (Shares{"a": 0.5, "b": 0.75}); err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	committed, err := LoadShares("shares.json")
	if err != nil || len(committed) == 0 {
		t.Errorf("committed shares: %d, %v", len(committed), err)
	}
}

// TestFaultyFlows: a measurement fails if more than one connection in a thousand failed or was repeated.
func TestFaultyFlows(t *testing.T) {
	for _, c := range []struct {
		counts load.FlowCounts
		once   bool
		ok     bool
	}{
		{load.FlowCounts{Started: 10_000, GaveUpSYN: 4, RepeatedSYN: 6}, false, true},
		{load.FlowCounts{Started: 10_000, GaveUpSYN: 5, RepeatedFIN: 6}, false, false},
		{load.FlowCounts{Started: 10_000, Resets: 11}, false, false},
		{load.FlowCounts{Started: 20_000}, true, true},
		{load.FlowCounts{Started: 20_001}, true, false},
	} {
		r := flowRates{counts: c.counts}
		if err := r.faults(c.once, 20_000); (err == nil) != c.ok {
			t.Errorf("%+v, once %v: %v", c.counts, c.once, err)
		}
	}
}
