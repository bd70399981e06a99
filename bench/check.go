// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/table"
)

// Checked is a comparison with an earlier run of the suite.
type Checked struct {
	Against string `json:"against"` // file of the earlier run
	// Machine of the earlier run, if it differs. Moved ratios may then be caused by the machine.
	Machine string `json:"machine,omitempty"`
	// Compared counts the figures that both runs have.
	Compared int `json:"compared"`
	// Half and NineOfTen are the shares by which half and nine tenths of the figures moved at most.
	Half      float64 `json:"half"`
	NineOfTen float64 `json:"nine_of_ten"`
	// Ratios counts the ratios of both runs; Most is the ratio that moved most. Quiet and MostQuiet leave out ratios
	// that either run marks as noisy.
	Ratios    int        `json:"ratios"`
	Most      *RatioMove `json:"most,omitempty"`
	Quiet     int        `json:"quiet_ratios"`
	MostQuiet *RatioMove `json:"most_quiet,omitempty"`
	Moves     []Move     `json:"moves"`
	// Failed lists figures of the earlier run that failed now: row, point and reason.
	Failed []string `json:"failed,omitempty"`
}

// Worse returns the number of figures that got worse, including figures that are now missing.
func (c *Checked) Worse() (n int) {
	n = len(c.Failed)
	for _, m := range c.Moves {
		if m.Worse {
			n++
		}
	}
	return n
}

// Move is a figure that differs between two runs by more than their noise.
type Move struct {
	Row    string  `json:"row"`
	Point  string  `json:"point"`
	Metric string  `json:"metric"`
	Then   float64 `json:"then"` // see Cell.Relative
	Now    float64 `json:"now"`
	Change float64 `json:"change"` // Now / Then − 1; ±1 where Then is 0.
	Noise  float64 `json:"noise"`  // Deviation that the spreads of both runs explain.
	Worse  bool    `json:"worse"`
}

// RatioMove is the change of one Result.Ratios entry between two runs.
type RatioMove struct {
	What   string  `json:"what"`
	Then   float64 `json:"then"`
	Now    float64 `json:"now"`
	Change float64 `json:"change"` // Now / Then − 1
}

// checkFloor is the normal deviation between two quiet runs.
const checkFloor = 0.05

// Compare fills in Check with the changes since the earlier run. Figures are compared in units of the yardstick
// (Cell.Relative), which cancels the speed of the machine.
func (r *Result) Compare(then *Result, path string) {
	r.Check = &Checked{Against: path, Moves: []Move{}}
	if !r.Environment.sameMachine(then.Environment) {
		r.Check.Machine = then.Environment.cpu()
	}
	var changes []float64
	for i := range r.Rows {
		for _, point := range slices.Sorted(maps.Keys(r.Rows[i].Absent)) {
			why := r.Rows[i].Absent[point]
			if strings.HasPrefix(why, failed) && then.hasFigure(r.Rows[i].Name, point) && !r.hasFigure(r.Rows[i].Name, point) {
				r.Check.Failed = append(r.Check.Failed, fmt.Sprintf("%s (%s): %s", r.Rows[i].Name, point, why))
			}
		}
		for j := range r.Rows[i].Cells {
			c := &r.Rows[i].Cells[j]
			old := then.Cell(r.Rows[i].Name, c.Point, c.Metric)
			// A figure in a unit cannot be compared with one that has none. The unit row itself is 1 in both runs.
			if old == nil || (len(old.Per) == 0) != (len(c.Per) == 0) || c.unit {
				continue
			}
			r.Check.Compared++
			m := compareCell(old, c)
			changes = append(changes, math.Abs(m.Change))
			if math.Abs(m.Change) > m.Noise {
				m.Row, m.Worse = r.Rows[i].Name, (m.Change > 0) == r.lowerIsBetter(c.Metric)
				r.Check.Moves = append(r.Check.Moves, m)
			}
		}
	}
	if slices.Sort(changes); len(changes) > 0 {
		r.Check.Half, r.Check.NineOfTen = changes[(len(changes)-1)/2], changes[(len(changes)-1)*9/10]
	}
	r.compareRatios(then)
}

// compareRatios counts the ratios of both runs and returns those with the largest changes.
func (r *Result) compareRatios(then *Result) {
	for _, q := range r.Ratios {
		i := slices.IndexFunc(then.Ratios, func(o Ratio) bool { return o.What == q.What && o.Ours != 0 })
		if i < 0 {
			continue
		}
		r.Check.Ratios++
		m := &RatioMove{What: q.What, Then: then.Ratios[i].Ours, Now: q.Ours}
		m.Change = m.Now/m.Then - 1
		r.Check.Most = m.largerMove(r.Check.Most)
		if !q.Noisy && !then.Ratios[i].Noisy {
			r.Check.Quiet++
			r.Check.MostQuiet = m.largerMove(r.Check.MostQuiet)
		}
	}
}

// largerMove returns the one of the two that moved more.
func (m *RatioMove) largerMove(o *RatioMove) *RatioMove {
	if o != nil && math.Abs(o.Change) >= math.Abs(m.Change) {
		return o
	}
	return m
}

// hasFigure reports whether the run has any figure of a row at a point.
func (r *Result) hasFigure(row, point string) bool {
	return slices.ContainsFunc(r.Rows, func(o ResultRow) bool {
		return o.Name == row && slices.ContainsFunc(o.Cells, func(c Cell) bool { return c.Point == point })
	})
}

func compareCell(old, c *Cell) Move {
	m := Move{Point: c.Point, Metric: c.Metric, Then: old.Relative, Now: c.Relative}
	switch {
	case m.Then != 0:
		m.Change = (m.Now - m.Then) / math.Abs(m.Then)
	case m.Now != 0: // the earlier figure is 0: there is no ratio
		m.Change = math.Copysign(1, m.Now)
	}
	// Half a spread is how far a median can be from the middle of its repetitions.
	m.Noise = max(checkFloor, (old.Spread+c.Spread)/2)
	return m
}

func (r *Result) lowerIsBetter(metric string) bool {
	for _, m := range r.Metrics {
		if m.Name == metric {
			return m.LowerIsBetter
		}
	}
	return false
}

func (c *Checked) write(w io.Writer) error {
	if c.Machine != "" {
		fmt.Fprintf(w, "\n%s was measured on another machine (%s): what moved may be the machine's part\n", c.Against, c.Machine)
	}
	if c.Compared > 0 {
		fmt.Fprintf(w, "\nof %d figures half moved by %.1f %% or less, nine of ten by %.1f %% or less", c.Compared, c.Half*100, c.NineOfTen*100)
		if m := c.Most; m != nil {
			fmt.Fprintf(w, "; ratios (%d) agree within %.1f %%: the most, %s, was %s and is %s",
				c.Ratios, math.Abs(m.Change)*100, m.What, ratio(m.Then), ratio(m.Now))
			if q := c.MostQuiet; q != nil && c.Quiet < c.Ratios {
				fmt.Fprintf(w, "; those not noisy (%d) within %.1f %%: %s, %s and %s",
					c.Quiet, math.Abs(q.Change)*100, q.What, ratio(q.Then), ratio(q.Now))
			}
		}
		fmt.Fprintln(w)
	}
	for _, f := range c.Failed {
		fmt.Fprintf(w, "\nmeasured in %s, and not now: %s\n", c.Against, f)
	}
	if c.Compared == 0 {
		fmt.Fprintf(w, "\nno figure of this run is in %s\n", c.Against)
		return nil
	}
	if len(c.Moves) == 0 {
		fmt.Fprintf(w, "\nnone of %d figures moved by more than the noise of the two runs (against %s)\n", c.Compared, c.Against)
		return nil
	}
	fmt.Fprintf(w, "\n%d of %d figures moved by more than the noise of the two runs, against %s:\n", len(c.Moves), c.Compared, c.Against)
	t := table.New("row", "point", "metric", ">then", ">now", ">change", ">noise", "verdict")
	for _, m := range c.Moves {
		verdict := "better"
		if m.Worse {
			verdict = "worse"
		}
		t.Row(m.Row, m.Point, m.Metric, fmt.Sprintf("%.3f", m.Then), fmt.Sprintf("%.3f", m.Now),
			fmt.Sprintf("%+.0f%%", m.Change*100), fmt.Sprintf("%.0f%%", m.Noise*100), verdict)
	}
	return t.Write(w)
}
