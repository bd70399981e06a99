// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ErrNoObject is wrapped by errors about an object that does not exist.
var ErrNoObject = errors.New("not found")

// ErrExists is wrapped by errors about an object that already exists.
var ErrExists = errors.New("exists already")

var (
	escaped = strings.NewReplacer("~", "~0", "/", "~1")
	plain   = strings.NewReplacer("~1", "/", "~0", "~")
)

// Join returns the path of an [Edit] from its steps.
func Join(steps ...string) string {
	list := make([]string, len(steps))
	for i, s := range steps {
		list[i] = escaped.Replace(s)
	}
	return strings.Join(list, "/")
}

// Split is the inverse of [Join].
func Split(path string) []string {
	steps := strings.Split(path, "/")
	if !strings.Contains(path, "~") {
		return steps
	}
	for i, s := range steps {
		steps[i] = plain.Replace(s)
	}
	return steps
}

// Object returns the value at a path as JSON, and as YAML in one line, the form of an [Edit].
func (c *Config) Object(path string) (asJSON []byte, asYAML string, err error) {
	v, err := c.valueAt(path)
	if err != nil {
		return nil, "", err
	}
	asJSON, err = json.Marshal(v.Interface())
	return asJSON, inlineYAML(v), err
}

// Text returns the value at a path as YAML in one line, the form of an [Edit].
func (c *Config) Text(path string) (string, error) {
	v, err := c.valueAt(path)
	if err != nil {
		return "", err
	}
	return inlineYAML(v), nil
}

// valueAt returns the value at a path.
func (c *Config) valueAt(path string) (reflect.Value, error) {
	steps := Split(path)
	from, rest := reflect.ValueOf(c).Elem(), steps
	if at := c.serviceAt(steps); at >= 0 {
		from, rest = reflect.ValueOf(&c.Services[at]).Elem(), steps[2:]
	}
	v, err := find(from, rest)
	if err != nil {
		return v, fmt.Errorf("%s: %w", path, err)
	}
	return v, nil
}

// find returns the value at the end of the steps.
func find(v reflect.Value, steps []string) (reflect.Value, error) {
	for _, step := range steps {
		if v.Kind() == reflect.Pointer {
			if v.IsNil() {
				return v, ErrNoObject
			}
			v = v.Elem()
		}
		switch t := v.Type(); {
		case t.Kind() == reflect.Struct && !isText(t) && t != targetType:
			f := layoutOf(t).byKey[step]
			if f == nil {
				return v, fmt.Errorf("unknown key %q: %w", step, ErrNoObject)
			}
			v = v.Field(f.index)
		case t.Kind() == reflect.Map:
			if v = v.MapIndex(reflect.ValueOf(step)); !v.IsValid() {
				return v, ErrNoObject
			}
		case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct:
			i := indexOf(v, step)
			if i < 0 {
				return v, ErrNoObject
			}
			v = v.Index(i)
		default:
			return v, ErrNoObject
		}
	}
	return v, nil
}

// typeAt returns the type of the values at a path.
func typeAt(t reflect.Type, steps []string) (reflect.Type, error) {
	for _, step := range steps {
		if t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		switch {
		case t.Kind() == reflect.Struct && !isText(t) && t != targetType:
			f := layoutOf(t).byKey[step]
			if f == nil {
				return nil, fmt.Errorf("unknown key %q: %w", step, ErrNoObject)
			}
			t = t.Field(f.index).Type
		case t.Kind() == reflect.Map, t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct:
			t = t.Elem()
		default:
			return nil, fmt.Errorf("%q leads into a value that has no parts: %w", step, ErrNoObject)
		}
	}
	return t, nil
}

// Put returns c with another value at a path, in YAML or JSON. It adds an object that does not
// exist. The name inside the value must equal the name in the path, or be omitted.
func (c *Config) Put(path string, value []byte) (*Config, error) {
	steps := Split(path)
	t, err := typeAt(reflect.TypeOf(c).Elem(), steps)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	root, syntax := parseBounded(value)
	if syntax != nil {
		return nil, Errors{syntax}
	}
	v := reflect.New(t).Elem()
	if root != nil {
		d := decoder{budget: 2 * nodeLimit(len(value)), named: true}
		d.value(root, v, nil)
		if len(d.errs) > 0 {
			for _, e := range d.errs {
				e.Path, e.Object = e.path.String(), path
			}
			return nil, d.errs
		}
	}
	if name, ok := nameOf(v); ok {
		switch last := steps[len(steps)-1]; name.String() {
		case "":
			name.SetString(last)
		case last:
		default:
			return nil, Errors{{Path: "name", Object: path, Cause: fmt.Sprintf("the name is %q", name), Hint: "write " + last + ", or leave it out; names do not change"}}
		}
	}
	return c.withValue(path, v)
}

// nameOf returns the name of an object of a list, as a settable value.
func nameOf(v reflect.Value) (reflect.Value, bool) {
	if v.Kind() != reflect.Struct {
		return v, false
	}
	name := v.FieldByName("Name")
	return name, name.IsValid() && name.Kind() == reflect.String
}

// withValue returns c with v at the path.
func (c *Config) withValue(path string, v reflect.Value) (*Config, error) {
	before, steps := "", Split(path)
	if at := c.serviceAt(steps); at >= 0 {
		if old, err := find(reflect.ValueOf(&c.Services[at]).Elem(), steps[2:]); err == nil && old.CanSet() { // avoids writing and parsing the old value
			return c.editedService(at, func(part *Config) error {
				now, err := find(reflect.ValueOf(part).Elem(), steps)
				if err == nil {
					now.Set(v)
				}
				return err
			})
		}
	}
	old, err := find(reflect.ValueOf(c).Elem(), steps)
	switch {
	case err == nil:
		before = inlineYAML(old)
	case !errors.Is(err, ErrNoObject):
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c.withEdit(Edit{Path: path, Before: before, After: inlineYAML(v)})
}

// Add is [Config.Put] for an object that must not exist. The path leads to the list or mapping. If
// name is empty, the name inside the value is used.
func (c *Config) Add(path, name string, value []byte) (next *Config, at string, err error) {
	if name == "" {
		root, syntax := parseBounded(value)
		if syntax != nil {
			return nil, "", Errors{syntax}
		}
		if name = memberOf(root, "name"); name == "" && strings.HasSuffix(path, "/backends") {
			name = memberOf(root, "address") // the default of a backend's name
		}
	}
	if name == "" {
		return nil, "", Errors{{Path: "name", Object: path, Cause: "name is missing", Hint: "write name: ..."}}
	}
	at = path + "/" + Join(name)
	if _, err := c.valueAt(at); err == nil {
		return nil, at, fmt.Errorf("%s: %w", at, ErrExists)
	}
	next, err = c.Put(at, value)
	return next, at, err
}

// Patch is [Config.Put] of the object at the path after a JSON merge patch (RFC 7396), in YAML or
// JSON: keys of the patch replace keys of the object, null removes a key.
func (c *Config) Patch(path string, patch []byte) (*Config, error) {
	v, err := c.valueAt(path)
	if err != nil {
		return nil, err
	}
	object, err := json.Marshal(v.Interface())
	if err != nil {
		return nil, err
	}
	root, syntax := parseBounded(patch)
	if syntax != nil {
		return nil, Errors{syntax}
	}
	var was, change any
	if err := json.Unmarshal(object, &was); err != nil {
		return nil, err
	}
	if root != nil {
		if e := tooManyKeys(root); e != nil {
			return nil, Errors{e}
		}
		if err := root.Decode(&change); err != nil {
			return nil, Errors{{Object: path, Cause: err.Error(), Hint: "write a mapping of keys to new values"}}
		}
	}
	if _, ok := change.(map[string]any); !ok {
		return nil, Errors{{Object: path, Cause: "not a mapping", Hint: "write a mapping of keys to new values"}}
	}
	merged, err := json.Marshal(mergePatch(was, change))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c.Put(path, merged)
}

// memberOf returns the scalar of a key in a mapping, "" for none. Put reports errors of the value. To decode the
// mapping takes time that grows with the square of its keys.
func memberOf(n *yaml.Node, key string) string {
	if n = resolveAlias(n); n == nil || n.Kind != yaml.MappingNode {
		return ""
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if value := resolveAlias(n.Content[i+1]); resolveAlias(n.Content[i]).Value == key && value.Kind == yaml.ScalarNode && !isNull(value) {
			return value.Value
		}
	}
	return ""
}

// Bounds of the keys in a patch: of one mapping, because the YAML library compares each with all others, and
// of all mappings, because a Go map takes more memory than its text.
const (
	maxKeys    = 1000
	maxAllKeys = 50_000
)

// tooManyKeys returns an error about a patch with too many keys, nil for none.
func tooManyKeys(root *yaml.Node) *Error {
	all := 0
	var check func(n *yaml.Node) *Error
	check = func(n *yaml.Node) *Error {
		if n.Kind == yaml.MappingNode {
			keys := len(n.Content) / 2
			if all += keys; keys > maxKeys || all > maxAllKeys {
				return &Error{Line: n.Line, Column: n.Column, Cause: "too many keys in a patch", Hint: fmt.Sprintf("write at most %d in a mapping and %d in all, or replace the object", maxKeys, maxAllKeys)}
			}
		}
		for _, c := range n.Content {
			if e := check(c); e != nil {
				return e
			}
		}
		return nil
	}
	return check(root)
}

// mergePatch is the algorithm of RFC 7396 §2.
func mergePatch(target, patch any) any {
	keys, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	object, ok := target.(map[string]any)
	if !ok {
		object = map[string]any{}
	}
	for k, v := range keys {
		if v == nil {
			delete(object, k)
		} else {
			object[k] = mergePatch(object[k], v)
		}
	}
	return object
}

// Remove returns c without the object at the path.
func (c *Config) Remove(path string) (*Config, error) {
	old, err := find(reflect.ValueOf(c).Elem(), Split(path))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c.withEdit(Edit{Path: path, Before: inlineYAML(old)})
}

// Elements returns c with elements of a set added and removed. Adding an existing element is no
// error; removing a missing one is.
func (c *Config) Elements(set string, add, remove []string) (*Config, error) {
	path := Join("firewall", "sets", set)
	v, err := find(reflect.ValueOf(c).Elem(), Split(path))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	list := reflect.New(v.Type()).Elem()
	clone(list, v)
	of := func(text string) (reflect.Value, error) {
		e := reflect.New(v.Type().Elem()).Elem()
		if err := read(e, quote(text)); err != nil {
			var errs Errors
			if errors.As(err, &errs) {
				errs[0].Object, errs[0].Line, errs[0].Column = "set "+set, 0, 0
			}
			return e, err
		}
		return e, nil
	}
	known := make(map[any]bool, list.Len()+len(add))
	for i := range list.Len() {
		known[list.Index(i).Interface()] = true
	}
	for _, text := range add {
		e, err := of(text)
		if err != nil {
			return nil, err
		}
		if !known[e.Interface()] {
			known[e.Interface()] = true
			list = reflect.Append(list, e)
		}
	}
	removed := make(map[any]bool, len(remove))
	for _, text := range remove {
		e, err := of(text)
		if err != nil {
			return nil, err
		}
		if !known[e.Interface()] || removed[e.Interface()] {
			return nil, fmt.Errorf("%s: element %s: %w", path, text, ErrNoObject)
		}
		removed[e.Interface()] = true
	}
	if len(removed) > 0 {
		kept := reflect.MakeSlice(v.Type(), 0, list.Len())
		for i := range list.Len() {
			if !removed[list.Index(i).Interface()] {
				kept = reflect.Append(kept, list.Index(i))
			}
		}
		list = kept
	}
	if list.IsNil() {
		list = reflect.MakeSlice(v.Type(), 0, 0)
	}
	return c.withValue(path, list)
}
