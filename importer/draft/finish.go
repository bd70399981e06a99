// SPDX-License-Identifier: Apache-2.0

package draft

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// Finish notes the lines that no object was made of and nothing was said of, takes out what the configuration does
// not accept, and writes it down.
func (d *Draft) Finish() (*Result, error) {
	for i, l := range d.lines {
		text := strings.TrimSpace(l)
		comment := slices.ContainsFunc(d.commentMarks, func(mark string) bool { return strings.HasPrefix(text, mark) })
		if text != "" && !comment && !d.known[i+1] {
			d.Lost(i+1, "", "not understood", "write by hand what it stands for")
		}
	}
	if err := d.accept(); err != nil {
		return nil, err
	}
	slices.SortStableFunc(d.notes, func(a, b Note) int { return a.Line - b.Line })
	r := &Result{Config: &d.Config, Notes: d.notes, Objects: d.objects(), unit: d.unit}
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

// objects lists what the draft has made, in the order of the file.
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

// place finds in the path of an error the object that it is about.
var place = regexp.MustCompile(`^(services|nat|firewall\.rules)\[(\d+)\]`)

// accept takes out what validation refuses, one object of each error at a time, until the rest
// is accepted.
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

// takeOut removes the objects that errors are about, and reports whether there were any.
func (d *Draft) takeOut(errs config.Errors) bool {
	gone := map[string][]int{}
	for _, e := range errs {
		m := place.FindStringSubmatch(e.Path)
		if m == nil {
			continue
		}
		n, err := strconv.Atoi(m[2])
		if err != nil || slices.Contains(gone[m[1]], n) {
			continue
		}
		gone[m[1]] = append(gone[m[1]], n)
		d.refuse(m[1], n, e)
	}
	keep := func(section string) func(int) bool {
		return func(i int) bool { return !slices.Contains(gone[section], i) }
	}
	d.Config.Services = filter(d.Config.Services, keep("services"))
	d.Config.NAT = filter(d.Config.NAT, keep("nat"))
	d.Config.Firewall.Rules = filter(d.Config.Firewall.Rules, keep("firewall.rules"))
	return len(gone) > 0
}

func filter[T any](list []T, keep func(int) bool) (kept []T) {
	for i := range list {
		if keep(i) {
			kept = append(kept, list[i])
		}
	}
	return kept
}

// refuse notes that an object is not accepted, and keeps it as a comment.
func (d *Draft) refuse(section string, n int, e *config.Error) {
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
	lines := d.origin[object]
	if len(lines) == 0 {
		lines = []int{0}
	}
	for _, l := range lines {
		d.note(Note{Kind: Lost, Line: l, Reason: object + " is refused: " + printable(e.Cause), Next: printable(e.Hint)})
	}
	delete(d.origin, object)
	// Notes about the object speak of nothing now.
	d.notes = slices.DeleteFunc(d.notes, func(note Note) bool { return note.Object == object })
}
