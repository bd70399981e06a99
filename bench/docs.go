// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
)

// WriteDocs renders the committed results of every suite as one Markdown page, with a chart for each result that is
// shown row by row. The results of the main machine are dir/SUITE.json; other machines have a subdirectory each.
// Suites without results are listed at the end. If a ratio needs an explanation and none exists, the page names it
// and the error names all such ratios.
func WriteDocs(dir, page string) error {
	machines, err := readMachines(dir)
	if err != nil {
		return err
	}
	link, err := filepath.Rel(filepath.Dir(page), dir)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	b.WriteString(docsHead)
	if agreement := "agreement.txt"; isReadable(filepath.Join(dir, agreement)) {
		fmt.Fprintf(&b, "How far two runs in a row agree stands in [%s](%s), by `make bench-agreement`.\n\n", agreement, path.Join(filepath.ToSlash(link), agreement))
	}
	writeMachines(&b, machines)
	var missing []Suite
	var unexplained []error
	for _, s := range Suites() {
		runs := runsOf(s, machines)
		if len(runs) == 0 {
			missing = append(missing, s)
			continue
		}
		chart := filepath.Join(dir, runs[0].machine.dir, s.Name+".svg")
		if err := os.WriteFile(chart, runs[0].Chart(), 0o644); err != nil {
			return err
		}
		for _, what := range writeSection(&b, s, filepath.ToSlash(link), runs) {
			unexplained = append(unexplained, fmt.Errorf("%s: %s: not explained in explained.yaml", s.Name, what))
		}
	}
	if err := writeCaseStudies(&b, dir, filepath.ToSlash(link), machines); err != nil {
		return err
	}
	if len(missing) > 0 {
		b.WriteString("## Not measured yet\n\n")
		for _, s := range missing {
			fmt.Fprintf(&b, "- `sluice bench %s`: %s\n", s.Name, s.Title)
		}
	}
	return errors.Join(append(unexplained, os.WriteFile(page, b.Bytes(), 0o644))...)
}

const docsHead = `# Benchmarks

This page is written by ` + "`make bench-docs`" + ` from the results in [bench/results](../../bench/results), which hold every
single repetition. To measure again, as root on a quiet machine:

    sluice bench SUITE --save bench/results/SUITE.json
    make bench-docs

Results of other machines lie in directories of their own there, each with a column in the tables of ratios: what differs between
them belongs to the machine, what does not to the program.

A ratio that differs from the published one by more than a fifth, or misses what Sluice was to reach, is explained under its table,
from profiles that lie beside the results. They are taken, and the text is kept, so:

    sluice bench SUITE --rows ROW --reps 1 --seconds 3 --profile bench/results
    $EDITOR bench/results/explained.yaml

How it is measured: the network is one of namespaces and veth pairs on one machine. Packets are made by an XDP program
that the kernel runs in a loop, and counted by an XDP program at the far end; connections are made by XDP programs at both
ends that turn each packet into the one that answers it. On veth all of this, gateway included, is one chain of soft
interrupts on one CPU, so a rate is what one CPU does, sender and far end included. The row called *limit* is what these
cost with the least possible gateway between them: a share of 1.00 would be a gateway that costs nothing more than that.
A second in these rates is one of that CPU's time, not of the clock on the wall. A virtual machine's CPU changes its speed
from one tenth of a second to the next, so in each run the redirect-only loop sends on the same CPU at the same time, a few
milliseconds in turn with the row, and what rows and runs are compared by is the quotient of both. Suites with
real TCP stacks measure by the clock on the wall and compare with their first row in the same repetition.

What no table here shows: network cards, their drivers and interrupts; several CPUs that contend; caches shared with the
applications of a real host; days of traffic.

`

// explainBeyond is the deviation from a published ratio that needs an explanation.
const explainBeyond = 0.20

// wantsWords reports whether a ratio needs an explanation.
func (q Ratio) wantsWords() bool {
	if q.Aim {
		return q.Missed
	}
	return math.Abs(q.OfRatios-1) > explainBeyond
}

// writeSection renders a suite: the rows of the first run, the ratios of all runs. It returns the ratios without an
// explanation.
func writeSection(b *bytes.Buffer, s Suite, link string, runs []machineRun) (unexplained []string) {
	fmt.Fprintf(b, "## %s: %s\n\n%s\n\n", s.Name, s.Title, s.About)
	if s.Reproduces != "" {
		fmt.Fprintf(b, "Stands beside %s.\n\n", s.Reproduces)
	}
	if on := runs[0].machineSuffix(); on != "" {
		fmt.Fprintf(b, "Rows measured%s:\n\n", on)
	}
	writeMarkdown(b, runs)
	writeNewer(b, s, runs[0].Result)
	for _, q := range allRatios(runs) {
		if !writeWhy(b, q.What, link, runs) {
			unexplained = append(unexplained, q.What)
		}
	}
	fmt.Fprintf(b, "\n![%s](%s.svg)\n\n", s.Title, path.Join(link, runs[0].machine.dir, s.Name))
	if len(s.NotShown) > 0 {
		b.WriteString("What it does not show:\n\n")
		for _, n := range s.NotShown {
			fmt.Fprintf(b, "- %s\n", n)
		}
		b.WriteString("\n")
	}
	for _, r := range runs {
		file := path.Join(r.machine.dir, s.Name+".json")
		fmt.Fprintf(b, "Measured%s %s at commit %s by `sluice bench %s --reps %d --seconds %g`; raw: [%s](%s).\n\n",
			r.machineSuffix(), r.Started.Format("2006-01-02 15:04 MST"), r.Environment.Commit, s.Name, r.Reps, r.Seconds, file, path.Join(link, file))
	}
	return unexplained
}

// writeNewer lists measurements that the suite has gained since an older run.
func writeNewer(b *bytes.Buffer, s Suite, r *Result) {
	var newer []string
	for _, m := range s.Metrics {
		if !slices.ContainsFunc(r.Metrics, func(o Metric) bool { return o.Name == m.Name }) {
			newer = append(newer, m.Name)
		}
	}
	for _, row := range s.Rows {
		if !slices.ContainsFunc(r.Rows, func(o ResultRow) bool { return o.Name == row.Name }) {
			newer = append(newer, row.Name)
		}
	}
	if len(newer) > 0 {
		fmt.Fprintf(b, "\nNot in this run, which is older: %s.\n", strings.Join(newer, "; "))
	}
}

// writeWhy writes the explanation of a ratio once for all machines that share it. It returns false if a required
// explanation is missing.
func writeWhy(b *bytes.Buffer, what, link string, runs []machineRun) (explained bool) {
	explained = true
	told := map[*explanation]bool{}
	for _, r := range runs {
		q := r.ratio(what)
		if q == nil || !q.wantsWords() {
			continue
		}
		why := r.findExplanation(what)
		if why == nil {
			explained = false
			fmt.Fprintf(b, "\n**%s is %s%s: not explained yet.**\n", what, figureOn(q, r), publishedText(q))
			continue
		}
		if told[why] {
			continue
		}
		told[why] = true
		var figures []string
		for _, o := range runs {
			if q := o.ratio(what); q != nil && q.wantsWords() && o.findExplanation(what) == why {
				figures = append(figures, figureOn(q, o))
			}
		}
		fmt.Fprintf(b, "\n**Why %s is %s%s:** %s", what, strings.Join(figures, ", "), publishedText(q), strings.TrimSpace(why.Why))
		for i, p := range why.Profiles {
			file := path.Join(why.dir, p)
			fmt.Fprintf(b, "%s[%s](%s)", map[bool]string{true: " Profiles: ", false: ", "}[i == 0], file, path.Join(link, file))
		}
		b.WriteString("\n")
	}
	return explained
}

// figureOn renders a ratio with the machine that measured it.
func figureOn(q *Ratio, r machineRun) string {
	on := r.machineSuffix()
	if on == "" && !q.Aim {
		on = " here"
	}
	return q.figure() + on
}

// publishedText renders the published figure or the goal of a ratio.
func publishedText(q *Ratio) string {
	if q.Aim {
		return " and not " + ratio(q.Published)
	}
	return " and " + ratio(q.Published) + " there"
}

// explanation explains why a ratio differs from the published one.
type explanation struct {
	Why string `yaml:"why"`
	// Profiles are files next to the results that support the text: folded stacks, as sluice profile writes them.
	Profiles []string `yaml:"profiles,omitempty"`

	dir string // directory of the machine's results
}

// readExplanations reads a machine's explained.yaml: by suite and by the ratio's name. A missing file is no error.
func readExplanations(root, dir string) (map[string]map[string]*explanation, error) {
	file := filepath.Join(root, dir, "explained.yaml")
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all map[string]map[string]*explanation
	if err := yaml.UnmarshalWithOptions(b, &all, yaml.Strict()); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for suite, ratios := range all {
		s, err := Find(suite)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for what, e := range ratios {
			if !slices.ContainsFunc(s.Comparisons, func(c Comparison) bool { return c.What == what }) {
				return nil, fmt.Errorf("%s: suite %s has no ratio %q", file, suite, what)
			}
			if e == nil || strings.TrimSpace(e.Why) == "" {
				return nil, fmt.Errorf("%s: %s: %q: no words", file, suite, what)
			}
			e.dir = dir
			for _, p := range e.Profiles {
				if _, err := os.Stat(filepath.Join(root, dir, p)); err != nil {
					return nil, fmt.Errorf("%s: %s: %q: %w", file, suite, what, err)
				}
			}
		}
	}
	return all, nil
}
