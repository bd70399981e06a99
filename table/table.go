// SPDX-License-Identifier: Apache-2.0

// Package table prints rows in aligned columns that fit a terminal: the widest
// columns that allow it are shortened first, nothing is ever wrapped. Output to
// a file or pipe is not shortened.
package table

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/term"
)

// Table collects rows. The zero value is ready to use.
type Table struct {
	header []string
	right  []bool
	rows   [][]string
	// Width in columns of the terminal; 0 takes it from the writer when it is a
	// terminal, and means no limit otherwise.
	Width int
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

// Row adds a row; values are printed with fmt.Sprint.
func (t *Table) Row(values ...any) {
	row := make([]string, len(t.header))
	for i := range row {
		if i < len(values) {
			row[i] = fmt.Sprint(values[i])
		}
	}
	t.rows = append(t.rows, row)
}

// Len returns the number of rows.
func (t *Table) Len() int { return len(t.rows) }

const gap = 2 // blanks between columns

// Write prints the table to w.
func (t *Table) Write(w io.Writer) error {
	widths := t.widths()
	if limit := t.limit(w); limit > 0 {
		shrink(widths, limit-gap*(len(widths)-1))
	}
	var b strings.Builder
	for _, row := range append([][]string{t.header}, t.rows...) {
		line := ""
		for i, cell := range row {
			cell = ansi.Truncate(cell, widths[i], "…")
			pad := strings.Repeat(" ", widths[i]-ansi.StringWidth(cell))
			if t.right[i] {
				cell = pad + cell
			} else {
				cell += pad
			}
			if i > 0 {
				line += strings.Repeat(" ", gap)
			}
			line += cell
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
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
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return 0
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 80
	}
	return width
}

// shrink narrows the widest columns until their sum is at most limit; no column
// gets narrower than six cells.
func shrink(widths []int, limit int) {
	for {
		sum, widest := 0, 0
		for i, n := range widths {
			sum += n
			if n > widths[widest] {
				widest = i
			}
		}
		if sum <= limit || widths[widest] <= 6 {
			return
		}
		widths[widest]--
	}
}
