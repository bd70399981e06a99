// SPDX-License-Identifier: Apache-2.0

// Package doctor finds out why NAT on a host is slow or loses packets. It reads
// the host twice over a window, runs a list of named checks on what it read, and
// concludes in plain words which cause to treat first. It changes nothing.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/trace"
)

// lightFill is the share of nf_conntrack_max below which a light examination does
// not read the table: a dump takes 1.6 s of CPU time for a million entries, and
// even for few it walks all buckets of the host.
const lightFill = 0.02

// DefaultWindow is how long a host is watched when nothing else is asked for.
const DefaultWindow = 3 * time.Second

// Verdict is how bad a finding is.
type Verdict uint8

// The verdicts, from good to bad. Unknown says that the check could not look.
const (
	OK Verdict = iota
	Unknown
	Info
	Warn
	Critical
)

var verdictNames = [...]string{"ok", "unknown", "info", "warn", "critical"}

// String returns the verdict in lower case.
func (v Verdict) String() string { return verdictNames[min(int(v), len(verdictNames)-1)] }

// MarshalText writes the same.
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// Check is one thing that the doctor looks at.
type Check struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	About string `json:"about"` // what is compared with what
	// Host checks run once; the others in every namespace.
	Host bool `json:"host"`
	// Symptom is what users notice, Remedy what to do about it, with what it
	// costs and risks. They are shown with verdicts of warn and critical.
	Symptom string `json:"symptom"`
	Remedy  Remedy `json:"remedy"`
	// Weight orders causes of equal verdict: causes before their consequences.
	Weight int                                        `json:"-"`
	Run    func(ctx context.Context, c *Case) Finding `json:"-"`
}

// Remedy is a treatment.
type Remedy struct {
	Do   string `json:"do"`
	Cost string `json:"cost,omitempty"`
	Risk string `json:"risk,omitempty"`
}

// Case is what a check looks at: the host, and one of its namespaces.
type Case struct {
	*Sample
	NS *Namespace // nil for host checks
}

// Finding is the answer of a check.
type Finding struct {
	Check     string     `json:"check"`
	Name      string     `json:"name"`
	Namespace string     `json:"namespace,omitempty"` // empty: the whole host
	Verdict   Verdict    `json:"verdict"`
	Summary   string     `json:"summary"`
	Evidence  []Evidence `json:"evidence,omitempty"`
	Symptom   string     `json:"symptom,omitempty"`
	Remedy    *Remedy    `json:"remedy,omitempty"`
	// CausedBy is the check whose finding explains this one; empty for causes.
	CausedBy string `json:"caused_by,omitempty"`
	// LostPerSecond is how many packets or connections the cause costs.
	LostPerSecond float64 `json:"lost_per_second,omitempty"`

	weight int
}

// Evidence is a value and where it was read.
type Evidence struct {
	What   string `json:"what"`
	Value  string `json:"value"`
	Source string `json:"source"`
}

// Report is the result of one examination.
type Report struct {
	At       time.Time     `json:"at"`
	Host     string        `json:"kernel"`
	Window   time.Duration `json:"window_ns"`
	Findings []Finding     `json:"findings"`
	// Conclusion names the most likely causes in the order in which to act; the
	// first line is the most likely one.
	Conclusion []string `json:"conclusion"`
	Worst      Verdict  `json:"worst"`
	Limits     []string `json:"limits,omitempty"`
	Namespaces []string `json:"namespaces"`
}

// ExitCode is 2 for a critical finding, 1 for a warning, else 0.
func (r *Report) ExitCode() int {
	switch r.Worst {
	case Critical:
		return 2
	case Warn:
		return 1
	}
	return 0
}

// Options says how to examine.
type Options struct {
	Window time.Duration // 0: DefaultWindow
	// NoDrops leaves out the drop events, which need the right to load BPF.
	NoDrops bool
	// Light leaves out what costs CPU time and says little: the connection tables
	// of namespaces that use less than lightFill of the limit.
	Light bool
	// Progress, when set, is told what is going on.
	Progress func(format string, args ...any)
	// During, when set, runs within the window, which then ends when it returns.
	During func(ctx context.Context) error
}

// Examine reads the host, waits, reads it again, and judges.
func Examine(ctx context.Context, reader Reader, o Options) (*Report, error) {
	sample, err := Take(ctx, reader, o)
	if err != nil {
		return nil, err
	}
	return Judge(ctx, sample), nil
}

// Take reads a host at both ends of a window.
func Take(ctx context.Context, reader Reader, o Options) (*Sample, error) {
	if o.Window == 0 {
		o.Window = DefaultWindow
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	list, hidden := reader.Namespaces()
	s := &Sample{Partial: reader.Partial()}
	if hidden > 0 {
		s.Limits = append(s.Limits, fmt.Sprintf("the network namespaces of %d processes are hidden from this user: run as root", hidden))
	}
	o.Progress("reading %d network namespaces", len(list))
	watcher := s.watchDrops(ctx, list, o)
	start := time.Now()
	s.Before = reader.Host(ctx)
	for _, ns := range list {
		n := &Namespace{Namespace: ns, IsHost: ns.Inode == conntrack.HostNamespace().Inode}
		var err error
		if n.Before, err = reader.Namespace(ctx, n.Namespace); err != nil {
			s.Limits = append(s.Limits, fmt.Sprintf("namespace %s: %v", ns.Name, err))
			continue
		}
		s.Namespaces = append(s.Namespaces, n)
	}
	o.Progress("watching for %s", o.Window)
	if o.During != nil {
		if err := o.During(ctx); err != nil {
			return nil, err
		}
	}
	s.inspect(ctx, reader, o.Light)
	if err := sleep(ctx, o.Window-time.Since(start)); err != nil {
		return nil, err
	}
	s.readAgain(ctx, reader)
	s.After = reader.Host(ctx)
	s.Window = time.Since(start)
	s.collectDrops(ctx, watcher)
	return s, nil
}

// readAgain takes the second readings. Namespaces that went away meanwhile are
// left out: what they were cannot be judged any more.
func (s *Sample) readAgain(ctx context.Context, reader Reader) {
	var stayed []*Namespace
	for _, n := range s.Namespaces {
		var err error
		n.After, err = reader.Namespace(ctx, n.Namespace)
		switch {
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EINVAL):
			continue
		case err != nil:
			n.After = n.Before
			s.Limits = append(s.Limits, fmt.Sprintf("namespace %s: second reading: %v", n.Name, err))
		}
		n.Delta = n.After.Counters.Sub(n.Before.Counters)
		stayed = append(stayed, n)
	}
	if gone := len(s.Namespaces) - len(stayed); gone > 0 {
		s.Limits = append(s.Limits, plural(gone, "namespace")+" went away while the host was watched")
	}
	s.Namespaces = stayed
}

// inspect reads what needs to be read once: tables and rules.
func (s *Sample) inspect(ctx context.Context, reader Reader, light bool) {
	for _, n := range s.Namespaces {
		if n.Rules, n.RulesErr = reader.Rules(ctx, n.Namespace); n.RulesErr != nil && n.Rules == nil {
			n.Rules = &Ruleset{}
		}
		if n.TableSkipped = light && n.Before.Limits.Fill() < lightFill; n.TableSkipped {
			continue
		}
		n.Table, n.PrivilegedPorts, n.TableErr = reader.Table(ctx, n.Namespace)
	}
}

// watchDrops starts to count drop events; without the right to, it notes why.
func (s *Sample) watchDrops(ctx context.Context, list []conntrack.Namespace, o Options) *trace.Watcher {
	if o.NoDrops {
		return nil
	}
	w := &trace.Watcher{Namespaces: list, Options: trace.DropOptions{SamplesPerSecond: 5, Stacks: true}}
	if len(list) == 1 {
		w.Options.Netns = list[0].Inode
	}
	if err := w.Start(ctx); err != nil {
		s.Limits = append(s.Limits, fmt.Sprintf("drop events are not seen, causes come from counters alone: %v", err))
		return nil
	}
	return w
}

// collectDrops gives each namespace its causes.
func (s *Sample) collectDrops(ctx context.Context, w *trace.Watcher) {
	if w == nil {
		for _, n := range s.Namespaces {
			n.DropsErr = errNoEvents
		}
		return
	}
	report, err := w.Stop(ctx)
	if err != nil {
		s.Limits = append(s.Limits, err.Error())
		return
	}
	s.Limits = append(s.Limits, report.Limits...)
	for _, g := range report.Groups {
		for _, n := range s.Namespaces {
			if n.Inode == g.Netns {
				n.Drops = append(n.Drops, g)
			}
		}
	}
}

// Judge runs all checks on a sample and concludes.
func Judge(ctx context.Context, s *Sample) *Report {
	r := &Report{At: time.Now(), Host: s.After.Release, Window: s.Window, Limits: s.Limits}
	for _, n := range s.Namespaces {
		r.Namespaces = append(r.Namespaces, n.Name)
	}
	for _, check := range Checks() {
		if check.Host {
			r.add(check, "", check.Run(ctx, &Case{Sample: s}))
			continue
		}
		for _, n := range s.Namespaces {
			r.add(check, n.Name, check.Run(ctx, &Case{Sample: s, NS: n}))
		}
	}
	r.conclude(s)
	return r
}

// add completes a finding with what its check knows.
func (r *Report) add(check Check, namespace string, f Finding) {
	f.Check, f.Name, f.Namespace, f.weight = check.ID, check.Name, namespace, check.Weight
	if f.Verdict >= Warn {
		if f.Symptom == "" {
			f.Symptom = check.Symptom
		}
		if f.Remedy == nil {
			remedy := check.Remedy
			f.Remedy = &remedy
		}
	}
	r.Worst = max(r.Worst, f.Verdict)
	r.Findings = append(r.Findings, f)
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// List finds checks whose ID or name begins with one of the words; none: all.
func List(words ...string) []Check {
	var out []Check
	for _, c := range Checks() {
		match := len(words) == 0
		for _, w := range words {
			match = match || strings.HasPrefix(strings.ToLower(c.ID), strings.ToLower(w)) || strings.HasPrefix(c.Name, strings.ToLower(w))
		}
		if match {
			out = append(out, c)
		}
	}
	return out
}
