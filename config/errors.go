// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// Error is one thing that is wrong with a configuration.
type Error struct {
	// File is the name given to Decode; empty for a Config that was not decoded.
	File string `json:"file,omitempty"`
	// Line and Column count from 1, Column in characters; 0 when there is no file.
	Line   int `json:"line,omitempty"`
	Column int `json:"column,omitempty"`
	// Path of the value in the YAML tree: "services[0].backends[1].weight".
	Path string `json:"path,omitempty"`
	// Object is what the value belongs to, by name: "service web: backend a".
	Object string `json:"object,omitempty"`
	// Cause says what is wrong, Hint what to write instead.
	Cause string `json:"cause"`
	Hint  string `json:"hint,omitempty"`
	// Source is the line of the file.
	Source string `json:"source,omitempty"`

	path  path
	atKey bool // the key is wrong, not its value
	width int  // characters to underline
	// depends are other values that the error speaks of: when one of them could
	// not be decoded, the error is not worth reporting.
	depends []path
}

// Error renders e on one line: "f.yaml:7:30: service web: backend a: weight 300:
// not between 1 and 256; write ...".
func (e *Error) Error() string {
	var b strings.Builder
	if p := e.position(); p != "" {
		b.WriteString(p + ": ")
	}
	b.WriteString(e.message())
	if e.Hint != "" {
		b.WriteString("; " + e.Hint)
	}
	return b.String()
}

func (e *Error) position() string {
	if e.Line == 0 {
		return e.File
	}
	return fmt.Sprintf("%s:%d:%d", e.File, e.Line, e.Column)
}

func (e *Error) message() string {
	if e.Object == "" {
		return e.Cause
	}
	return e.Object + ": " + e.Cause
}

// Errors is everything that is wrong with a configuration, in file order.
type Errors []*Error

// Error renders one error a line.
func (es Errors) Error() string {
	lines := make([]string, len(es))
	for i, e := range es {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap gives errors.Is and errors.As the single errors.
func (es Errors) Unwrap() []error {
	out := make([]error, len(es))
	for i, e := range es {
		out[i] = e
	}
	return out
}

// sorted orders es by place in the file, then by path.
func (es Errors) sorted() Errors {
	slices.SortStableFunc(es, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return es
}

// finish names the file and quotes the source lines.
func finish(name string, data []byte, es Errors) Errors {
	es.sorted()
	line, rest := 0, data
	var text []byte
	for _, e := range es {
		e.File = name
		for line < e.Line && len(rest) > 0 {
			text, rest, _ = bytes.Cut(rest, []byte("\n"))
			line++
		}
		if line == e.Line {
			e.Source = clean(string(text))
		}
	}
	return es
}

// clean makes a source line safe to print on a terminal: no control characters.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\t' {
			return ' '
		}
		if r < ' ' || r == 0x7f || r == utf8.RuneError || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, strings.TrimRight(s, "\r"))
}

// Window of a source line that is shown, in characters.
const sourceWidth = 100

// Render writes the errors for people, each with its source line and a caret
// under the place. Colour uses ANSI sequences.
func (es Errors) Render(w io.Writer, colour bool) {
	bold, red, green, off := "", "", "", ""
	if colour {
		bold, red, green, off = "\x1b[1m", "\x1b[1;31m", "\x1b[32m", "\x1b[0m"
	}
	for i, e := range es {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if p := e.position(); p != "" {
			fmt.Fprintf(w, "%s%s%s: ", bold, p, off)
		}
		fmt.Fprintf(w, "%s%s%s\n", red, clean(e.message()), off)
		if e.Source != "" {
			source, indent := e.window()
			num := fmt.Sprint(e.Line)
			fmt.Fprintf(w, "  %s | %s\n", num, source)
			room := max(1, utf8.RuneCountInString(source)-indent)
			fmt.Fprintf(w, "  %s | %s%s%s%s\n", strings.Repeat(" ", len(num)), strings.Repeat(" ", indent),
				red, strings.Repeat("^", min(max(1, e.width), room)), off)
		}
		if e.Path != "" {
			fmt.Fprintf(w, "  at %s\n", e.Path)
		}
		if e.Hint != "" {
			fmt.Fprintf(w, "  %s%s%s\n", green, clean(e.Hint), off)
		}
	}
}

// window cuts a long source line around the column and returns the column's
// place in what is left.
func (e *Error) window() (string, int) {
	runes := []rune(e.Source)
	indent := min(max(0, e.Column-1), len(runes))
	if len(runes) <= sourceWidth {
		return e.Source, indent
	}
	from := max(0, min(indent-sourceWidth/2, len(runes)-sourceWidth))
	return string(runes[from : from+sourceWidth]), indent - from
}
