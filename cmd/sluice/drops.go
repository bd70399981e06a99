// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/table"
	"github.com/sluice-lb/sluice/trace"
)

// dropFlags are the flags of sluice drops.
type dropFlags struct {
	seconds float64
	stack   bool
	pcap    string
	netns   string
	benign  bool
}

func newDrops(a *app) *cobra.Command {
	var f dropFlags
	cmd := &cobra.Command{
		Use:     "drops [filter]",
		Short:   "Show which packets the kernel drops, and why",
		GroupID: "diagnosis",
		Long: "Drops counts every packet that the kernel drops, in all network namespaces, and says why: a full\n" +
			"connection table, no free SNAT port, a firewall rule (with its text), a missing route and so on.\n" +
			"Some packets of each kind are shown before and after NAT. The counts are compared with the\n" +
			"kernel's own counters.\n\n" +
			"The filter is made of: tcp, udp or another protocol; host ADDRESS; net PREFIX; port N.\n" +
			"It matches the packet as dropped and the connection as its client sees it.\n\n" +
			"Nothing on the host is changed. It costs about 0.35 µs for each dropped packet.",
		Example: "  sluice drops\n" +
			"  sluice drops tcp port 443 --seconds 30 --stack\n" +
			"  sluice drops host 192.0.2.7 --netns office --pcap drops.pcapng",
		ValidArgsFunction: cobra.FixedCompletions(append([]string{"host", "net", "port"}, protocolWords...), cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkSeconds(f.seconds); err != nil {
				return usageError(cmd, "%w", err)
			}
			filter, err := trace.ParseFilter(args)
			if err != nil {
				return usageError(cmd, "%w", err)
			}
			return f.run(cmd.Context(), a, filter)
		},
	}
	flags := cmd.Flags()
	flags.Float64Var(&f.seconds, "seconds", 5, "how long to watch; 0: until Ctrl-C")
	flags.BoolVar(&f.stack, "stack", false, "show kernel stacks")
	flags.StringVar(&f.pcap, "pcap", "", "write sampled packets to this file (pcapng), with the cause as comment")
	flags.StringVar(&f.netns, "netns", "all", "network namespace: a name under /run/netns, a path, host, or all")
	flags.BoolVar(&f.benign, "benign", false, "show drops that are part of normal work in full")
	offerFrom(cmd, "netns", namespaces)
	return cmd
}

// chooseNamespaces turns the flag into a list; note describes missing namespaces.
func chooseNamespaces(flag string) (list []netdev.Namespace, note string, err error) {
	if flag == "all" {
		list, hidden := netdev.Namespaces()
		if hidden > 0 {
			note = netdev.HiddenText(hidden)
		}
		return list, note, nil
	}
	ns, err := netdev.NamespaceAt(flag)
	return []netdev.Namespace{ns}, "", err
}

func (f *dropFlags) run(ctx context.Context, a *app, filter trace.Filter) error {
	namespaces, note, err := chooseNamespaces(f.netns)
	if err != nil {
		return err
	}
	w := trace.Watcher{Namespaces: namespaces, PortsInUse: true, Options: trace.DropOptions{Filter: filter, Stacks: true, SamplesPerSecond: 20}}
	if f.netns != "all" {
		w.Options.Netns = namespaces[0].Inode
	}
	closeCapture := func() error { return nil }
	if f.pcap != "" {
		w.Options.SamplesPerSecond = 1000
		// A file that is there already stays as it is when the probe cannot start.
		if w.Probe, err = trace.OpenDrops(w.Options); err != nil {
			return err
		}
		defer w.Probe.Close()
		if err := w.Probe.Pause(); err != nil {
			return err
		}
		if closeCapture, err = w.CaptureTo(f.pcap); err != nil {
			return err
		}
	}
	if err := w.Start(ctx); err != nil {
		return errors.Join(err, closeCapture())
	}
	a.progress("watching %s for %s", plural(len(namespaces), "namespace"), watchText(f.seconds))
	wait(ctx, f.seconds)
	report, err := w.Stop(context.WithoutCancel(ctx))
	if err := errors.Join(err, closeCapture()); err != nil {
		return err
	}
	if note != "" {
		report.Limits = append(report.Limits, note)
	}
	if !f.stack {
		for _, g := range report.Groups {
			for _, s := range g.Samples {
				s.Stack = nil
			}
		}
	}
	return a.print(report, func(w io.Writer) error { return f.print(a, w, report) })
}

// checkSeconds refuses times that are not positive or unreasonably long.
func checkSeconds(seconds float64) error {
	const most = 1e9
	switch {
	case seconds >= 0 && seconds <= most:
		return nil
	case seconds > most:
		return fmt.Errorf("--seconds %g: at most %g", seconds, most)
	}
	return fmt.Errorf("--seconds %g: must not be negative", seconds)
}

// watchText describes the duration of an observation.
func watchText(seconds float64) string {
	if seconds <= 0 {
		return "as long as you like (Ctrl-C ends)"
	}
	return fmt.Sprintf("%g s", seconds)
}

// wait returns after the given seconds, or when ctx ends; 0 waits for ctx alone.
func wait(ctx context.Context, seconds float64) {
	var timer <-chan time.Time
	if seconds > 0 {
		timer = time.After(time.Duration(seconds * float64(time.Second)))
	}
	select {
	case <-ctx.Done():
	case <-timer:
	}
}

func (f *dropFlags) print(a *app, w io.Writer, r *trace.DropReport) error {
	var benign []trace.DropGroup
	shown := 0
	for _, g := range r.Groups {
		if g.Cause.Benign && !f.benign {
			benign = append(benign, g)
			continue
		}
		shown++
		f.printGroup(a, w, &g)
	}
	if shown == 0 {
		fmt.Fprintf(w, "%s in %.1f s\n", a.colour(w, green, "nothing was dropped that anybody waits for"), r.Window.Seconds())
	}
	if len(benign) > 0 {
		fmt.Fprintf(w, "\npart of normal work (--benign shows more):\n")
		t := table.New("  namespace", "cause", ">packets")
		for _, g := range benign {
			t.Row("  "+g.Namespace, g.Cause.Title, g.Packets)
		}
		if err := t.Write(w); err != nil {
			return err
		}
	}
	if len(r.Reconciled) > 0 {
		fmt.Fprintln(w, "\nevents against the kernel's counters:")
		for _, line := range r.Reconciled {
			note := ""
			if slices.Contains(line.Causes, trace.CauseAcceptQueue.ID) {
				note = "; the kernel makes no events for these"
			}
			fmt.Fprintf(w, "  %s%s\n", line, note)
		}
	}
	if r.Uncounted > 0 {
		fmt.Fprintf(w, "%d drops were not told apart: too many kinds\n", r.Uncounted)
	}
	if r.Interrupted > 0 {
		fmt.Fprintf(w, "%d drops of the whole host were not counted: they interrupted the probe\n", r.Interrupted)
	}
	if r.Hidden > 0 {
		fmt.Fprintln(w, r.HiddenText())
	}
	for _, limit := range r.Limits {
		fmt.Fprintln(w, wrap("not visible here: "+limit, reportWidth, "\n"))
	}
	return nil
}

func (f *dropFlags) printGroup(a *app, w io.Writer, g *trace.DropGroup) {
	fmt.Fprintf(w, "%s  %d packets, %.0f/s, in %s\n", a.colour(w, bold, g.Cause.Title), g.Packets, g.PerSecond, g.Namespace)
	fmt.Fprintf(w, "  %s\n", g.Cause.Meaning)
	for _, p := range g.Places {
		if p.Offset == 0 { // a tracepoint, not an address in a function
			fmt.Fprintf(w, "  by %s: %s, %s, %d\n", p.Function, p.Reason, p.Interface, p.Packets)
			continue
		}
		fmt.Fprintf(w, "  at %s+%#x: %s%s, %s%s, %d\n", p.Function, p.Offset, p.Reason, prefixNonEmpty(" in ", p.Hook.String()),
			p.Tracked, prefixNonEmpty(", ", p.Interface), p.Packets)
	}
	switch {
	case len(g.Rules) == 1:
		fmt.Fprintf(w, "  rule  %s\n", g.Rules[0])
	case len(g.Rules) > 1:
		fmt.Fprintf(w, "  one of these rules:\n")
		for _, r := range g.Rules[:min(len(g.Rules), 5)] {
			fmt.Fprintf(w, "    %s\n", r)
		}
		if command := g.ReplayCommand(); command != "" {
			fmt.Fprintf(w, "  to tell which: %s\n", command)
		}
	}
	for _, s := range g.Samples {
		fmt.Fprintf(w, "  packet  %s%s%s\n", s.Text(), prefixNonEmpty(" on ", s.Interface), natText(s))
		if f.stack && len(s.Stack) > 0 {
			names := make([]string, len(s.Stack))
			for i, frame := range s.Stack {
				names[i] = frame.String()
			}
			fmt.Fprintf(w, "    %s\n", strings.Join(names, " < "))
		}
	}
	if g.Cause.Remedy != "" {
		fmt.Fprintf(w, "  remedy  %s\n", g.Cause.Remedy)
	}
	fmt.Fprintln(w)
}

// natText names the client before NAT and the endpoint after NAT if they differ.
func natText(s *trace.DropSample) string {
	if !s.Original.IsValid() || s.Original == s.Packet && s.Reply == s.Original.Reverse() {
		return ""
	}
	return fmt.Sprintf("  (before NAT %s -> %s, after %s -> %s)",
		s.Original.Source, s.Original.Dest, s.Reply.Dest, s.Reply.Source)
}

func prefixNonEmpty(prefix, s string) string {
	if s == "" {
		return ""
	}
	return prefix + s
}
