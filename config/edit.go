// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"reflect"
	"slices"
)

// Edit is one difference between two configurations: a value that is added, removed or replaced.
type Edit struct {
	// Path leads to the value: the keys of the file, and the names of the objects of a list, as in
	// services/web/backends/a/weight. In a key or name "~" is written ~0 and "/" is written ~1 (RFC
	// 6901 §3). The path of a list of objects, followed by @order, denotes their order.
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

// order is the last step of a path that denotes the order of a list.
const order = "@order"

// Conflict is an edit whose Before differs from the value in the configuration.
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

// Merge applies edits to a copy of a configuration with its defaults. An edit whose After is
// already the value is not returned in needed. If a value is neither Before nor After of its edit,
// the edit is a conflict. An error means that the result is invalid, or that an edit cannot be
// parsed.
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

// edit applies one edit. If the value is not the edit's Before, edit returns the value in now.
func (c *Config) edit(e Edit) (done bool, now string, err error) {
	return change(reflect.ValueOf(c).Elem(), Split(e.Path), e)
}

// change applies an edit below v, which must be settable.
func change(v reflect.Value, steps []string, e Edit) (done bool, now string, err error) {
	t := v.Type()
	if len(steps) == 0 {
		if now = inlineYAML(v); now != e.Before {
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
			part.SetZero() // equal to a file without the key
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
		if now = inlineYAML(elem); len(steps) == 1 && e.After == "" {
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
		if now = inlineYAML(v.Index(at)); now != e.Before {
			return false, now, nil
		}
		v.Set(reflect.AppendSlice(v.Slice3(0, at, at), v.Slice(at+1, v.Len())))
		return true, now, nil
	}
	return change(v.Index(at), steps[1:], e)
}

// reorder changes the order of a list of objects. Objects unknown to the edit remain behind their
// predecessor.
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
			return false, e.After, nil // already in this order
		}
		return false, inlineYAML(reflect.ValueOf(names)), nil
	}
	var wanted []string
	for i, n := range names { // objects at the beginning that the edit does not name
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

// read sets v to a value written by inlineYAML.
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

// clone makes a deep copy of src in dst.
func clone(dst, src reflect.Value) {
	t := src.Type()
	switch {
	case isText(t) || t.Kind() == reflect.Interface:
		dst.Set(src)
	case t.Kind() == reflect.Pointer && !src.IsNil():
		dst.Set(reflect.New(t.Elem()))
		clone(dst.Elem(), src.Elem())
	case t.Kind() == reflect.Struct:
		dst.Set(src) // unexported fields hold no references
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
