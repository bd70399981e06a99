// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSaveAndDocs(t *testing.T) {
	dir := t.TempDir()
	r := run(t, fixed(4, 2))
	r.Suite = "packets" // a suite that the page knows
	if err := r.Save(filepath.Join(dir, "packets.json")); err != nil {
		t.Fatal(err)
	}
	page := filepath.Join(dir, "benchmarks.md")
	if err := WriteDocs(dir, page); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"## packets", "packets.svg", "## Not measured yet", "sluice bench fnat64"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("%q is missing in the page", want)
		}
	}
}

// site is a directory of results and the page about them.
type site struct {
	*testing.T
	dir, page string
}

func newSite(t *testing.T) site {
	dir := t.TempDir()
	return site{t, dir, filepath.Join(dir, "benchmarks.md")}
}

func (s site) write(name, text string) {
	s.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o644); err != nil {
		s.Fatal(err)
	}
}

// measure saves a run of the suite flows on a machine.
func (s site) measure(dir, machine string, dnat, dsr float64) {
	s.Helper()
	r := run(s.T, fixed(dnat, dsr))
	r.Suite, r.Environment.Machine, r.Rows[0].Name, r.Rows[1].Name = "flows", machine, "nft DNAT", "nft DSR"
	r.Points, r.Metrics = []string{"HTTP"}, []Metric{kflows}
	for i := range r.Rows {
		for j := range r.Rows[i].Cells {
			r.Rows[i].Cells[j].Point, r.Rows[i].Cells[j].Metric = "HTTP", kflows.Name
		}
	}
	if err := os.MkdirAll(filepath.Join(s.dir, dir), 0o755); err != nil {
		s.Fatal(err)
	}
	if err := r.Save(filepath.Join(s.dir, dir, "flows.json")); err != nil {
		s.Fatal(err)
	}
}

// written returns the page, and the errors about it.
func (s site) written() (string, error) {
	s.Helper()
	said := WriteDocs(s.dir, s.page)
	b, err := os.ReadFile(s.page)
	if err != nil {
		s.Fatal(err)
	}
	return string(b), said
}

// TestExplanations: a difference of more than a fifth from a published ratio needs an explanation in the file.
// Without one, the page and the error report it.
func TestExplanations(t *testing.T) {
	s := newSite(t)
	s.measure("", "Z80", 4, 2)
	if page, err := s.written(); err == nil || !strings.Contains(err.Error(), "flows: nft DSR / nft DNAT") ||
		!strings.Contains(page, "**nft DSR / nft DNAT is 0.50 here and 13.01 there: not explained yet.**") {
		t.Errorf("an unexplained difference passes in silence: %v\n%s", err, page)
	}
	s.write("dsr.folded", "a;b 1\n")
	s.write("explained.yaml", "flows:\n  nft DSR / nft DNAT:\n    why: the links are veth.\n    profiles: [dsr.folded]\n")
	if page, err := s.written(); err != nil || !strings.Contains(page, "is 0.50 here and 13.01 there:** the links are veth. Profiles: [dsr.folded](dsr.folded)") ||
		strings.Contains(page, "not explained yet") {
		t.Errorf("the explanation is not in: %v\n%s", err, page)
	}
	for _, wrong := range []string{
		"flaws: {}", "flows:\n  a / b: {why: c}", "flows:\n  nft DSR / nft DNAT: {why: c, profiles: [gone.folded]}",
		"flows:\n  nft DSR / nft DNAT:\n", "flows:\n  nft DSR / nft DNAT: {why: ' '}",
	} {
		s.write("explained.yaml", wrong)
		if _, err := s.written(); err == nil {
			t.Errorf("%q is accepted", wrong)
		}
	}
}

// TestTwoMachines: the page shows the ratios of two machines side by side. Each uses its own explanations or the
// main machine's. The rows are the main machine's.
func TestTwoMachines(t *testing.T) {
	s := newSite(t)
	s.measure("", "Zilog(R) Z80 CPU @ 4.00MHz", 4, 2)
	s.measure("mos", "MOS 6502", 4, 1)
	s.write("explained.yaml", "flows: {nft DSR / nft DNAT: {why: the links are veth., profiles: [dsr.folded]}}\n")
	s.write("dsr.folded", "a;b 1\n")
	wants := func(want ...string) {
		t.Helper()
		page, err := s.written()
		if err != nil {
			t.Error(err)
		}
		for _, w := range want {
			if !strings.Contains(page, w) {
				t.Errorf("%q is missing in\n%s", w, page)
			}
		}
	}
	wants("| | Zilog Z80 | MOS 6502 |", "Rows measured on Zilog Z80:", "| nft DSR | 2.0 ",
		"| ratio | here on Zilog Z80 | here on MOS 6502 | published | ratio of ratios on Zilog Z80 | ratio of ratios on MOS 6502 | source |",
		"| nft DSR / nft DNAT | 0.50 | 0.25 | 13.01 | 0.04 | 0.02 |",
		"**Why nft DSR / nft DNAT is 0.50 on Zilog Z80, 0.25 on MOS 6502 and 13.01 there:** the links are veth.",
		"raw: [mos/flows.json](mos/flows.json)", "(flows.svg)")

	// Own explanations of the second machine.
	s.write("mos/explained.yaml", "flows: {nft DSR / nft DNAT: {why: it has three registers., profiles: [dsr.folded]}}\n")
	s.write("mos/dsr.folded", "a;b 1\n")
	wants("is 0.50 on Zilog Z80 and 13.01 there:** the links are veth.",
		"is 0.25 on MOS 6502 and 13.01 there:** it has three registers. Profiles: [mos/dsr.folded](mos/dsr.folded)")

	// An explanation that the main machine lacks.
	s.write("explained.yaml", "")
	if page, err := s.written(); err == nil || !strings.Contains(page, "**nft DSR / nft DNAT is 0.50 on Zilog Z80 and 13.01 there: not explained yet.**") {
		t.Errorf("%v\n%s", err, page)
	}

	// A suite that only the second machine has, and another suite of the main machine.
	if err := os.Rename(filepath.Join(s.dir, "flows.json"), filepath.Join(s.dir, "peers.json")); err != nil {
		t.Fatal(err)
	}
	wants("| | Zilog Z80 | MOS 6502 |", "Rows measured on MOS 6502:", "| nft DSR | 1.0 ",
		"| ratio | here on MOS 6502 | published | ratio of ratios on MOS 6502 | source |\n|---|---:|---:|---:|---|\n| nft DSR / nft DNAT | 0.25 | 13.01 | 0.02 |",
		"(mos/flows.svg)")

	// Two machines of one name, and two machines in one directory.
	s.measure("mos", "Zilog Z80", 4, 2)
	wants("| | Zilog Z80 | Zilog Z80 (mos) |")
	s.measure("", "MOS 6502", 4, 2)
	if _, err := s.written(); err == nil || !strings.Contains(err.Error(), "results of one machine") {
		t.Errorf("two machines in one directory: %v", err)
	}
}

// TestMissedAims: a missed aim on any machine is reported, and needs an explanation there.
func TestMissedAims(t *testing.T) {
	missed := Ratio{What: "speed", Ours: 0.949, Published: 0.95, Aim: true, Missed: true, OfRatios: 0.999, Source: goal}
	met := missed
	met.Ours, met.Missed = 1.2, false
	on := func(name string, q Ratio) machineRun {
		return machineRun{&Result{Suite: "flows", Ratios: []Ratio{q}}, &machine{name: name}, true}
	}
	for _, c := range []struct {
		runs  []machineRun
		says  string
		words bool
	}{
		{[]machineRun{on("A", met), on("B", missed)}, "| speed | 1.20 | 0.949 | 0.95 | 1.00 | 1.00 | " + goal + ": missed on B |", false},
		{[]machineRun{on("A", missed), on("B", missed)}, "| " + goal + ": missed |", false},
		{[]machineRun{on("A", met), on("B", met)}, "| " + goal + " |", true},
	} {
		var table, words bytes.Buffer
		if writeRatios(&table, c.runs); !strings.Contains(table.String(), c.says) {
			t.Errorf("%q is not in\n%s", c.says, table.String())
		}
		if writeWhy(&words, "speed", "", c.runs) != c.words || (words.Len() == 0) != c.words {
			t.Errorf("explained: %v, want %v: %s", !c.words, c.words, words.String())
		}
	}
}

// TestCommittedPage: docs/measurements/benchmarks.md equals the page written from the committed results. Each
// ratio that needs an explanation has one.
func TestCommittedPage(t *testing.T) {
	root := t.TempDir()
	results, page := filepath.Join(root, "bench", "results"), filepath.Join(root, "docs", "measurements", "benchmarks.md")
	if err := os.CopyFS(results, os.DirFS("results")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(page), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := WriteDocs(results, page); err != nil {
		t.Error(err)
	}
	written, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	committed, err := os.ReadFile(filepath.Join("..", "docs", "measurements", "benchmarks.md"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(written, committed) {
		t.Error("docs/measurements/benchmarks.md is not current: make bench-docs")
	}
	charts, err := filepath.Glob(filepath.Join("results", "*.svg"))
	if err != nil || len(charts) == 0 {
		t.Fatalf("charts %v, %v", charts, err)
	}
	for _, f := range charts {
		was, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if now, err := os.ReadFile(filepath.Join(results, filepath.Base(f))); err != nil || !bytes.Equal(was, now) {
			t.Errorf("%s is not current: make bench-docs (%v)", f, err)
		}
	}
}

// TestNewer: the page names figures and rows that an old run lacks.
func TestNewer(t *testing.T) {
	s := fixed(4, 2)
	r := run(t, s)
	var b bytes.Buffer
	if writeNewer(&b, s, r); b.Len() > 0 {
		t.Errorf("nothing is newer than the run: %s", &b)
	}
	s.Metrics = append(s.Metrics, Metric{Name: "memory"})
	s.Rows = append(s.Rows, Row{Name: "another"})
	if writeNewer(&b, s, r); b.String() != "\nNot in this run, which is older: memory; another.\n" {
		t.Errorf("%s", &b)
	}
}
