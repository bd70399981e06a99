// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Style says how a report is written.
type Style struct {
	All      bool // also the checks that found nothing
	Markdown bool
	// Paint colours a verdict's name; nil leaves it plain.
	Paint func(v Verdict, text string) string
}

// Write prints the report for users: problems with their evidence and remedy, then notes, missing
// data, and the conclusion.
func (r *Report) Write(w io.Writer, s Style) error {
	if s.Paint == nil {
		s.Paint = func(_ Verdict, text string) string { return text }
	}
	p := &printer{w: w, style: s}
	p.header(r)
	var effects []Finding
	for _, v := range []Verdict{Critical, Warn} {
		for _, f := range r.of(v) {
			if f.CausedBy != "" {
				f.Summary = fmt.Sprintf("%s (%s, from %s)", f.Summary, f.Verdict, f.CausedBy)
				effects = append(effects, f)
				continue
			}
			p.full(f)
		}
	}
	p.lines("Explained by the above", Warn, effects)
	notes := r.of(Info)
	if !s.All {
		notes = folded(notes)
	}
	p.lines("Notes", Info, notes)
	p.unknown(r)
	if s.All {
		p.lines("Good", OK, r.of(OK))
	} else {
		p.printf("\n%d checks found nothing.\n", len(r.of(OK)))
	}
	p.conclusion(r)
	return p.err
}

// of returns the findings of one verdict, those that lose most first.
func (r *Report) of(v Verdict) []Finding {
	var out []Finding
	for _, f := range r.Findings {
		if f.Verdict == v {
			out = append(out, f)
		}
	}
	slices.SortStableFunc(out, compareCauses)
	return out
}

// usual are the checks with notes on nearly every gateway: they report defaults of the kernel.
var usual = []string{"CT14", "ST06", "RL11"}

// folded puts the usual notes into one.
func folded(notes []Finding) (kept []Finding) {
	var names []string
	for _, f := range notes {
		if !slices.Contains(usual, f.Check) {
			kept = append(kept, f)
		} else if name := f.Check + " " + f.Name; !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if len(names) < 2 {
		return notes
	}
	slices.Sort(names)
	return append(kept, Finding{Check: "As on most hosts", Name: "", Summary: strings.Join(names, ", ") + " (--all shows each)"})
}

type printer struct {
	w     io.Writer
	style Style
	err   error
}

func (p *printer) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

func (p *printer) header(r *Report) {
	format := "%d checks of %s, kernel %s, watched for %.1f s at %s\n"
	if p.style.Markdown {
		format = "# Sluice doctor\n\n" + format
	}
	p.printf(format, len(Checks()), plural(len(r.Namespaces), "network namespace"), r.Host, r.Window.Seconds(), r.At.Format(time.DateTime))
}

// full prints a finding with all it has.
func (p *printer) full(f Finding) {
	where := f.Namespace
	if where == "" {
		where = "host"
	}
	if p.style.Markdown {
		p.printf("\n## %s %s (%s): %s\n\n%s\n\n", f.Check, f.Name, where, f.Verdict, upperFirst(f.Summary))
	} else {
		p.printf("\n%s  %s %s, %s\n  %s\n", p.style.Paint(f.Verdict, strings.ToUpper(f.Verdict.String())), f.Check, f.Name, where, f.Summary)
	}
	bullet := "  "
	if p.style.Markdown {
		bullet = "- "
	}
	for _, e := range f.Evidence {
		p.printf("%s%s: %s (%s)\n", bullet, e.What, e.Value, e.Source)
	}
	if f.Symptom != "" {
		p.printf("%susers see: %s\n", bullet, f.Symptom)
	}
	if m := f.Remedy; m != nil && m.Do != "" {
		p.printf("%sremedy: %s\n", bullet, m.Do)
		p.commands(bullet, m.Commands)
		if m.Cost != "" {
			p.printf("%scost: %s\n", bullet, m.Cost)
		}
		if m.Risk != "" {
			p.printf("%srisk: %s\n", bullet, m.Risk)
		}
	}
}

// lines prints findings in one line each, equal ones of several namespaces together.
func (p *printer) lines(title string, v Verdict, findings []Finding) {
	if len(findings) == 0 {
		return
	}
	p.title(title)
	where := map[string][]string{}
	var order []string
	for _, f := range findings {
		key := strings.TrimSuffix(f.Check+" "+f.Name, " ") + ": " + f.Summary
		if where[key] == nil {
			order = append(order, key)
		}
		where[key] = append(where[key], f.Namespace)
	}
	bullet := "  "
	if p.style.Markdown {
		bullet = "- "
	}
	for _, key := range order {
		p.printf("%s%s\n", bullet, p.style.Paint(v, key+inNamespaces(where[key])))
	}
}

// inNamespaces words where something was found; the empty name is the host's as a whole.
func inNamespaces(names []string) string {
	switch {
	case names[0] == "":
		return ""
	case len(names) == 1:
		return " (" + names[0] + ")"
	}
	return fmt.Sprintf(" (%d namespaces)", len(names))
}

func (p *printer) title(title string) {
	if p.style.Markdown {
		p.printf("\n## %s\n\n", title)
		return
	}
	p.printf("\n%s\n", title)
}

func (p *printer) unknown(r *Report) {
	findings := r.of(Unknown)
	if len(findings)+len(r.Limits) == 0 {
		return
	}
	p.title("Not visible")
	// A reason with the checks that it blinds, and those with the namespaces where it does.
	checks, where := map[string][]string{}, map[string][]string{}
	var reasons, lines []string
	for _, f := range findings {
		key := f.Summary + "\x00" + f.Namespace
		if checks[key] == nil {
			reasons = append(reasons, key)
		}
		checks[key] = append(checks[key], f.Check)
	}
	for _, key := range reasons {
		reason, namespace, _ := strings.Cut(key, "\x00")
		line := strings.Join(checks[key], ", ") + ": " + reason
		if where[line] == nil {
			lines = append(lines, line)
		}
		where[line] = append(where[line], namespace)
	}
	bullet := "  "
	if p.style.Markdown {
		bullet = "- "
	}
	for _, line := range lines {
		p.printf("%s%s%s\n", bullet, line, inNamespaces(where[line]))
	}
	for _, l := range r.Limits {
		p.printf("%s%s\n", bullet, l)
	}
}

func (p *printer) conclusion(r *Report) {
	p.title("Conclusion")
	for i, c := range r.Conclusion {
		line, indent := c.String(), "   "
		if len(r.Conclusion) > 1 {
			line = fmt.Sprintf("%d. %s", i+1, line)
		}
		if p.style.Markdown {
			indent += "- "
		}
		p.printf("%s\n", p.style.Paint(c.Severity, line))
		p.commands(indent, c.Commands)
	}
}

// commands prints each on a line of its own, to be copied.
func (p *printer) commands(indent string, list []string) {
	for _, command := range list {
		if p.style.Markdown {
			command = "`" + command + "`"
		}
		p.printf("%srun: %s\n", indent, command)
	}
}
