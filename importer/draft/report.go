// SPDX-License-Identifier: Apache-2.0

package draft

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// width of the report and of comments, in columns.
const width = 80

// comment writes the configuration's text with what there is to say: where each object comes
// from, what acts otherwise, and at the end what has no equal.
func (d *Draft) comment(body string, r *Result) string {
	var b strings.Builder
	for _, l := range wrap(fmt.Sprintf("Imported from %s: %s of %s; %s. Read the comments, then: sluice check FILE",
		d.Source, plural(len(r.Objects), "object"), d.unit.count(d.spoken()), r.summary()), width-2) {
		b.WriteString("# " + l + "\n")
	}
	for _, remark := range d.remarks {
		for _, l := range wrap(remark, width-2) {
			b.WriteString("# " + l + "\n")
		}
	}
	of := map[string][]Note{}
	var rest []Note
	for _, n := range r.Notes {
		if n.Object != "" {
			of[n.Object] = append(of[n.Object], n)
		} else if n.Kind != Implied {
			rest = append(rest, n)
		}
	}
	objects, next := r.Objects, 0
	for _, line := range strings.SplitAfter(body, "\n") {
		indent := len(line) - len(strings.TrimLeft(line, " "))
		starts := strings.HasPrefix(line[indent:], "- name: ") && indent == 2 || strings.HasPrefix(line[indent:], "- {name: ") && indent == 4
		if starts && next < len(objects) {
			writeOrigin(&b, strings.Repeat(" ", indent)+"# ", d, objects[next], of[objects[next].Name])
			next++
		}
		b.WriteString(line)
	}
	if len(rest)+len(d.refused) > 0 {
		b.WriteString("\n# Not taken over:\n")
	}
	for _, g := range group(rest) {
		for _, l := range wrap(g.lines(d.unit)+": "+g.words(), width-2) {
			b.WriteString("# " + l + "\n")
		}
		for _, t := range g.texts {
			b.WriteString("#   " + t + "\n")
		}
	}
	for _, text := range d.refused {
		for l := range strings.Lines(text) {
			b.WriteString("# " + printable(strings.TrimRight(l, "\n")) + "\n")
		}
	}
	return b.String()
}

func writeOrigin(b *strings.Builder, margin string, d *Draft, o Object, notes []Note) {
	say := func(s string) {
		for _, l := range wrap(s, width-len(margin)) {
			b.WriteString(margin + l + "\n")
		}
	}
	text := ""
	if len(o.Lines) == 1 {
		text = printable(d.Line(o.Lines[0]))
	}
	if len(text) > 2 { // not a bracket of JSON alone
		b.WriteString(margin + "from " + d.unit.list(o.Lines) + ": " + text + "\n")
	} else if len(o.Lines) > 0 {
		say("from " + d.unit.list(o.Lines))
	}
	for _, g := range group(notes) {
		say(string(g.Kind) + ": " + g.words())
	}
}

// spoken counts the lines that say something.
func (d *Draft) spoken() (n int) {
	for _, l := range d.lines {
		text := strings.TrimSpace(l)
		if text != "" && !slices.ContainsFunc(d.commentMarks, func(mark string) bool { return strings.HasPrefix(text, mark) }) {
			n++
		}
	}
	return n
}

// summary counts what was lost and what acts otherwise, in words.
func (r *Result) summary() string {
	lost, changed := r.Count(Lost), r.Count(Changed)
	switch {
	case lost+changed == 0:
		return "everything has its equal"
	case changed == 0:
		return hasOrHave(lost, "place", "has no equal", "have no equal")
	case lost == 0:
		return hasOrHave(changed, "place", "acts otherwise", "act otherwise")
	}
	return hasOrHave(lost, "place", "has no equal", "have no equal") + ", " + hasOrHave(changed, "place", "acts otherwise", "act otherwise")
}

func hasOrHave(n int, what, one, more string) string {
	if n == 1 {
		return "1 " + what + " " + one
	}
	return fmt.Sprintf("%d %ss %s", n, what, more)
}

// Report writes the notes for people: those of one reason together, in the order of the lines.
// Implied lines are counted, or with all listed too.
func (r *Result) Report(w io.Writer, all bool) error {
	var b strings.Builder
	implied := 0
	for _, g := range group(r.Notes) {
		if g.Kind == Implied && !all {
			implied += len(g.numbers)
			continue
		}
		head := g.lines(r.unit) + ": " + string(g.Kind)
		if g.Object != "" {
			head += " in " + g.Object
		}
		fmt.Fprintln(&b, head)
		for _, t := range g.texts {
			fmt.Fprintln(&b, "    "+cut(t, width-4))
		}
		for _, l := range wrap(g.words(), width-2) {
			fmt.Fprintln(&b, "  "+l)
		}
	}
	fmt.Fprintf(&b, "%s: %s\n", plural(len(r.Objects), "object"), r.summary())
	if implied > 0 {
		fmt.Fprintf(&b, "%s left out that Sluice needs no rule for; --all lists them\n", hasOrHave(implied, "line", "is", "are"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// grouped are the notes of one reason.
type grouped struct {
	Note
	numbers []int
	texts   []string
}

// group puts notes together that differ by their line and text only.
func group(notes []Note) (list []*grouped) {
	index := map[Note]*grouped{}
	for _, n := range notes {
		key := n
		key.Line, key.Text = 0, ""
		g := index[key]
		if g == nil {
			g = &grouped{Note: n}
			index[key] = g
			list = append(list, g)
		}
		if n.Line > 0 && !slices.Contains(g.numbers, n.Line) {
			g.numbers = append(g.numbers, n.Line)
		}
		if n.Text != "" && !slices.Contains(g.texts, n.Text) {
			g.texts = append(g.texts, n.Text)
		}
	}
	return list
}

func (g *grouped) words() string {
	if g.Next == "" {
		return g.Reason
	}
	return g.Reason + "; " + g.Next
}

func (g *grouped) lines(u unit) string {
	if len(g.numbers) == 0 {
		return "the whole"
	}
	return u.list(g.numbers)
}

// unit is what a text is counted in.
type unit struct{ one, more string }

func (u unit) count(n int) string {
	if n == 1 {
		return "1 " + u.one
	}
	return fmt.Sprintf("%d %s", n, u.more)
}

// list writes "line 3", or "lines 3, 5-8".
func (u unit) list(numbers []int) string {
	var parts []string
	for i := 0; i < len(numbers); i++ {
		first := numbers[i]
		for i+1 < len(numbers) && numbers[i+1] == numbers[i]+1 {
			i++
		}
		if numbers[i] == first {
			parts = append(parts, fmt.Sprint(first))
		} else {
			parts = append(parts, fmt.Sprintf("%d-%d", first, numbers[i]))
		}
	}
	word := u.more
	if len(numbers) == 1 {
		word = u.one
	}
	return word + " " + strings.Join(parts, ", ")
}

func plural(n int, what string) string { return strings.TrimSuffix(hasOrHave(n, what, "", ""), " ") }

// cut shortens s to n columns.
func cut(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-3]) + "..."
}

// wrap breaks s between words into lines of at most n columns; a longer word has a line of its own.
func wrap(s string, n int) (lines []string) {
	line := ""
	for _, w := range strings.Fields(s) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(w) > n {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += w
	}
	return append(lines, line)
}
