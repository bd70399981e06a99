// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/table"
)

// column is one printed column: a metric at a point.
type column struct {
	point  string
	metric Metric
}

func (r *Result) columns() []column {
	var out []column
	for _, p := range r.Points {
		for _, m := range r.Metrics {
			if r.has(p, m.Name) {
				out = append(out, column{p, m})
			}
		}
	}
	return out
}

func (r *Result) has(point, metric string) bool {
	for i := range r.Rows {
		if r.Rows[i].cell(point, metric) != nil {
			return true
		}
	}
	return false
}

// heading names a column as shortly as the other columns allow.
func (r *Result) heading(c column) string {
	switch {
	case len(r.Points) == 1:
		return c.metric.Name + ", " + c.metric.Unit
	case len(r.Metrics) == 1:
		return c.point + ", " + c.metric.Unit
	}
	return c.point + ": " + c.metric.Name + ", " + c.metric.Unit
}

// figure renders a cell with its share of the limit and its spread.
func (r *Result) figure(row *ResultRow, c column) string {
	cell := row.cell(c.point, c.metric.Name)
	if cell == nil {
		return "-"
	}
	s := format(cell.Median, c.metric.Digits)
	if cell.Noisy {
		s = "~" + s
	}
	if cell.Share > 0 {
		s += fmt.Sprintf(" (%.2f)", cell.Share)
	}
	switch {
	case cell.Spread > 10:
		s += " ±>500%"
	case len(cell.Raw) > 1:
		s += fmt.Sprintf(" ±%.0f%%", cell.Spread*50)
	}
	return s
}

// WriteTable prints the result for a terminal.
func (r *Result) WriteTable(w io.Writer) error {
	fmt.Fprintf(w, "%s: %s\n\n", r.Suite, r.Title)
	columns := r.columns()
	heads := []string{"row"}
	for _, c := range columns {
		heads = append(heads, ">"+r.heading(c))
	}
	t := table.New(heads...)
	t.Fold = true
	for i := range r.Rows {
		row := &r.Rows[i]
		if len(row.Cells) == 0 {
			continue
		}
		values := []any{row.Name}
		for _, c := range columns {
			values = append(values, r.figure(row, c))
		}
		t.Row(values...)
	}
	if err := t.Write(w); err != nil {
		return err
	}
	fmt.Fprintf(w, "\n%s\n", r.legend())
	if len(r.Ratios) > 0 {
		fmt.Fprintln(w)
		if err := r.ratioTable().Write(w); err != nil {
			return err
		}
	}
	r.writeRemarks(w, "  ")
	for _, n := range r.Noise {
		fmt.Fprintf(w, "\nNOISY: %s\n", n)
	}
	if r.Check != nil {
		return r.Check.write(w)
	}
	return nil
}

// legend says how to read the figures.
func (r *Result) legend() string {
	s := fmt.Sprintf("Median of %d interleaved repetitions of %g s; ± is half the range of the repetitions", r.Reps, r.Seconds)
	switch {
	case r.Beside:
		s += ", each divided by what the redirect-only loop did at the same time on the same CPU"
	case r.Yardstick:
		s += ", each divided by what the redirect-only loop did before and after it"
	}
	s += fmt.Sprintf("; ~ marks a range of more than %.0f %%.", noisyCell*100)
	switch {
	case r.ShareOfYardstick:
		s += " In brackets: that quotient, the share of the redirect-only loop."
	case r.Limit != "":
		s += fmt.Sprintf(" In brackets: the share of “%s” in the same column.", r.Limit)
	}
	return s
}

func (r *Result) ratioTable() *table.Table {
	t := table.New("ratio", ">here", ">published", ">ratio of ratios", "source")
	for _, q := range r.Ratios {
		t.Row(q.What, q.ours(), ratio(q.Published), fmt.Sprintf("%.2f", q.OfRatios), q.source())
	}
	return t
}

func (q Ratio) ours() string {
	if q.Noisy {
		return "~" + ratio(q.Ours)
	}
	return ratio(q.Ours)
}

func (q Ratio) source() string {
	if q.Missed {
		return q.Source + ": missed"
	}
	return q.Source
}

func ratio(v float64) string {
	if v >= 20 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// writeRemarks lists absent rows and notes.
func (r *Result) writeRemarks(w io.Writer, indent string) {
	var lines []string
	for i := range r.Rows {
		row := &r.Rows[i]
		why := map[string][]string{}
		for _, p := range slices.Sorted(maps.Keys(row.Absent)) {
			text := "not measured: " + row.Absent[p]
			if r.measured(row.Name, p) {
				text = "not in every repetition: " + row.Absent[p]
			}
			why[text] = append(why[text], p)
		}
		for _, text := range slices.Sorted(maps.Keys(why)) {
			where := ""
			if len(why[text]) < len(r.Points) {
				where = " (" + strings.Join(why[text], ", ") + ")"
			}
			lines = append(lines, fmt.Sprintf("%s%s: %s", row.Name, where, text))
		}
		for _, n := range row.Notes {
			lines = append(lines, row.Name+": "+n)
		}
	}
	if len(lines) > 0 {
		fmt.Fprintln(w)
	}
	for _, l := range lines {
		fmt.Fprintln(w, indent+l)
	}
}

// WriteMarkdown prints the result for the documentation.
func (r *Result) WriteMarkdown(w io.Writer) {
	columns := r.columns()
	fmt.Fprint(w, "| row |")
	for _, c := range columns {
		fmt.Fprintf(w, " %s |", r.heading(c))
	}
	fmt.Fprint(w, "\n|---|")
	for range columns {
		fmt.Fprint(w, "---:|")
	}
	fmt.Fprintln(w)
	for i := range r.Rows {
		row := &r.Rows[i]
		if len(row.Cells) == 0 {
			continue
		}
		fmt.Fprintf(w, "| %s |", row.Name)
		for _, c := range columns {
			fmt.Fprintf(w, " %s |", r.figure(row, c))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "\n%s\n", r.legend())
	if len(r.Ratios) > 0 {
		fmt.Fprint(w, "\n| ratio | here | published | ratio of ratios | source |\n|---|---:|---:|---:|---|\n")
		for _, q := range r.Ratios {
			fmt.Fprintf(w, "| %s | %s | %s | %.2f | %s |\n", q.What, q.ours(), ratio(q.Published), q.OfRatios, q.source())
		}
	}
	r.writeRemarks(w, "- ")
	for _, n := range r.Noise {
		fmt.Fprintf(w, "\n**Noisy run:** %s.\n", n)
	}
	if r.Check != nil {
		var text bytes.Buffer
		r.Check.write(&text) // into memory
		fmt.Fprintf(w, "\n```\n%s```\n", strings.TrimLeft(text.String(), "\n"))
	}
}
