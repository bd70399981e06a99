// SPDX-License-Identifier: Apache-2.0

// Package draft collects the result of an import: the objects of Sluice, the lines of the source
// that each is made from, and notes about lines that have no equivalent. Every line ends in exactly
// one [Place]. The package is pure.
package draft

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// Kind is the outcome of a line.
type Kind string

// Kinds of notes.
const (
	// Lost lines have no equivalent in the configuration.
	Lost Kind = "lost"
	// Changed lines are in the configuration, but behave differently in some way.
	Changed Kind = "changed"
	// Implied lines need no configuration: Sluice always has the effect, or there is none.
	Implied Kind = "implied"
)

// Note describes the outcome of one line.
type Note struct {
	Kind Kind `json:"kind"`
	// Line is the line number in the source from 1, or 0 for a note about the whole source.
	Line int `json:"line"`
	// Text is the line, or the part with the difference.
	Text string `json:"text"`
	// Reason is the cause, Next the next step.
	Reason string `json:"reason"`
	Next   string `json:"next,omitempty"`
	// Object is the object with the difference: "nat web".
	Object string `json:"object,omitempty"`
}

// Object is one service, NAT rule or firewall rule, and its lines in the source.
type Object struct {
	Name  string `json:"name"` // with its kind: "nat web"
	Lines []int  `json:"lines"`
}

// Disposition is the result of the import for a line.
type Disposition string

// Dispositions of lines.
const (
	// InObject lines are in an object of the configuration.
	InObject Disposition = "object"
	// InRest lines stay with the source's program, or need a change by hand.
	InRest Disposition = "rest"
	// NotNeeded lines are in neither: Sluice always has the effect, or there is none.
	NotNeeded Disposition = "implied"
)

// Line is one line of the source, or one entry of a list, that is neither empty nor a comment.
type Line struct {
	Number int         `json:"number"`
	Place  Disposition `json:"place"`
	// Class names the kind of line in the summary, "translations"; empty for others.
	Class string `json:"class,omitempty"`
	Text  string `json:"text"`
}

// Result is the outcome of an import.
type Result struct {
	// YAML is the configuration with comments; [config.Decode] accepts it.
	YAML string `json:"yaml"`
	// Config is the same, without defaults.
	Config *config.Config `json:"config"`
	// Objects are the services, NAT rules and firewall rules, with their lines.
	Objects []Object `json:"objects"`
	// Notes in the order of the lines.
	Notes []Note `json:"notes"`
	// Remarks are about the whole configuration.
	Remarks []string `json:"remarks,omitempty"`
	// Lines has every line of the source that has a meaning, in order.
	Lines []Line `json:"lines"`
	// Rest has the lines without an equivalent in the source's own form, to load together with
	// Sluice; empty if none has an effect, or the source has no such form.
	Rest string `json:"rest,omitempty"`

	unit    unit
	program string
}

// Lossy reports whether something was lost, or behaves differently.
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

// mark is an importer's declaration about one line.
type mark struct {
	structure bool   // Punctuation: the end of a block, the name of a table.
	kept      bool   // Stays in the source's program.
	class     string // in the summary
}

// Draft is an incomplete configuration.
type Draft struct {
	Config config.Config
	// Source is the program of the text.
	Source string

	// Rest writes the lines that stay in the source's own form, "" if none has an effect.
	// Nil if the source has no such form.
	Rest func(stays func(line int) bool) string
	// Returned is called for each line that leaves a refused object and stays in the source's
	// program. It may change the settings of the configuration. Nil to ignore it.
	Returned func(line int)

	lines   []string
	marks   []mark // indexed by line number, counted from 1
	origin  map[string][]int
	notes   []Note
	noted   map[Note]bool
	refused []string       // Objects that validation rejected, as YAML.
	names   map[string]int // by kind and name: the last number that was appended
	remarks []string
	unit    unit
	// commentMarks are the prefixes of comment lines.
	commentMarks []string
}

// New returns a draft for a text. Lines that begin with one of the marks are comments.
func New(source, text string, commentMarks ...string) *Draft {
	lines := strings.Split(strings.TrimSuffix(strings.ReplaceAll(text, "\r\n", "\n"), "\n"), "\n")
	return &Draft{
		Source: source, lines: lines, marks: make([]mark, len(lines)+1),
		unit:  unit{"line", "lines"},
		noted: map[Note]bool{}, origin: map[string][]int{}, names: map[string]int{}, commentMarks: commentMarks,
	}
}

// Entries returns a draft for a list. Its entries count as lines, because a JSON document may be a
// single line.
func Entries(source string, entries []string) *Draft {
	for i, e := range entries {
		entries[i] = printable(strings.ReplaceAll(e, "\n", " "))
	}
	d := New(source, strings.Join(entries, "\n"))
	d.unit = unit{"entry", "entries"}
	return d
}

// Lines returns the lines of the text; the first has index 0.
func (d *Draft) Lines() []string { return d.lines }

// Line returns line n, counted from 1, without the space around it.
func (d *Draft) Line(n int) string {
	if n < 1 || n > len(d.lines) {
		return ""
	}
	return strings.Join(strings.Fields(d.lines[n-1]), " ")
}

// Structure marks lines without a meaning of their own: the name of a table, the end of a block.
func (d *Draft) Structure(lines ...int) { d.mark(lines, func(m *mark) { m.structure = true }) }

// Keep marks lines that stay in the source's program, even if an object is made from them.
func (d *Draft) Keep(lines ...int) { d.mark(lines, func(m *mark) { m.kept = true }) }

// Class sets the summary class of source lines.
func (d *Draft) Class(class string, lines ...int) {
	d.mark(lines, func(m *mark) { m.class = class })
}

func (d *Draft) mark(lines []int, set func(*mark)) {
	for _, n := range lines {
		if n > 0 && n < len(d.marks) {
			set(&d.marks[n])
		}
	}
}

// Service adds a service made from the lines, and returns its name in notes.
func (d *Draft) Service(s config.Service, lines ...int) string {
	s.Name = d.name("service", s.Name)
	d.Config.Services = append(d.Config.Services, s)
	return d.originComment("service "+s.Name, lines)
}

// NAT adds a NAT rule, like Service.
func (d *Draft) NAT(r config.NATRule, lines ...int) string {
	r.Name = d.name("nat", r.Name)
	d.Config.NAT = append(d.Config.NAT, r)
	return d.originComment("nat "+r.Name, lines)
}

// Rule adds a firewall rule, like Service.
func (d *Draft) Rule(r config.FirewallRule, lines ...int) string {
	r.Name = d.name("rule", r.Name)
	d.Config.Firewall.Rules = append(d.Config.Firewall.Rules, r)
	return d.originComment("rule "+r.Name, lines)
}

// Set adds a firewall set, or prefixes to one, and returns its name.
func (d *Draft) Set(name string, prefixes []netip.Prefix) string {
	if d.Config.Firewall.Sets == nil {
		d.Config.Firewall.Sets = map[string][]netip.Prefix{}
	}
	name = cleanName(name)
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

// Remark adds a comment about the whole configuration.
func (d *Draft) Remark(text string) {
	if !slices.Contains(d.remarks, text) {
		d.remarks = append(d.remarks, text)
	}
}

// AlsoFrom adds source lines to an object.
func (d *Draft) AlsoFrom(object string, lines ...int) { d.originComment(object, lines) }

func (d *Draft) originComment(object string, lines []int) string {
	for _, n := range lines {
		if at, found := slices.BinarySearch(d.origin[object], n); n > 0 && !found {
			d.origin[object] = slices.Insert(d.origin[object], at, n)
		}
	}
	return object
}

// Lost adds a note that a line, or the part in text, has no equivalent. An empty text means the
// whole line.
func (d *Draft) Lost(line int, text, reason, next string) {
	d.addNote(Note{Kind: Lost, Line: line, Text: text, Reason: reason, Next: next})
}

// Changed adds a note that a line behaves differently in an object.
func (d *Draft) Changed(object string, line int, text, reason, next string) {
	d.addNote(Note{Kind: Changed, Line: line, Text: text, Reason: reason, Next: next, Object: object})
}

// LostOf adds a note that a part of a line has no equivalent in the line's object.
func (d *Draft) LostOf(object string, line int, text, reason, next string) {
	d.addNote(Note{Kind: Lost, Line: line, Text: text, Reason: reason, Next: next, Object: object})
}

// ImpliedBy adds a note that an object has the effect of a line. If validation rejects the object,
// the line stays in the source's program.
func (d *Draft) ImpliedBy(object string, line int, text, reason string) {
	d.addNote(Note{Kind: Implied, Line: line, Text: text, Reason: reason, Object: object})
}

// Implied adds a note that a line needs no configuration.
func (d *Draft) Implied(line int, text, reason string) {
	d.addNote(Note{Kind: Implied, Line: line, Text: text, Reason: reason})
}

func (d *Draft) addNote(n Note) {
	if n.Text == "" {
		n.Text = d.Line(n.Line)
	}
	n.Text, n.Reason, n.Next = printable(n.Text), printable(n.Reason), printable(n.Next) // they may include text of the source
	if !d.noted[n] {
		d.noted[n] = true
		d.notes = append(d.notes, n)
	}
}

// maxText is the maximum length of the text in a note, in bytes.
const maxText = 400

// printable makes a text of the source safe for a terminal and for a comment.
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

// cleanName converts any text to a name of letters, digits, and - _ . :
func cleanName(s string) string {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.:", r) {
			return r
		}
		return '-'
	}, strings.TrimSpace(s))
	s = strings.Trim(s, "-")
	return cmp.Or(s[:min(len(s), maxName)], "unnamed")
}

// name returns a name that is unique among objects of the kind.
func (d *Draft) name(kind, wanted string) string {
	base := cleanName(wanted)
	name := base
	for d.names[kind+" "+name] > 0 {
		d.names[kind+" "+base]++ // the next suffix to try, so that equal names need no search
		suffix := fmt.Sprintf("-%d", d.names[kind+" "+base])
		name = base[:min(len(base), maxName-len(suffix))] + suffix
	}
	d.names[kind+" "+name] = 1
	return name
}
