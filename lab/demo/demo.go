// SPDX-License-Identifier: Apache-2.0

// Package demo shows Sluice at work: it builds labs, runs the real daemon in their gateways with
// the example configurations, sends real traffic through, breaks things on the way, and compares
// what it measures with what Sluice promises.
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
	// Sluice is the program to run as "Sluice run -c FILE".
	Sluice string
	// Progress is told what happens, a line at a time; nil means silence.
	Progress func(line string)
}

// Result is one promise and what became of it.
type Result struct {
	Example  string `json:"example"` // configuration file that was in force
	Promise  string `json:"promise"`
	Measured string `json:"measured"`
	Kept     bool   `json:"kept"`
	// Skipped says why an example was not shown at all: this host cannot carry it.
	Skipped string `json:"skipped,omitempty"`
}

// Report is what the demo found.
type Report struct {
	Results []Result `json:"results"`
	// Exchanges are HTTP requests, DNS questions and datagrams with an answer; Unanswered are
	// those without one, of which some are expected while a server is dead.
	Exchanges  int           `json:"exchanges"`
	Unanswered int           `json:"unanswered"`
	Took       time.Duration `json:"took_ns"`
}

// Broken returns the promises that were not kept.
func (r *Report) Broken() []Result {
	var broken []Result
	for _, one := range r.Results {
		if !one.Kept && one.Skipped == "" {
			broken = append(broken, one)
		}
	}
	return broken
}

// Run plays all acts. Everything is removed when it returns. A broken promise is in the report;
// an error means that the demo itself could not go on, and the report holds what came before.
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
		err = onStage(ctx, opt, report, lab.IPv6Only(), playIPv6Only)
	}
	report.Took = time.Since(start)
	return report, err
}

// stage is one lab with what the acts on it share.
type stage struct {
	opt     Options
	report  *Report
	lab     *lab.Lab
	example string
	lesser  bool // what runs is less than the example, for this host carries no more
}

func onStage(ctx context.Context, opt Options, report *Report, t lab.Topology, acts ...func(context.Context, *stage) error) (err error) {
	opt.Progress(fmt.Sprintf("building the lab: %s", t.About))
	l, err := lab.Up(ctx, t)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	s := &stage{opt: opt, report: report, lab: l}
	s.say("lab %s is up", l.ID())
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

func (s *stage) say(format string, args ...any) {
	s.opt.Progress("  " + fmt.Sprintf(format, args...))
}

// judge notes one promise and what was measured.
func (s *stage) judge(kept bool, promise, measured string, args ...any) {
	r := Result{Example: s.example, Promise: promise, Measured: fmt.Sprintf(measured, args...), Kept: kept}
	s.report.Results = append(s.report.Results, r)
	mark := "ok"
	if !kept {
		mark = "NOT KEPT"
	}
	s.say("%s %s: %s", mark, r.Promise, r.Measured)
}

// notCarried is how the daemon says that no datapath of this host can do what is asked.
const notCarried = "no datapath carries it"

// whyNot picks the reason out of an error that says notCarried.
func whyNot(err error) string {
	_, why, _ := strings.Cut(err.Error(), notCarried+": ")
	why, _, _ = strings.Cut(why, "\n")
	return why
}

// start runs the daemon in a node with one of the examples and tells which datapath carries what.
// When no datapath of this host carries the example, it tries what lesser makes of it; when that
// is nil or not carried either, it notes why and returns nil.
func (s *stage) start(ctx context.Context, node, example string, lesser func([]byte) ([]byte, error)) (*daemon.Daemon, error) {
	s.example, s.lesser = example, false
	s.opt.Progress("examples/" + example)
	config, err := examples.Files.ReadFile(example)
	if err != nil {
		return nil, err
	}
	d, err := daemon.Start(ctx, s.lab.Node(node), s.opt.Sluice, example, config)
	if lesser != nil && err != nil && strings.Contains(err.Error(), notCarried) {
		s.lesser = true
		s.say("this host does not carry it as it stands: %s", whyNot(err))
		if config, err = lesser(config); err != nil {
			return nil, err
		}
		d, err = daemon.Start(ctx, s.lab.Node(node), s.opt.Sluice, example, config)
	}
	if err != nil && strings.Contains(err.Error(), notCarried) {
		why := whyNot(err)
		s.say("not shown: %s", why)
		s.report.Results = append(s.report.Results, Result{Example: example, Promise: "(not shown on this host)", Measured: why, Skipped: why})
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return d, s.sayPlaces(ctx, d)
}

// sayPlaces tells which datapath carries what.
func (s *stage) sayPlaces(ctx context.Context, d *daemon.Daemon) error {
	services, err := d.Services(ctx)
	if err != nil {
		return err
	}
	for _, one := range services {
		s.say("service %s: %s, %s, on %s", one.Name, one.Mode, one.Scheduler, one.Datapath)
	}
	rules, err := d.NAT(ctx)
	if err != nil {
		return err
	}
	for _, one := range rules {
		s.say("nat rule %s: %s, on %s", one.Name, one.Type, one.Datapath)
	}
	return nil
}

// patience is how long an exchange may take on a machine that is busy otherwise.
const patience = 10 * time.Second

// run makes a load's exchanges and adds them to the report.
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

// background runs a load until its end is asked for. What is under way then is still counted: a
// loss must not hide in the end.
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

// stopper is a server of package host.
type stopper interface{ Stop() error }

// servers of one act.
type servers []stopper

func (all servers) stop() {
	for _, one := range all {
		_ = one.Stop() // at the end of the act
	}
}

// wait lets a background load run on for a while.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// causes writes why exchanges failed: " (3 timeout, 1 connection refused)".
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

// within reports whether a share is near enough to what was wanted, both from 0 to 1.
func within(got, want, tolerance float64) bool {
	return got >= want-tolerance && got <= want+tolerance
}

func share(t host.Tally, server string) float64 {
	if t.Good() == 0 {
		return 0
	}
	return float64(t.Servers()[server]) / float64(t.Good())
}

// manyClients are addresses that the client of the balancer lab owns.
var (
	manyClients  = netip.MustParsePrefix("10.64.0.0/16")
	manyClients6 = netip.MustParsePrefix("fd00:64::/64")
)
