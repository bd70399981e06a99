// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// Run measures a suite: every repetition goes over all rows and points before
// the next begins, so that a disturbance of the machine hits all rows alike.
func Run(ctx context.Context, s Suite, o Options) (*Result, error) {
	if o.Reps == 0 {
		o.Reps = 5
	}
	if o.Seconds == 0 {
		o.Seconds = 2
	}
	r := newResult(s, o)
	begin := time.Now()
	for rep := range o.Reps {
		for i := range s.Rows {
			if o.Rows != nil && !o.Rows.MatchString(s.Rows[i].Name) {
				continue
			}
			for _, p := range s.Points {
				if o.Points != nil && !o.Points.MatchString(p.Name) {
					continue
				}
				if err := ctx.Err(); err != nil {
					return nil, err
				}
				runOne(ctx, s, o, r, &s.Rows[i], p, rep)
			}
		}
	}
	r.Duration = time.Since(begin).Round(time.Millisecond).String()
	r.summarize(s)
	return r, nil
}

// runOne runs a row at a point once. What goes wrong is kept in the result: one
// row that fails must not cost the others.
func runOne(ctx context.Context, s Suite, o Options, r *Result, row *Row, p Point, rep int) {
	out := r.row(row)
	if row.Absent != nil {
		if why := row.Absent(p); why != "" {
			out.absent(p.Name, why)
			return
		}
	}
	t := &Trial{Context: ctx, Point: p, Seconds: o.Seconds, CPU: o.CPU, values: map[string]float64{}}
	before := readLoad()
	err := row.Run(t)
	for _, f := range slices.Backward(t.cleanup) {
		err = errors.Join(err, f())
	}
	foreign := before.foreignSince()
	if err != nil && ctx.Err() == nil {
		out.fail(p.Name, err)
	}
	if o.Progress != nil {
		o.Progress(progressLine(s, o, row.Name, p, rep, t, err))
	}
	if err != nil {
		return
	}
	r.Foreign = append(r.Foreign, math.Round(foreign*1000)/1000)
	for _, n := range t.notes {
		out.note(n)
	}
	for _, m := range s.Metrics {
		if v, ok := t.values[m.Name]; ok {
			out.add(p.Name, m.Name, v)
		}
	}
}

func progressLine(s Suite, o Options, row string, p Point, rep int, t *Trial, err error) string {
	line := fmt.Sprintf("%d/%d  %-34s %-14s", rep+1, o.Reps, row, p.Name)
	if err != nil {
		return line + " " + err.Error()
	}
	for _, m := range s.Metrics {
		if v, ok := t.values[m.Name]; ok {
			line += fmt.Sprintf(" %s %s", format(v, m.Digits), m.Unit)
		}
	}
	return line
}
