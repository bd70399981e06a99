// SPDX-License-Identifier: Apache-2.0

package draft

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// Finish removes objects that validation rejects, sets the place of every line, and writes the
// configuration.
func (d *Draft) Finish() (*Result, error) {
	if err := d.accept(); err != nil {
		return nil, err
	}
	r := &Result{Config: &d.Config, Objects: d.objects(), Remarks: d.remarks, unit: d.unit, program: d.Source}
	d.classifyLines(r)
	slices.SortStableFunc(d.notes, func(a, b Note) int { return a.Line - b.Line })
	r.Notes = d.notes
	if err := r.check(); err != nil {
		return nil, err
	}
	body, err := marshal(&d.Config)
	if err != nil {
		return nil, err
	}
	r.YAML = d.comment(body, r)
	if _, err := config.Decode("the imported configuration", []byte(r.YAML)); err != nil {
		return nil, fmt.Errorf("the import made a configuration that is not valid, which is a fault of sluice: %w", err)
	}
	return r, nil
}

// hasContent reports whether a line is neither empty nor a comment.
func (d *Draft) hasContent(line string) bool {
	text := strings.TrimSpace(line)
	return text != "" && !slices.ContainsFunc(d.commentMarks, func(mark string) bool { return strings.HasPrefix(text, mark) })
}

// classifyLines sets the place of every line and writes the rest. A line without a place is lost and stays
// in the source's program.
func (d *Draft) classifyLines(r *Result) {
	lost, implied, in := map[int]bool{}, map[int]bool{}, map[int]bool{}
	for _, n := range d.notes {
		lost[n.Line] = lost[n.Line] || n.Kind == Lost && n.Object == ""
		implied[n.Line] = implied[n.Line] || n.Kind == Implied
	}
	for _, o := range r.Objects {
		for _, n := range o.Lines {
			in[n] = true
		}
	}
	for i, l := range d.lines {
		n := i + 1
		if m := d.marks[n]; d.hasContent(l) && !m.structure && !m.kept && !in[n] && !lost[n] && !implied[n] {
			d.Lost(n, "", "not understood", "write the equivalent by hand")
			d.Keep(n)
			lost[n] = true
		}
	}
	if d.Rest != nil {
		r.Rest = d.Rest(func(n int) bool { return d.marks[n].kept })
	}
	for i, l := range d.lines {
		n := i + 1
		m := d.marks[n]
		line := Line{Number: n, Class: m.class, Text: d.Line(n), Place: NotNeeded}
		switch {
		case !d.hasContent(l) && !in[n] && !lost[n]:
			continue
		case lost[n] || m.kept && (d.Rest == nil || r.Rest != ""):
			line.Place = InRest
		case in[n]:
			line.Place = InObject
		}
		r.Lines = append(r.Lines, line)
	}
}

// check verifies the result. Each line must have one place, and a line in an object must be listed
// by an object. Every note must name an existing object, and a lost line must be in the rest.
func (r *Result) check() error {
	in, exists := map[int]bool{}, map[string]bool{}
	for _, o := range r.Objects {
		exists[o.Name] = true
		for _, n := range o.Lines {
			in[n] = true
		}
	}
	fault := func(format string, args ...any) error {
		return fmt.Errorf("the import does not account for its input, which is a fault of sluice: "+format, args...)
	}
	placed := map[int]Disposition{}
	for _, l := range r.Lines {
		if _, twice := placed[l.Number]; twice {
			return fault("%s %d has two places", r.unit.one, l.Number)
		}
		placed[l.Number] = l.Place
		if l.Place == InObject && !in[l.Number] {
			return fault("%s %d is in no object", r.unit.one, l.Number)
		}
		if l.Place == NotNeeded && in[l.Number] {
			return fault("%s %d is in an object and not needed", r.unit.one, l.Number)
		}
	}
	for n := range in {
		if placed[n] == "" {
			return fault("%s %d is in an object and has no place", r.unit.one, n)
		}
	}
	for _, n := range r.Notes {
		if n.Object != "" && !exists[n.Object] {
			return fault("a note on %s %d is about %s, which does not exist", r.unit.one, n.Line, n.Object)
		}
		if n.Kind == Lost && n.Object == "" && n.Line > 0 && placed[n.Line] != InRest {
			return fault("%s %d is lost and not in the rest", r.unit.one, n.Line)
		}
	}
	return nil
}

func marshal(c *config.Config) (string, error) {
	body, err := config.Marshal(c)
	if err != nil {
		return "", err
	}
	if string(body) == "{}\n" {
		return "services: []\n", nil
	}
	return string(body), nil
}

// objects returns the objects of the draft in the order of the file.
func (d *Draft) objects() (list []Object) {
	add := func(name string) {
		list = append(list, Object{Name: name, Lines: append([]int{}, d.origin[name]...)})
	}
	for i := range d.Config.Services {
		add("service " + d.Config.Services[i].Name)
	}
	for i := range d.Config.NAT {
		add("nat " + d.Config.NAT[i].Name)
	}
	for i := range d.Config.Firewall.Rules {
		add("rule " + d.Config.Firewall.Rules[i].Name)
	}
	return list
}

// objectPath finds the object in the path of an error.
var objectPath = regexp.MustCompile(`^(services|nat|firewall\.rules)\[(\d+)\]`)

// accept removes the objects that validation rejects, one per error and round, until the rest is
// valid.
func (d *Draft) accept() error {
	for {
		body, err := marshal(&d.Config)
		if err != nil {
			return err
		}
		_, err = config.Decode("the imported configuration", []byte(body))
		if err == nil {
			return nil
		}
		var errs config.Errors
		if !errors.As(err, &errs) {
			return err
		}
		if !d.takeOut(errs) {
			return fmt.Errorf("the import made a configuration that is not valid, which is a fault of sluice: %w", errs)
		}
	}
}

// takeOut removes the objects in errors, and reports whether there were any.
func (d *Draft) takeOut(errs config.Errors) bool {
	gone := map[string]map[int]bool{}
	why := map[string]*config.Error{} // grouped by object
	for _, e := range errs {
		m := objectPath.FindStringSubmatch(e.Path)
		if m == nil {
			continue
		}
		n, err := strconv.Atoi(m[2])
		if err != nil || gone[m[1]][n] {
			continue
		}
		if gone[m[1]] == nil {
			gone[m[1]] = map[int]bool{}
		}
		gone[m[1]][n] = true
		why[d.rejectObject(m[1], n, e)] = e
	}
	d.returnLines(why)
	d.Config.Services = filter(d.Config.Services, gone["services"])
	d.Config.NAT = filter(d.Config.NAT, gone["nat"])
	d.Config.Firewall.Rules = filter(d.Config.Firewall.Rules, gone["firewall.rules"])
	return len(gone) > 0
}

func filter[T any](list []T, gone map[int]bool) (kept []T) {
	if len(gone) == 0 {
		return list
	}
	for i := range list {
		if !gone[i] {
			kept = append(kept, list[i])
		}
	}
	return kept
}

// rejectObject stores a rejected object for a comment, and returns its name.
func (d *Draft) rejectObject(section string, n int, e *config.Error) string {
	one, object := &config.Config{}, ""
	switch section {
	case "services":
		one.Services, object = d.Config.Services[n:n+1], "service "+d.Config.Services[n].Name
	case "nat":
		one.NAT, object = d.Config.NAT[n:n+1], "nat "+d.Config.NAT[n].Name
	default:
		one.Firewall.Rules, object = d.Config.Firewall.Rules[n:n+1], "rule "+d.Config.Firewall.Rules[n].Name
	}
	if text, err := config.Marshal(one); err == nil {
		d.refused = append(d.refused, strings.TrimSuffix(object+" is refused: "+e.Cause+"; "+e.Hint, "; ")+"\n"+string(text))
	}
	return object
}

// returnLines notes the lines of rejected objects as lost, so that they stay in the source's
// program. It removes the notes about these objects. Lines implied by a rejected object are lost
// too.
func (d *Draft) returnLines(why map[string]*config.Error) {
	lose := func(object string, lines ...int) {
		e := why[object]
		for _, l := range lines {
			d.addNote(Note{Kind: Lost, Line: l, Reason: object + " is refused: " + printable(e.Cause), Next: printable(e.Hint)})
			d.Keep(l)
			if d.Returned != nil && l > 0 {
				d.Returned(l)
			}
		}
	}
	notes := d.notes
	d.notes = nil
	for _, n := range notes {
		if why[n.Object] == nil {
			d.notes = append(d.notes, n)
		}
	}
	for _, n := range notes {
		if why[n.Object] != nil && n.Kind == Implied {
			lose(n.Object, n.Line)
		}
	}
	for _, object := range slices.Sorted(maps.Keys(why)) {
		if lines := d.origin[object]; len(lines) > 0 {
			lose(object, lines...)
		} else {
			lose(object, 0)
		}
		delete(d.origin, object)
	}
}
