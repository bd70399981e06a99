// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/load"
)

func newLoadHTTP(a *app) *cobra.Command {
	var spec load.HTTPSpec
	var bounds loadBounds
	var from string
	cmd := &cobra.Command{
		Use:   "http [--from [LAB/]NODE] URL",
		Short: "Make real HTTP requests over many connections at once",
		Long: "http is a closed-loop client (each connection asks again when it was answered) or, with --rate, an open-loop\n" +
			"one: each request has its due time and its latency counts from there. What the end of the run cuts off is\n" +
			"unanswered; it and what timed out count in the total times by how long they had waited.",
		Example: "  sluice lab up balancer\n" +
			"  sluice lab exec balancer s1 -- python3 -m http.server 80 &\n" +
			"  sluice load http --from client --connections 50 --requests 10000 \\\n      http://10.0.2.2/",
		Args: requireArgs("URL"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if spec.Requests == 0 || bounds.seconds != 0 { // the number of requests may be the only limit
				if err := bounds.check(); err != nil {
					return usageError(cmd, "%w", err)
				}
			}
			spec.URL, spec.Duration = args[0], time.Duration(bounds.seconds*float64(time.Second))
			if err := cmp.Or(spec.Validate(), checkKept("--histogram", bounds.svg)); err != nil {
				return usageError(cmd, "%w", err)
			}
			if from != "" {
				return reexecIn(cmd, from)
			}
			if err := mayLoad(bounds.own, loadPlace{}); err != nil {
				return err
			}
			var last uint64
			r, err := load.RunHTTP(cmd.Context(), spec, func(complete, failed uint64) {
				a.progress("%s requests/s, %s complete, %s failed", load.Count(complete-last), load.Count(complete), load.Count(failed))
				last = complete
			})
			if err != nil {
				return err
			}
			if err := bounds.saveHistogram(r.Histogram, "time of a request, "+load.Count(r.Total.Count)+" requests"); err != nil {
				return err
			}
			if err := a.print(r, func(w io.Writer) error { return writeHTTP(w, r) }); err != nil {
				return err
			}
			if r.Complete == 0 {
				return noSuccessError("no request was answered")
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "run in a lab's node: [LAB/]NODE")
	f.Float64Var(&bounds.seconds, "seconds", 10, "end after so many seconds; 0: only after --requests")
	f.BoolVar(&bounds.own, "i-own-this-network", false, "send outside of a lab's namespaces")
	f.StringVar(&bounds.svg, "histogram", "", "write the latency histogram to this SVG file")
	f.IntVarP(&spec.Connections, "connections", "c", 1, "connections at once")
	f.IntVarP(&spec.Requests, "requests", "n", 0, "end after so many requests; 0: no bound")
	f.Float64Var(&spec.Rate, "rate", 0, "requests a second, open-loop; 0: closed-loop")
	f.BoolVarP(&spec.KeepAlive, "keep-alive", "k", false, "use a connection for more than one request")
	f.DurationVar(&spec.Timeout, "timeout", 30*time.Second, "time after which a request has failed")
	f.BoolVar(&spec.Insecure, "insecure", false, "do not verify certificates")
	return cmd
}

// reexecIn runs the same command line inside a lab's node. A Go program has threads before main
// runs and cannot move all threads to another namespace.
func reexecIn(cmd *cobra.Command, from string) error {
	place, err := parseLoadPlace(from + "/lo")
	if err != nil {
		return usageError(cmd, "%w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := place.node.Command(cmd.Context(), self, withoutFrom(os.Args[1:])...)
	child.Stdin, child.Stdout, child.Stderr = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
	return runToItsEnd(child)
}

// withoutFrom appends an empty --from, which overrides earlier ones.
func withoutFrom(args []string) []string {
	at := slices.Index(args, "--")
	if at < 0 {
		at = len(args)
	}
	return slices.Insert(slices.Clone(args), at, "--from=")
}

// runToItsEnd interrupts the command when its context ends, so that it prints its results, and
// returns its error.
func runToItsEnd(child *exec.Cmd) error {
	child.Cancel = func() error { return child.Process.Signal(os.Interrupt) }
	child.WaitDelay = 5 * time.Second
	err := child.Run()
	if errors.Is(err, context.Canceled) && child.ProcessState.Success() { // interrupted as requested
		return nil
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exitError{code: exit.ExitCode()}
	}
	return err
}

// writeHTTP prints the fields of ab, and more percentiles.
func writeHTTP(w io.Writer, r *load.HTTPResult) error {
	fmt.Fprintf(w, "Time taken for tests:   %.3f seconds\n", r.Took.Seconds())
	fmt.Fprintf(w, "Concurrency Level:      %d\n", r.Spec.Connections)
	fmt.Fprintf(w, "Complete requests:      %d\n", r.Complete)
	fmt.Fprintf(w, "Failed requests:        %d\n", r.Failed)
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		fmt.Fprintf(w, "   %s: %d\n", kind, r.Errors[kind])
	}
	fmt.Fprintf(w, "Unanswered at the end:  %d\n", r.Unanswered)
	if r.Spec.Rate > 0 {
		fmt.Fprintf(w, "Due and not sent:       %d\n", r.Unsent)
	}
	for _, status := range slices.Sorted(maps.Keys(r.Statuses)) {
		if status != 200 {
			fmt.Fprintf(w, "Status %d:             %d\n", status, r.Statuses[status])
		}
	}
	fmt.Fprintf(w, "Total transferred:      %d bytes\n", r.Bytes)
	fmt.Fprintf(w, "Requests per second:    %.2f [#/sec] (mean)\n", r.RequestsPerSecond)
	if r.Complete > 0 {
		each := r.Took.Seconds() * 1e3 / float64(r.Complete)
		fmt.Fprintf(w, "Time per request:       %.3f [ms] (mean)\n", each*float64(r.Spec.Connections))
		fmt.Fprintf(w, "Time per request:       %.3f [ms] (mean, across all concurrent requests)\n", each)
	}
	if waited := uint64(r.TimedOut()) + r.Unanswered; waited > 0 {
		fmt.Fprintf(w, "In Total below are %d requests that timed out or were cut off: they would have taken longer.\n", waited)
	}
	fmt.Fprintf(w, "\nTimes (ms)       mean     50%%     90%%     99%%   99.9%%     max\n")
	ms := func(d time.Duration) float64 { return float64(d) / 1e6 }
	for _, row := range []struct {
		name string
		l    load.Latency
	}{{"Connect:", r.Connect}, {"Waiting:", r.Wait}, {"Total:", r.Total}} {
		fmt.Fprintf(w, "%-10s %10.3f %7.3f %7.3f %7.3f %7.3f %7.3f\n", row.name,
			ms(row.l.Mean), ms(row.l.P50), ms(row.l.P90), ms(row.l.P99), ms(row.l.P999), ms(row.l.Max))
	}
	return nil
}
