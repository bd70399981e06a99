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

// Error is one error in a configuration.
type Error struct {
	// File is the name given to Decode; empty for a Config that was not decoded.
	File string `json:"file,omitempty"`
	// Line and Column count from 1, Column in characters; 0 when there is no file.
	Line   int `json:"line,omitempty"`
	Column int `json:"column,omitempty"`
	// Path of the value in the YAML tree: "services[0].backends[1].weight".
	Path string `json:"path,omitempty"`
	// Object names the object that contains the value: "service web: backend a".
	Object string `json:"object,omitempty"`
	// Cause describes the error, Hint the remedy.
	Cause string `json:"cause"`
	Hint  string `json:"hint,omitempty"`
	// Source is the line of the file; for a long line, 100 characters around the error.
	Source string `json:"source,omitempty"`

	path   path
	atKey  bool // The key is wrong, not its value.
	indent int  // Characters of Source before the error.
	width  int  // Characters to underline.
	// depends are other values that the error mentions. If one of these could not be decoded, the
	// error is not reported.
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
	if e.Line == 0 || e.File == "" { // a value from the API has no file
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

// Errors are all errors of a configuration, in file order.
type Errors []*Error

// Error renders one error a line.
func (es Errors) Error() string {
	lines := make([]string, len(es))
	for i, e := range es {
		lines[i] = e.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the single errors for errors.Is and errors.As.
func (es Errors) Unwrap() []error {
	out := make([]error, len(es))
	for i, e := range es {
		out[i] = e
	}
	return out
}

// sorted orders es by position in the file, then by path.
func (es Errors) sorted() Errors {
	slices.SortStableFunc(es, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return es
}

// finish names the file and quotes the source lines.
func finish(name string, data []byte, es Errors) Errors {
	es.sorted()
	number, rest := 0, data
	var l line
	for _, e := range es {
		e.File = name
		for number < e.Line && len(rest) > 0 {
			var text []byte
			text, rest, _ = bytes.Cut(rest, []byte("\n"))
			number, l = number+1, line{text: bytes.TrimRight(text, "\r")}
		}
		if number == e.Line {
			e.Source, e.indent = l.excerpt(max(0, e.Column-1))
		}
	}
	return es
}

// sourceWidth is how much of a source line is shown, in characters.
const sourceWidth = 100

// line is read from left to right: generated configurations may be a single line with a thousand
// errors.
type line struct {
	text   []byte
	at     int // Current byte.
	passed int // Characters before it.
}

// excerpt returns the text around a character (counted from 0) and the character's position in that
// text. Calls must be in ascending order.
func (l *line) excerpt(character int) (string, int) {
	for l.passed < character-sourceWidth/2 && l.at < len(l.text) {
		_, size := utf8.DecodeRune(l.text[l.at:])
		l.at, l.passed = l.at+size, l.passed+1
	}
	from, before, end, n := l.at, l.passed, l.at, 0
	for ; n < sourceWidth && end < len(l.text); n++ {
		_, size := utf8.DecodeRune(l.text[end:])
		end += size
	}
	for ; n < sourceWidth && from > 0; n++ {
		_, size := utf8.DecodeLastRune(l.text[:from])
		from, before = from-size, before-1
	}
	return stripControls(string(l.text[from:end])), min(character-before, n)
}

// stripControls makes a source line safe to print on a terminal: no control characters.
func stripControls(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\t' {
			return ' '
		}
		if r < ' ' || r == 0x7f || r == utf8.RuneError || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// Render writes the errors for a terminal, each with its source line and a caret under the
// position. Colour uses ANSI sequences.
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
		fmt.Fprintf(w, "%s%s%s\n", red, stripControls(e.message()), off)
		if e.Source != "" {
			num := fmt.Sprint(e.Line)
			fmt.Fprintf(w, "  %s | %s\n", num, e.Source)
			room := max(1, utf8.RuneCountInString(e.Source)-e.indent)
			fmt.Fprintf(w, "  %s | %s%s%s%s\n", strings.Repeat(" ", len(num)), strings.Repeat(" ", e.indent),
				red, strings.Repeat("^", min(max(1, e.width), room)), off)
		}
		if e.Path != "" {
			fmt.Fprintf(w, "  at %s\n", e.Path)
		}
		if e.Hint != "" {
			fmt.Fprintf(w, "  %s%s%s\n", green, stripControls(e.Hint), off)
		}
	}
}
