// SPDX-License-Identifier: Apache-2.0

package table

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// Escape returns s with every character that is not printable as an escape. Control characters move the
// cursor or forge lines, and format characters such as U+202E reorder a line. It uses JSON's escapes, and
// \xNN for bytes that are not UTF-8.
func Escape(s string) string {
	if printable(s) {
		return s
	}
	return string(appendEscaped(nil, []byte(s), func(rune) bool { return false }))
}

// Styled is a cell that holds colour sequences of the program itself. It is printed as it is.
type Styled string

func printable(s string) bool {
	for _, r := range s {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return false
		}
	}
	return true
}

// appendEscaped appends text to dst, with escapes for characters that are neither printable nor allowed.
func appendEscaped(dst, text []byte, allowed func(rune) bool) []byte {
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && size == 1:
			dst = fmt.Appendf(dst, `\x%02x`, text[0])
		case unicode.IsPrint(r) || allowed(r):
			dst = append(dst, text[:size]...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			dst = fmt.Appendf(dst, `\u%04x\u%04x`, high, low)
		case r == '\n':
			dst = append(dst, `\n`...)
		case r == '\t':
			dst = append(dst, `\t`...)
		default:
			dst = fmt.Appendf(dst, `\u%04x`, r)
		}
		text = text[size:]
	}
	return dst
}

// Output writes text of any origin to a terminal, file or pipe. It escapes every character that is not
// printable except line feeds, tabs and the colours of the program. JSON keeps its meaning, because the
// escapes are valid in JSON.
type Output struct {
	To io.Writer
	// Colored reports whether the program prints colours; nil is no.
	Colored func() bool

	rest []byte // an incomplete character or colour sequence at the end of the last text
}

// colours are the sequences that programs of this repository print (ECMA-48 SGR).
var colours = []string{"\x1b[0m", "\x1b[1m", "\x1b[1;31m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"}

// Write implements io.Writer.
func (o *Output) Write(b []byte) (int, error) {
	text, colored := b, o.Colored != nil && o.Colored()
	if len(o.rest) > 0 {
		text = append(o.rest, b...)
		o.rest = nil
	} else if isPlainASCII(b) {
		return o.To.Write(b)
	}
	out := make([]byte, 0, len(text)+16)
	for len(text) > 0 {
		end := len(text)
		if at := strings.IndexByte(string(text), '\x1b'); colored && at >= 0 {
			end = at
		}
		if end > 0 {
			part := text[:end]
			if end == len(text) {
				part = trimIncomplete(part)
				o.rest = append(o.rest, text[len(part):]...)
			}
			out = appendEscaped(out, part, lineOrTab)
			text = text[end:]
			continue
		}
		size, more := colour(text)
		switch {
		case more:
			o.rest = append(o.rest, text...)
			text = nil
		case size > 0:
			out = append(out, text[:size]...)
			text = text[size:]
		default:
			out = append(out, `\u001b`...)
			text = text[1:]
		}
	}
	if _, err := o.To.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}

func lineOrTab(r rune) bool { return r == '\n' || r == '\t' }

// isPlainASCII reports whether the text is printable ASCII with line feeds and tabs.
func isPlainASCII(b []byte) bool {
	for _, c := range b {
		if (c < ' ' || c > '~') && c != '\n' && c != '\t' {
			return false
		}
	}
	return true
}

// trimIncomplete returns the text without an incomplete character at its end.
func trimIncomplete(b []byte) []byte {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if last := b[len(b)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				return b[:len(b)-n]
			}
			break
		}
	}
	return b
}

// colour returns the length of the colour sequence at the beginning of the text, 0 for none, and whether
// the text may be the beginning of one.
func colour(text []byte) (size int, more bool) {
	for _, c := range colours {
		switch {
		case strings.HasPrefix(string(text[:min(len(text), len(c))]), c):
			return len(c), false
		case len(text) < len(c) && strings.HasPrefix(c, string(text)):
			more = true
		}
	}
	return 0, more
}

// File returns the file that a writer writes to, also through an [Output].
func File(w io.Writer) (*os.File, bool) {
	if o, ok := w.(*Output); ok {
		w = o.To
	}
	f, ok := w.(*os.File)
	return f, ok
}

// Line prints one line, in which a line feed of a value is an escape.
func Line(w io.Writer, format string, values ...any) (int, error) {
	return fmt.Fprintln(w, Escape(fmt.Sprintf(format, values...)))
}
