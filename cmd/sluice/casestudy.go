// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/doctor/casestudy"
	"github.com/sluice-lb/sluice/table"
)

// hostChange describes the changes of the case study to the whole host.
var hostChange = "changes settings of the whole host while it plays, about a minute:\n" + strings.Join(casestudy.HostSettings, ", ") + ".\n" +
	"The first is 1000 during two of the runs, and connections of other programs may be refused then."

// newCaseStudy returns the command 'sluice lab case-study'.
func newCaseStudy(a *app) *cobra.Command {
	var allow bool
	var o casestudy.Options
	cmd := &cobra.Command{
		Use:   "case-study",
		Short: "Overload a NAT gateway, diagnose it, repair it and measure",
		Args:  noArgs,
		Long: "Case-study runs a real nginx behind a gateway made of namespaces, sends 5,000 connections at once,\n" +
			"lowers the limit of the connection table until new connections are refused, asks the doctor for\n" +
			"the cause, repairs it with sluice tune, and measures again; at last the table is small again and the\n" +
			"eBPF datapath translates, which makes no entry in it. With --docker the server is a container of a Docker\n" +
			"daemon of its own, published with -p 8080:8080; the last run puts eBPF in front of the same container.\n\n" +
			"It " + hostChange + "\nAll of them come back in any case, also when it is killed.",
		Example: "  sluice lab case-study\n  sluice lab case-study --allow-host-sysctl --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return daemon.ErrNoRoot
			}
			if err := a.askHostSysctl(allow); err != nil {
				return err
			}
			self, err := os.Executable()
			if err != nil {
				return err
			}
			o.Sluice, o.Progress = self, a.progress
			report, err := casestudy.Play(cmd.Context(), o)
			if cmd.Context().Err() != nil {
				return interruptedError("the case study", err)
			}
			if err != nil {
				return err
			}
			if err := a.print(report, func(w io.Writer) error { return printCaseStudy(a, w, report) }); err != nil {
				return err
			}
			if !report.FoundFirst {
				return exitError{exitFailure, errors.New("the doctor did not name the full table first")}
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&allow, "allow-host-sysctl", false, "do not ask before changing settings of the host")
	flags.IntVar(&o.Connections, "connections", 5000, "connections at once")
	flags.BoolVar(&o.Docker, "docker", false, "publish the server by a Docker daemon in the gateway")
	flags.IntVar(&o.Requests, "requests", 30000, "requests of each run")
	return cmd
}

// askHostSysctl asks for permission on a terminal, and refuses without a terminal.
func (a *app) askHostSysctl(allowed bool) error {
	if allowed {
		return nil
	}
	in, ok := a.stdin.(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return errors.New("the case study " + hostChange + " --allow-host-sysctl allows it")
	}
	fmt.Fprint(a.stderr, "This "+hostChange+" Go on? [y/N] ")
	answer, err := bufio.NewReader(in).ReadString('\n')
	if err != nil || !strings.HasPrefix(strings.ToLower(strings.TrimSpace(answer)), "y") {
		return errors.New("not confirmed; nothing was changed")
	}
	return nil
}

func printCaseStudy(a *app, w io.Writer, r *casestudy.Report) error {
	fmt.Fprintf(w, "\nserver: %s\n\n", r.Server)
	t := table.New("run", "", ">requests/s", ">complete", ">failed", ">p50", ">p99", ">entries", ">eBPF flows", ">refused", ">SYN again")
	for _, run := range r.Runs {
		t.Row(run.Name, run.About, fmt.Sprintf("%.0f", run.RequestsPerSecond), run.Complete, run.Failed,
			run.P50.Round(time.Millisecond/10), run.P99.Round(time.Millisecond/10), run.Entries, run.Flows, run.Refused, run.Retransmitted)
	}
	if err := t.Write(w); err != nil {
		return err
	}
	fmt.Fprintf(w, "\nthe doctor, during the collapse:\n")
	for _, cause := range r.Conclusion {
		fmt.Fprintf(w, "  %s\n", a.colour(w, bold, cause.String()))
	}
	i := r.Identity
	verdict := a.colour(w, green, "all equal")
	switch {
	case !i.Exact():
		verdict = a.colour(w, yellow, "not equal")
	case i.Events < i.Dropped:
		verdict = fmt.Sprintf("equal but for %d that this kernel hides from probes", i.Dropped-i.Events)
	}
	fmt.Fprintf(w, "\nthe same packets, counted three times: kernel's drop counter %d, drop events %d, SYNs never answered %d: %s\n",
		i.Dropped, i.Events, i.SYNs, verdict)
	fmt.Fprintf(w, "\nthe remedy:\n")
	for _, c := range r.Changes {
		if c.Skipped != "" {
			fmt.Fprintf(w, "  %s stays %s (%s)\n", c.Key, c.Now, c.Skipped)
			continue
		}
		fmt.Fprintf(w, "  %s: %s -> %s (%s)\n", c.Key, c.Now, c.Value, c.Why)
	}
	for _, note := range r.Notes {
		fmt.Fprintf(w, "\n%s\n", note)
	}
	return nil
}
