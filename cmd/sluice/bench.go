// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/bench"
	"github.com/sluice-lb/sluice/load"
	"github.com/sluice-lb/sluice/table"
)

// benchFlags are the flags of bench.
type benchFlags struct {
	reps         int
	seconds      float64
	cpu          int
	rows, points string
	check        bool
	lower        bool
	baseline     string
	save         string
	appends      bool
	markdown     bool
	chart        string
	profile      string
}

func newBench(a *app) *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:     "bench [SUITE]",
		GroupID: "measure",
		Short:   "Measure datapaths side by side and compare with published figures",
		Long: "bench builds a network of namespaces, sets up each row of the suite (reference programs, other products,\n" +
			"Sluice's datapaths), loads it and prints medians of interleaved repetitions. Without a suite it\n" +
			"lists them. Where CPU time is measured, the redirect-only loop runs beside each row on the same CPU,\n" +
			"and what is compared is the quotient. nf_conntrack_max of the host is raised where a row needs it, and\n" +
			"restored. With --check it compares with a committed run and exits 1\n" +
			"when a figure got worse by more than the noise of both; with --json both are one document. A long\n" +
			"suite can be spread over several quiet periods: --append adds repetitions to a saved run.",
		Example: "  sluice bench\n  sluice bench packets --reps 3 --rows 'nft|limit'\n  sluice bench fnat64 --save bench/results/fnat64.json\n" +
			"  sluice bench router --reps 1 --save router.json --append",
		Args: atMost(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return listSuites(a)
			}
			return runBench(cmd, a, args[0], f)
		},
	}
	cmd.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		var names []string
		for _, s := range bench.Suites() {
			if len(args) == 0 {
				names = append(names, s.Name+"\t"+s.Title)
			}
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
	cmd.AddCommand(newBenchDocs(a), newBenchGuard(a))
	flags := cmd.Flags()
	flags.IntVar(&f.reps, "reps", 5, "repetitions, interleaved; a suite whose runs take long makes fewer")
	flags.Float64Var(&f.seconds, "seconds", 0, "measured seconds of one run; 0: what the suite needs")
	flags.IntVar(&f.cpu, "cpu", -1, "CPU that sends, and so does everything; -1: the last one. Not for suites of real programs")
	flags.StringVar(&f.rows, "rows", "", "only rows whose name matches this regular expression")
	flags.StringVar(&f.points, "points", "", "only points (columns) whose name matches this regular expression")
	flags.BoolVar(&f.check, "check", false, "compare with the committed run and exit 1 when a ratio got worse")
	flags.BoolVar(&f.lower, "allow-host-sysctl", false, "let rows lower nf_conntrack_max of the whole host while they run (nat-tax, flood)")
	flags.StringVar(&f.baseline, "baseline", "", "the run that --check compares with (default bench/results/SUITE.json)")
	flags.StringVar(&f.save, "save", "", "write the result with every repetition to this JSON file")
	flags.BoolVar(&f.appends, "append", false, "continue the run in the file of --save: add the repetitions to its own")
	flags.BoolVar(&f.markdown, "markdown", false, "print Markdown instead of a table")
	flags.StringVar(&f.profile, "profile", "", "write the folded stacks of each row's measured time into this directory; costs a little")
	flags.StringVar(&f.chart, "chart", "", "write a bar chart to this SVG file")
	return cmd
}

func newBenchDocs(a *app) *cobra.Command {
	var dir, page string
	cmd := &cobra.Command{
		Use:   "docs",
		Short: "Write the benchmark page and charts from the committed results",
		Long: "docs renders the results of the main machine, SUITE.json, and those of other machines in a directory\n" +
			"each beside them. It exits 1 when a ratio wants an explanation that explained.yaml does not have.",
		Example: "  sluice bench docs",
		Args:    noArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := bench.WriteDocs(dir, page); err != nil {
				return fmt.Errorf("bench: docs: %w", err)
			}
			a.progress("%s is written from %s", page, dir)
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "results", filepath.Join("bench", "results"), "directory of the results")
	cmd.Flags().StringVar(&page, "page", filepath.Join("docs", "measurements", "benchmarks.md"), "page to write")
	return cmd
}

func listSuites(a *app) error {
	type item struct {
		Name       string `json:"name"`
		Title      string `json:"title"`
		Reproduces string `json:"reproduces,omitempty"`
	}
	var items []item
	for _, s := range bench.Suites() {
		items = append(items, item{s.Name, s.Title, s.Reproduces})
	}
	return a.print(items, func(w io.Writer) error {
		t := table.New("SUITE", "MEASURES", "BESIDE")
		for _, i := range items {
			t.Row(i.Name, i.Title, i.Reproduces)
		}
		return t.Write(w)
	})
}

func runBench(cmd *cobra.Command, a *app, name string, f benchFlags) error {
	suite, err := bench.Find(name)
	if err != nil {
		return usageError(cmd, "%w", err)
	}
	switch {
	case f.cpu == -1:
		cpus, err := load.CPUs()
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		f.cpu = cpus[len(cpus)-1]
	case suite.AllCPUs:
		return usageError(cmd, "--cpu %d: the programs of %s share all CPUs", f.cpu, name)
	}
	o := bench.Options{
		Reps: f.reps, Seconds: f.seconds, CPU: f.cpu, Profile: f.profile, Command: strings.Join(os.Args, " "),
		AllowHostSysctl: f.lower,
		Progress:        func(s string) { a.progress("%s", s) },
	}
	if f.rows != "" {
		if o.Rows, err = regexp.Compile(f.rows); err != nil {
			return usageError(cmd, "--rows: %w", err)
		}
	}
	if f.points != "" {
		if o.Points, err = regexp.Compile(f.points); err != nil {
			return usageError(cmd, "--points: %w", err)
		}
	}
	if f.reps == 0 {
		return usageError(cmd, "--reps 0: at least 1")
	}
	if err := o.Validate(suite); err != nil {
		return usageError(cmd, "%w", err)
	}
	// Files are checked before the run, so that no result is lost after it.
	var old *bench.Result
	baseline := cmp.Or(f.baseline, filepath.Join("bench", "results", name+".json"))
	if f.check {
		if old, err = bench.Load(baseline); err != nil {
			return fmt.Errorf("bench: --check: %w", err)
		}
		if old.Suite != name {
			return fmt.Errorf("bench: --check: %s holds a run of %q, not of %s: name one with --baseline", baseline, old.Suite, name)
		}
	}
	if f.appends {
		if f.save == "" {
			return usageError(cmd, "--append: name the file with --save")
		}
		if o.Earlier, err = bench.Load(f.save); err != nil && !errors.Is(err, fs.ErrNotExist) { // the first run with --append has no file
			return fmt.Errorf("bench: --append: %w", err)
		}
	}
	if err := f.checkKept(); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("bench: network namespaces need root: run it with sudo")
	}
	result, stopped := bench.Run(cmd.Context(), suite, o)
	if stopped != nil && cmd.Context().Err() != nil {
		stopped = interruptedError("the benchmark", stopped)
	}
	if result == nil {
		return stopped
	}
	if f.check {
		result.Compare(old, baseline)
	}
	kept := keepBench(result, f)
	printed := a.print(result, func(w io.Writer) error {
		if f.markdown {
			result.WriteMarkdown(w)
			return nil
		}
		return result.WriteTable(w)
	})
	if err := cmp.Or(kept, stopped, printed); err != nil { // a lost result has precedence over a print error
		return err
	}
	return benchVerdict(result)
}

func benchVerdict(r *bench.Result) error {
	switch {
	case !r.HasFigures():
		return errors.New("bench: nothing was measured")
	case r.Check == nil:
	case r.Check.Worse() > 0:
		return exitError{code: exitFailure}
	case r.Check.Compared == 0:
		return fmt.Errorf("bench: --check: no figure of this run is in %s", r.Check.Against)
	}
	return nil
}

// checkKept reports whether all requested files can be written.
func (f benchFlags) checkKept() error {
	profile := f.profile
	if profile != "" {
		if s, err := os.Stat(profile); err != nil || !s.IsDir() {
			return fmt.Errorf("--profile %s: is no directory: make it first", profile)
		}
		profile = filepath.Join(profile, "stacks")
	}
	return cmp.Or(checkKept("--save", f.save), checkKept("--chart", f.chart), checkKept("--profile", profile))
}

func keepBench(r *bench.Result, f benchFlags) error {
	if f.save != "" {
		if err := r.Save(f.save); err != nil {
			return fmt.Errorf("bench: save: %w", err)
		}
	}
	if f.chart != "" {
		if err := os.WriteFile(f.chart, r.Chart(), 0o644); err != nil {
			return fmt.Errorf("bench: chart: %w", err)
		}
	}
	return nil
}
