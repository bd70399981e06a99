// SPDX-License-Identifier: Apache-2.0

// Package draft collects what an import makes of another program's configuration: the objects of
// ours, where each comes from, and notes about every line that has no equal. It is pure.
package draft

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// Kind is what became of a line.
type Kind string

// Kinds of notes.
const (
	// Lost lines have no equal: nothing in the configuration stands for them.
	Lost Kind = "lost"
	// Changed lines are in the configuration, but act otherwise in some way.
	Changed Kind = "changed"
	// Implied lines need nothing in the configuration: Sluice does so by itself, or they
	// have no effect.
	Implied Kind = "implied"
)

// Note says what became of one line.
type Note struct {
	Kind Kind `json:"kind"`
	// Line of the source, from 1; 0 for what no single line says.
	Line int `json:"line"`
	// Text is the line, or the part of it that the note is about.
	Text string `json:"text"`
	// Reason says why, Next what to do about it.
	Reason string `json:"reason"`
	Next   string `json:"next,omitempty"`
	// Object of the configuration that the note is about: "nat web".
	Object string `json:"object,omitempty"`
}

// Object is one service, NAT rule or firewall rule, and the lines that it comes from.
type Object struct {
	Name  string `json:"name"` // with its kind: "nat web"
	Lines []int  `json:"lines"`
}

// Result is what an import has made.
type Result struct {
	// YAML is the configuration with comments; [config.Decode] accepts it.
	YAML string `json:"yaml"`
	// Config is the same, without defaults.
	Config *config.Config `json:"config"`
	// Objects are the services, NAT rules and firewall rules, and where they come from.
	Objects []Object `json:"objects"`
	// Notes in the order of the lines.
	Notes []Note `json:"notes"`
	// Rest is what has no equal in the source's own form, to be loaded beside Sluice;
	// empty when nothing is left, or the source has no such form.
	Rest string `json:"rest,omitempty"`

	unit unit
}

// Lossy reports whether something was lost, or acts otherwise.
func (r *Result) Lossy() bool { return r.Count(Lost)+r.Count(Changed) > 0 }

// Count counts the notes of a kind.
func (r *Result) Count(k Kind) (n int) {
	for _, note := range r.Notes {
		if note.Kind == k {
			n++
		}
	}
	return n
}

// Draft is a configuration in the making.
type Draft struct {
	Config config.Config
	// Source is the program that the text is of.
	Source string

	lines   []string
	known   []bool // lines that somebody has spoken for
	origin  map[string][]int
	notes   []Note
	noted   map[Note]bool
	refused []string // objects that the configuration does not take, as YAML
	names   map[string]bool
	remarks []string
	unit    unit
	// commentMarks begin lines that say nothing.
	commentMarks []string
}

// New starts a draft of a text. What begins with one of the marks is a comment.
func New(source, text string, commentMarks ...string) *Draft {
	lines := strings.Split(strings.TrimSuffix(strings.ReplaceAll(text, "\r\n", "\n"), "\n"), "\n")
	return &Draft{
		Source: source, lines: lines, known: make([]bool, len(lines)+1),
		unit:  unit{"line", "lines"},
		noted: map[Note]bool{}, origin: map[string][]int{}, names: map[string]bool{}, commentMarks: commentMarks,
	}
}

// Entries makes a draft of a list whose entries stand for lines, where the text's own lines say
// nothing: a document on one line.
func Entries(source string, entries []string) *Draft {
	for i, e := range entries {
		entries[i] = printable(strings.ReplaceAll(e, "\n", " "))
	}
	d := New(source, strings.Join(entries, "\n"))
	d.unit = unit{"entry", "entries"}
	return d
}

// Lines returns the text's lines; the first has the index 0.
func (d *Draft) Lines() []string { return d.lines }

// Line returns line n, counted from 1, without the space around it.
func (d *Draft) Line(n int) string {
	if n < 1 || n > len(d.lines) {
		return ""
	}
	return strings.Join(strings.Fields(d.lines[n-1]), " ")
}

// Know marks lines that mean nothing by themselves, such as the end of a block, or of which
// somebody else will speak.
func (d *Draft) Know(lines ...int) {
	for _, n := range lines {
		if n > 0 && n < len(d.known) {
			d.known[n] = true
		}
	}
}

// Service adds a service that comes from the lines, and returns what notes call it.
func (d *Draft) Service(s config.Service, lines ...int) string {
	s.Name = d.name("service", s.Name)
	d.Config.Services = append(d.Config.Services, s)
	return d.from("service "+s.Name, lines)
}

// NAT adds a NAT rule in the same way.
func (d *Draft) NAT(r config.NATRule, lines ...int) string {
	r.Name = d.name("nat", r.Name)
	d.Config.NAT = append(d.Config.NAT, r)
	return d.from("nat "+r.Name, lines)
}

// Rule adds a firewall rule in the same way.
func (d *Draft) Rule(r config.FirewallRule, lines ...int) string {
	r.Name = d.name("rule", r.Name)
	d.Config.Firewall.Rules = append(d.Config.Firewall.Rules, r)
	return d.from("rule "+r.Name, lines)
}

// Set adds a firewall set, or prefixes to one, and returns its name.
func (d *Draft) Set(name string, prefixes []netip.Prefix) string {
	if d.Config.Firewall.Sets == nil {
		d.Config.Firewall.Sets = map[string][]netip.Prefix{}
	}
	name = clean(name)
	all := d.Config.Firewall.Sets[name]
	for _, p := range prefixes {
		if !slices.Contains(all, p.Masked()) {
			all = append(all, p.Masked())
		}
	}
	if all == nil {
		all = []netip.Prefix{}
	}
	d.Config.Firewall.Sets[name] = all
	return name
}

// Remark adds a comment about the whole at the top.
func (d *Draft) Remark(text string) {
	if !slices.Contains(d.remarks, text) {
		d.remarks = append(d.remarks, text)
	}
}

// AlsoFrom says that an object comes from further lines.
func (d *Draft) AlsoFrom(object string, lines ...int) { d.from(object, lines) }

func (d *Draft) from(object string, lines []int) string {
	for _, n := range lines {
		if n > 0 && !slices.Contains(d.origin[object], n) {
			d.origin[object] = append(d.origin[object], n)
		}
	}
	slices.Sort(d.origin[object])
	d.Know(lines...)
	return object
}

// Lost notes that a line, or the part of it that is text, has no equal. An empty text is the
// whole line.
func (d *Draft) Lost(line int, text, reason, next string) {
	d.note(Note{Kind: Lost, Line: line, Text: text, Reason: reason, Next: next})
}

// Changed notes that a line acts otherwise in an object.
func (d *Draft) Changed(object string, line int, text, reason, next string) {
	d.note(Note{Kind: Changed, Line: line, Text: text, Reason: reason, Next: next, Object: object})
}

// LostOf notes that a part of a line has no equal in the object that was made of the line.
func (d *Draft) LostOf(object string, line int, text, reason, next string) {
	d.note(Note{Kind: Lost, Line: line, Text: text, Reason: reason, Next: next, Object: object})
}

// Implied notes that a line needs nothing in the configuration.
func (d *Draft) Implied(line int, text, reason string) {
	d.note(Note{Kind: Implied, Line: line, Text: text, Reason: reason})
}

func (d *Draft) note(n Note) {
	if n.Text == "" {
		n.Text = d.Line(n.Line)
	}
	n.Text, n.Reason, n.Next = printable(n.Text), printable(n.Reason), printable(n.Next) // they may hold words of the source
	d.Know(n.Line)
	if !d.noted[n] {
		d.noted[n] = true
		d.notes = append(d.notes, n)
	}
}

// maxText bounds the text of a note, in bytes.
const maxText = 400

// printable makes a text of the source fit for a terminal and for a comment.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0xfffd || r == 0x2028 || r == 0x2029 || r == 0xfeff {
			return ' '
		}
		return r
	}, s)
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "") + "..."
	}
	return s
}

// maxName is the longest name of an object (package config).
const maxName = 63

// clean makes a name of letters, digits, and - _ . : of any text.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.:", r) {
			return r
		}
		return '-'
	}, strings.TrimSpace(s))
	s = strings.Trim(s, "-")
	return cmp.Or(s[:min(len(s), maxName)], "unnamed")
}

// name makes a name that no other object of the kind has.
func (d *Draft) name(kind, wanted string) string {
	base := clean(wanted)
	name := base
	for n := 2; d.names[kind+" "+name]; n++ {
		suffix := fmt.Sprintf("-%d", n)
		name = base[:min(len(base), maxName-len(suffix))] + suffix
	}
	d.names[kind+" "+name] = true
	return name
}
