// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Edit is one difference between two configurations: a value that is added, removed or replaced.
type Edit struct {
	// Path leads to the value: the keys of the file, and the names of the objects of a list, as in
	// services/web/backends/a/weight. In a key or name "~" is written ~0 and "/" is written ~1
	// (RFC 6901 §3). The path of a list with objects, followed by @order, stands for their order.
	Path string `json:"path" doc:"keys and names that lead to the value, as in services/web/backends/a/weight"`
	// Before and After are the value as YAML in one line; empty where there is none.
	Before string `json:"before,omitempty" doc:"the value before, as YAML in one line; empty: none"`
	After  string `json:"after,omitempty" doc:"the value after, as YAML in one line; empty: none"`
}

func (e Edit) String() string {
	switch {
	case e.Before == "":
		return "+ " + e.Path + ": " + e.After
	case e.After == "":
		return "- " + e.Path + ": " + e.Before
	}
	return "~ " + e.Path + ": " + e.Before + " -> " + e.After
}

// order is the last step of the path that stands for the order of a list.
const order = "@order"

// Diff returns the edits that make b of a, both valid and with their defaults. [Merge] of a with them is b.
func Diff(a, b *Config) []Edit {
	var d differ
	d.parts(nil, reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem())
	return d.edits
}

// DiffAgain is Diff(a, b) for who knows the edits that make an older configuration of a: services that
// are the same there are not compared.
func DiffAgain(a, b, older *Config, edits []Edit) []Edit {
	d := differ{of: make(map[string][]Edit, len(edits)), older: older.Services}
	d.edits = slices.Grow(d.edits, len(edits))
	for len(edits) > 0 { // those of a service mostly stand together
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

// serviceOf returns the name of the service that a path leads to or into, "" for none.
func serviceOf(path string) string {
	rest, ok := strings.CutPrefix(path, "services/")
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	return name
}

// differ collects edits.
type differ struct {
	edits []Edit
	// of are those that are known of older services, by name.
	of    map[string][]Edit
	older []Service
}

// known adds the edits of a service that is the same as the older one at its place, and reports whether
// it is.
func (d *differ) known(s *Service, at int) bool {
	if at >= len(d.older) || !s.Is(&d.older[at]) {
		return false
	}
	if len(d.of) > 0 {
		d.edits = append(d.edits, d.of[s.Name]...)
	}
	return true
}

// services compares two lists of services with the same names at the same places; others it leaves, and
// says so. Of thousands one may differ.
func (d *differ) services(path []string, a, b []Service) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Name != b[i].Name {
			return false
		}
	}
	for i := range a {
		if x, y := &a[i], &b[i]; !d.known(y, i) && !x.Is(y) {
			d.values(append(path[:len(path):len(path)], y.Name), reflect.ValueOf(x).Elem(), reflect.ValueOf(y).Elem())
		}
	}
	return true
}

func (d *differ) add(path []string, before, after string) {
	d.edits = append(d.edits, Edit{Path: Join(path...), Before: before, After: after})
}

// values compares two values of the same type.
func (d *differ) values(path []string, a, b reflect.Value) {
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
		d.add(path, inline(a), inline(b))
	}
}

// parts compares the fields of two structs.
func (d *differ) parts(path []string, a, b reflect.Value) {
	for _, f := range layoutOf(a.Type()).fields {
		d.values(append(path[:len(path):len(path)], f.key), a.Field(f.index), b.Field(f.index))
	}
}

// members compares two maps.
func (d *differ) members(path []string, a, b reflect.Value) {
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
			d.add(at, "", inline(y))
		case !y.IsValid():
			d.add(at, inline(x), "")
		default:
			d.values(at, x, y)
		}
	}
}

// objects compares two lists whose elements have names.
func (d *differ) objects(path []string, a, b reflect.Value, was, is []string) {
	element := func(name string, i, j int) {
		if len(path) == 1 && path[0] == "services" && d.known(b.Index(j).Addr().Interface().(*Service), j) {
			return
		}
		if !identical(a.Index(i), b.Index(j)) {
			d.values(append(path[:len(path):len(path)], name), a.Index(i), b.Index(j))
		}
	}
	if slices.Equal(was, is) {
		for i, name := range was {
			element(name, i, i)
		}
		return
	}
	wasAt, isAt := places(was), places(is)
	rest := []string{} // the order that the edits before @order leave
	for i, name := range was {
		j, ok := isAt[name]
		if !ok {
			d.add(append(path[:len(path):len(path)], name), inline(a.Index(i)), "")
			continue
		}
		rest = append(rest, name)
		element(name, i, j)
	}
	for j, name := range is {
		if _, ok := wasAt[name]; !ok {
			rest = append(rest, name)
			d.add(append(path[:len(path):len(path)], name), "", inline(b.Index(j)))
		}
	}
	if !slices.Equal(rest, is) {
		d.add(append(path[:len(path):len(path)], order), inline(reflect.ValueOf(rest)), inline(reflect.ValueOf(is)))
	}
}

// namesOf returns the names of a list's elements; nil for what is not a list of objects with
// names of their own.
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
	if len(places(names)) < len(names) {
		return nil
	}
	return names
}

// indexOf returns where the object of that name stands in a list, -1 for nowhere.
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

// places returns where each name stands in a list.
func places(names []string) map[string]int {
	at := make(map[string]int, len(names))
	for i, name := range names {
		at[name] = i
	}
	return at
}

// inline writes a value as YAML in one line; "" when it has none to write.
func inline(v reflect.Value) string {
	if v.Kind() == reflect.Pointer && v.IsNil() || isEmptyText(v) {
		return ""
	}
	if t, ok := v.Interface().(Target); ok && t.IsZero() {
		return ""
	}
	var w writer
	w.flow(plainly(v))
	return w.String()
}

// isEmptyText reports whether v is a word that is left out of the file when it is empty.
func isEmptyText(v reflect.Value) bool {
	return isText(v.Type()) && v.IsZero() || v.Kind() == reflect.String && v.Len() == 0
}

// Conflict is an edit that does not fit a configuration, which has another value in its place.
type Conflict struct {
	Edit
	Now string `json:"now" doc:"what the configuration has there, as YAML in one line; empty: nothing"`
}

func (c Conflict) String() string {
	or := func(s, other string) string {
		if s == "" {
			return other
		}
		return s
	}
	return fmt.Sprintf("%s: changed at run time from %s to %s, and in the file to %s",
		c.Path, or(c.Before, "nothing"), or(c.After, "nothing"), or(c.Now, "nothing"))
}

// Merge makes the edits to a configuration with its defaults. Where that has what an edit begins
// from, it gets what the edit ends with; where it has that already, nothing is to do, and the edit
// is not among those that are returned as still needed. Anything else is a conflict. c is not
// changed. An error says that the result is not valid, or that an edit cannot be read.
func Merge(c *Config, edits []Edit) (merged *Config, needed []Edit, conflicts []Conflict, err error) {
	merged = &Config{}
	clone(reflect.ValueOf(merged).Elem(), reflect.ValueOf(c).Elem())
	for _, e := range edits {
		done, now, err := merged.edit(e)
		switch {
		case err != nil:
			return nil, nil, nil, fmt.Errorf("%s: %w", e.Path, err)
		case done:
			needed = append(needed, e)
		case now != e.After:
			conflicts = append(conflicts, Conflict{e, now})
		}
	}
	if len(conflicts) > 0 {
		return nil, nil, conflicts, nil
	}
	merged.SetDefaults()
	if err := merged.Validate(); err != nil {
		return nil, nil, nil, err
	}
	return merged, needed, nil, nil
}

// edit makes one edit. Where c has another value than the edit begins from, that is returned.
func (c *Config) edit(e Edit) (done bool, now string, err error) {
	return change(reflect.ValueOf(c).Elem(), Split(e.Path), e)
}

// change makes an edit below v, which can be set.
func change(v reflect.Value, steps []string, e Edit) (done bool, now string, err error) {
	t := v.Type()
	if len(steps) == 0 {
		if now = inline(v); now != e.Before {
			return false, now, nil
		}
		return true, now, read(v, e.After)
	}
	switch {
	case t.Kind() == reflect.Struct && !isText(t) && t != targetType:
		f := layoutOf(t).byKey[steps[0]]
		if f == nil {
			return false, "", fmt.Errorf("unknown key %q", steps[0])
		}
		part := v.Field(f.index)
		done, now, err = change(part, steps[1:], e)
		if k := part.Kind(); f.omitempty && (k == reflect.Slice || k == reflect.Map) && part.Len() == 0 {
			part.SetZero() // as in a file without the key
		}
		return done, now, err
	case t.Kind() == reflect.Map && t.Key().Kind() == reflect.String:
		return changeMember(v, steps, e)
	case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct:
		return changeObject(v, steps, e)
	}
	return false, "", fmt.Errorf("%q leads into a value that has no parts", steps[0])
}

func changeMember(v reflect.Value, steps []string, e Edit) (done bool, now string, err error) {
	key, elem := reflect.ValueOf(steps[0]), reflect.New(v.Type().Elem()).Elem()
	old := v.MapIndex(key)
	switch {
	case old.IsValid():
		clone(elem, old)
		if now = inline(elem); len(steps) == 1 && e.After == "" {
			if now != e.Before {
				return false, now, nil
			}
			v.SetMapIndex(key, reflect.Value{})
			return true, now, nil
		}
	case len(steps) > 1 || e.Before != "":
		return false, "", nil
	}
	if !old.IsValid() {
		err = read(elem, e.After)
		done = true
	} else {
		done, now, err = change(elem, steps[1:], e)
	}
	if done && err == nil {
		if v.IsNil() {
			v.Set(reflect.MakeMap(v.Type()))
		}
		v.SetMapIndex(key, elem)
	}
	return done, now, err
}

func changeObject(v reflect.Value, steps []string, e Edit) (done bool, now string, err error) {
	if steps[0] == order {
		return reorder(v, e)
	}
	at := indexOf(v, steps[0])
	switch {
	case at < 0 && (len(steps) > 1 || e.Before != ""):
		return false, "", nil
	case at < 0:
		elem := reflect.New(v.Type().Elem()).Elem()
		if err := read(elem, e.After); err != nil {
			return false, "", err
		}
		v.Set(reflect.Append(v, elem))
		return true, "", nil
	case len(steps) == 1 && e.After == "":
		if now = inline(v.Index(at)); now != e.Before {
			return false, now, nil
		}
		v.Set(reflect.AppendSlice(v.Slice3(0, at, at), v.Slice(at+1, v.Len())))
		return true, now, nil
	}
	return change(v.Index(at), steps[1:], e)
}

// reorder puts the objects of a list in another order. Those that the edit does not know keep
// their place behind the one that they follow.
func reorder(v reflect.Value, e Edit) (done bool, now string, err error) {
	var before, after []string
	for text, names := range map[string]*[]string{e.Before: &before, e.After: &after} {
		if err := read(reflect.ValueOf(names).Elem(), text); err != nil {
			return false, "", err
		}
	}
	names := namesOf(v)
	if names == nil {
		return false, "", fmt.Errorf("a list whose objects have no names of their own has no order to change")
	}
	known := func(of []string) []string {
		return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !slices.Contains(of, n) })
	}
	both := func(list []string) []string {
		return slices.DeleteFunc(slices.Clone(list), func(n string) bool { return !slices.Contains(names, n) })
	}
	if !slices.Equal(known(before), both(before)) {
		if slices.Equal(known(after), both(after)) {
			return false, e.After, nil // it is so already
		}
		return false, inline(reflect.ValueOf(names)), nil
	}
	var wanted []string
	for i, n := range names { // those at the beginning that the edit does not know
		if slices.Contains(after, n) {
			break
		}
		wanted = append(wanted, names[i])
	}
	for _, n := range both(after) {
		wanted = append(wanted, n)
		for _, follower := range names[slices.Index(names, n)+1:] {
			if slices.Contains(after, follower) {
				break
			}
			wanted = append(wanted, follower)
		}
	}
	sorted := reflect.MakeSlice(v.Type(), 0, v.Len())
	for _, n := range wanted {
		sorted = reflect.Append(sorted, v.Index(slices.Index(names, n)))
	}
	v.Set(sorted)
	return true, "", nil
}

// read sets v to a value that inline has written.
func read(v reflect.Value, text string) error {
	v.SetZero()
	if text == "" {
		return nil
	}
	root, syntax := parse([]byte(text))
	if syntax != nil {
		return syntax
	}
	d := decoder{budget: maxNodes}
	d.value(root, v, nil)
	if len(d.errs) > 0 {
		return d.errs
	}
	return nil
}

// clone copies src to dst, which share nothing afterwards.
func clone(dst, src reflect.Value) {
	t := src.Type()
	switch {
	case isText(t) || t.Kind() == reflect.Interface:
		dst.Set(src)
	case t.Kind() == reflect.Pointer && !src.IsNil():
		dst.Set(reflect.New(t.Elem()))
		clone(dst.Elem(), src.Elem())
	case t.Kind() == reflect.Struct:
		dst.Set(src) // fields that are not exported hold no references
		for i := range t.NumField() {
			if t.Field(i).IsExported() {
				clone(dst.Field(i), src.Field(i))
			}
		}
	case t.Kind() == reflect.Slice && !src.IsNil():
		dst.Set(reflect.MakeSlice(t, src.Len(), src.Len()))
		for i := range src.Len() {
			clone(dst.Index(i), src.Index(i))
		}
	case t.Kind() == reflect.Map && !src.IsNil():
		dst.Set(reflect.MakeMapWithSize(t, src.Len()))
		for it := src.MapRange(); it.Next(); {
			elem := reflect.New(t.Elem()).Elem()
			clone(elem, it.Value())
			dst.SetMapIndex(it.Key(), elem)
		}
	default:
		dst.Set(src)
	}
}
