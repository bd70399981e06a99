// SPDX-License-Identifier: Apache-2.0

// Package trial applies the first remedy of a report, watches the same traffic again, and takes the remedy back unless
// it healed. The journal of package tune records each change before it is made.
package trial

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/tune"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/pause"
)

// Options are how a remedy is tried.
type Options struct {
	// Examine observes the host.
	Examine func(context.Context) (*doctor.Report, error)
	// Namespaces are those that Examine observes.
	Namespaces []netdev.Namespace
	// Journal is the directory of the journal; empty: the default of package tune.
	Journal string
	// Program is the path of sluice, for commands of remedies; empty: the running program.
	Program  string
	Progress func(format string, args ...any)
}

// Verdict is the end of a trial.
type Verdict string

// The verdicts.
const (
	Healed   Verdict = "healed"     // The remedy is kept.
	TookBack Verdict = "taken back" // It did not heal.
	NotTried Verdict = "not tried"  // There is no remedy that can be taken back.
	Healthy  Verdict = "healthy"    // There is nothing to heal.
)

// Result is a trial.
type Result struct {
	Verdict    Verdict           `json:"verdict"`
	Why        string            `json:"why,omitempty"` // it was not tried, or taken back
	Conclusion doctor.Conclusion `json:"conclusion"`    // the first one before the trial
	Namespace  string            `json:"namespace"`     // in which the commands ran
	Commands   []string          `json:"commands"`
	Risk       string            `json:"risk,omitempty"`
	Before     doctor.Fate       `json:"before"`
	After      *doctor.Fate      `json:"after,omitempty"` // absent if nothing was tried
	// Changes is the entry of the journal.
	Changes *tune.Entry `json:"changes,omitempty"`
	// Undo is the command that takes back a remedy that was kept.
	Undo  string   `json:"undo,omitempty"`
	Notes []string `json:"notes,omitempty"`
}

// looks matches commands that change nothing.
var looks = regexp.MustCompile(`^(sluice (drops|conns --|profile|explain|show|top)|ss |ethtool -[gS] |tc -s |ip -s |ip xfrm |ip (-6 )?(route (show|get)|rule$|neigh$|addr show)|nft (-a )?list |dmesg)`)

// settle is how long connections get to repeat their requests before they are watched again. windows is how often
// they are watched until one is seen.
const (
	settle  = 500 * time.Millisecond
	windows = 3
)

// Run examines the host, tries the remedy of the first conclusion, and examines the host again.
func Run(ctx context.Context, o Options) (*Result, error) {
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	report, err := o.Examine(ctx)
	if err != nil {
		return nil, err
	}
	retry := report.Retry()
	first := retry.Conclusion
	r := &Result{Conclusion: first, Namespace: first.Namespace, Before: retry.Fate(report), Risk: riskOf(report, first)}
	r.Commands = slices.DeleteFunc(slices.Clone(first.Commands), looks.MatchString)
	system, why := o.place(r)
	switch {
	case first.Severity < doctor.Warn:
		r.Verdict, r.Why, r.Commands = Healthy, "no check found anything that needs a remedy", nil
		return r, nil
	case len(r.Commands) == 0:
		r.Verdict, r.Why = NotTried, "the remedy has no command that changes this host"
		return r, nil
	case why == nil:
		why = tune.Reversible(ctx, system, r.Commands)
	}
	if why != nil {
		r.Verdict, r.Why = NotTried, why.Error()
		return r, nil
	}
	return r, o.try(ctx, r, system, retry)
}

// place returns the namespace of the commands.
func (o *Options) place(r *Result) (*tune.System, error) {
	s := &tune.System{Dir: o.Journal, Program: o.Program}
	if strings.Contains(r.Conclusion.Do, "in the host's own namespace") || r.Conclusion.Namespace == "" {
		s.Namespace = netdev.HostNamespace()
		r.Namespace = s.Namespace.Name
		return s, nil
	}
	for _, ns := range o.Namespaces {
		if ns.Name == r.Conclusion.Namespace {
			s.Namespace = ns
			return s, nil
		}
	}
	return s, fmt.Errorf("the namespace %s is gone", r.Conclusion.Namespace)
}

// riskOf is the risk of the remedy.
func riskOf(report *doctor.Report, c doctor.Conclusion) string {
	for _, f := range report.Findings {
		if f.Check == c.Check && f.Namespace == c.Namespace && f.Remedy != nil {
			return f.Remedy.Risk
		}
	}
	return ""
}

// try applies the commands and decides.
func (o *Options) try(ctx context.Context, r *Result, s *tune.System, retry doctor.Retry) error {
	for _, c := range r.Commands {
		o.Progress("trying: %s", c)
	}
	tried, err := tune.Try(ctx, s, "doctor "+r.Conclusion.Check, r.Commands)
	if err != nil {
		return err
	}
	why := o.watch(ctx, r, retry)
	if why == nil {
		if err := tried.Keep(); err != nil {
			return err
		}
		r.Verdict, r.Changes, r.Undo = Healed, &tried.Entry, "sluice tune rollback"
		if s.Namespace.Path != "" && s.Namespace.Name != "host" {
			r.Undo += " --netns " + s.Namespace.Name
		}
		return nil
	}
	if r.Notes, err = tried.TakeBack(why.Error()); err != nil {
		return fmt.Errorf("%w; and not everything could be taken back: %w", why, err)
	}
	r.Verdict, r.Why, r.Changes = TookBack, why.Error(), &tried.Entry
	return nil
}

// watch observes the host until an exchange of the conclusion is seen. The error is the reason to take the remedy back.
func (o *Options) watch(ctx context.Context, r *Result, retry doctor.Retry) error {
	if err := pause.For(ctx, settle); err != nil {
		return errors.New("the trial was interrupted")
	}
	for left := windows; ; left-- {
		report, err := o.Examine(ctx)
		switch {
		case ctx.Err() != nil:
			return errors.New("the trial was interrupted")
		case err != nil:
			return fmt.Errorf("the host could not be examined again: %w", err)
		}
		after := retry.Fate(report)
		r.After = &after
		if after.Observed && after.Concerns.All() == 0 && left > 1 {
			continue
		}
		if healed, why := after.Healed(r.Before); !healed {
			return errors.New(why)
		}
		return nil
	}
}
