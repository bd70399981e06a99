// SPDX-License-Identifier: Apache-2.0

// Package table prints rows in aligned columns that fit a terminal. It shortens the widest columns, or prints the
// columns that do not fit in a second table below. Output to a file or pipe is neither shortened nor folded.
package table

import (
	"fmt"
	"io"
	"strings"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/term"
)

// Table collects rows. The zero value is ready to use.
type Table struct {
	header []string
	right  []bool
	rows   [][]string
	// Width of the terminal in columns. If it is 0, Write uses the writer's width, or no limit if the writer is not a
	// terminal.
	Width int
	// Fold prints columns that do not fit below the others, with the first column
	// again, instead of shortening all.
	Fold bool
	// Middle shortens cells in their middle instead of at their end, for addresses, which differ at both ends.
	Middle bool
}

// New returns a table with the given headings. A heading that begins with ">"
// aligns its column to the right.
func New(headings ...string) *Table {
	t := &Table{header: make([]string, len(headings)), right: make([]bool, len(headings))}
	for i, h := range headings {
		t.header[i], t.right[i] = strings.CutPrefix(h, ">")
	}
	return t
}

// Row adds a row. Values are printed with fmt.Sprint and [Escape], except those that are [Styled].
func (t *Table) Row(values ...any) {
	row := make([]string, len(t.header))
	for i := range row {
		if i < len(values) {
			row[i] = formatCell(values[i])
		}
	}
	t.rows = append(t.rows, row)
}

func formatCell(value any) string {
	if styled, ok := value.(Styled); ok {
		return string(styled)
	}
	return Escape(fmt.Sprint(value))
}

// Len returns the number of rows.
func (t *Table) Len() int { return len(t.rows) }

const gap = 2 // blanks between columns

// Write prints the table to w.
func (t *Table) Write(w io.Writer) error {
	widths := t.widths()
	limit := t.limit(w)
	folds := [][]int{all(len(widths))}
	if limit > 0 && t.Fold {
		folds = splitColumns(widths, limit)
	}
	var b strings.Builder
	for i, columns := range folds {
		if limit > 0 {
			shrink(widths, columns, limit)
		}
		if i > 0 {
			b.WriteString("\n")
		}
		t.print(&b, columns, widths)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// print writes the selected columns.
func (t *Table) print(b *strings.Builder, columns, widths []int) {
	for _, row := range append([][]string{t.header}, t.rows...) {
		line := ""
		for n, i := range columns {
			cell := ansi.Truncate(row[i], widths[i], "…")
			if t.Middle {
				cell = Middle(row[i], widths[i], "…")
			}
			pad := strings.Repeat(" ", widths[i]-ansi.StringWidth(cell))
			if t.right[i] {
				cell = pad + cell
			} else {
				cell += pad
			}
			if n > 0 {
				line += strings.Repeat(" ", gap)
			}
			line += cell
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}

// Middle removes the middle of a text that is wider than width columns and inserts mark, which is one column wide.
func Middle(s string, width int, mark string) string {
	columns := ansi.StringWidth(s)
	if columns <= width {
		return s
	}
	left := (width - 1) / 2
	return ansi.Truncate(s, left, "") + mark + ansi.TruncateLeft(s, columns-(width-1-left), "")
}

func all(n int) []int {
	columns := make([]int, n)
	for i := range columns {
		columns[i] = i
	}
	return columns
}

// splitColumns distributes the columns to tables that fit, each with the first column.
func splitColumns(widths []int, limit int) [][]int {
	var folds [][]int
	width := 0
	for i := 1; i < len(widths); i++ {
		if len(folds) == 0 || width+gap+widths[i] > limit {
			folds = append(folds, []int{0})
			width = widths[0]
		}
		folds[len(folds)-1] = append(folds[len(folds)-1], i)
		width += gap + widths[i]
	}
	if len(folds) == 0 {
		return [][]int{all(len(widths))}
	}
	return folds
}

func (t *Table) widths() []int {
	widths := make([]int, len(t.header))
	for _, row := range append([][]string{t.header}, t.rows...) {
		for i, cell := range row {
			widths[i] = max(widths[i], ansi.StringWidth(cell))
		}
	}
	return widths
}

func (t *Table) limit(w io.Writer) int {
	if t.Width > 0 {
		return t.Width
	}
	f, ok := File(w)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return 0
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 80
	}
	return width
}

// shrink narrows the widest columns until all fit. No column gets narrower than six cells.
func shrink(widths, columns []int, limit int) {
	for {
		sum, widest := gap*(len(columns)-1), columns[0]
		for _, i := range columns {
			sum += widths[i]
			if widths[i] > widths[widest] {
				widest = i
			}
		}
		if sum <= limit || widths[widest] <= 6 {
			return
		}
		widths[widest]--
	}
}
