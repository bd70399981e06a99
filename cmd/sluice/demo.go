// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/demo"
	"github.com/sluice-lb/sluice/table"
)

func newDemo(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "demo",
		Short:   "Show the gateway at work on real traffic, in under two minutes",
		GroupID: "measure",
		Long: "Demo builds a lab of network namespaces, runs this program as the gateway with the example\n" +
			"configurations, sends thousands of requests through it, kills a server and the daemon, and\n" +
			"reports which checks passed. The exit code is 1 when one failed.\n" +
			"Nothing is left behind, not even after Ctrl-C. Needs root.",
		Example: "  sluice demo\n  sluice demo --json > demo.json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return daemon.ErrNoRoot
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			report, err := demo.Run(cmd.Context(), demo.Options{Sluice: self, Progress: a.demoProgress})
			if cmd.Context().Err() != nil {
				return interruptedError("the demo", err)
			}
			if err != nil {
				return err
			}
			if err := a.print(report, func(w io.Writer) error { return a.printDemo(w, report) }); err != nil {
				return err
			}
			if n := len(report.Broken()); n > 0 {
				return exitError{exitFailure, fmt.Errorf("%d of %d promises were not kept", n, len(report.Results))}
			}
			return nil
		},
	}
}

// interruptedError returns the result of a demonstration after its context ended; err is its own error.
func interruptedError(what string, err error) error {
	if errors.Is(err, lab.ErrDown) || errors.Is(err, faults.ErrRestore) {
		return fmt.Errorf("%s was interrupted, and not all is as it was before: %w", what, err)
	}
	return fmt.Errorf("%s was interrupted; everything is as it was before", what)
}

// demoProgress prints a line of the demo's progress. Headings are emphasised on a terminal.
func (a *app) demoProgress(line string) {
	if !strings.HasPrefix(line, " ") {
		line = a.colour(a.stderr, bold, line)
	}
	line = strings.Replace(line, "NOT KEPT", a.colour(a.stderr, red, "NOT KEPT"), 1)
	if rest, ok := strings.CutPrefix(line, "  ok "); ok {
		line = "  " + a.colour(a.stderr, green, "ok") + " " + rest
	}
	a.progress("%s", line)
}

func (a *app) printDemo(w io.Writer, report *demo.Report) error {
	t := table.New("EXAMPLE", "PROMISE", "MEASURED", "")
	example, shownPromises := "", 0
	for _, r := range report.Results {
		shown := r.Example
		if shown == example {
			shown = ""
		}
		example = r.Example
		verdict := a.colour(w, green, "kept")
		if r.Skipped != "" {
			verdict = a.colour(w, yellow, "skipped")
		} else if !r.Kept {
			verdict = a.colour(w, red, "NOT KEPT")
		}
		if r.Skipped == "" {
			shownPromises++
		}
		t.Row(shown, r.Promise, r.Measured, table.Styled(verdict))
	}
	fmt.Fprintln(w)
	if err := t.Write(w); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%d of %d promises kept; %d exchanges answered, %d not (a dead server's, before it was out), in %.0f s.\n\n"+
		"What to try next:\n"+
		"  sluice lab up balancer                                     the same network, to play in\n"+
		"  sluice lab exec balancer gateway -- sluice run -c examples/lb-dnat.yaml\n"+
		"  sluice lab exec balancer gateway -- sluice show services   in another terminal\n"+
		"  sluice lab down --all\n"+
		"  sluice doctor                                              what keeps NAT on this host from being fast\n",
		shownPromises-len(report.Broken()), shownPromises, report.Exchanges, report.Unanswered, report.Took.Round(time.Second).Seconds())
	return err
}
