// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
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
	Yardstick   bool        `json:"yardstick,omitempty"`
	// Beside reports that the yardstick ran at the same time. In older results it ran before and after.
	Beside bool `json:"yardstick_beside,omitempty"`
	// See Suite.ShareOfYardstick.
	ShareOfYardstick bool        `json:"share_of_yardstick,omitempty"`
	Rows             []ResultRow `json:"rows"`
	Ratios           []Ratio     `json:"ratios,omitempty"`
	// Foreign is, for each run, the average number of CPUs used by programs outside the benchmark, including stolen
	// time.
	Foreign []float64 `json:"foreign_cpus"`
	// Noise describes why the figures are unreliable; empty for a quiet run.
	Noise []string `json:"noise,omitempty"`
	// Check holds the changes since an earlier run, if requested.
	Check *Checked `json:"check,omitempty"`
}

// ResultRow is one row with its cells.
type ResultRow struct {
	Name   string            `json:"name"`
	About  string            `json:"about,omitempty"`
	Cells  []Cell            `json:"cells,omitempty"`
	Absent map[string]string `json:"absent,omitempty"` // by point: why it was not measured
	Notes  []string          `json:"notes,omitempty"`
}

// Cell is one figure.
type Cell struct {
	Point  string    `json:"point"`
	Metric string    `json:"metric"`
	Raw    []float64 `json:"raw"`
	// Per is the divisor of each raw value for comparisons between runs. It is the yardstick's rate in Mpps during
	// the measurement, or the first row's value of that repetition; 0 if there was none.
	Per    []float64 `json:"per,omitempty"`
	Median float64   `json:"median"`
	// Relative is the median of Raw / Per, or of Raw if Per is empty.
	Relative float64 `json:"relative"`
	// Spread is (max − min) / median of the values behind Relative. The unit row uses Raw, because its quotient with
	// itself is constant.
	Spread float64 `json:"spread"`
	// Unheld counts repetitions at a rate that the sender did not reach for lack of CPU time.
	Unheld int `json:"unheld,omitempty"`
	// Noisy cells have a spread above noisyCell, too few repetitions for a spread, or a rate that the sender did not
	// reach.
	Noisy bool `json:"noisy,omitempty"`
	// Share is Relative divided by the limit row's Relative, or by the yardstick's rate during the run
	// (Suite.ShareOfYardstick); 0 without a limit.
	Share float64 `json:"share,omitempty"`

	unit bool // the values of other rows are divided by this row
}

// summarize computes medians and spreads. unit marks the row that divides the others, if they have a unit.
func (c *Cell) summarize(unit bool) {
	if !slices.ContainsFunc(c.Per, func(per float64) bool { return per != 0 }) {
		c.Per = nil // compared without the yardstick as unit
	}
	c.unit = unit && c.Per != nil
	relative := c.relativeValues()
	c.Median, c.Relative, c.Spread = median(c.Raw), median(relative), relativeSpread(relative)
	if c.unit {
		c.Spread = relativeSpread(c.Raw)
	}
	c.Noisy = c.Spread > noisyCell || len(relative) < enoughReps || c.Unheld > 0
}

// relativeValues returns the values that Relative is the median of.
func (c *Cell) relativeValues() []float64 {
	if c.Per == nil {
		return c.Raw
	}
	var relative []float64
	for i, per := range c.Per {
		if per != 0 { // the repetition has a measured yardstick
			relative = append(relative, c.Raw[i]/per)
		}
	}
	return relative
}

// relativeSpread returns the range of values as a part of their median. A median of 0 with other values returns 2, which is ±
// 100 %.
func relativeSpread(v []float64) float64 {
	switch middle := median(v); {
	case len(v) == 0 || slices.Min(v) == slices.Max(v):
		return 0
	case middle == 0:
		return 2
	default:
		return (slices.Max(v) - slices.Min(v)) / math.Abs(middle)
	}
}

// Ratio is one comparison with a published figure or a goal.
type Ratio struct {
	What      string  `json:"what"`
	Ours      float64 `json:"ours"`
	Published float64 `json:"published"`
	// Aim: Published is a goal of Sluice; Missed reports that it is not reached.
	Aim    bool `json:"aim,omitempty"`
	Missed bool `json:"missed,omitempty"`
	// OfRatios is Ours / Published.
	OfRatios float64 `json:"ratio_of_ratios"`
	Source   string  `json:"source"`
	// Noisy reports that a figure of the ratio is noisy, or that the spread of the ratio over the
	// repetitions exceeds noisyCell.
	Noisy bool `json:"noisy,omitempty"`
}

func newResult(s Suite, o Options) *Result {
	r := &Result{
		Suite: s.Name, Title: s.Title, Command: o.Command, Started: time.Now().UTC().Truncate(time.Second),
		Reps: o.Reps, Seconds: o.Seconds, CPU: o.CPU, Environment: readEnvironment(), Metrics: s.Metrics, Limit: s.Limit, Yardstick: s.Yardstick, Beside: s.Yardstick, ShareOfYardstick: s.ShareOfYardstick,
	}
	for _, p := range s.Points {
		r.Points = append(r.Points, p.Name)
	}
	return r
}

// HasFigures reports whether the result has a figure.
func (r *Result) HasFigures() bool {
	return slices.ContainsFunc(r.Rows, func(row ResultRow) bool { return len(row.Cells) > 0 })
}

// row returns the row with that name, and appends it if it is new.
func (r *Result) row(row *Row) *ResultRow {
	for i := range r.Rows {
		if r.Rows[i].Name == row.Name {
			return &r.Rows[i]
		}
	}
	r.Rows = append(r.Rows, ResultRow{Name: row.Name, About: row.About})
	return &r.Rows[len(r.Rows)-1]
}

func (r *ResultRow) addAbsent(point, why string) {
	if r.Absent == nil {
		r.Absent = map[string]string{}
	}
	r.Absent[point] = why
}

// failed begins the reason of a row that could not run.
const failed = "failed: "

func (r *ResultRow) fail(point string, err error) { r.addAbsent(point, failed+err.Error()) }

func (r *ResultRow) addNote(n string) {
	if !slices.Contains(r.Notes, n) {
		r.Notes = append(r.Notes, n)
	}
}

// add stores a value. per is its divisor, or 0 for none.
func (r *ResultRow) add(point, metric string, v, per float64) {
	c := r.findCell(point, metric)
	if c == nil {
		r.Cells = append(r.Cells, Cell{Point: point, Metric: metric})
		c = &r.Cells[len(r.Cells)-1]
	}
	c.Raw = append(c.Raw, v)
	c.Per = append(c.Per, per)
}

func (r *ResultRow) findCell(point, metric string) *Cell {
	for i := range r.Cells {
		if r.Cells[i].Point == point && r.Cells[i].Metric == metric {
			return &r.Cells[i]
		}
	}
	return nil
}

// Cell returns the figure of a row at a point, or nil if it was not measured.
func (r *Result) Cell(row, point, metric string) *Cell {
	for i := range r.Rows {
		if r.Rows[i].Name == row {
			return r.Rows[i].findCell(point, metric)
		}
	}
	return nil
}

// Thresholds of a quiet run.
const (
	noisyCell    = 0.10 // Spread of one figure, ± 5 %.
	noisyShare   = 0.10 // Share of noisy figures that makes a run noisy.
	enoughReps   = 3    // Minimum number of repetitions for a spread.
	noisyForeign = 0.10 // CPUs used by other programs, median over the runs.
)

// summarize computes medians, spreads, shares and ratios from the repetitions.
func (r *Result) summarize(s Suite) {
	r.Ratios, r.Noise = nil, nil
	for i := range r.Rows {
		for j := range r.Rows[i].Cells {
			r.Rows[i].Cells[j].summarize(i == 0 && !r.Yardstick)
		}
	}
	for i := range r.Rows {
		for j := range r.Rows[i].Cells {
			c := &r.Rows[i].Cells[j]
			c.Share = 0
			if limit := r.limit(s, c.Point); c.Metric == s.Metrics[0].Name && limit > 0 {
				c.Share = c.Relative / limit
			}
		}
	}
	r.compare(s)
	r.tellNoise(s)
}

// limit returns the divisor of shares at a point, in the unit of Cell.Relative; 0 for none.
func (r *Result) limit(s Suite, point string) float64 {
	if s.ShareOfYardstick {
		return 1
	}
	if c := r.Cell(s.Limit, point, s.Metrics[0].Name); c != nil {
		return c.Relative
	}
	return 0
}

// tellNoise describes which figures are unreliable and why.
func (r *Result) tellNoise(s Suite) {
	noisy, unheld, all := 0, 0, 0
	for i := range r.Rows {
		for _, c := range r.Rows[i].Cells {
			all++
			switch {
			case c.Unheld > 0:
				unheld++
			case c.Noisy:
				noisy++
			}
		}
	}
	if float64(noisy) > noisyShare*float64(all) {
		r.Noise = append(r.Noise, fmt.Sprintf("the repetitions of %d of %d figures differ by more than %.0f %%, or are fewer than %d: those marked ~",
			noisy, all, noisyCell*100, enoughReps))
	}
	if unheld > 0 {
		r.Noise = append(r.Noise, fmt.Sprintf("the sender did not hold the rate of %d of %d figures, marked ~: other programs had its CPU, or it was more than the row carries", unheld, all))
	}
	if f := median(r.Foreign); f > noisyForeign && !s.Yardstick {
		r.Noise = append(r.Noise, fmt.Sprintf("other programs used %.2f CPUs meanwhile (quiet is below %.2f)", f, noisyForeign))
	}
	if r.Reps < enoughReps {
		r.Noise = append(r.Noise, fmt.Sprintf("only %d repetition(s): noise cannot be told", r.Reps))
	}
}

func (r *Result) compare(s Suite) {
	for _, c := range s.Comparisons {
		point, metric := cmp.Or(c.Point, s.Points[0].Name), cmp.Or(c.Metric, s.Metrics[0].Name)
		a := r.Cell(c.Row, point, metric)
		if a == nil || a.Median == 0 {
			continue
		}
		q := Ratio{
			What: c.What, Ours: a.Median, Published: c.Published / cmp.Or(c.PublishedAgainst, 1),
			Source: c.Source, Aim: c.Source == goal, Noisy: a.Noisy && !a.unit,
		}
		var each []float64 // ratio of each repetition
		switch b := r.Cell(c.Against, cmp.Or(c.AgainstPoint, point), metric); {
		case c.Added: // converts Mpps to ns per packet
			q.Ours = (1/a.Relative - 1) * 1e3 / median(a.Per)
			for i, per := range a.Per {
				each = append(each, (per/a.Raw[i]-1)*1e3/per)
			}
		case c.Against == s.Limit && s.ShareOfYardstick:
			q.Ours = a.Relative
		case c.Against == "":
			each = a.Raw
		case b == nil || b.Relative == 0:
			continue
		default:
			q.Ours, q.Noisy = a.Relative/b.Relative, q.Noisy || b.Noisy && !b.unit
			each = divideEach(a.relativeValues(), b.relativeValues())
		}
		q.Noisy = q.Noisy || relativeSpread(each) > noisyCell
		q.OfRatios = q.Ours / q.Published
		q.Missed = q.Aim && q.Ours < q.Published
		r.Ratios = append(r.Ratios, q)
	}
}

// divideEach divides repetition by repetition. It returns nil if a or b lacks a repetition.
func divideEach(a, b []float64) (q []float64) {
	if len(a) != len(b) || slices.Contains(b, 0) {
		return nil
	}
	for i := range a {
		q = append(q, a[i]/b[i])
	}
	return q
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
