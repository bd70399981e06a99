// SPDX-License-Identifier: Apache-2.0

// Package bench runs the benchmark suites: it builds the network, sets up each
// row (a reference program, a peer's rules or one of Sluice's datapaths), loads
// it with the generator of package load, and reports medians of interleaved
// repetitions with their spread, beside figures that others have published.
//
// A row that cannot run on a machine is in the table with the reason; it is
// never filled with a figure from elsewhere.
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
	// Title in a few words; About says what is measured and how, in sentences.
	Title, About string
	// Reproduces names the published measurement, "" when there is none.
	Reproduces string
	// Points are the conditions that every row is measured under, one run each.
	Points []Point
	// Metrics are what one run reports.
	Metrics []Metric
	Rows    []Row
	// Limit names the row that the others' shares are computed against, per
	// point, in the first metric; "" means no shares.
	Limit string
	// Comparisons puts ratios of rows beside published ones.
	Comparisons []Comparison
	// Yardstick suites measure by CPU time, and each run beside the redirect-only loop,
	// in whose unit runs are compared. The others measure by the clock on the wall,
	// where every program on the machine counts, and compare with what their first row
	// did in the same repetition.
	Yardstick bool
	// ShareOfYardstick: the limit row is the yardstick's own loop, so that shares are
	// of what it did beside each run, and not of its one figure at another time.
	ShareOfYardstick bool
	// AllCPUs: real programs share whatever CPUs there are, and none can be chosen.
	AllCPUs bool
	// Seconds is the measured time of one run unless asked otherwise; 0 means 0.3.
	Seconds float64
	// MaxReps bounds the repetitions where each takes long; 0 means no bound.
	MaxReps int
	// NotShown lists what a reader must not conclude.
	NotShown []string
}

// Point is one condition, for example a number of flows.
type Point struct {
	Name  string
	Value int
	// Shuffled makes the flows follow in an order that defeats prefetching.
	Shuffled bool
	// MaxReps bounds the repetitions at a point that takes long; 0 means no bound.
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
	// About says in a sentence how the row is set up.
	About string
	// Absent returns why the row cannot run at a point on this machine, "" when it can.
	Absent func(Point) string
	// Run sets the row up, measures once and reports to the trial.
	Run func(*Trial) error
}

// Comparison is a figure, or the ratio of two rows, beside a published one or beside
// what Sluice was to reach.
type Comparison struct {
	What string
	// Row over Against at a point and metric; empty means the first of the suite.
	// Without Against the figure stands alone.
	Row, Against, Point, Metric string
	// AgainstPoint is another point for Against; empty means the same.
	AgainstPoint string
	// Published figures of both, in the source's unit, and where they stand.
	// PublishedAgainst 0 means 1.
	Published, PublishedAgainst float64
	Source                      string
	// Added compares not rates but what a packet takes longer by Row than by the
	// yardstick; the published figure is in nanoseconds.
	Added bool
}

// aim is the source of figures that nobody published: what Sluice was to reach.
const aim = "what Sluice was to reach"

// aims compares with what a row was to reach against another, at each point.
func aims(what, row, against string, reach map[string]float64) (list []Comparison) {
	for _, point := range slices.Sorted(maps.Keys(reach)) {
		list = append(list, Comparison{
			What: what + ", " + point, Row: row, Against: against, Point: point, Published: reach[point], Source: aim,
		})
	}
	return list
}

// Options of a run.
type Options struct {
	Reps    int            // repetitions; 0 means 5; a suite may make fewer
	Seconds float64        // measured time of one run; 0 means the suite's own
	Rows    *regexp.Regexp // only these rows; nil means all
	Points  *regexp.Regexp // only these points; nil means all
	CPU     int            // CPU that generates
	// AllowHostSysctl lets rows that show a small connection table lower the limit of
	// the whole host for the time of a run.
	AllowHostSysctl bool
	// Profile is a directory that gets the folded stacks of each row's measured time,
	// "" for none. Sampling costs a little: such figures are not for keeping.
	Profile string
	// Progress is told about each run; nil means nobody.
	Progress func(string)
	Command  string // how the user called it, for the record
}

// Trial is one run of one row at one point.
type Trial struct {
	context.Context
	Point   Point
	Seconds float64
	CPU     int

	yardstick *yardstick // nil in suites without
	per       float64    // what it did beside the latest measurement, in Mpps
	away      bool       // packets of that were handled by another CPU
	disturbed bool       // so were some of a value that is reported
	unheld    bool       // a rate was to be held and was not

	profile  string            // file that folded stacks of the measured time go to, "" for none
	profiles map[string]string // what was written, by file
	lower    bool              // Options.AllowHostSysctl
	borrowed bool              // the connection table's limit is to be restored

	values  map[string]reported
	notes   []string
	cleanup []func() error
}

// Report gives the value of a metric.
func (t *Trial) Report(metric string, value float64) {
	t.values[metric] = reported{value, t.per}
	t.disturbed = t.disturbed || t.away
}

// reported is a value and what the yardstick did beside the measurement before it, in
// Mpps; 0 when there was none.
type reported struct{ value, per float64 }

// Note adds a sentence to the row.
func (t *Trial) Note(format string, args ...any) {
	t.notes = append(t.notes, fmt.Sprintf(format, args...))
}

// Cleanup calls f after the run, last registered first.
func (t *Trial) Cleanup(f func() error) { t.cleanup = append(t.cleanup, f) }

// end cleans up, what came last first.
func (t *Trial) end() error {
	var errs []error
	for _, f := range slices.Backward(t.cleanup) {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// Duration of the measurement.
func (t *Trial) Duration() time.Duration { return time.Duration(t.Seconds * float64(time.Second)) }

// window waits until the packet path has used the trial's duration of CPU time:
// on a busy machine that is longer by the clock on the wall, up to twenty times and
// never cut below ten seconds.
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
	return []Suite{packetsSuite(), flowsSuite(), rulesSuite(), dropSuite(), fnat64Suite(), latencySuite(), natTaxSuite(), routerSuite(), scaleSuite(), portsSuite(), floodSuite(), peersSuite(), generatorSuite()}
}

// Find returns the suite of that name.
func Find(name string) (Suite, error) {
	for _, s := range Suites() {
		if s.Name == name {
			return s, nil
		}
	}
	return Suite{}, fmt.Errorf("no suite %q: 'sluice bench' lists them", name)
}
