// SPDX-License-Identifier: Apache-2.0

package bench

import (
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

// TestExplanations: a difference of more than a fifth from a published ratio is
// explained from the file, or the page says that it is not.
func TestExplanations(t *testing.T) {
	dir := t.TempDir()
	r := run(t, fixed(4, 2))
	r.Suite, r.Rows[0].Name, r.Rows[1].Name = "flows", "nft DNAT", "nft DSR"
	for i := range r.Rows {
		for j := range r.Rows[i].Cells {
			r.Rows[i].Cells[j].Point, r.Rows[i].Cells[j].Metric = "HTTP", kflows.Name
		}
	}
	if err := r.Save(filepath.Join(dir, "flows.json")); err != nil {
		t.Fatal(err)
	}
	page := filepath.Join(dir, "benchmarks.md")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	written := func() string {
		t.Helper()
		if err := WriteDocs(dir, page); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if !strings.Contains(written(), "not explained yet") {
		t.Error("an unexplained difference passes in silence")
	}
	write("dsr.folded", "a;b 1\n")
	write("explained.yaml", "flows:\n  nft DSR / nft DNAT:\n    why: the links are veth.\n    profiles: [dsr.folded]\n")
	if got := written(); !strings.Contains(got, "the links are veth.") || !strings.Contains(got, "(./dsr.folded)") || strings.Contains(got, "not explained yet") {
		t.Errorf("the explanation is not in\n%s", got)
	}
	for _, wrong := range []string{
		"flaws: {}", "flows:\n  a / b: {why: c}", "flows:\n  nft DSR / nft DNAT: {why: c, profiles: [gone.folded]}",
	} {
		write("explained.yaml", wrong)
		if err := WriteDocs(dir, page); err == nil {
			t.Errorf("%q is accepted", wrong)
		}
	}
}
