// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/trial"
)

// Exit codes of sluice doctor --try.
const (
	exitTookBack = 1
	exitNotTried = 2
)

// tryRemedy runs sluice doctor --try.
func (f *doctorFlags) tryRemedy(ctx context.Context, a *app) error {
	if os.Geteuid() != 0 {
		return daemon.ErrNoRoot
	}
	only, err := f.namespaces()
	if err != nil {
		return err
	}
	reader := observe.NewLive(only)
	options := f.options(a)
	o := trial.Options{Progress: a.progress, Examine: func(ctx context.Context) (*doctor.Report, error) { return doctor.Examine(ctx, reader, options) }}
	o.Namespaces, _ = reader.Namespaces()
	if a.paths.State != "" {
		o.Journal = filepath.Join(a.paths.State, "tune")
	}
	r, err := trial.Run(ctx, o)
	if err != nil {
		return err
	}
	if r.Undo != "" && a.paths.State != "" {
		r.Undo += " --state-dir " + a.paths.State
	}
	if err := a.print(r, func(w io.Writer) error { return writeTrial(w, r) }); err != nil {
		return err
	}
	switch r.Verdict {
	case trial.TookBack:
		return exitError{code: exitTookBack}
	case trial.NotTried:
		return exitError{code: exitNotTried}
	}
	return nil
}

// writeTrial prints the state before the trial, the commands, the state after them, and the decision.
func writeTrial(w io.Writer, r *trial.Result) error {
	fmt.Fprintf(w, "before: %s\n        %s\n", r.Conclusion, fateText(r.Before))
	if r.After == nil {
		for _, c := range r.Commands {
			fmt.Fprintf(w, "remedy: %s\n", c)
		}
		_, err := fmt.Fprintf(w, "%s: %s\n", r.Verdict, r.Why)
		return err
	}
	for _, c := range r.Commands {
		fmt.Fprintf(w, "tried:  %s   (namespace %s)\n", c, r.Namespace)
	}
	fmt.Fprintf(w, "after:  %s\n        %s\n", r.After.Summary, fateText(*r.After))
	if r.Verdict == trial.Healed {
		fmt.Fprintln(w, "healed: the remedy is kept until the next boot")
		if r.Risk != "" {
			fmt.Fprintf(w, "risk:   %s\n", r.Risk)
		}
		_, err := fmt.Fprintf(w, "undo:   %s\n", r.Undo)
		return err
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "note:   %s\n", n)
	}
	_, err := fmt.Fprintf(w, "%s: %s; everything is as it was\n", r.Verdict, r.Why)
	return err
}

// fateText counts the exchanges of a conclusion and all others.
func fateText(f doctor.Fate) string {
	others := fmt.Sprintf("%d of %d others", f.Others.Answered, f.Others.All())
	if !f.Observed {
		return "it is about no connections that were observed; answered: " + others
	}
	return fmt.Sprintf("answered: %d of %d connections of this kind, %s", f.Concerns.Answered, f.Concerns.All(), others)
}
