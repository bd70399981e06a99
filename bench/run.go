// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/load"
)

// Run measures a suite. Every repetition covers all rows and points before the next begins, so a disturbance of the
// machine affects all rows alike. If ctx ends, Run returns the results so far, or nil, and the reason.
func Run(ctx context.Context, s Suite, o Options) (_ *Result, err error) {
	o.fill(s)
	r := &runner{suite: s, o: o, result: newResult(s, o)}
	if o.Earlier != nil {
		if err := r.result.checkExtends(o.Earlier); err != nil {
			return nil, err
		}
	}
	if s.Yardstick {
		if r.yardstick, err = newYardstick(ctx, o.CPU); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, r.yardstick.close()) }()
	}
	begin := time.Now()
	rep := 0
	for ; rep < o.Reps && err == nil; rep++ {
		err = r.runRepetition(ctx, rep)
	}
	if err != nil && !r.result.HasFigures() {
		return nil, err
	}
	r.result.Duration = time.Since(begin).Round(time.Millisecond).String()
	r.result.Reps = rep // number of repetitions that have begun
	if o.Earlier != nil {
		r.result.extend(o.Earlier)
	}
	r.result.summarize(s)
	if err != nil {
		r.result.Noise = append(r.result.Noise, fmt.Sprintf("it was stopped in repetition %d of %d", rep, o.Reps))
	}
	return r.result, err
}

// runRepetition runs all selected rows and points.
func (r *runner) runRepetition(ctx context.Context, rep int) error {
	r.first = map[string]float64{}
	for i := range r.suite.Rows {
		row := &r.suite.Rows[i]
		unit := i == 0 && !r.suite.Yardstick // the divisor of the other rows
		if r.o.Rows != nil && !r.o.Rows.MatchString(row.Name) && !unit {
			continue
		}
		for _, p := range r.suite.Points {
			if r.o.Points != nil && !r.o.Points.MatchString(p.Name) || p.MaxReps > 0 && rep >= p.MaxReps {
				continue
			}
			if err := r.runRow(ctx, row, p, rep); err != nil {
				return err
			}
		}
	}
	return nil
}

// Validate returns an error if an option is impossible or selects nothing of the suite.
func (o Options) Validate(s Suite) error {
	switch {
	case o.Reps < 0:
		return fmt.Errorf("%d repetitions: at least 1", o.Reps)
	case !(o.Seconds >= 0 && o.Seconds < 1e6):
		return fmt.Errorf("%g seconds a run: more than 0 and less than 1e6", o.Seconds)
	}
	cpus, err := load.CPUs()
	if err != nil {
		return err
	}
	if !slices.Contains(cpus, o.CPU) {
		return fmt.Errorf("CPU %d is none of the %d that this process may use", o.CPU, len(cpus))
	}
	if o.Rows != nil && !slices.ContainsFunc(s.Rows, func(r Row) bool { return o.Rows.MatchString(r.Name) }) {
		return fmt.Errorf("no row of %s matches %q; it has:%s", s.Name, o.Rows, names(s.Rows, func(r Row) string { return r.Name }))
	}
	if o.Points != nil && !slices.ContainsFunc(s.Points, func(p Point) bool { return o.Points.MatchString(p.Name) }) {
		return fmt.Errorf("no point of %s matches %q; it has:%s", s.Name, o.Points, names(s.Points, func(p Point) string { return p.Name }))
	}
	return nil
}

// names returns a list with one name per line: there are dozens, and names contain commas.
func names[T any](list []T, name func(T) string) string {
	var b strings.Builder
	for _, e := range list {
		fmt.Fprintf(&b, "\n  %s", name(e))
	}
	return b.String()
}

// fill replaces unset options by the suite's defaults.
func (o *Options) fill(s Suite) {
	if o.Reps == 0 {
		o.Reps = 5
	}
	if s.MaxReps > 0 {
		o.Reps = min(o.Reps, s.MaxReps)
	}
	if o.Seconds == 0 {
		o.Seconds = s.Seconds
	}
	if o.Seconds == 0 {
		o.Seconds = 0.3
	}
}

// runner is a run of a suite in progress.
type runner struct {
	suite     Suite
	o         Options
	result    *Result
	yardstick *yardstick // nil in suites without one
	// first holds the values of the suite's first row in this repetition, by point and metric. It is the unit of
	// suites without a yardstick. If the first row was not measured, the other rows have no unit.
	first map[string]float64
}

// runRow runs a row at a point. It stores failures in the result, so one failing row does not stop the others. It
// returns an error only if the run's context has ended.
func (r *runner) runRow(ctx context.Context, row *Row, p Point, rep int) error {
	out := r.result.row(row)
	if row.Absent != nil {
		if why := row.Absent(p); why != "" {
			out.addAbsent(p.Name, why)
			return nil
		}
	}
	t, err := r.measure(ctx, row, p)
	if ctx.Err() != nil {
		return cmp.Or(err, ctx.Err())
	}
	if r.o.Progress != nil {
		r.o.Progress(r.progressLine(row.Name, p, rep, t, err))
	}
	if err != nil {
		out.fail(p.Name, err)
		return nil
	}
	for _, n := range t.notes {
		out.addNote(n)
	}
	for _, m := range r.suite.Metrics {
		v, ok := t.values[m.Name]
		if !ok {
			continue
		}
		if sum := v.value + v.per; math.IsNaN(sum) || math.IsInf(sum, 0) { // JSON and the median cannot represent it
			out.fail(p.Name, fmt.Errorf("%s: %g %s beside %g", m.Name, v.value, m.Unit, v.per))
			continue
		}
		out.add(p.Name, m.Name, v.value, r.divisorOf(row, m, p, v))
		if t.missedRate {
			out.findCell(p.Name, m.Name).Unheld++
		}
	}
	return nil
}

// measure runs a row, and repeats it once if another CPU handled packets. If that recurs, the row gets a note.
func (r *runner) measure(ctx context.Context, row *Row, p Point) (*Trial, error) {
	t, err := r.attempt(ctx, row, p)
	if err == nil && t.disturbed {
		t, err = r.attempt(ctx, row, p)
	}
	if err == nil && t.disturbed {
		t.Note("%s: another CPU handled packets of this row, or of the loop beside it: the figure is not that of one CPU", p.Name)
	}
	return t, err
}

// divisorOf returns the divisor of a figure for comparisons between runs, or 0 for none.
func (r *runner) divisorOf(row *Row, m Metric, p Point, v reportedValue) float64 {
	switch {
	case m.Absolute:
		return 0
	case r.yardstick != nil:
		return v.per
	}
	key := p.Name + "\x00" + m.Name
	if row.Name == r.suite.Rows[0].Name {
		r.first[key] = v.value
	}
	return r.first[key]
}

// attempt sets up a row, runs it and cleans up.
func (r *runner) attempt(ctx context.Context, row *Row, p Point) (*Trial, error) {
	t := &Trial{Context: ctx, Point: p, Seconds: r.o.Seconds, CPU: r.o.CPU, yardstick: r.yardstick, lower: r.o.AllowHostSysctl, values: map[string]reportedValue{}}
	if r.o.Profile != "" {
		t.profile = filepath.Join(r.o.Profile, profileName(r.suite.Name, row.Name, p.Name))
	}
	before := readLoad()
	err := errors.Join(row.Run(t), t.end())
	if err == nil && t.profile != "" && len(t.profiles) == 0 {
		err = errors.New("no profile was taken: it measured for no time")
	}
	r.result.Foreign = append(r.result.Foreign, math.Round(before.foreignSince()*1000)/1000)
	return t, err
}

func (r *runner) progressLine(row string, p Point, rep int, t *Trial, err error) string {
	line := fmt.Sprintf("%d/%d  %-34s %-14s", rep+1, r.o.Reps, row, p.Name)
	if err != nil {
		return line + " " + err.Error()
	}
	for _, m := range r.suite.Metrics {
		if v, ok := t.values[m.Name]; ok {
			line += fmt.Sprintf(" %s %s", format(v.value, m.Digits), m.Unit)
		}
	}
	return line
}
