// SPDX-License-Identifier: Apache-2.0

// Package bench runs the benchmark suites. A run builds the network, sets up each row and loads it with the generator
// of package load. A row is a reference program, a peer's rules or one of Sluice's datapaths. The result reports
// medians of interleaved repetitions, their spread, and published figures for comparison.
//
// A row that cannot run on a machine is listed with the reason. It is never filled with a figure from elsewhere.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"time"
)

// Suite is one table.
type Suite struct {
	Name string
	// Title in a few words. About describes in sentences how the suite measures.
	Title, About string
	// Reproduces names the published measurement, "" when there is none.
	Reproduces string
	// Points are the conditions of the suite. Each row runs once per point.
	Points []Point
	// Metrics are the quantities that a run reports.
	Metrics []Metric
	Rows    []Row
	// Limit names the row that shares are computed against, per point, in the first metric; "" means no shares.
	Limit string
	// Comparisons sets ratios of rows against published ratios.
	Comparisons []Comparison
	// Yardstick suites measure by CPU time. The redirect-only loop runs alongside each run, and figures are compared
	// in its unit. Other suites measure by wall-clock time, which includes every program on the machine. They compare
	// each row with the first row of the same repetition.
	Yardstick bool
	// ShareOfYardstick: the limit row is the yardstick's own loop. Each share then refers to the loop's rate during
	// the same run.
	ShareOfYardstick bool
	// AllCPUs: real programs use all CPUs of the machine; a single CPU cannot be chosen.
	AllCPUs bool
	// Seconds is the default measured time of one run; 0 means 0.3.
	Seconds float64
	// MaxReps bounds the repetitions of a slow suite; 0 means no bound.
	MaxReps int
	// NotShown lists conclusions that the suite does not support.
	NotShown []string
}

// Point is one condition, for example a number of flows.
type Point struct {
	Name  string
	Value int
	// Shuffled sends the flows in an order that defeats prefetching.
	Shuffled bool
	// MaxReps bounds the repetitions at a slow point; 0 means no bound.
	MaxReps int
}

// Metric is one reported quantity.
type Metric struct {
	Name string
	Unit string
	// LowerIsBetter for times and memory.
	LowerIsBetter bool
	// Absolute figures do not depend on the machine's speed: bytes, shares, losses.
	Absolute bool
	// Digits after the decimal point in tables.
	Digits int
}

// Row is one line of the table.
type Row struct {
	Name string
	// About describes in a sentence how the row is set up.
	About string
	// Absent returns the reason why the row cannot run at a point on this machine, or "".
	Absent func(Point) string
	// Run sets up the row, measures once and reports to the trial.
	Run func(*Trial) error
}

// Comparison compares a figure, or the ratio of two rows, with a published figure or with a goal of Sluice.
type Comparison struct {
	What string
	// Row over Against at a point and metric; empty means the first of the suite. An empty Against compares the
	// figure of Row itself.
	Row, Against, Point, Metric string
	// AgainstPoint is another point for Against; empty means the same.
	AgainstPoint string
	// Published and PublishedAgainst are the published figures of both rows, in the unit of Source. PublishedAgainst
	// 0 means 1.
	Published, PublishedAgainst float64
	Source                      string
	// Added compares the time that Row adds to a packet relative to the yardstick. The published figure is then in
	// nanoseconds.
	Added bool
}

// goal is the source of goals, which have no publication.
const goal = "what Sluice was to reach"

// goals returns the comparisons of a row with its goals against another row, one per point.
func goals(what, row, against string, reach map[string]float64) (list []Comparison) {
	for _, point := range slices.Sorted(maps.Keys(reach)) {
		list = append(list, Comparison{
			What: what + ", " + point, Row: row, Against: against, Point: point, Published: reach[point], Source: goal,
		})
	}
	return list
}

// Options of a run.
type Options struct {
	Reps    int            // Repetitions; 0 means 5; a suite may make fewer.
	Seconds float64        // Measured time of one run; 0 means the suite's own.
	Rows    *regexp.Regexp // Only these rows; nil means all.
	Points  *regexp.Regexp // Only these points; nil means all.
	CPU     int            // CPU that generates.
	// AllowHostSysctl lets rows that need a small connection table lower the limit of the whole host during a run.
	AllowHostSysctl bool
	// Profile is the directory for the folded stacks of each row's measured time; "" disables profiles. Sampling
	// costs CPU time, so such figures are not for publication.
	Profile string
	// Earlier is a run of the same suite on the same machine that this one continues; nil for none.
	Earlier *Result
	// Progress is called after each run; nil disables it.
	Progress func(string)
	Command  string // how the user called it, for the record
}

// Trial is one run of one row at one point.
type Trial struct {
	context.Context
	Point   Point
	Seconds float64
	CPU     int

	yardstick  *yardstick // nil in suites without one.
	per        float64    // Rate of the yardstick during the latest measurement, in Mpps.
	away       bool       // Another CPU handled packets of the latest measurement.
	disturbed  bool       // Another CPU handled packets of a reported value.
	missedRate bool       // The sender did not reach a required rate.

	profile  string            // File for folded stacks of the measured time, "" for none.
	profiles map[string]string // Folded stacks by file.
	lower    bool              // Options.AllowHostSysctl.
	borrowed bool              // The connection table's limit must be restored.

	values  map[string]reportedValue
	notes   []string
	cleanup []func() error
}

// Report records the value of a metric.
func (t *Trial) Report(metric string, value float64) {
	t.values[metric] = reportedValue{value, t.per}
	t.disturbed = t.disturbed || t.away
}

// reportedValue is a value and the yardstick's rate during its measurement, in Mpps; 0 without a yardstick.
type reportedValue struct{ value, per float64 }

// Note adds a sentence to the row.
func (t *Trial) Note(format string, args ...any) {
	t.notes = append(t.notes, fmt.Sprintf(format, args...))
}

// Cleanup calls f after the run, last registered first.
func (t *Trial) Cleanup(f func() error) { t.cleanup = append(t.cleanup, f) }

// end runs the cleanups, last registered first.
func (t *Trial) end() error {
	var errs []error
	for _, f := range slices.Backward(t.cleanup) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// Duration of the measurement.
func (t *Trial) Duration() time.Duration { return time.Duration(t.Seconds * float64(time.Second)) }

// window waits until the packet path has used the trial's duration of CPU time. A busy machine may need up to twenty
// times as long by the wall clock; the bound is at least ten seconds.
func (t *Trial) window(ctx context.Context, used func() time.Duration) error {
	end, giveUp := used()+t.Duration(), time.Now().Add(max(20*t.Duration(), 10*time.Second))
	if t.profile != "" {
		if err := t.takeProfile(ctx); err != nil {
			return err
		}
	}
	for left := t.Duration(); left > 0 && time.Now().Before(giveUp); left = end - used() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(max(left, time.Millisecond)):
		}
	}
	return nil
}

// closeLater registers an io.Closer.
func (t *Trial) closeLater(c io.Closer) { t.Cleanup(c.Close) }

// Suites returns every suite in the order of the documentation.
func Suites() []Suite {
	return []Suite{packetsSuite(), flowsSuite(), rulesSuite(), dropSuite(), fnat64Suite(), latencySuite(), natTaxSuite(), routerSuite(), accelerateSuite(), scaleSuite(), portsSuite(), tableSuite(), floodSuite(), peersSuite(), generatorSuite()}
}

// Find returns the suite with the given name.
func Find(name string) (Suite, error) {
	for _, s := range Suites() {
		if s.Name == name {
			return s, nil
		}
	}
	return Suite{}, fmt.Errorf("no suite %q: 'sluice bench' lists them", name)
}
