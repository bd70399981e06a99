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
	"fmt"
	"io"
	"regexp"
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
	// WallClock suites measure by the clock on the wall, so that other programs on
	// the machine change their figures. The others measure by CPU time.
	WallClock bool
	// NotShown lists what a reader must not conclude.
	NotShown []string
}

// Point is one condition, for example a number of flows.
type Point struct {
	Name  string
	Value int
	// Shuffled makes the flows follow in an order that defeats prefetching.
	Shuffled bool
}

// Metric is one reported quantity.
type Metric struct {
	Name string
	Unit string
	// LowerIsBetter for times and memory.
	LowerIsBetter bool
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

// Comparison is a ratio of two rows beside the same ratio as published.
type Comparison struct {
	What string
	// Row over Against at a point and metric; empty means the first of the suite.
	Row, Against, Point, Metric string
	// Published figures of both, in the source's unit, and where they stand.
	Published, PublishedAgainst float64
	Source                      string
	// Why explains a difference of more than a fifth, from a profile.
	Why string
}

// Options of a run.
type Options struct {
	Reps    int            // repetitions; 0 means 5
	Seconds float64        // measured time of one run; 0 means 2
	Rows    *regexp.Regexp // only these rows; nil means all
	Points  *regexp.Regexp // only these points; nil means all
	CPU     int            // CPU that generates
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

	values  map[string]float64
	notes   []string
	cleanup []func() error
}

// Report gives the value of a metric.
func (t *Trial) Report(metric string, value float64) { t.values[metric] = value }

// Note adds a sentence to the row.
func (t *Trial) Note(format string, args ...any) {
	t.notes = append(t.notes, fmt.Sprintf(format, args...))
}

// Cleanup calls f after the run, last registered first.
func (t *Trial) Cleanup(f func() error) { t.cleanup = append(t.cleanup, f) }

// Duration of the measurement.
func (t *Trial) Duration() time.Duration { return time.Duration(t.Seconds * float64(time.Second)) }

// closeLater registers an io.Closer.
func (t *Trial) closeLater(c io.Closer) { t.Cleanup(c.Close) }

// Suites returns every suite in the order of the documentation.
func Suites() []Suite {
	return []Suite{packetsSuite(), flowsSuite(), rulesSuite(), dropSuite(), fnat64Suite(), latencySuite(), natTaxSuite(), routerSuite(), scaleSuite(), portsSuite(), peersSuite()}
}

// Find returns the suite of that name.
func Find(name string) (Suite, error) {
	var names []string
	for _, s := range Suites() {
		if s.Name == name {
			return s, nil
		}
		names = append(names, s.Name)
	}
	return Suite{}, fmt.Errorf("suite %q: not one of %v", name, names)
}
