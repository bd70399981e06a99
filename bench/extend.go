// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"slices"
	"time"
)

// checkExtends returns an error unless r continues an earlier run: the same suite and duration of a run, on the same
// machine, kernel and commit.
func (r *Result) checkExtends(earlier *Result) error {
	for _, c := range []struct {
		what       string
		then, here any
	}{
		{"suite", earlier.Suite, r.Suite},
		{"seconds of a run", earlier.Seconds, r.Seconds},
		{"CPU", earlier.CPU, r.CPU},
		{"machine", earlier.Environment.Machine, r.Environment.Machine},
		{"kernel", earlier.Environment.Kernel, r.Environment.Kernel},
		{"commit", earlier.Environment.Commit, r.Environment.Commit},
	} {
		if c.then != c.here {
			return fmt.Errorf("the earlier run cannot be continued: its %s is %v, not %v: save to another file", c.what, c.then, c.here)
		}
	}
	return nil
}

// extend puts the repetitions of an earlier run before those of r.
func (r *Result) extend(earlier *Result) {
	then, _ := time.ParseDuration(earlier.Duration) // a file written by hand may lack it
	here, _ := time.ParseDuration(r.Duration)
	r.Started, r.Duration, r.Reps = earlier.Started, (then + here).String(), earlier.Reps+r.Reps
	r.Foreign = slices.Concat(earlier.Foreign, r.Foreign)
	for _, was := range earlier.Rows {
		row := r.row(&Row{Name: was.Name, About: was.About})
		for _, c := range was.Cells {
			now := row.findCell(c.Point, c.Metric)
			if now == nil {
				row.Cells = append(row.Cells, c)
				continue
			}
			now.Per = slices.Concat(divisors(c), divisors(*now))
			now.Raw = slices.Concat(c.Raw, now.Raw)
			now.Unheld += c.Unheld
		}
		for point, why := range was.Absent {
			row.addAbsent(point, why)
		}
		for _, n := range was.Notes {
			row.addNote(n)
		}
	}
}

// divisors returns the divisor of each raw value, 0 where there was none.
func divisors(c Cell) []float64 {
	if c.Per == nil {
		return make([]float64, len(c.Raw))
	}
	return c.Per
}
