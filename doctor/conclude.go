// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
)

// consequences lists, for a cause, the checks that only show its effects. The conclusion does not name them if it
// names the cause.
var consequences = map[string][]string{
	"CT05": {"CT01", "CT02", "CT03", "CT04", "CT06", "CT15", "ST01", "ST03", "ST05", "ST08", "CT11", "CT10"},
	"CT09": {"CT07", "CT10"},
	"PT01": {"PT02", "PT03", "CT11", "CT05", "ST03"},
	"CT01": {"CT02", "CT03", "CT15", "ST01", "ST03", "ST05"},
	"CT04": {"CT15"},
	"FW03": {"FW04", "FW05"},
	"FW06": {"FW07", "CT04"},
	"FW07": {"FW06", "FW04"},
	"FW08": {"FW04"},
	"FW15": {"FW13"},
	"FW16": {"FW04"},
	"FW17": {"ST02", "ST11"},
	"FW19": {"ST02", "ST12"},
	"FW20": {"ST02", "FW07"},
	"RL15": {"FW04"},
	"RX11": {"FW13", "FW04", "FW07"},
	"RX12": {"FW13", "FW03"},
	"RX13": {"FW13"},
	"RX14": {"FW07", "FW13", "RX07"},
	"RX15": {"FW07", "ST02"},
	"ST05": {"ST08"},
	"ST08": {"ST02", "ST09", "ST11"},
	"ST12": {"FW04"},
	"RX01": {"RX02", "RX10", "RX03", "RX04"},
	"RX10": {"RX02", "RX03", "RX04"},
	"RL01": {"RL04", "RX10", "RX03"},
}

// conclude names causes in the order in which to act on them: what loses packets
// now before what may, causes before consequences, more loss before less.
func (r *Report) conclude(s *observe.Sample) {
	classes := r.failingClasses(s)
	r.noteCounters(s, classes)
	var causes []*Finding
	for i := range r.Findings {
		if r.Findings[i].Verdict >= Warn {
			causes = append(causes, &r.Findings[i])
		}
	}
	slices.SortStableFunc(causes, func(a, b *Finding) int { return compareCauses(*a, *b) })
	type effect struct{ check, namespace string }
	explained := map[effect]string{}
	var named []namedCause
	explain := func(f *Finding) {
		for _, id := range consequences[f.Check] {
			for _, e := range []effect{{id, f.Namespace}, {id, ""}} { // of the host as a whole, too
				if explained[e] == "" {
					explained[e] = f.Check
				}
			}
		}
	}
	concluded := map[*Finding]bool{}
	var unexplained []Conclusion
	for _, class := range classes {
		if f := class.cause; f != nil {
			if concluded[f] {
				continue
			}
			concluded[f] = true
			if f.Verdict < Warn {
				r.raise(f, severityOf(class.class))
			}
			explain(f)
		} else if len(s.Namespaces) > 1 {
			unexplained = append(unexplained, class.concluded(s))
			continue
		}
		r.Conclusion = append(r.Conclusion, class.concluded(s))
	}
	for _, f := range causes {
		if concluded[f] || f.Check == outcomesCheck && len(classes) > 0 {
			continue
		}
		if f.CausedBy = explained[effect{f.Check, f.Namespace}]; f.CausedBy != "" {
			continue
		}
		explain(f)
		first := slices.IndexFunc(named, func(n namedCause) bool { return n.Check == f.Check && n.Summary == f.Summary })
		if first < 0 {
			named = append(named, namedCause{*f, []string{f.Namespace}})
			continue
		}
		named[first].namespaces = append(named[first].namespaces, f.Namespace)
	}
	for _, n := range named {
		r.Conclusion = append(r.Conclusion, n.concluded(s))
	}
	// A class without an explanation may follow from a cause in another namespace.
	r.Conclusion = append(r.Conclusion, unexplained...)
	r.first = r.firstClass(classes)
	if last := r.nothingFound(s); len(r.Conclusion) == 0 || r.CannotTell {
		r.Conclusion = append(r.Conclusion, last)
	}
}

// raise gives a finding that explains failing connections their severity.
func (r *Report) raise(f *Finding, v Verdict) {
	f.Verdict = v
	for _, check := range Checks() {
		if check.ID == f.Check {
			if f.Symptom == "" {
				f.Symptom = check.Symptom
			}
			if f.Remedy == nil {
				f.Remedy = check.Remedy.filled(f.fill)
			}
		}
	}
}

func compareCauses(a, b Finding) int {
	losing := func(f Finding) int {
		if f.LostPerSecond > 0 {
			return 1
		}
		return 0
	}
	return cmp.Or(
		cmp.Compare(b.Verdict, a.Verdict),
		cmp.Compare(losing(b), losing(a)),
		cmp.Compare(b.weight, a.weight),
		cmp.Compare(b.LostPerSecond, a.LostPerSecond),
	)
}

// namedCause is a cause with all the namespaces in which it was found alike.
type namedCause struct {
	Finding
	namespaces []string
}

// Conclusion is a cause and what to do about it.
type Conclusion struct {
	Check     string `json:"check"`     // Empty: no check found anything.
	Namespace string `json:"namespace"` // Empty: the whole host.
	// Namespaces are all in which it was found alike, where there are several.
	Namespaces []string `json:"namespaces,omitempty"`
	Severity   Verdict  `json:"severity"`
	Summary    string   `json:"summary"`
	Do         string   `json:"do,omitempty"`
	Commands   []string `json:"commands"` // as in Remedy
}

// concluded is a cause as the conclusion names it.
func (n namedCause) concluded(s *observe.Sample) Conclusion {
	c := Conclusion{Check: n.Check, Namespace: n.namespaces[0], Severity: n.Verdict, Summary: upperFirst(n.Summary), Commands: []string{}}
	switch where := n.namespaces; {
	case len(where) > 1:
		c.Namespaces = where
		c.Summary = fmt.Sprintf("In %d namespaces (%s): %s", len(where), strings.Join(where[:min(len(where), 4)], ", "), n.Summary)
	case where[0] != "" && len(s.Namespaces) > 1:
		c.Summary = fmt.Sprintf("In namespace %s: %s", where[0], n.Summary)
	}
	if extra := table(n.Finding, s); extra != "" {
		c.Summary += "; " + extra
	}
	if n.Remedy != nil {
		c.Do, c.Commands = n.Remedy.Do, n.Remedy.Commands
	}
	return c
}

// String is the conclusion in one line, without its commands.
func (c Conclusion) String() string {
	text := c.Summary
	if !strings.HasSuffix(text, ".") {
		text += "."
	}
	if c.Do != "" {
		text += " To do: " + c.Do + "."
	}
	if c.Check != "" {
		text += " [" + c.Check + "]"
	}
	return text
}

// table adds what fills the connection table when that is the cause.
func table(f Finding, s *observe.Sample) string {
	if f.Check != "CT05" && f.Check != "CT01" {
		return ""
	}
	for _, n := range s.Namespaces {
		if n.Name != f.Namespace || n.Table == nil || n.Table.Total.Entries == 0 {
			continue
		}
		states := n.Table.States()
		share := float64(states[0].Entries) / float64(n.Table.Total.Entries)
		return fmt.Sprintf("%s of the entries are %s", percent(share), states[0].Key)
	}
	return ""
}

// nothingFound is the conclusion if no check found anything: that nothing is wrong, or that this is
// unknown, because checks of dropped packets, rules or the table had no data. The latter also
// follows causes.
func (r *Report) nothingFound(s *observe.Sample) Conclusion {
	blind := map[string]bool{}
	for _, f := range r.Findings {
		if f.Verdict == Unknown {
			blind[f.Check] = true
		}
	}
	where := fmt.Sprintf("%s, watched for %.1f s", plural(len(s.Namespaces), "namespace"), s.Window.Seconds())
	if r.blinded(blind) {
		r.CannotTell = true
		c := Conclusion{Severity: Unknown, Commands: []string{}, Summary: fmt.Sprintf("Cannot tell whether anything %s wrong in %s: %d of %d checks could not look",
			map[bool]string{true: "is", false: "else is"}[len(r.Conclusion) == 0], where, len(blind), len(Checks()))}
		if len(r.Missing) > 0 {
			c.Do = "run it as root, or give it the capabilities " + strings.Join(r.Missing, ", ")
		}
		return c
	}
	summary := "Nothing is wrong in " + where + "."
	if text := answeredText(s); text != "" {
		summary = fmt.Sprintf("Nothing is wrong: %s, in %s.", text, where)
	}
	c := Conclusion{Summary: summary, Commands: []string{"sluice drops --seconds 10", "sluice conns --by service --top 20"}}
	if n := len(blind); n > 0 {
		c.Summary += fmt.Sprintf(" %s could not look; see their reasons.", plural(n, "check"))
	}
	c.Do = "if something fails all the same, look at its packets and its connections (sluice conns --list --src ADDRESS)"
	return c
}

// blinded reports whether missing data forbids the conclusion that nothing is wrong: more than one
// check in ten had none, or a capability is missing.
func (r *Report) blinded(blind map[string]bool) bool {
	return len(r.Missing) > 0 || 10*len(blind) > len(Checks())
}

func upperFirst(s string) string {
	if s == "" || s[0] < 'a' || s[0] > 'z' {
		return s
	}
	return string(s[0]-'a'+'A') + s[1:]
}
