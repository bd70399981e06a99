// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// Result is one run of a suite with every raw repetition.
type Result struct {
	Suite       string      `json:"suite"`
	Title       string      `json:"title"`
	Command     string      `json:"command"`
	Started     time.Time   `json:"started"`
	Duration    string      `json:"duration"`
	Reps        int         `json:"reps"`
	Seconds     float64     `json:"seconds"`
	CPU         int         `json:"cpu"`
	Environment Environment `json:"environment"`
	Points      []string    `json:"points"`
	Metrics     []Metric    `json:"metrics"`
	Limit       string      `json:"limit,omitempty"`
	Rows        []ResultRow `json:"rows"`
	Ratios      []Ratio     `json:"ratios,omitempty"`
	// Foreign is, for each run, how many CPUs' worth of time went to programs
	// that are not part of the benchmark, stolen time included.
	Foreign []float64 `json:"foreign_cpus"`
	// Noise says in words why the figures should not be trusted; empty when quiet.
	Noise []string `json:"noise,omitempty"`
}

// ResultRow is one row with its cells.
type ResultRow struct {
	Name   string            `json:"name"`
	About  string            `json:"about,omitempty"`
	Cells  []Cell            `json:"cells,omitempty"`
	Absent map[string]string `json:"absent,omitempty"` // point → why it was not measured
	Notes  []string          `json:"notes,omitempty"`
}

// Cell is one figure.
type Cell struct {
	Point  string    `json:"point"`
	Metric string    `json:"metric"`
	Raw    []float64 `json:"raw"`
	Median float64   `json:"median"`
	// Spread is (max − min) / median of the raw values.
	Spread float64 `json:"spread"`
	// Share of the limit row's median at the same point; 0 when there is none.
	Share float64 `json:"share,omitempty"`
}

// Ratio is one comparison with a published figure.
type Ratio struct {
	What      string  `json:"what"`
	Ours      float64 `json:"ours"`
	Published float64 `json:"published"`
	// OfRatios is Ours / Published.
	OfRatios float64 `json:"ratio_of_ratios"`
	Source   string  `json:"source"`
}

func newResult(s Suite, o Options) *Result {
	r := &Result{
		Suite: s.Name, Title: s.Title, Command: o.Command, Started: time.Now().UTC().Truncate(time.Second),
		Reps: o.Reps, Seconds: o.Seconds, CPU: o.CPU, Environment: readEnvironment(), Metrics: s.Metrics, Limit: s.Limit,
	}
	for _, p := range s.Points {
		r.Points = append(r.Points, p.Name)
	}
	return r
}

// row returns the result's row of that name, appending it when it is new.
func (r *Result) row(row *Row) *ResultRow {
	for i := range r.Rows {
		if r.Rows[i].Name == row.Name {
			return &r.Rows[i]
		}
	}
	r.Rows = append(r.Rows, ResultRow{Name: row.Name, About: row.About})
	return &r.Rows[len(r.Rows)-1]
}

func (r *ResultRow) absent(point, why string) {
	if r.Absent == nil {
		r.Absent = map[string]string{}
	}
	r.Absent[point] = why
}

func (r *ResultRow) fail(point string, err error) { r.absent(point, "failed: "+err.Error()) }

func (r *ResultRow) note(n string) {
	if !slices.Contains(r.Notes, n) {
		r.Notes = append(r.Notes, n)
	}
}

func (r *ResultRow) add(point, metric string, v float64) {
	c := r.cell(point, metric)
	if c == nil {
		r.Cells = append(r.Cells, Cell{Point: point, Metric: metric})
		c = &r.Cells[len(r.Cells)-1]
	}
	c.Raw = append(c.Raw, v)
}

func (r *ResultRow) cell(point, metric string) *Cell {
	for i := range r.Cells {
		if r.Cells[i].Point == point && r.Cells[i].Metric == metric {
			return &r.Cells[i]
		}
	}
	return nil
}

// Cell returns the figure of a row at a point, nil when it was not measured.
func (r *Result) Cell(row, point, metric string) *Cell {
	for i := range r.Rows {
		if r.Rows[i].Name == row {
			return r.Rows[i].cell(point, metric)
		}
	}
	return nil
}

// Thresholds of a quiet run.
const (
	noisySpread  = 0.05 // median spread over all cells
	noisyForeign = 0.10 // CPUs' worth of other programs, median over the runs
)

// summarize computes medians, spreads, shares and ratios.
func (r *Result) summarize(s Suite) {
	var spreads []float64
	for i := range r.Rows {
		for j := range r.Rows[i].Cells {
			c := &r.Rows[i].Cells[j]
			c.Median = median(c.Raw)
			if c.Median != 0 {
				c.Spread = (slices.Max(c.Raw) - slices.Min(c.Raw)) / c.Median
			}
			spreads = append(spreads, c.Spread)
		}
	}
	if s.Limit != "" && len(s.Metrics) > 0 {
		for i := range r.Rows {
			for j := range r.Rows[i].Cells {
				c := &r.Rows[i].Cells[j]
				if limit := r.Cell(s.Limit, c.Point, s.Metrics[0].Name); limit != nil && c.Metric == s.Metrics[0].Name && limit.Median > 0 {
					c.Share = c.Median / limit.Median
				}
			}
		}
	}
	r.compare(s)
	if m := median(spreads); m > noisySpread {
		r.Noise = append(r.Noise, fmt.Sprintf("repetitions of the same figure differ by %.0f %% (median of all cells; quiet is below %.0f %%)", m*100, noisySpread*100))
	}
	if f := median(r.Foreign); f > noisyForeign && s.WallClock {
		r.Noise = append(r.Noise, fmt.Sprintf("other programs used %.2f CPUs meanwhile (quiet is below %.2f)", f, noisyForeign))
	}
	if r.Reps < 3 {
		r.Noise = append(r.Noise, fmt.Sprintf("only %d repetition(s): noise cannot be told", r.Reps))
	}
}

func (r *Result) compare(s Suite) {
	for _, c := range s.Comparisons {
		point, metric := c.Point, c.Metric
		if point == "" {
			point = s.Points[0].Name
		}
		if metric == "" {
			metric = s.Metrics[0].Name
		}
		a, b := r.Cell(c.Row, point, metric), r.Cell(c.Against, point, metric)
		if a == nil || b == nil || b.Median == 0 {
			continue
		}
		ours, published := a.Median/b.Median, c.Published/c.PublishedAgainst
		r.Ratios = append(r.Ratios, Ratio{What: c.What, Ours: ours, Published: published, OfRatios: ours / published, Source: c.Source})
	}
}

// median returns 0 for no values.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Clone(v)
	slices.Sort(s)
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// format renders a figure with thousands separators.
func format(v float64, digits int) string {
	s := fmt.Sprintf("%.*f", digits, v)
	whole, frac, _ := strings.Cut(s, ".")
	first := 0
	if strings.HasPrefix(whole, "-") {
		first = 1
	}
	for i := len(whole) - 3; i > first; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if frac != "" {
		return whole + "." + frac
	}
	return whole
}

// Save writes the result as JSON.
func (r *Result) Save(path string) error {
	b, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// Load reads a result.
func Load(path string) (*Result, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var r Result
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &r, nil
}
