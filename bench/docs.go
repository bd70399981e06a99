// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
)

// WriteDocs renders the committed results of every suite as one Markdown page
// and a chart beside each result. The results are in dir as SUITE.json; suites
// without one are named at the end.
func WriteDocs(dir, page string) error {
	var b bytes.Buffer
	b.WriteString(docsHead)
	explained, err := readExplanations(dir)
	if err != nil {
		return err
	}
	var missing []Suite
	var machine string
	for _, s := range Suites() {
		r, err := Load(filepath.Join(dir, s.Name+".json"))
		if errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, s)
			continue
		}
		if err != nil {
			return err
		}
		r.summarize(s) // what is compared may be newer than the repetitions
		if m := r.Environment.describe(); m != machine {
			machine = m
			b.WriteString(m)
		}
		chart := filepath.Join(dir, s.Name+".svg")
		if err := os.WriteFile(chart, r.Chart(), 0o644); err != nil {
			return err
		}
		link, err := filepath.Rel(filepath.Dir(page), dir)
		if err != nil {
			return err
		}
		r.writeSection(&b, s, filepath.ToSlash(link), explained[s.Name])
	}
	if len(missing) > 0 {
		b.WriteString("## Not measured yet\n\n")
		for _, s := range missing {
			fmt.Fprintf(&b, "- `sluice bench %s`: %s\n", s.Name, s.Title)
		}
	}
	return os.WriteFile(page, b.Bytes(), 0o644)
}

const docsHead = `# Benchmarks

This page is written by ` + "`make bench-docs`" + ` from the results in [bench/results](../bench/results), which hold every
single repetition. To measure again, as root on a quiet machine:

    sluice bench SUITE --save bench/results/SUITE.json
    make bench-docs

A ratio that differs from the published one by more than a fifth is explained under its table, from profiles that lie beside the
results. They are taken, and the text is kept, so:

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

// describe renders what a reader must know of the machine.
func (e Environment) describe() string {
	s := fmt.Sprintf("## Machine\n\n| | |\n|---|---|\n| CPU | %s, %d CPUs%s |\n| memory | %.1f GiB |\n| kernel | %s |\n| clock | %s |\n",
		e.Machine, e.CPUs, virtual(e.Virtual), float64(e.MemoryBytes)/(1<<30), e.Kernel, e.Clock)
	for _, k := range slices.Sorted(maps.Keys(e.Mitigations)) {
		s += fmt.Sprintf("| mitigation: %s | %s |\n", k, e.Mitigations[k])
	}
	for _, k := range slices.Sorted(maps.Keys(e.Sysctls)) {
		if k == "net.netfilter.nf_conntrack_max" {
			continue // the suites set it as they need it
		}
		s += fmt.Sprintf("| %s | %s |\n", k, e.Sysctls[k])
	}
	for _, k := range slices.Sorted(maps.Keys(e.Versions)) {
		s += fmt.Sprintf("| %s | %s |\n", k, e.Versions[k])
	}
	return s + "\n"
}

func virtual(product string) string {
	if product == "" {
		return ""
	}
	return " (" + product + ")"
}

// explainBeyond is how far a ratio may be from the published one without words.
const explainBeyond = 0.20

func (r *Result) writeSection(b *bytes.Buffer, s Suite, link string, explained map[string]explanation) {
	fmt.Fprintf(b, "## %s: %s\n\n%s\n\n", s.Name, s.Title, s.About)
	if s.Reproduces != "" {
		fmt.Fprintf(b, "Stands beside %s.\n\n", s.Reproduces)
	}
	r.WriteMarkdown(b)
	for _, q := range r.Ratios {
		why, far := explained[q.What], math.Abs(q.OfRatios-1) > explainBeyond
		if q.Aim {
			far = far && q.Missed
		}
		switch {
		case why.Why == "" && far:
			fmt.Fprintf(b, "\n**%s is %s here and %s there: not explained yet.**\n", q.What, ratio(q.Ours), ratio(q.Published))
			continue
		case !far && !(q.Missed && why.Why != ""):
			continue
		case q.Aim:
			fmt.Fprintf(b, "\n**Why %s is %s and not %s:** %s", q.What, ratio(q.Ours), ratio(q.Published), strings.TrimSpace(why.Why))
		default:
			fmt.Fprintf(b, "\n**Why %s is %s here and %s there:** %s", q.What, ratio(q.Ours), ratio(q.Published), strings.TrimSpace(why.Why))
		}
		for i, p := range why.Profiles {
			fmt.Fprintf(b, "%s[%s](%s/%s)", map[bool]string{true: " Profiles: ", false: ", "}[i == 0], p, link, p)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(b, "\n![%s](%s/%s.svg)\n\n", s.Title, link, s.Name)
	if len(s.NotShown) > 0 {
		b.WriteString("What it does not show:\n\n")
		for _, n := range s.NotShown {
			fmt.Fprintf(b, "- %s\n", n)
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(b, "Measured %s at commit %s by `sluice bench %s --reps %d --seconds %g`; raw: [%s.json](%s/%s.json).\n\n",
		r.Started.Format("2006-01-02 15:04 MST"), r.Environment.Commit, s.Name, r.Reps, r.Seconds, s.Name, link, s.Name)
}

// explanation says why a ratio differs from the published one.
type explanation struct {
	Why string `yaml:"why"`
	// Profiles are files beside the results that show it: folded stacks, as sluice
	// profile writes them.
	Profiles []string `yaml:"profiles,omitempty"`
}

// readExplanations reads explained.yaml: by suite and by the ratio's name. None is no error.
func readExplanations(dir string) (map[string]map[string]explanation, error) {
	path := filepath.Join(dir, "explained.yaml")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var all map[string]map[string]explanation
	if err := yaml.UnmarshalWithOptions(b, &all, yaml.Strict()); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for suite, ratios := range all {
		s, err := Find(suite)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		for what, e := range ratios {
			if !slices.ContainsFunc(s.Comparisons, func(c Comparison) bool { return c.What == what }) {
				return nil, fmt.Errorf("%s: suite %s has no ratio %q", path, suite, what)
			}
			for _, p := range e.Profiles {
				if _, err := os.Stat(filepath.Join(dir, p)); err != nil {
					return nil, fmt.Errorf("%s: %s: %q: %w", path, suite, what, err)
				}
			}
		}
	}
	return all, nil
}
