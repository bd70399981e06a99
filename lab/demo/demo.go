// SPDX-License-Identifier: Apache-2.0

// Package demo demonstrates Sluice. It builds labs, runs the real daemon in their gateways with the example
// configurations, sends real traffic and causes failures. It compares its measurements with Sluice's promises.
package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/examples"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
)

// Options of the demo.
type Options struct {
	// Sluice is the program, run as "Sluice run -c FILE".
	Sluice string
	// Progress receives a line per step; nil disables it.
	Progress func(line string)
}

// Result is the outcome of one promise.
type Result struct {
	Example  string `json:"example"` // configuration file in force
	Promise  string `json:"promise"`
	Measured string `json:"measured"`
	Kept     bool   `json:"kept"`
	// Skipped is the reason why this host cannot run an example.
	Skipped string `json:"skipped,omitempty"`
}

// Report is the result of the demo.
type Report struct {
	Results []Result `json:"results"`
	// Exchanges counts HTTP requests, DNS questions and datagrams with an answer. Unanswered counts exchanges without
	// one; some are expected while a server is down.
	Exchanges  int           `json:"exchanges"`
	Unanswered int           `json:"unanswered"`
	Took       time.Duration `json:"took_ns"`
}

// Broken returns the promises that were not fulfilled.
func (r *Report) Broken() []Result {
	var broken []Result
	for _, one := range r.Results {
		if !one.Kept && one.Skipped == "" {
			broken = append(broken, one)
		}
	}
	return broken
}

// Run runs all acts and removes all objects before it returns. The report contains broken promises. An error means
// that the demo could not continue; the report then contains the earlier results.
func Run(ctx context.Context, opt Options) (*Report, error) {
	if opt.Progress == nil {
		opt.Progress = func(string) {}
	}
	start := time.Now()
	report := &Report{}
	err := onStage(ctx, opt, report, lab.Balancer(), playWeb, playFullNAT, playDirect, playStateless)
	if err == nil {
		err = onStage(ctx, opt, report, lab.Office(), playRouter)
	}
	if err == nil {
		err = onStage(ctx, opt, report, officeWithClients(), playOffice)
	}
	if err == nil {
		err = onStage(ctx, opt, report, lab.IPv6Only(), playIPv6Only)
	}
	report.Took = time.Since(start)
	return report, err
}

// stage is one lab with the data shared by its acts.
type stage struct {
	opt     Options
	report  *Report
	lab     *lab.Lab
	example string
	reduced bool // a reduced form of the example runs, because the host does not support the whole
}

func onStage(ctx context.Context, opt Options, report *Report, t lab.Topology, acts ...func(context.Context, *stage) error) (err error) {
	opt.Progress(fmt.Sprintf("building the lab: %s", t.About))
	l, err := lab.Up(ctx, t)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	s := &stage{opt: opt, report: report, lab: l}
	s.printText("lab %s is up", l.ID())
	for _, act := range acts {
		if err := act(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s.example, err)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

func (s *stage) printText(format string, args ...any) {
	s.opt.Progress("  " + fmt.Sprintf(format, args...))
}

// recordPromise records one promise and its measurement.
func (s *stage) recordPromise(kept bool, promise, measured string, args ...any) {
	r := Result{Example: s.example, Promise: promise, Measured: fmt.Sprintf(measured, args...), Kept: kept}
	s.report.Results = append(s.report.Results, r)
	mark := "ok"
	if !kept {
		mark = "NOT KEPT"
	}
	s.printText("%s %s: %s", mark, r.Promise, r.Measured)
}

// notCarried is the daemon's error text if no datapath of this host supports an object.
const notCarried = "no datapath carries it"

// whyNot extracts the reason from an error with notCarried.
func whyNot(err error) string {
	_, why, _ := strings.Cut(err.Error(), notCarried+": ")
	why, _, _ = strings.Cut(why, "\n")
	return why
}

// start runs the daemon in a node with one of the examples and reports the datapath of each object. If no datapath of
// this host supports the example, start tries the reduced configuration of reduce. If that is nil or also
// unsupported, start records the reason and returns nil.
func (s *stage) start(ctx context.Context, node, example string, reduce func([]byte) ([]byte, error)) (*daemon.Daemon, error) {
	s.example, s.reduced = example, false
	s.opt.Progress("examples/" + example)
	config, err := examples.Files.ReadFile(example)
	if err != nil {
		return nil, err
	}
	d, err := daemon.Start(ctx, s.lab.Node(node), s.opt.Sluice, example, config)
	if reduce != nil && err != nil && strings.Contains(err.Error(), notCarried) {
		s.reduced = true
		s.printText("this host does not support the whole example: %s", whyNot(err))
		if config, err = reduce(config); err != nil {
			return nil, err
		}
		d, err = daemon.Start(ctx, s.lab.Node(node), s.opt.Sluice, example, config)
	}
	if err != nil && strings.Contains(err.Error(), notCarried) {
		why := whyNot(err)
		s.printText("not shown: %s", why)
		s.report.Results = append(s.report.Results, Result{Example: example, Promise: "(not shown on this host)", Measured: why, Skipped: why})
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return d, s.sayPlaces(ctx, d)
}

// sayPlaces reports the datapath of each object.
func (s *stage) sayPlaces(ctx context.Context, d *daemon.Daemon) error {
	services, err := d.Services(ctx)
	if err != nil {
		return err
	}
	for _, one := range services {
		s.printText("service %s: %s, %s, on %s", one.Name, one.Mode, one.Scheduler, one.Datapath)
	}
	rules, err := d.NAT(ctx)
	if err != nil {
		return err
	}
	for _, one := range rules {
		s.printText("nat rule %s: %s, on %s", one.Name, one.Type, one.Datapath)
	}
	return nil
}

// patience is the time limit of an exchange on a busy machine.
const patience = 10 * time.Second

// run performs a load's exchanges and adds them to the report.
func (s *stage) run(ctx context.Context, l host.Load) host.Tally {
	l.Timeout = cmp.Or(l.Timeout, patience)
	t := l.Run(ctx)
	s.count(t)
	return t
}

func (s *stage) count(t host.Tally) {
	s.report.Exchanges += t.Good()
	s.report.Unanswered += len(t.Failures)
}

// background runs a load until end is called. Exchanges in progress are completed and counted, so that losses at the
// end are not hidden.
func (s *stage) background(ctx context.Context, l host.Load) (end func() host.Tally) {
	l.Timeout = cmp.Or(l.Timeout, patience)
	stop := make(chan struct{})
	done := make(chan host.Tally, 1)
	go func() { done <- l.RunUntil(ctx, stop) }()
	return func() host.Tally {
		close(stop)
		t := <-done
		s.count(t)
		return t
	}
}

// hostServer is a server of package host.
type hostServer interface{ Stop() error }

// servers of one part of the demo.
type servers []hostServer

func (all servers) stop() {
	for _, one := range all {
		_ = one.Stop() // at the end of the act
	}
}

// causes formats the causes of failures: " (3 timeout, 1 connection refused)".
func causes(failures []host.Failure) string {
	if len(failures) == 0 {
		return ""
	}
	by := host.Tally{Failures: failures}.Causes()
	text := ""
	for cause, n := range by {
		if text != "" {
			text += ", "
		}
		text += fmt.Sprintf("%d %s", n, cause)
	}
	return " (" + text + ")"
}

// isClose reports whether a share is close enough to the expected one; both are between 0 and 1.
func isClose(got, want, tolerance float64) bool {
	return got >= want-tolerance && got <= want+tolerance
}

func share(t host.Tally, server string) float64 {
	if t.Good() == 0 {
		return 0
	}
	return float64(t.Servers()[server]) / float64(t.Good())
}

// manyClients are addresses that belong to the client of the balancer lab.
var (
	manyClients  = netip.MustParsePrefix("10.64.0.0/16")
	manyClients6 = netip.MustParsePrefix("fd00:64::/64")
)
