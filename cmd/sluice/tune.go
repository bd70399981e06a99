// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/doctor/tune"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/table"
)

// tuneFlags are the flags of 'sluice tune' and of its subcommands.
type tuneFlags struct {
	load, netns, etc string
	set              []string
	dryRun, force    bool
	all              bool
	trial            time.Duration
}

func newTune(a *app) *cobra.Command {
	f := &tuneFlags{}
	names := make([]string, len(tune.Profiles))
	about := ""
	for i, p := range tune.Profiles {
		names[i] = p.Name + "\t" + p.About
		about += fmt.Sprintf("  %-11s %s\n", p.Name, p.About)
	}
	cmd := &cobra.Command{
		Use:     "tune [PROFILE]",
		GroupID: "diagnosis",
		Short:   "Set the kernel's limits and timeouts for a role, with rollback",
		Long: `Computes kernel settings for a profile or a planned load, shows each value now and
then with its memory and risk, writes them, reads them back, and watches the drop
counters for a trial time. If drops rise, or the terminal is lost, everything is
undone. Values that passed are kept in /etc/sysctl.d for the next boot.

Profiles (default: chosen by whether the host forwards):
` + about + `
Sizes are never lowered. Timeouts below the floors of the RFCs are refused without
--force. CPU mitigations, offloads, MTUs and forwarding are never touched.`,
		Example: `  sluice tune --dry-run
  sluice tune router
  sluice tune --for-load load.yaml --trial 1m
  sluice tune containers --set net.netfilter.nf_conntrack_max=2000000
  sluice tune status
  sluice tune rollback`,
		Args:      atMost(1),
		ValidArgs: names,
		RunE:      func(cmd *cobra.Command, args []string) error { return f.run(cmd, a, args) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.load, "for-load", "", "size for the load in this YAML file (see 'sluice plan')")
	flags.StringArrayVar(&f.set, "set", nil, "KEY=VALUE that replaces, or is added to, those of the profile")
	flags.BoolVar(&f.dryRun, "dry-run", false, "show what would change and stop")
	flags.BoolVar(&f.force, "force", false, "accept timeouts below the floors of the RFCs, and limits below what is in use")
	flags.DurationVar(&f.trial, "trial", 10*time.Second, "how long drops are watched before the values are kept; 0 for no trial")
	persistent := cmd.PersistentFlags()
	persistent.StringVar(&f.netns, "netns", "", "tune this network namespace: a name or a path (default the caller's)")
	persistent.StringVar(&f.etc, "sysctl-dir", "/etc/sysctl.d", "where values are kept for the next boot")
	offerFrom(cmd, "netns", namespaces)
	_ = cmd.MarkFlagFilename("for-load", "yaml", "yml")
	_ = cmd.MarkFlagDirname("sysctl-dir")
	cmd.AddCommand(newTuneStatus(a, f), newTuneRollback(a, f))
	return cmd
}

// system returns the tuner for the flags.
func (f *tuneFlags) system(a *app) (*tune.System, error) {
	s := &tune.System{Etc: f.etc}
	if a.paths.State != "" {
		s.Dir = filepath.Join(a.paths.State, "tune")
	}
	if f.netns == "" {
		s.Namespace = netdev.CurrentNamespace()
		return s, nil
	}
	ns, err := netdev.NamespaceAt(f.netns)
	s.Namespace = ns
	return s, err
}

func (f *tuneFlags) run(cmd *cobra.Command, a *app, args []string) error {
	if f.trial < 0 {
		return usageError(cmd, "--trial %s: must not be negative", f.trial)
	}
	s, err := f.system(a)
	if err != nil {
		return err
	}
	p, err := f.computeProposal(cmd, a, s, args)
	if err != nil {
		return err
	}
	if f.dryRun {
		return a.print(p, func(w io.Writer) error { return writeProposal(w, p) })
	}
	if os.Geteuid() != 0 {
		return daemon.ErrNoRoot
	}
	if !a.json {
		if err := writeProposal(a.stdout, p); err != nil {
			return err
		}
	}
	watched := []netdev.Namespace{s.Namespace}
	if f.netns == "" {
		watched, _ = netdev.Namespaces()
	}
	r, err := tune.Apply(cmd.Context(), s, p, tune.Watch{Window: f.trial, Drops: tune.Drops(watched),
		Tell: func(line string) { a.progress("%s", line) }})
	if err != nil {
		return err
	}
	if err := a.print(r, func(w io.Writer) error { return writeResult(w, r) }); err != nil {
		return err
	}
	if r.RolledBack != "" {
		return exitError{code: exitFailure}
	}
	return nil
}

func (f *tuneFlags) computeProposal(cmd *cobra.Command, a *app, s *tune.System, args []string) (*tune.Proposal, error) {
	o := tune.Options{Force: f.force}
	for _, text := range f.set {
		key, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, usageError(cmd, "--set %s: want KEY=VALUE", text)
		}
		o.Set = append(o.Set, tune.Setting{Key: strings.TrimSpace(key), Value: strings.TrimSpace(value), Why: "asked for"})
	}
	switch {
	case f.load != "" && len(args) > 0:
		return nil, usageError(cmd, "give either a profile or --for-load")
	case f.load != "":
		load, err := readLoadFile(f.load, a.stdin)
		if err != nil {
			return nil, err
		}
		return tune.ProposeFor(s, load, o)
	case len(args) == 0:
		profile, why := tune.Detect(s)
		a.progress("profile %s: %s", profile.Name, why)
		return tune.Propose(s, profile, o)
	}
	profile, err := tune.ProfileNamed(args[0])
	if err != nil {
		return nil, usageError(cmd, "%w", err)
	}
	return tune.Propose(s, profile, o)
}

// oneSpace replaces the kernel's tabs in a value, which tables do not align.
func oneSpace(value string) string { return strings.Join(strings.Fields(value), " ") }

// shortKey is the last part of a key.
func shortKey(key string) string { return key[strings.LastIndexByte(key, '.')+1:] }

func writeProposal(w io.Writer, p *tune.Proposal) error {
	t := table.New("SETTING", ">NOW", ">THEN", ">MEMORY")
	t.Width = reportWidth
	for _, c := range p.Pending() {
		memory := ""
		if c.Cost > 0 {
			memory = "+" + capacity.Bytes(c.Cost).String()
		}
		t.Row(c.Key, oneSpace(c.Now), oneSpace(c.Value), memory)
	}
	if t.Len() > 0 {
		if err := t.Write(w); err != nil {
			return err
		}
		fmt.Fprintf(w, "\nmemory at most: +%s\n", capacity.Bytes(p.Cost()))
	}
	for _, line := range reasons(p.Pending()) {
		fmt.Fprintf(w, "- %s\n", wrap(line, reportWidth-2, "\n  "))
	}
	var hostWide []string
	for _, c := range p.Changes {
		if c.WholeHost {
			hostWide = append(hostWide, shortKey(c.Key))
			continue
		}
		if c.Skipped != "" {
			fmt.Fprintf(w, "kept: %s\n", wrap(fmt.Sprintf("%s = %s (%s)", c.Key, c.Now, c.Skipped), reportWidth-6, "\n      "))
		}
	}
	if len(hostWide) > 0 {
		fmt.Fprintf(w, "kept: %s\n", wrap(strings.Join(hostWide, ", ")+" (of the whole host: run it without --netns)", reportWidth-6, "\n      "))
	}
	for _, n := range p.Notes {
		fmt.Fprintf(w, "note: %s\n", wrap(n, reportWidth-6, "\n      "))
	}
	return nil
}

// reasons lists the reason and the risk of each setting. Settings with the same reason share a
// line.
func reasons(changes []tune.Change) (lines []string) {
	type reason struct{ why, risk string }
	var order []reason
	keys := map[reason][]string{}
	for _, c := range changes {
		r := reason{c.Why, c.Risk}
		if keys[r] == nil {
			order = append(order, r)
		}
		if k := shortKey(c.Key); !slices.Contains(keys[r], k) {
			keys[r] = append(keys[r], k)
		}
	}
	for _, r := range order {
		line := strings.Join(keys[r], ", ") + ": " + r.why
		if r.risk != "" {
			line += ". Risk: " + r.risk
		}
		lines = append(lines, line)
	}
	return lines
}

func writeResult(w io.Writer, r *tune.Result) error {
	for _, n := range append(r.Notes, r.Overridden...) {
		fmt.Fprintf(w, "note: %s\n", n)
	}
	switch {
	case r.RolledBack != "":
		_, err := fmt.Fprintf(w, "taken back: %s; every value is as it was\n", r.RolledBack)
		return err
	case len(r.Entry.Steps) == 0:
		return nil
	}
	kept := "for as long as the namespace lives"
	if r.Entry.File != nil {
		kept = "and for the next boot in " + r.Entry.File.Path
	}
	_, err := fmt.Fprintf(w, "%s in force %s; drops %.1f/s before, %.1f/s after\nundo: sluice tune rollback\n",
		plural(len(r.Entry.Steps), "value"), kept, r.Before, r.During)
	return err
}

func newTuneStatus(a *app, f *tuneFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show what was tuned or tried, and whether it still holds",
		Example: "  sluice tune status\n" +
			"  sluice tune status --netns office --json",
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			s, err := f.system(a)
			if err != nil {
				return err
			}
			list, err := s.Journal(f.netns == "")
			if err != nil {
				return err
			}
			status := tuneStatus(s, list)
			return a.print(status, func(w io.Writer) error { return writeTuneStatus(w, status) })
		},
	}
}

// tunedEntry is a journal entry with the present values of its keys.
type tunedEntry struct {
	tune.Entry
	Now map[string]string `json:"now,omitempty"`
}

func tuneStatus(s *tune.System, list []tune.Entry) []tunedEntry {
	out := []tunedEntry{}
	for _, e := range list {
		t := tunedEntry{Entry: e}
		if e.State != tune.RolledBack && e.Inode == s.Namespace.Inode {
			t.Now = map[string]string{}
			for _, step := range e.Steps {
				if v, err := s.Get(step.Key); err == nil {
					t.Now[step.Key] = v
				}
			}
		}
		out = append(out, t)
	}
	return out
}

func writeTuneStatus(w io.Writer, list []tunedEntry) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "nothing was tuned here")
		return err
	}
	for _, e := range list {
		where := ""
		if e.Namespace != "" {
			where = " in " + e.Namespace
		}
		fmt.Fprintf(w, "%s  %s%s: %s", e.Time.Local().Format("2006-01-02 15:04:05"), e.Profile, where, e.State)
		if e.Why != "" {
			fmt.Fprintf(w, " (%s)", e.Why)
		}
		fmt.Fprintln(w)
		if e.Now == nil {
			continue
		}
		t := table.New("  SETTING", ">BEFORE", ">TUNED", ">NOW", "")
		t.Width = reportWidth
		for _, step := range e.Steps {
			if step.Wanted == "" { // another setting changed it too
				continue
			}
			remark := ""
			if e.Now[step.Key] != step.After {
				remark = "changed since"
			}
			t.Row("  "+shortKey(step.Key), oneSpace(step.Before), oneSpace(step.After), oneSpace(e.Now[step.Key]), remark)
		}
		if t.Len() > 0 {
			if err := t.Write(w); err != nil {
				return err
			}
		}
		for _, c := range e.Commands {
			fmt.Fprintf(w, "  %s\n", c.Run)
		}
	}
	return nil
}

// changes counts the changes of an entry, without values that changed with others.
func changes(e tune.Entry) int {
	n := len(e.Commands)
	for _, step := range e.Steps {
		if step.Wanted != "" {
			n++
		}
	}
	return n
}

func newTuneRollback(a *app, f *tuneFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rollback",
		Short: "Undo the latest run, or all of them",
		Long: `Writes back every value that was there before, last one first, and restores or
removes the file in /etc/sysctl.d. A value that someone else changed in the
meantime is left alone and named. It also takes back remedies that
sluice doctor --try has kept.`,
		Example: "  sluice tune rollback\n" +
			"  sluice tune rollback --all",
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			if os.Geteuid() != 0 {
				return daemon.ErrNoRoot
			}
			s, err := f.system(a)
			if err != nil {
				return err
			}
			done, notes, err := tune.Rollback(s, f.all)
			if err != nil {
				return err
			}
			return a.print(map[string]any{"rolled_back": done, "notes": notes}, func(w io.Writer) error {
				for _, n := range notes {
					fmt.Fprintf(w, "note: %s\n", n)
				}
				for _, e := range done {
					fmt.Fprintf(w, "%s of %s taken back: %s\n", e.Profile, e.Time.Local().Format("2006-01-02 15:04:05"), plural(changes(e), "change"))
				}
				if len(done) == 0 {
					fmt.Fprintln(w, "nothing is in force that could be taken back")
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&f.all, "all", false, "undo every run that is in force, newest first")
	return cmd
}
