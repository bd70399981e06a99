// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestNoiseIsTold has several rows; the repetitions of one row differ. This row and every ratio with it are
// marked; others are not.
func TestNoiseIsTold(t *testing.T) {
	s, n := fixed(4, 2), 0.0
	s.Rows[1].Run = func(t *Trial) error { n++; t.Report("rate", n); return nil }
	r := run(t, s)
	if len(r.Noise) != 1 || !strings.Contains(r.Noise[0], "2 of 5 figures") {
		t.Errorf("noise %q", r.Noise)
	}
	if !r.Cell("row", "a", "rate").Noisy || r.Cell("limit", "a", "rate").Noisy || !r.Ratios[0].Noisy {
		t.Errorf("row %+v, limit %+v, ratio %+v", r.Cell("row", "a", "rate"), r.Cell("limit", "a", "rate"), r.Ratios[0])
	}
	var text bytes.Buffer
	if err := r.WriteTable(&text); err != nil || !strings.Contains(text.String(), " ~") || !strings.Contains(text.String(), "NOISY") {
		t.Errorf("error %v, table\n%s", err, text.String())
	}
	if chart := string(r.Chart()); strings.Count(chart, ">~") != 2 {
		t.Errorf("the chart does not mark two figures:\n%s", chart)
	}
}

// TestSpeedCancelsOut changes the speed of the machine between repetitions. The figures change, and their ratios
// do not.
func TestSpeedCancelsOut(t *testing.T) {
	s, speed := fixed(4, 2), 1.0
	s.Rows[0].Run = func(t *Trial) error { speed *= 1.5; t.Report("rate", 4*speed); return nil }
	s.Rows[1].Run = func(t *Trial) error { t.Report("rate", 2*speed); return nil }
	s.Points = s.Points[:1]
	r := run(t, s)
	c := r.Cell("row", "a", "rate")
	if c.Noisy || c.Spread != 0 || c.Relative != 0.5 || c.Share != 0.5 || c.Raw[0] == c.Raw[1] || r.Ratios[0].Noisy {
		t.Errorf("%+v, %+v", c, r.Ratios[0])
	}
	// The divisors have no figures other than their own.
	var text bytes.Buffer
	r.WriteMarkdown(&text)
	if c := r.Cell("limit", "a", "rate"); !c.Noisy || c.Relative != 1 || !strings.Contains(text.String(), "| limit | ~9.00 (1.00) ±42% |") || !strings.Contains(r.legend(), "in other rows than the first") {
		t.Errorf("%+v\n%s", c, text.String())
	}
}

// TestChartOfNothing: figures of 0 are drawn, the title names the metric, and long names have room.
func TestChartOfNothing(t *testing.T) {
	s := fixed(0, 0)
	s.Rows[1].Name = strings.Repeat("long ", 12)
	chart := string(run(t, s).Chart())
	if strings.Count(chart, ">0.00") != 5 || !strings.Contains(chart, ": rate, ") || strings.Contains(chart, "NaN") {
		t.Errorf("no zeros, or not what they count:\n%s", chart)
	}
	if !strings.Contains(chart, `viewBox="0 0 1028 `) { // 60 letters and bars
		t.Errorf("no room for a long name:\n%s", chart)
	}
}

// TestChartHoldsItsBars: nothing is drawn outside the picture, whatever the spread of the repetitions.
func TestChartHoldsItsBars(t *testing.T) {
	s, n := fixed(4, 2), 0.0
	s.Rows[1].Run = func(t *Trial) error { n++; t.Report("rate", n*n*n); return nil }
	var chart struct {
		Lines []struct {
			From float64 `xml:"x1,attr"`
			To   float64 `xml:"x2,attr"`
		} `xml:"line"`
		Text []struct {
			X float64 `xml:"x,attr"`
		} `xml:"text"`
	}
	if err := xml.Unmarshal(run(t, s).Chart(), &chart); err != nil || len(chart.Lines) == 0 {
		t.Fatal(err, chart)
	}
	for _, l := range chart.Lines {
		if l.From < chartLabel || l.To > chartLabel+chartBars+chartOver {
			t.Errorf("a whisker from %g to %g", l.From, l.To)
		}
	}
	for _, w := range chart.Text {
		if w.X > chartLabel+chartBars+chartOver+6 {
			t.Errorf("words at %g", w.X)
		}
	}
}

// TestNoiseOfRatios: a ratio may vary more than its figures, and figures may vary more than their ratio.
func TestNoiseOfRatios(t *testing.T) {
	cell := func(values, per []float64) []Cell { return []Cell{{Point: "a", Metric: "rate", Raw: values, Per: per}} }
	s := fixed(0, 0)
	s.Yardstick = true
	s.Comparisons = []Comparison{
		{What: "up / down", Row: "up", Against: "down", Published: 1}, {What: "up / up", Row: "up", Against: "up", Published: 1},
		{What: "ns added by up", Row: "up", Against: "down", Added: true, Published: 1}, {What: "ns added by half", Row: "half", Added: true, Published: 1},
		{What: "half", Row: "half", Published: 1},
	}
	r := newResult(s, Options{Reps: 3})
	r.Rows = []ResultRow{
		{Name: "up", Cells: cell([]float64{0.96, 1, 1.04}, []float64{1.2, 1.2, 1.2})},
		{Name: "down", Cells: cell([]float64{1.04, 1, 0.96}, []float64{1.2, 1.2, 1.2})},
		{Name: "half", Cells: cell([]float64{1, 1.2, 1.5}, []float64{2, 2.4, 3})}, // a machine that changes its speed
		{Name: "rare", Cells: cell([]float64{0, 0, 5}, nil)},
	}
	r.summarize(s)
	got := ""
	for _, q := range r.Ratios {
		got += fmt.Sprintf("%s %v; ", q.What, q.Noisy)
	}
	if want := "up / down true; up / up false; ns added by up true; ns added by half true; half true; "; got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	for _, row := range []string{"up", "down", "half"} {
		if c := r.Cell(row, "a", "rate"); c.Noisy {
			t.Errorf("%s %+v", row, c)
		}
	}
	if c := r.Cell("rare", "a", "rate"); !c.Noisy || c.Median != 0 || c.Spread != 2 {
		t.Errorf("what happened once in three times: %+v", c)
	}
}

// TestUnitOfRows: without a yardstick, rows are compared with the suite's first one, independent of the
// selection. If it fails, they have no common unit.
func TestUnitOfRows(t *testing.T) {
	s := fixed(4, 2)
	r, err := Run(context.Background(), s, Options{Reps: 3, Rows: regexp.MustCompile("^row$")})
	if c := r.Cell("row", "a", "rate"); err != nil || c.Relative != 0.5 {
		t.Errorf("%+v, error %v", c, err)
	}
	s.Rows[0].Run = func(*Trial) error { return errors.New("no room") }
	if c := run(t, s).Cell("row", "a", "rate"); c.Relative != 2 || len(c.Per) != 0 {
		t.Errorf("without a first row: %+v", c)
	}
	n := 0
	s.Rows[0].Run = func(t *Trial) error {
		if n++; n == 3 { // in the second repetition at a
			return errors.New("no room")
		}
		t.Report("rate", 4)
		return nil
	}
	if c := run(t, s).Cell("row", "a", "rate"); c.Relative != 0.5 || c.Spread != 0 || len(c.Raw) != 3 || !c.Noisy {
		t.Errorf("without a first row once: %+v", c)
	}
}

// TestElsewhere: a trial with work on another CPU is repeated. If it happens again, the row reports it.
func TestElsewhere(t *testing.T) {
	s, away := fixed(4, 2), 0
	s.Points = s.Points[:1]
	s.Rows[1].Run = func(t *Trial) error {
		away--
		t.away = away >= 0
		t.Report("rate", 2)
		return nil
	}
	for n, noted := range map[int]int{0: 0, 1: 0, 2: 1} { // attempts; a repetition has two
		away = n
		if r := run(t, s); len(r.row(&s.Rows[1]).Notes) != noted || len(r.Cell("row", "a", "rate").Raw) != 3 {
			t.Errorf("%d: %+v", n, r.Rows[1])
		}
	}
}

// TestFewRepetitions: two repetitions have no meaningful spread.
func TestFewRepetitions(t *testing.T) {
	r, err := Run(context.Background(), fixed(4, 2), Options{Reps: 2})
	if c := r.Cell("row", "a", "rate"); err != nil || !c.Noisy {
		t.Errorf("%+v, error %v", c, err)
	}
}

// TestNoiseOfMetrics counts noisy figures; a row may have several at a point.
func TestNoiseOfMetrics(t *testing.T) {
	s, n := fixed(4, 2), 0.0
	s.Metrics = append(s.Metrics, Metric{Name: "other"}, Metric{Name: "third"})
	s.Rows = []Row{{Name: "row", Run: func(t *Trial) error {
		n++
		for _, m := range s.Metrics {
			t.Report(m.Name, n)
		}
		return nil
	}}, {Name: "again", Run: func(t *Trial) error { n++; t.Report("rate", 1); return nil }}}
	s.Comparisons = nil
	for i := range s.Metrics {
		s.Metrics[i].Absolute = true
	}
	if r := run(t, s); len(r.Noise) != 1 || !strings.Contains(r.Noise[0], "6 of 8 figures") {
		t.Errorf("noise %q", r.Noise)
	}
}

// TestUnheldRate: if the sender did not hold its rate, the figure is noisy even if its repetitions agree, and
// the run reports it.
func TestUnheldRate(t *testing.T) {
	for offered, want := range map[float64]bool{1000: false, 995: false, 900: true, 1100: true} {
		if got := (rates{offered: offered}).missedRate(1000); got != want {
			t.Errorf("%g of 1000 a second: %v", offered, got)
		}
	}
	s := fixed(4, 2)
	s.Rows[1].Run = func(t *Trial) error {
		t.missedRate = t.Point.Name == "a"
		t.Report("rate", 2)
		return nil
	}
	r := run(t, s)
	if a, b := r.Cell("row", "a", "rate"), r.Cell("row", "b", "rate"); !a.Noisy || a.Unheld != 3 || b.Noisy {
		t.Errorf("%+v, %+v", a, b)
	}
	if len(r.Noise) != 1 || !strings.Contains(r.Noise[0], "did not hold the rate of 1 of") {
		t.Errorf("noise %q", r.Noise)
	}
}

// TestLatencyRow runs a short trial. A share of its maximum is a rate that the sender can hold.
func TestLatencyRow(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	r, err := Run(t.Context(), latencySuite(), Options{Reps: 1, Seconds: 0.1, Rows: regexp.MustCompile("redirect"), Points: regexp.MustCompile("^10 %")})
	if err != nil {
		t.Fatal(err)
	}
	if c := r.Rows[0].findCell("10 %", "p50"); c == nil || c.Median <= 0 {
		t.Errorf("%+v", r.Rows)
	}
}
