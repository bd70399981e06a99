// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/load"
)

func newLoad(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "load",
		GroupID: "measure",
		Short:   "Send packets, connections and requests, and measure what arrives",
		Long: "load sends into the namespaces of a lab only, unless --i-own-this-network is given.\n\n" +
			"A place is written NODE/INTERFACE or LAB/NODE/INTERFACE; an interface alone means the namespace\n" +
			"that the command runs in. On veth links one CPU carries the whole way of a packet: sender, gateway\n" +
			"and far end. That is what \"per CPU\" means here.\n\n" +
			"It exits with 1, after the summary, when no packet arrived.",
	}
	cmd.AddCommand(newLoadPackets(a), newLoadFlows(a), newLoadHTTP(a))
	return cmd
}

// loadPlace is the interface where load sends or counts.
type loadPlace struct {
	load.Namespace
	node  *lab.Node // nil: the namespace of this process.
	lab   *lab.Lab  // nil where node is.
	iface string
}

// parseLoadPlace reads [[LAB/]NODE/]INTERFACE.
func parseLoadPlace(s string) (loadPlace, error) {
	parts := strings.Split(s, "/")
	iface := parts[len(parts)-1]
	switch {
	case iface == "":
	case len(parts) == 1:
		return loadPlace{Namespace: load.Here{}, iface: iface}, nil
	case len(parts) == 2:
		return nodePlace("", parts[0], iface)
	case len(parts) == 3:
		return nodePlace(parts[0], parts[1], iface)
	}
	return loadPlace{}, fmt.Errorf("place %q: not [[LAB/]NODE/]INTERFACE", s)
}

func parseLoadPlaces(texts ...string) ([]loadPlace, error) {
	var places []loadPlace
	for _, s := range texts {
		p, err := parseLoadPlace(s)
		if err != nil {
			return nil, err
		}
		places = append(places, p)
	}
	return places, nil
}

func nodePlace(id, name, iface string) (loadPlace, error) {
	l, n, err := lab.FindNode(id, name)
	if err != nil {
		return loadPlace{}, err
	}
	return loadPlace{Namespace: n, node: n, lab: l, iface: iface}, nil
}

// prepare makes the links of a lab take frames that XDP redirects to them.
func (p loadPlace) prepare() error {
	if p.lab == nil {
		return nil
	}
	for _, link := range p.lab.Topology().Links {
		for _, e := range []lab.End{link.A, link.B} {
			if err := p.lab.Node(e.Node).SetGRO(e.Iface, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// mayLoad refuses to send, count or answer outside of labs, because the receiver takes all packets
// of its interface.
func mayLoad(own bool, places ...loadPlace) error {
	outside := func(p loadPlace) bool { return p.node == nil }
	if own || !slices.ContainsFunc(places, outside) {
		return nil
	}
	if inLab, err := lab.Contains(os.Getpid()); inLab || err != nil {
		return err
	}
	return errors.New("load: this namespace is not one of a lab; --i-own-this-network allows it where the network is yours")
}

// loadBounds are the flags that end a run.
type loadBounds struct {
	seconds float64
	count   uint64
	cpus    string
	own     bool
	svg     string
}

func (b *loadBounds) flags(cmd *cobra.Command, what string) {
	f := cmd.Flags()
	f.Float64Var(&b.seconds, "seconds", 10, "end after so many seconds")
	f.Uint64Var(&b.count, "count", 0, "end after so many "+what+"; 0: no bound")
	f.StringVar(&b.cpus, "cpus", "", "CPUs to send from, as 0,1 (default the last one)")
	f.BoolVar(&b.own, "i-own-this-network", false, "send outside of a lab's namespaces")
	f.StringVar(&b.svg, "histogram", "", "write the latency histogram to this SVG file")
}

// list returns the sending CPUs, a subset of the allowed ones.
func (b *loadBounds) list() ([]int, error) {
	all, err := load.CPUs()
	if err != nil {
		return nil, err
	}
	var cpus []int
	if b.cpus == "" {
		return all[len(all)-1:], nil
	}
	for _, s := range strings.Split(b.cpus, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(s))
		if err != nil || !slices.Contains(all, n) {
			return nil, fmt.Errorf("--cpus %s: %q is not one of this process's CPUs %v", b.cpus, s, all)
		}
		if slices.Contains(cpus, n) {
			return nil, fmt.Errorf("--cpus %s: CPU %d twice", b.cpus, n)
		}
		cpus = append(cpus, n)
	}
	return cpus, nil
}

// check refuses an invalid time and an unwritable histogram before the run, so that no result is
// lost after it.
func (b *loadBounds) check() error {
	if !(b.seconds > 0 && b.seconds < 1e6) {
		return fmt.Errorf("--seconds %g: more than 0 and less than 1e6", b.seconds)
	}
	return checkKept("--histogram", b.svg)
}

// checkKept returns an error if a file cannot be written.
func checkKept(flag, path string) error {
	if path == "" {
		return nil
	}
	if err := unix.Access(filepath.Dir(path), unix.W_OK); err != nil {
		return fmt.Errorf("%s %s: %w", flag, path, err)
	}
	if f, err := os.Stat(path); err == nil && f.IsDir() {
		return fmt.Errorf("%s %s: is a directory: name a file in it", flag, path)
	}
	return nil
}

// noSuccessError returns the error of a run without any successful packet or request. Its summary is
// already printed; a script sees the exit code.
func noSuccessError(what string) error {
	return exitError{exitFailure, fmt.Errorf("load: %s", what)}
}

func (b *loadBounds) context(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, time.Duration(b.seconds*float64(time.Second)))
}

// saveHistogram writes the SVG if requested.
func (b *loadBounds) saveHistogram(h *load.Histogram, title string) error {
	if b.svg == "" || h == nil {
		return nil
	}
	if err := os.WriteFile(b.svg, h.SVG(title), 0o644); err != nil {
		return fmt.Errorf("load: histogram: %w", err)
	}
	return nil
}

// runWithProgress runs until it ends or the context does, and calls tick every
// second.
func runWithProgress(ctx context.Context, run func(context.Context, chan<- struct{}) error, tick func(second int)) error {
	started, done := make(chan struct{}), make(chan error, 1)
	go func() { done <- run(ctx, started) }()
	select {
	case <-started:
	case err := <-done:
		return err
	}
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for second := 1; ; second++ {
		select {
		case err := <-done:
			return err
		case <-ticker.C:
			tick(second)
		}
	}
}

// perSecond returns a rate, or 0 if no time passed, because a rate needs two packets.
func perSecond(n uint64, took time.Duration) float64 {
	if took <= 0 {
		return 0
	}
	return float64(n) / took.Seconds()
}

// writeBehind reports a missed schedule if more than a hundredth is missing.
func writeBehind(w io.Writer, what string, missing, done uint64) {
	if missing*100 > done {
		fmt.Fprintf(w, what+": the rate is more than these CPUs make with what they carry; times hold the wait\n", load.Count(missing))
	}
}

// rate renders a number a second.
func rate(perSecond float64) string { return load.Count(uint64(math.Round(perSecond))) }

func latencyLine(l load.Latency) string {
	return fmt.Sprintf("p50 %s  p90 %s  p99 %s  p99.9 %s  max %s",
		roundDuration(l.P50), roundDuration(l.P90), roundDuration(l.P99), roundDuration(l.P999), roundDuration(l.Max))
}

// roundDuration rounds a time to three digits, the resolution of the histogram.
func roundDuration(d time.Duration) time.Duration {
	for unit := time.Second; unit >= time.Microsecond; unit /= 1000 {
		if d >= unit {
			return d.Round(unit / 100)
		}
	}
	return d
}
