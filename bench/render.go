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
			if r.hasMetric(p, m.Name) {
				out = append(out, column{p, m})
			}
		}
	}
	return out
}

func (r *Result) hasMetric(point, metric string) bool {
	for i := range r.Rows {
		if r.Rows[i].findCell(point, metric) != nil {
			return true
		}
	}
	return false
}

// heading returns the shortest unambiguous name of a column.
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
	cell := row.findCell(c.point, c.metric.Name)
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

// legend explains how to read the figures.
func (r *Result) legend() string {
	s := fmt.Sprintf("Median of %d interleaved repetitions of %g s; ± is half the range of the repetitions", r.Reps, r.Seconds)
	switch {
	case r.Beside:
		s += ", each divided by what the redirect-only loop did at the same time on the same CPU"
	case r.Yardstick:
		s += ", each divided by what the redirect-only loop did before and after it"
	case r.hasUnit():
		s += ", in other rows than the first each divided by what that one did in the same repetition"
	}
	s += fmt.Sprintf("; ~ marks a range of more than %.0f %%.", noisyCell*100)
	switch {
	case !r.hasShares():
	case r.ShareOfYardstick:
		s += " In brackets: that quotient, the share of the redirect-only loop."
	default:
		s += fmt.Sprintf(" In brackets: the share of “%s” in the same column.", r.Limit)
	}
	return s
}

// hasShares reports whether figures have a share in brackets. They have none if --rows excluded the limit row.
func (r *Result) hasShares() bool {
	return slices.ContainsFunc(r.Rows, func(row ResultRow) bool {
		return slices.ContainsFunc(row.Cells, func(c Cell) bool { return c.Share > 0 })
	})
}

// hasUnit reports whether the other rows are divided by the first row.
func (r *Result) hasUnit() bool {
	return len(r.Rows) > 0 && slices.ContainsFunc(r.Rows[0].Cells, func(c Cell) bool { return c.unit })
}

func (r *Result) ratioTable() *table.Table {
	t := table.New("ratio", ">here", ">published", ">ratio of ratios", "source")
	for _, q := range r.Ratios {
		t.Row(q.What, q.numeratorName(), ratio(q.Published), fmt.Sprintf("%.2f", q.OfRatios), q.source())
	}
	return t
}

func (q Ratio) numeratorName() string {
	if q.Noisy {
		return "~" + q.figure()
	}
	return q.figure()
}

// figure renders a ratio with enough digits to distinguish a miss from its goal.
func (q Ratio) figure() string {
	s := ratio(q.Ours)
	for digits := 3; q.Missed && digits < 6 && s == fmt.Sprintf("%.*f", digits-1, q.Published); digits++ {
		s = fmt.Sprintf("%.*f", digits, q.Ours)
	}
	return s
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

// rowRemark is a text about rows, with its point.
type rowRemark struct{ where, text string }

// writeRemarks lists absent rows and notes. Rows with the same remark share a line.
func (r *Result) writeRemarks(w io.Writer, indent string) {
	var order []rowRemark
	rows := map[rowRemark][]*ResultRow{}
	say := func(row *ResultRow, said rowRemark) {
		if rows[said] == nil {
			order = append(order, said)
		}
		rows[said] = append(rows[said], row)
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		why := map[string][]string{}
		for _, p := range slices.Sorted(maps.Keys(row.Absent)) {
			text := notMeasured + row.Absent[p]
			if r.hasFigure(row.Name, p) {
				text = "not in every repetition: " + row.Absent[p]
			}
			why[text] = append(why[text], p)
		}
		for _, text := range slices.Sorted(maps.Keys(why)) {
			where := ""
			if len(why[text]) < len(r.Points) {
				where = " (" + strings.Join(why[text], ", ") + ")"
			}
			say(row, rowRemark{where, text})
		}
		for _, n := range row.Notes {
			say(row, rowRemark{"", n})
		}
	}
	if len(order) > 0 {
		fmt.Fprintln(w)
	}
	for _, said := range order {
		fmt.Fprintf(w, "%s%s%s: %s\n", indent, said.rowNames(rows[said]), said.where, said.text)
	}
}

const (
	notMeasured = "not measured: "
	namedRows   = 4 // in one remark; more are counted if the table shows them
)

// rowNames names the rows of a remark, or counts them if the table shows many rows without a figure.
func (said rowRemark) rowNames(rows []*ResultRow) string {
	shown := !slices.ContainsFunc(rows, func(row *ResultRow) bool { return len(row.Cells) == 0 })
	if len(rows) > namedRows && shown && strings.HasPrefix(said.text, notMeasured) {
		return fmt.Sprintf("%d rows", len(rows))
	}
	var names []string
	for _, row := range rows {
		names = append(names, row.Name)
	}
	return strings.Join(names, "; ")
}

// WriteMarkdown prints the result for the documentation.
func (r *Result) WriteMarkdown(w io.Writer) {
	writeMarkdown(w, []machineRun{{Result: r}})
	if r.Check != nil {
		var text bytes.Buffer
		r.Check.write(&text) // writes to a buffer cannot fail
		fmt.Fprintf(w, "\n```\n%s```\n", strings.TrimLeft(text.String(), "\n"))
	}
}

// writeMarkdown prints the rows of the first run, and the ratios and the noise of all.
func writeMarkdown(w io.Writer, runs []machineRun) {
	r := runs[0]
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
	writeRatios(w, runs)
	r.writeRemarks(w, "- ")
	for _, r := range runs {
		for _, n := range r.Noise {
			fmt.Fprintf(w, "\n**Noisy run%s:** %s.\n", r.machineSuffix(), n)
		}
	}
}

// writeRatios prints the ratios of all runs as one table.
func writeRatios(w io.Writer, runs []machineRun) {
	all := allRatios(runs)
	if len(all) == 0 {
		return
	}
	here, of := "", ""
	for _, r := range runs {
		here += " here" + r.machineSuffix() + " |"
		of += " ratio of ratios" + r.machineSuffix() + " |"
	}
	lines := strings.Repeat("---:|", len(runs))
	fmt.Fprintf(w, "\n| ratio |%s published |%s source |\n|---|%s---:|%s---|\n", here, of, lines, lines)
	for _, q := range all {
		here, of = "", ""
		var missed []string
		measured := 0
		for _, r := range runs {
			o := r.ratio(q.What)
			if o == nil {
				here, of = here+" - |", of+" - |"
				continue
			}
			measured++
			here += " " + o.numeratorName() + " |"
			of += fmt.Sprintf(" %.2f |", o.OfRatios)
			if o.Missed {
				missed = append(missed, r.machineSuffix())
			}
		}
		source := q.Source
		switch {
		case len(missed) == measured:
			source += ": missed"
		case len(missed) > 0:
			source += ": missed" + strings.Join(missed, ",")
		}
		fmt.Fprintf(w, "| %s |%s %s |%s %s |\n", q.What, here, ratio(q.Published), of, source)
	}
}
