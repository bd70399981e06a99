// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/pause"
)

// Watch is the trial after the values were written.
type Watch struct {
	// Window is how long drops are watched; 0 skips the trial.
	Window time.Duration
	// Drops returns a counter of dropped packets that only grows.
	Drops func(context.Context) (uint64, error)
	// Every is the time between two looks; default one second.
	Every time.Duration
	// Tell receives a line about each step; may be nil.
	Tell func(string)
}

// Result is what Apply did.
type Result struct {
	Entry Entry `json:"entry"`
	// RolledBack says why everything was taken back; empty when it was kept.
	RolledBack string `json:"rolled_back,omitempty"`
	// Before and During are drops a second before and in the trial.
	Before float64 `json:"drops_per_second_before"`
	During float64 `json:"drops_per_second_during"`
	// Overridden names files that undo a value at the next boot.
	Overridden []string `json:"overridden_at_boot,omitempty"`
	Notes      []string `json:"notes,omitempty"`
}

// Apply writes the proposal live, reads it back, watches the trial and keeps the
// values for the next boot. If a value is refused, if drops rise, or if ctx ends
// before the trial does (Ctrl-C, or the terminal is gone because the network is),
// everything is taken back before Apply returns.
func Apply(ctx context.Context, s *System, p *Proposal, w Watch) (*Result, error) {
	unlock, err := s.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := errors.Join(s.unfinished(), s.unchanged(p)); err != nil {
		return nil, err
	}
	r := &Result{}
	if len(p.Pending()) == 0 {
		r.Notes = []string{"nothing to change"}
		return r, nil
	}
	if w.Tell == nil {
		w.Tell = func(string) {}
	}
	if w.Every <= 0 {
		w.Every = time.Second
	}
	if r.Before, err = w.rate(ctx, min(w.Window, 2*w.Every)); err != nil {
		return nil, fmt.Errorf("drops before the change: %w", err)
	}
	if s.persistent() {
		if err := s.keepsFiles(); err != nil {
			return nil, err
		}
	}
	now := time.Now()
	e := s.newEntry(p, now)
	if err := s.save(e); err != nil {
		return nil, err
	}
	why := s.write(e)
	if why == nil {
		why = s.save(e)
	}
	if why == nil {
		w.Tell(fmt.Sprintf("%d values written; drops are watched for %v", len(e.Steps), w.Window))
		r.During, why = w.trial(ctx, r.Before)
	}
	if why == nil && s.persistent() {
		why = s.persist(e, now)
	}
	if why != nil {
		notes, err := s.takeBack(e, why.Error())
		if err != nil {
			return nil, fmt.Errorf("%w; and not everything could be taken back: %w", why, err)
		}
		r.Entry, r.RolledBack, r.Notes = *e, why.Error(), notes
		return r, nil
	}
	e.State = Applied
	r.Entry, r.Overridden = *e, s.Overrides(e)
	return r, s.save(e)
}

// write sets every value in order and reads it back.
func (s *System) write(e *Entry) error {
	for i := range e.Steps {
		step := &e.Steps[i]
		if err := s.Set(step.Key, step.Wanted); err != nil {
			return err
		}
		after, err := s.Get(step.Key)
		if err != nil {
			return err
		}
		step.After = after
		if !accepted(step) {
			return fmt.Errorf("%s: wrote %s, the kernel keeps %s", step.Key, step.Wanted, after)
		}
	}
	return nil
}

// bucketRounding is how far the kernel rounds the number of buckets up: to whole
// pages of 8-byte heads.
const bucketRounding = 4096 / 8

// accepted compares the written value with the kernel's.
func accepted(step *Step) bool {
	if same(step.After, step.Wanted) {
		return true
	}
	want, e1 := strconv.ParseUint(step.Wanted, 10, 64)
	got, e2 := strconv.ParseUint(step.After, 10, 64)
	return step.Key == conntrackBuckets && e1 == nil && e2 == nil && got >= want && got-want < bucketRounding
}

// rate counts drops for d and returns them by the second.
func (w *Watch) rate(ctx context.Context, d time.Duration) (float64, error) {
	if w.Drops == nil || d <= 0 {
		return 0, nil
	}
	start := time.Now()
	first, err := w.Drops(ctx)
	if err != nil {
		return 0, err
	}
	if err := pause.For(ctx, d); err != nil {
		return 0, err
	}
	last, err := w.Drops(ctx)
	return float64(last-first) / time.Since(start).Seconds(), err
}

// trial watches drops until the window is over. They have risen when their rate
// is both twice the former and one a second above it.
func (w *Watch) trial(ctx context.Context, before float64) (during float64, err error) {
	if w.Drops == nil || w.Window <= 0 {
		return 0, nil
	}
	start := time.Now()
	first, err := w.Drops(ctx)
	if err != nil {
		return 0, fmt.Errorf("drops during the trial: %w", err)
	}
	for time.Since(start) < w.Window {
		if err := pause.For(ctx, min(w.Every, w.Window)); err != nil {
			return during, errors.New("the trial was interrupted")
		}
		last, err := w.Drops(ctx)
		if err != nil {
			return during, fmt.Errorf("drops during the trial: %w", err)
		}
		during = float64(last-first) / time.Since(start).Seconds()
		if during > 2*before && during > before+1 {
			return during, fmt.Errorf("drops rose from %.1f/s to %.1f/s", before, during)
		}
	}
	return during, nil
}

// unfinished refuses to build on a trial that was neither confirmed nor taken
// back, because the program was killed in it.
func (s *System) unfinished() error {
	list, err := s.Journal(false)
	if err != nil {
		return err
	}
	for _, e := range list {
		if e.State == Trial {
			return fmt.Errorf("journal entry %s: its trial never ended (the program was killed): take it back with 'sluice tune rollback' first", e.ID)
		}
	}
	return nil
}

// unchanged refuses a proposal based on values that have changed since. Rollback would otherwise
// overwrite another user's change.
func (s *System) unchanged(p *Proposal) error {
	for _, c := range p.Pending() {
		switch now, err := s.Get(c.Key); {
		case err != nil:
			return err
		case !same(now, c.Now):
			return fmt.Errorf("%s: somebody has changed it from %s to %s meanwhile: run it again", c.Key, oneLine(c.Now), oneLine(now))
		}
	}
	return nil
}

// oneLine is a value without the kernel's tabs.
func oneLine(value string) string { return strings.Join(strings.Fields(value), " ") }

// Rollback reverts the latest run in force, or all runs, newest first. It returns the resulting
// entries, and notes about values that others have changed meanwhile.
func Rollback(s *System, all bool) (done []Entry, notes []string, err error) {
	unlock, err := s.lock()
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	list, err := s.Journal(false)
	if err != nil {
		return nil, nil, err
	}
	slices.Reverse(list)
	for i := range list {
		e := &list[i]
		if e.State == RolledBack {
			continue
		}
		more, err := s.takeBack(e, "asked for")
		done, notes = append(done, *e), append(notes, more...)
		if err != nil {
			return done, notes, err
		}
		if !all {
			break
		}
	}
	return done, notes, nil
}

// takeBack restores every value that e wrote, last one first, and the file. A
// value that is no longer what e wrote belongs to someone else and is left.
func (s *System) takeBack(e *Entry, why string) (notes []string, err error) {
	notes, err = s.undoCommands(e)
	errs := []error{err}
	for _, step := range slices.Backward(e.Steps) {
		now, err := s.Get(step.Key)
		switch {
		case errors.Is(err, fs.ErrNotExist): // such as a module that is not loaded since a reboot
			notes = append(notes, fmt.Sprintf("%s: the kernel has it no more: nothing to put back (it was %s before)", step.Key, oneLine(step.Before)))
		case err != nil:
			errs = append(errs, err)
		case same(now, step.Before):
			// never written, or back already
		case step.Wanted == "":
			errs = append(errs, s.restore(step)) // it changed with the step that was restored before
		case step.After != "" && !same(now, step.After) || step.After == "" && !same(now, step.Wanted) && !roundedUp(step, now):
			notes = append(notes, fmt.Sprintf("%s: someone set %s since: left alone (it was %s before)", step.Key, oneLine(now), oneLine(step.Before)))
		default:
			errs = append(errs, s.restore(step))
		}
	}
	note, err := restoreFile(e.File)
	if note != "" {
		notes = append(notes, note)
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		return notes, fmt.Errorf("rollback of %s: %w", e.ID, err)
	}
	e.State, e.Why = RolledBack, why
	return notes, s.save(e)
}

// roundedUp reports whether the kernel rounded a number of buckets before a crash prevented
// recording it.
func roundedUp(step Step, now string) bool {
	step.After = now
	return accepted(&step)
}

func (s *System) restore(step Step) error {
	if err := s.Set(step.Key, step.Before); err != nil {
		return err
	}
	now, err := s.Get(step.Key)
	if err == nil && !same(now, step.Before) {
		err = fmt.Errorf("%s: restored %s, the kernel keeps %s", step.Key, step.Before, now)
	}
	return err
}
