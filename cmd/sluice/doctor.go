// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/doctor"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/table"
)

// doctorFlags are the flags of sluice doctor.
type doctorFlags struct {
	seconds  float64
	netns    string
	watch    bool
	every    time.Duration
	markdown bool
	all      bool
	list     bool
	try      bool
}

func newDoctor(a *app) *cobra.Command {
	var f doctorFlags
	cmd := &cobra.Command{
		Use:     "doctor",
		Short:   "Find out why NAT on this host is slow or loses packets",
		GroupID: "diagnosis",
		Args:    noArgs,
		Long: "Doctor reads the host twice, a few seconds apart: connection tracking, ports, rules, forwarding,\n" +
			"interfaces, sockets and dropped packets, in every network namespace. It prints what is wrong with\n" +
			"its evidence and remedy, and concludes with the causes in the order in which to act on them.\n" +
			"It changes nothing, except with --try.\n\n" +
			"With --try it applies the first remedy, watches the same connections again, keeps the remedy if they\n" +
			"are answered now and other connections are still answered, and takes it back otherwise. It does not\n" +
			"try commands that it cannot take back. The journal of sluice tune records each change before it is\n" +
			"made: sluice tune status shows it, sluice tune rollback takes it back. A remedy that is kept lasts\n" +
			"until the next boot.\n\n" +
			"Exit code: 2 when something is critical, 1 with warnings, else 0; 4 when nothing was found but too\n" +
			"many checks could not read what they need, 3 when the examination itself failed or was interrupted, and 64 for\n" +
			"mistakes in the command line. With --try: 0 when the remedy healed or nothing is wrong, 1 when it did\n" +
			"not heal and was taken back, 2 when no remedy could be tried, 3 and 64 as above.",
		Example: "  sluice doctor\n" +
			"  sluice doctor --netns office --seconds 10\n" +
			"  sluice doctor --markdown > report.md\n" +
			"  sluice doctor --try\n" +
			"  sluice doctor --watch --json | jq -r '.conclusion[0].summary'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkSeconds(f.seconds); err != nil {
				return usageError(cmd, "%w", err)
			}
			if f.seconds == 0 {
				return usageError(cmd, "--seconds 0: must be more than 0")
			}
			if f.markdown && a.json {
				return usageError(cmd, "give either --markdown or --json")
			}
			if f.list {
				return listChecks(a)
			}
			if f.try {
				return examinationError(f.tryRemedy(cmd.Context(), a))
			}
			return examinationError(f.run(cmd.Context(), a))
		},
	}
	flags := cmd.Flags()
	flags.Float64Var(&f.seconds, "seconds", observe.DefaultWindow.Seconds(), "how long to watch")
	flags.StringVar(&f.netns, "netns", "all", "network namespace: a name under /run/netns, a path, host, or all")
	flags.BoolVar(&f.watch, "watch", false, "examine again and again until Ctrl-C")
	flags.DurationVar(&f.every, "every", 15*time.Second, "with --watch: time from one examination to the next")
	flags.BoolVar(&f.markdown, "markdown", false, "print Markdown, for a ticket")
	flags.BoolVar(&f.all, "all", false, "show also the checks that found nothing")
	flags.BoolVar(&f.list, "list", false, "list the checks and do nothing")
	flags.BoolVar(&f.try, "try", false, "apply the first remedy, and take it back unless it heals")
	for _, ignored := range []string{"markdown", "all", "list"} {
		cmd.MarkFlagsMutuallyExclusive("watch", ignored)
		cmd.MarkFlagsMutuallyExclusive("try", ignored)
	}
	cmd.MarkFlagsMutuallyExclusive("try", "watch")
	offerFrom(cmd, "netns", namespaces)
	return cmd
}

// exitUnexamined is the exit code of a failed examination; 0 to 2 are results.
const exitUnexamined = 3

// examinationError gives errors their own exit code, different from warnings.
func examinationError(err error) error {
	var status exitError
	switch {
	case err == nil || errors.As(err, &status):
		return err
	case err == context.Canceled:
		err = errInterrupted
	}
	return exitError{exitUnexamined, err}
}

// namespaces returns the namespace of --netns; none: all.
func (f *doctorFlags) namespaces() ([]netdev.Namespace, error) {
	if f.netns == "all" {
		return nil, nil
	}
	ns, err := netdev.NamespaceAt(f.netns)
	return []netdev.Namespace{ns}, err
}

func (f *doctorFlags) run(ctx context.Context, a *app) error {
	only, err := f.namespaces()
	if err != nil {
		return err
	}
	options := f.options(a)
	if f.watch {
		options.Progress, options.Session = nil, &observe.Session{}
		defer options.Session.Close()
	}
	reader := observe.NewLive(only)
	for {
		next := time.After(f.every)
		report, err := doctor.Examine(ctx, reader, options)
		if err != nil {
			if f.watch && ctx.Err() != nil {
				return nil
			}
			return err
		}
		if err := f.print(a, report); err != nil {
			return err
		}
		if !f.watch {
			if code := report.ExitCode(); code != 0 {
				return exitError{code: code}
			}
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-next:
		}
	}
}

// options returns how the host is observed.
func (f *doctorFlags) options(a *app) observe.Options {
	return observe.Options{Window: time.Duration(f.seconds * float64(time.Second)), Progress: a.progress, Probed: a.backendAddresses}
}

// answersWithin bounds the wait for a daemon.
const answersWithin = time.Second

// backendAddresses returns the addresses of the backends of the daemon in a namespace; none without a daemon.
func (a *app) backendAddresses(ctx context.Context, ns netdev.Namespace) (list []netip.Addr) {
	socket := daemon.SocketIn(ns)
	if ns.Path == "" || ns.Inode == netdev.CurrentNamespace().Inode {
		socket = a.paths.SocketPath()
	}
	ctx, cancel := context.WithTimeout(ctx, answersWithin)
	defer cancel()
	backends, _ := api.NewClient(socket).Backends(ctx)
	for _, b := range backends {
		list = append(list, b.Address.Addr())
	}
	return list
}

func (f *doctorFlags) print(a *app, r *doctor.Report) error {
	return a.print(r, func(w io.Writer) error {
		if f.watch {
			return watchLine(a, w, r)
		}
		return r.Write(w, doctor.Style{All: f.all, Markdown: f.markdown, Paint: func(v doctor.Verdict, text string) string {
			return a.paintVerdict(w, v, text)
		}})
	})
}

// watchLine prints an examination as its time and conclusion.
func watchLine(a *app, w io.Writer, r *doctor.Report) error {
	_, err := fmt.Fprintf(w, "%s  %-8s  %s\n", r.At.Format(time.TimeOnly), a.paintVerdict(w, r.Worst, r.Worst.String()), r.Conclusion[0])
	return err
}

func (a *app) paintVerdict(w io.Writer, v doctor.Verdict, text string) string {
	switch v {
	case doctor.Critical:
		return a.colour(w, red, text)
	case doctor.Warn:
		return a.colour(w, yellow, text)
	}
	return text
}

func listChecks(a *app) error {
	checks := doctor.Checks()
	return a.print(checks, func(w io.Writer) error {
		t := table.New("id", "name", "looks at")
		for _, c := range checks {
			t.Row(c.ID, c.Name, c.About)
		}
		return t.Write(w)
	})
}
