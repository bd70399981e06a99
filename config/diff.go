// SPDX-License-Identifier: Apache-2.0

package config

import (
	"reflect"
	"slices"
	"strings"
)

// Diff returns the edits that turn a into b. Both must be valid and have their defaults. [Merge] of
// a with the edits returns b.
func Diff(a, b *Config) []Edit {
	var d editCollector
	d.parts(nil, reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem())
	return d.edits
}

// DiffAgain returns Diff(a, b) faster if the edits from a to an older configuration are known.
// Services that are identical in b and older are not compared.
func DiffAgain(a, b, older *Config, edits []Edit) []Edit {
	d := editCollector{of: make(map[string][]Edit, len(edits)), older: older.Services}
	d.edits = slices.Grow(d.edits, len(edits))
	for len(edits) > 0 { // edits of a service are usually adjacent
		name, n := serviceOf(edits[0].Path), 1
		for n < len(edits) && serviceOf(edits[n].Path) == name {
			n++
		}
		if d.of[name] == nil {
			d.of[name] = edits[:n:n]
		} else {
			d.of[name] = append(d.of[name], edits[:n]...)
		}
		edits = edits[n:]
	}
	d.parts(nil, reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem())
	if len(d.edits) == 0 {
		return nil
	}
	return d.edits
}

// serviceOf returns the name of the service that contains a path, or "". Names need no escaping in
// a path.
func serviceOf(path string) string {
	rest, ok := strings.CutPrefix(path, "services/")
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	return name
}

// editCollector collects edits.
type editCollector struct {
	edits []Edit
	// of are the known edits of older services, by name.
	of    map[string][]Edit
	older []Service
}

// addIdentical adds the edits of a service that is identical to the older one at its index, and reports
// whether it is.
func (d *editCollector) addIdentical(s *Service, at int) bool {
	if at >= len(d.older) || !s.Is(&d.older[at]) {
		return false
	}
	if len(d.of) > 0 {
		d.edits = append(d.edits, d.of[s.Name]...)
	}
	return true
}

// services compares two lists of services with the same names at the same indexes, and reports
// whether they are. It is faster than objects if few of many services differ.
func (d *editCollector) services(path []string, a, b []Service) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Name != b[i].Name {
			return false
		}
	}
	for i := range a {
		if x, y := &a[i], &b[i]; !d.addIdentical(y, i) && !x.Is(y) {
			d.values(append(path[:len(path):len(path)], y.Name), reflect.ValueOf(x).Elem(), reflect.ValueOf(y).Elem())
		}
	}
	return true
}

func (d *editCollector) add(path []string, before, after string) {
	d.edits = append(d.edits, Edit{Path: Join(path...), Before: before, After: after})
}

// values compares two values of the same type.
func (d *editCollector) values(path []string, a, b reflect.Value) {
	t := a.Type()
	if len(path) == 1 && path[0] == "services" && d.services(path, a.Interface().([]Service), b.Interface().([]Service)) {
		return
	}
	if was, is := namesOf(a), namesOf(b); was != nil && is != nil {
		d.objects(path, a, b, was, is)
		return
	}
	switch {
	case reflect.DeepEqual(a.Interface(), b.Interface()):
	case t.Kind() == reflect.Struct && !isText(t) && t != targetType:
		d.parts(path, a, b)
	case t.Kind() == reflect.Map && t.Key().Kind() == reflect.String:
		d.members(path, a, b)
	default:
		d.add(path, inlineYAML(a), inlineYAML(b))
	}
}

// parts compares the fields of two structs.
func (d *editCollector) parts(path []string, a, b reflect.Value) {
	for _, f := range layoutOf(a.Type()).fields {
		d.values(append(path[:len(path):len(path)], f.key), a.Field(f.index), b.Field(f.index))
	}
}

// members compares two maps.
func (d *editCollector) members(path []string, a, b reflect.Value) {
	var keys []string
	for _, m := range []reflect.Value{a, b} {
		for _, k := range m.MapKeys() {
			keys = append(keys, k.String())
		}
	}
	slices.Sort(keys)
	for _, k := range slices.Compact(keys) {
		at, key := append(path[:len(path):len(path)], k), reflect.ValueOf(k)
		switch x, y := a.MapIndex(key), b.MapIndex(key); {
		case !x.IsValid():
			d.add(at, "", inlineYAML(y))
		case !y.IsValid():
			d.add(at, inlineYAML(x), "")
		default:
			d.values(at, x, y)
		}
	}
}

// objects compares two lists of named objects.
func (d *editCollector) objects(path []string, a, b reflect.Value, was, is []string) {
	element := func(name string, i, j int) {
		if len(path) == 1 && path[0] == "services" && d.addIdentical(b.Index(j).Addr().Interface().(*Service), j) {
			return
		}
		if !sameBytes(a.Index(i), b.Index(j)) {
			d.values(append(path[:len(path):len(path)], name), a.Index(i), b.Index(j))
		}
	}
	if slices.Equal(was, is) {
		for i, name := range was {
			element(name, i, i)
		}
		return
	}
	wasAt, isAt := indexByName(was), indexByName(is)
	rest := []string{} // the order after the preceding edits
	for i, name := range was {
		j, ok := isAt[name]
		if !ok {
			d.add(append(path[:len(path):len(path)], name), inlineYAML(a.Index(i)), "")
			continue
		}
		rest = append(rest, name)
		element(name, i, j)
	}
	for j, name := range is {
		if _, ok := wasAt[name]; !ok {
			rest = append(rest, name)
			d.add(append(path[:len(path):len(path)], name), "", inlineYAML(b.Index(j)))
		}
	}
	if !slices.Equal(rest, is) {
		d.add(append(path[:len(path):len(path)], order), inlineYAML(reflect.ValueOf(rest)), inlineYAML(reflect.ValueOf(is)))
	}
}

// namesOf returns the names of a list's elements, or nil if the list has no objects or their names
// are not unique.
func namesOf(v reflect.Value) []string {
	if v.Kind() != reflect.Slice || v.Type().Elem().Kind() != reflect.Struct {
		return nil
	}
	f, ok := v.Type().Elem().FieldByName("Name")
	if !ok || f.Type.Kind() != reflect.String {
		return nil
	}
	names := make([]string, v.Len())
	for i := range names {
		names[i] = v.Index(i).FieldByIndex(f.Index).String()
		if names[i] == "" || names[i] == order {
			return nil
		}
	}
	if len(indexByName(names)) < len(names) {
		return nil
	}
	return names
}

// indexOf returns the index of the object with that name in a list, or -1.
func indexOf(v reflect.Value, name string) int {
	f, ok := v.Type().Elem().FieldByName("Name")
	if !ok || f.Type.Kind() != reflect.String {
		return -1
	}
	for i := range v.Len() {
		if v.Index(i).FieldByIndex(f.Index).String() == name {
			return i
		}
	}
	return -1
}

// indexByName returns the index of each name.
func indexByName(names []string) map[string]int {
	at := make(map[string]int, len(names))
	for i, name := range names {
		at[name] = i
	}
	return at
}

// inlineYAML returns a value as YAML in one line; "" for an empty value.
func inlineYAML(v reflect.Value) string {
	if v.Kind() == reflect.Pointer && v.IsNil() || isEmptyText(v) {
		return ""
	}
	if t, ok := v.Interface().(Target); ok && t.IsZero() {
		return ""
	}
	var w writer
	w.flow(resolveShape(v))
	return w.String()
}

// isEmptyText reports whether v is an empty scalar, which the file omits.
func isEmptyText(v reflect.Value) bool {
	return isText(v.Type()) && v.IsZero() || v.Kind() == reflect.String && v.Len() == 0
}
