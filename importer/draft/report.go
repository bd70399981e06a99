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

// comment returns the configuration with comments: the summary, the lines and differences of each
// object, and at the end the lines without an equivalent.
func (d *Draft) comment(body string, r *Result) string {
	var b strings.Builder
	for _, l := range wrap(fmt.Sprintf("Imported from %s: %s of %s; %s. Read the comments, then: sluice check FILE",
		d.Source, plural(len(r.Objects), "object"), d.unit.count(d.contentLines()), r.summary()), width-2) {
		b.WriteString("# " + l + "\n")
	}
	if s := r.Summary(); s != "" {
		for _, l := range wrap(s, width-2) {
			b.WriteString("# " + l + "\n")
		}
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
	objects, next, first := r.Objects, 0, map[Note]string{}
	for _, line := range strings.SplitAfter(body, "\n") {
		indent := len(line) - len(strings.TrimLeft(line, " "))
		starts := strings.HasPrefix(line[indent:], "- name: ") && indent == 2 || strings.HasPrefix(line[indent:], "- {name: ") && indent == 4
		if starts && next < len(objects) {
			writeOrigin(&b, strings.Repeat(" ", indent)+"# ", d, objects[next], of[objects[next].Name], first)
			next++
		}
		b.WriteString(line)
	}
	if len(rest)+len(d.refused) > 0 {
		b.WriteString("\n# Not imported:\n")
	}
	for _, g := range group(rest, true) {
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

// writeOrigin writes the comment of an object. first has the object that already explains a reason.
func writeOrigin(b *strings.Builder, margin string, d *Draft, o Object, notes []Note, first map[Note]string) {
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
	for _, g := range group(notes, true) {
		reason := Note{Kind: g.Kind, Reason: g.Reason, Next: g.Next}
		if before := first[reason]; before != "" {
			say(string(g.Kind) + ": as in " + before)
			continue
		}
		first[reason] = o.Name
		say(string(g.Kind) + ": " + g.words())
	}
}

// contentLines counts the lines that are neither empty nor comments.
func (d *Draft) contentLines() (n int) {
	for _, l := range d.lines {
		if d.hasContent(l) {
			n++
		}
	}
	return n
}

// summary describes the number of lines without an equivalent and of lines that behave differently.
func (r *Result) summary() string {
	lost, changed := r.Count(Lost), r.Count(Changed)
	switch {
	case lost+changed == 0:
		return "all lines have an equivalent"
	case changed == 0:
		return hasOrHave(lost, "place", "has no equivalent", "have no equivalent")
	case lost == 0:
		return hasOrHave(changed, "place", "behaves differently", "behave differently")
	}
	return hasOrHave(lost, "place", "has no equivalent", "have no equivalent") + ", " + hasOrHave(changed, "place", "behaves differently", "behave differently")
}

func hasOrHave(n int, what, one, more string) string {
	if n == 1 {
		return "1 " + what + " " + one
	}
	return fmt.Sprintf("%d %ss %s", n, what, more)
}

// Summary returns the places of the lines by class, and the lines to check by hand: "translations:
// 10 of 10; filter: 8 of 12 stay in iptables; check by hand: line 3".
func (r *Result) Summary() string {
	type count struct{ all, rest int }
	counts, order := map[string]*count{}, []string{}
	place := map[int]Disposition{}
	for _, l := range r.Lines {
		place[l.Number] = l.Place
		if l.Class == "" {
			continue
		}
		c := counts[l.Class]
		if c == nil {
			c = &count{}
			counts[l.Class] = c
			order = append(order, l.Class)
		}
		c.all++
		if l.Place == InRest {
			c.rest++
		}
	}
	var parts []string
	slices.Sort(order)
	slices.Reverse(order) // translations before filter
	for _, class := range order {
		c := counts[class]
		part := fmt.Sprintf("%s: %d of %d", class, c.all-c.rest, c.all)
		if c.rest > 0 && r.Rest != "" {
			part = fmt.Sprintf("%s: %d of %d stay in %s", class, c.rest, c.all, r.program)
		}
		parts = append(parts, part)
	}
	var byHand []int
	for _, n := range r.Notes {
		if n.Line > 0 && n.Kind != Implied && (n.Object != "" || n.Kind == Changed || r.Rest == "") {
			byHand = append(byHand, n.Line)
		}
	}
	slices.Sort(byHand)
	if byHand = slices.Compact(byHand); len(byHand) > 0 {
		parts = append(parts, "check by hand: "+r.unit.list(byHand))
	}
	return strings.Join(parts, "; ")
}

// maxTexts is the maximum number of source lines in the report for one reason.
const maxTexts = 8

// Report writes the summary and then the notes, grouped by reason, in the order of the lines. It
// counts implied lines, or lists them too if all is true.
func (r *Result) Report(w io.Writer, all bool) error {
	var b strings.Builder
	say := func(margin, text string) {
		for _, l := range wrap(text, width-len(margin)) {
			fmt.Fprintln(&b, margin+l)
		}
	}
	say("", plural(len(r.Objects), "object")+": "+r.summary())
	if s := r.Summary(); s != "" {
		say("", s)
	}
	for _, remark := range r.Remarks {
		say("", "note: "+remark)
	}
	implied := map[int]bool{}
	for _, g := range group(r.Notes, false) {
		if g.Kind == Implied && !all {
			for _, n := range g.numbers {
				implied[n] = true
			}
			continue
		}
		say("", g.heading(r.unit))
		for i, t := range g.texts {
			if i == maxTexts {
				fmt.Fprintf(&b, "    ... and %d more\n", len(g.texts)-i)
				break
			}
			fmt.Fprintln(&b, "    "+truncateText(t, width-4))
		}
		say("  ", g.words())
	}
	if len(implied) > 0 {
		fmt.Fprintf(&b, "%s omitted: no rule is needed; --all lists them\n", hasOrHave(len(implied), r.unit.one, "is", "are"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// noteGroup has the notes with one reason.
type noteGroup struct {
	Note
	numbers []int
	texts   []string
	objects []string
	seen    map[any]bool
}

// group joins notes that differ only in line and text. If separate is false, it also joins notes
// about different objects.
func group(notes []Note, separate bool) (list []*noteGroup) {
	index := map[Note]*noteGroup{}
	for _, n := range notes {
		key := n
		key.Line, key.Text = 0, ""
		if !separate {
			key.Object = ""
		}
		g := index[key]
		if g == nil {
			g = &noteGroup{Note: n, seen: map[any]bool{}}
			index[key] = g
			list = append(list, g)
		}
		first := func(x any) bool {
			seen := g.seen[x]
			g.seen[x] = true
			return !seen
		}
		if n.Line > 0 && first(n.Line) {
			g.numbers = append(g.numbers, n.Line)
		}
		if n.Text != "" && first(n.Text) {
			g.texts = append(g.texts, n.Text)
		}
		if n.Object != "" && first("object "+n.Object) {
			g.objects = append(g.objects, n.Object)
		}
	}
	return list
}

// heading returns the lines, their kind and their objects: "lines 3, 5: changed in nat web, nat mail".
func (g *noteGroup) heading(u unit) string {
	s := g.lines(u) + ": " + string(g.Kind)
	if len(g.objects) > 0 {
		s += " in " + strings.Join(g.objects[:min(len(g.objects), maxTexts)], ", ")
	}
	if more := len(g.objects) - maxTexts; more > 0 {
		s += fmt.Sprintf(" and %d more", more)
	}
	return s
}

func (g *noteGroup) words() string {
	if g.Next == "" {
		return g.Reason
	}
	return g.Reason + "; " + g.Next
}

func (g *noteGroup) lines(u unit) string {
	if len(g.numbers) == 0 {
		return "the whole"
	}
	return u.list(g.numbers)
}

// unit is the word for one line of a source.
type unit struct{ one, more string }

func (u unit) count(n int) string {
	if n == 1 {
		return "1 " + u.one
	}
	return fmt.Sprintf("%d %s", n, u.more)
}

// list returns "line 3", or "lines 3, 5-8".
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

// truncateText shortens s to n columns.
func truncateText(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-3]) + "..."
}

// wrap splits s between words into lines of at most n columns. A longer word has a line of its own.
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
