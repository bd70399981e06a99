// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// fixed is a suite whose rows report what they are told.
func fixed(limit, row float64) Suite {
	say := func(v float64) func(*Trial) error {
		return func(t *Trial) error { t.Report("rate", v); return nil }
	}
	return Suite{
		Name: "fixed", Title: "A suite that needs no network", About: "Nothing is measured.",
		Points: []Point{{Name: "a"}, {Name: "b"}}, Metrics: []Metric{{Name: "rate", Unit: "Mpps", Digits: 2}}, Limit: "limit",
		Rows: []Row{
			{Name: "limit", Run: say(limit)},
			{Name: "row", Run: say(row)},
			{Name: "broken", Run: func(*Trial) error { return errors.New("a cable is missing") }},
			{Name: "absent", Absent: func(p Point) string {
				if p.Name == "a" {
					return "the moon is full"
				}
				return ""
			}, Run: say(limit / 4)},
		},
		Comparisons: []Comparison{{What: "row / limit", Row: "row", Against: "limit", Published: 1, PublishedAgainst: 4, Source: "a book", Why: "books are old."}},
		NotShown:    []string{"Anything."},
	}
}

func run(t *testing.T, s Suite) *Result {
	t.Helper()
	r, err := Run(context.Background(), s, Options{Reps: 3})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestResult(t *testing.T) {
	r := run(t, fixed(4, 2))
	c := r.Cell("row", "a", "rate")
	if c == nil || c.Median != 2 || c.Share != 0.5 || len(c.Raw) != 3 || c.Spread != 0 {
		t.Errorf("cell %+v", c)
	}
	if len(r.Ratios) != 1 || r.Ratios[0].Ours != 0.5 || r.Ratios[0].OfRatios != 2 {
		t.Errorf("ratios %+v", r.Ratios)
	}
	if r.Cell("absent", "a", "rate") != nil || r.Cell("absent", "b", "rate") == nil {
		t.Error("the absent point was measured, or the other was not")
	}
	if len(r.Noise) != 0 {
		t.Errorf("constant figures are called noisy: %v", r.Noise)
	}
}

func TestNoiseIsTold(t *testing.T) {
	s, n := fixed(4, 2), 0.0
	for i := range s.Rows {
		s.Rows[i].Run = func(t *Trial) error { n++; t.Report("rate", n); return nil }
	}
	if r := run(t, s); len(r.Noise) != 1 || !strings.Contains(r.Noise[0], "differ") {
		t.Errorf("noise %v", r.Noise)
	}
}

func TestCheck(t *testing.T) {
	then := run(t, fixed(4, 2))
	if moves := Check(then, run(t, fixed(8, 4))); len(moves) != 0 {
		t.Errorf("a machine twice as fast: %+v", moves)
	}
	moves := Check(then, run(t, fixed(4, 1)))
	if len(moves) != 2 || !moves[0].Worse || moves[0].Row != "row" || moves[0].Change != -0.5 {
		t.Errorf("half the rate: %+v", moves)
	}
	if moves = Check(then, run(t, fixed(4, 3))); len(moves) != 2 || moves[0].Worse {
		t.Errorf("a better rate: %+v", moves)
	}
}

func TestTables(t *testing.T) {
	r := run(t, fixed(4, 2))
	var text, markdown bytes.Buffer
	if err := r.WriteTable(&text); err != nil {
		t.Fatal(err)
	}
	r.WriteMarkdown(&markdown)
	for _, out := range []string{text.String(), markdown.String()} {
		for _, want := range []string{"2.00 (0.50)", "the moon is full", "a cable is missing", "a book"} {
			if !strings.Contains(out, want) {
				t.Errorf("%q is missing in:\n%s", want, out)
			}
		}
	}
	d := xml.NewDecoder(bytes.NewReader(r.Chart()))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the chart is not XML: %v", err)
		}
	}
}

func TestSaveAndDocs(t *testing.T) {
	dir := t.TempDir()
	r := run(t, fixed(4, 2))
	r.Suite = "packets" // a suite that the page knows
	if err := r.Save(filepath.Join(dir, "packets.json")); err != nil {
		t.Fatal(err)
	}
	page := filepath.Join(dir, "benchmarks.md")
	if err := WriteDocs(dir, page); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"## packets", "packets.svg", "## Not measured yet", "sluice bench fnat64"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("%q is missing in the page", want)
		}
	}
}

// TestSuitesAreConsistent checks names that refer to each other, and that every
// configuration of Sluice's own rows is a valid one.
func TestSuitesAreConsistent(t *testing.T) {
	for _, s := range Suites() {
		rows, points, metrics := map[string]bool{}, map[string]bool{}, map[string]bool{}
		for _, r := range s.Rows {
			if rows[r.Name] {
				t.Errorf("%s: two rows %q", s.Name, r.Name)
			}
			rows[r.Name] = true
		}
		for _, p := range s.Points {
			points[p.Name] = true
		}
		for _, m := range s.Metrics {
			metrics[m.Name] = true
		}
		if s.Limit != "" && !rows[s.Limit] {
			t.Errorf("%s: limit row %q", s.Name, s.Limit)
		}
		for _, c := range s.Comparisons {
			if !rows[c.Row] || !rows[c.Against] || c.Point != "" && !points[c.Point] || c.Metric != "" && !metrics[c.Metric] {
				t.Errorf("%s: comparison %q names what is not there", s.Name, c.What)
			}
		}
		if len(s.NotShown) == 0 || s.About == "" {
			t.Errorf("%s: does not say what it measures and what not", s.Name)
		}
	}
	for _, yaml := range []string{
		service{mode: "dnat", protocol: "udp", port: 53, vip: vip4, backend: server4}.yaml(Point{Value: 1}),
		service{mode: "fullnat", protocol: "udp", attach: "xdp", port: 53, vip: vip6, backend: server4}.yaml(Point{Value: 1}),
		service{mode: "fullnat", protocol: "udp", attach: "tc", port: 53, vip: vip4, backend: server6}.yaml(Point{Value: 1}),
		service{mode: "dsr", protocol: "tcp", attach: "xdp", port: 80, vip: vip4, backend: server4}.yaml(Point{Value: 1}),
		snatYAML("xdp")(Point{Value: 4_000_000}),
		manyServices(Point{Name: "1,000 services", Value: 1000}, "xdp"),
		manyServices(Point{Name: "1,000 backends", Value: 1000}, ""),
	} {
		if _, err := config.Decode("bench", []byte(yaml)); err != nil {
			t.Errorf("%v in\n%.300s", err, yaml)
		}
	}
}

// TestRows runs short trials of rows that stand for the others.
func TestRows(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables)
	for suite, rows := range map[string]string{
		"packets": "redirect|^kernel forwarding|^nft DSR", "flows": "redirect|^kernel", "drop": "limit|nft ingress",
	} {
		s, err := Find(suite)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Run(context.Background(), s, Options{Reps: 1, Seconds: 0.05, Rows: regexp.MustCompile(rows), Points: regexp.MustCompile("^(1 |HTTP)")})
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range r.Rows {
			if len(row.Cells) != 1 || row.Cells[0].Median <= 0 {
				t.Errorf("%s: %s: %+v, absent %v", suite, row.Name, row.Cells, row.Absent)
			}
		}
	}
}
