// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxNodes bounds how many YAML nodes a text of Sluice's own may have: enough for 100,000 services. Texts from
// outside may have twice the nodes of [nodeLimit] when their aliases are written out.
const maxNodes = 5_000_000

// decoder fills a Config from a YAML tree. It continues after an error, so that one run finds all
// errors.
type decoder struct {
	path   path // of the value being decoded; reused, cloned for errors
	errs   Errors
	failed map[string]bool // paths of errs
	// budget is how many nodes may still be visited.
	budget int
	// named is set if the path contains the object's name, which the value may then omit.
	named     bool
	truncated bool // there were more errors than maxErrors
}

func (d *decoder) document(root *yaml.Node, c *Config) {
	d.value(root, reflect.ValueOf(c).Elem(), nil)
	if d.budget < 0 {
		d.truncated = true
		d.errs = append(d.errs, &Error{Line: 1, Column: 1, Cause: "too many values when aliases are written out", Hint: "use fewer aliases"})
	}
}

func (d *decoder) errorf(n *yaml.Node, hint, format string, args ...any) {
	e := &Error{path: slices.Clone(d.path), Cause: fmt.Sprintf(format, args...), Hint: hint}
	e.setNodePosition(n)
	d.add(e)
}

func (d *decoder) add(e *Error) {
	if len(d.errs) >= maxErrors {
		d.truncated = true
		return
	}
	if d.failed == nil {
		d.failed = map[string]bool{}
	}
	d.failed[e.path.String()] = true
	d.errs = append(d.errs, e)
}

// unlessFailed drops errors about values that could not be decoded, and about
// what lies around or inside them.
func (d *decoder) unlessFailed(es Errors) Errors {
	if len(d.failed) == 0 {
		return es
	}
	return slices.DeleteFunc(es, func(e *Error) bool {
		for i := 1; i <= len(e.path); i++ {
			if d.failed[e.path[:i].String()] {
				return true
			}
		}
		return slices.ContainsFunc(e.depends, func(p path) bool {
			for f := range d.failed {
				if s := p.String(); f == s || strings.HasPrefix(f, s+".") || strings.HasPrefix(f, s+"[") {
					return true
				}
			}
			return false
		})
	})
}

// value decodes n into v, to which the tags of f apply (nil for elements).
func (d *decoder) value(n *yaml.Node, v reflect.Value, f *field) {
	n = resolveAlias(n)
	if d.budget--; d.budget < 0 || isNull(n) {
		return
	}
	if n.Style&yaml.TaggedStyle != 0 {
		d.errorf(n, "remove it", "tag %s is not used here", n.Tag)
		return
	}
	t := v.Type()
	switch {
	case t == targetType:
		d.target(n, v.Addr().Interface().(*Target))
	case t == interfacesType:
		d.words(n, v, "an interface or a list of them", "wan0, or [wan0, ppp*]")
	case t == portSetType && n.Kind == yaml.ScalarNode:
		v.Set(reflect.MakeSlice(t, 1, 1))
		d.value(n, v.Index(0), nil)
	case t == helpersType:
		d.words(n, v, "a helper or a list of them", "ftp, or [ftp, tftp]")
	case t.Kind() == reflect.Pointer:
		v.Set(reflect.New(t.Elem()))
		d.value(n, v.Elem(), f)
	case isText(t):
		d.text(n, v, f)
	case t.Kind() == reflect.Struct:
		d.mapping(n, v)
	case t.Kind() == reflect.Slice:
		d.sequence(n, v)
		if f != nil && f.omitempty && v.Len() == 0 {
			v.SetZero() // as if the key were not there
		}
	case t.Kind() == reflect.Map:
		d.dictionary(n, v)
		if v.Len() == 0 {
			v.SetZero()
		}
	default:
		d.scalar(n, v)
	}
	if f == nil || len(f.enum) == 0 && f.min == nil && f.max == nil || len(d.failed) > 0 && d.failed[d.path.String()] {
		return
	}
	if cause, hint := f.check(v); cause != "" {
		d.errorf(n, hint, "%s", cause)
	}
}

func isNull(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && n.Tag == "!!null" && n.Style&yaml.TaggedStyle == 0
}

// withStep calls f with one more step on the path.
func (d *decoder) withStep(s step, f func()) {
	d.path = append(d.path, s)
	f()
	d.path = d.path[:len(d.path)-1]
}

func (d *decoder) mapping(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		d.errorf(n, "write "+mappingOutline(v.Type()), "%s where a mapping belongs", describe(n))
		return
	}
	l := layoutOf(v.Type())
	seen := make([]*yaml.Node, len(l.fields)) // keys, by field
	var unknown []string
	for i := 0; i+1 < len(n.Content) && !d.truncated; i += 2 {
		key, value := resolveAlias(n.Content[i]), n.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			d.errorf(key, "write a word", "%s where a key belongs", describe(key))
			continue
		}
		d.path = append(d.path, step{key: key.Value})
		switch f := l.byKey[key.Value]; {
		case key.Value == "<<":
			d.errorf(key, "use an alias for the whole value, or write the keys", "merge keys are not used here")
		case f == nil:
			unknown = append(unknown, Nearest(key.Value, l.keys))
			d.errorf(key, hintKey(key.Value, l.keys), "unknown key %q", key.Value)
		case seen[f.nth] != nil:
			d.errorf(key, "keep one of them", "key %s is written twice (first in line %d)", key.Value, seen[f.nth].Line)
		default:
			seen[f.nth] = key
			d.value(value, v.Field(f.index), f)
		}
		d.path = d.path[:len(d.path)-1]
	}
	for _, f := range l.required {
		if d.named && len(d.path) == 0 && f.key == "name" {
			continue
		}
		absent := seen[f.nth] == nil && !slices.Contains(unknown, f.key) // a misspelt key is reported already
		empty := seen[f.nth] != nil && !f.zeroCounts && v.Field(f.index).IsZero() && !d.hasErrorBelow(step{key: f.key})
		if absent || empty {
			d.failedAt(n, &Error{path: d.path.key(f.key), Cause: f.key + " is missing", Hint: f.hintMissing()})
		}
	}
}

// failedAt records an error about a missing part of node n.
func (d *decoder) failedAt(n *yaml.Node, e *Error) {
	place := n
	if n.Kind == yaml.MappingNode && len(n.Content) > 0 {
		place = n.Content[0]
	}
	e.setNodePosition(place)
	d.add(e)
}

// hasErrorBelow reports whether an error was found at or below the step.
func (d *decoder) hasErrorBelow(s step) bool {
	prefix := append(d.path, s).String()
	for i := len(d.errs) - 1; i >= 0; i-- {
		if strings.HasPrefix(d.errs[i].path.String(), prefix) {
			return true
		}
	}
	return false
}

// mappingOutline shows a mapping with the keys that it must have, or may have where it needs none.
func mappingOutline(t reflect.Type) string {
	l := layoutOf(t)
	var keys []string
	for _, f := range l.required {
		keys = append(keys, f.key+": ...")
	}
	if len(keys) == 0 {
		for _, key := range l.keys[:min(len(l.keys), 3)] {
			keys = append(keys, key+": ...")
		}
	}
	return "{" + strings.Join(keys, ", ") + "}"
}

func hintKey(key string, known []string) string {
	if near := Nearest(key, known); near != "" {
		return "write " + near
	}
	return "known here are " + strings.Join(known, ", ")
}

func (f *field) hintMissing() string {
	if len(f.enum) > 0 {
		return "write " + f.key + ": " + strings.Join(f.enum, ", ")
	}
	return "write " + f.key + ": ..."
}

// firstItems is how many items of a list are allocated before the first one is decoded.
const firstItems = 1024

func (d *decoder) sequence(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.SequenceNode {
		hint := `write a list, each item after "- "`
		if item := v.Type().Elem(); item.Kind() == reflect.Struct && !isText(item) {
			hint = "write [" + mappingOutline(item) + "]"
		} else if n.Kind == yaml.ScalarNode {
			hint = "write [" + n.Value + "]"
		}
		d.errorf(n, hint, "%s where a list belongs", describe(n))
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), 0, min(len(n.Content), firstItems)))
	for i, item := range n.Content {
		if d.truncated || d.budget < 0 {
			return // an item of an object takes more memory than its text
		}
		if v.Len() == v.Cap() {
			v.Grow(min(v.Cap(), len(n.Content)-i))
		}
		v.SetLen(i + 1)
		d.withStep(step{index: i}, func() {
			if isNull(resolveAlias(item)) {
				d.errorf(item, "remove it", "an empty list item")
				return
			}
			d.value(item, v.Index(i), nil)
		})
	}
}

func (d *decoder) dictionary(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		d.errorf(n, "write names and values", "%s where a mapping belongs", describe(n))
		return
	}
	v.Set(reflect.MakeMapWithSize(v.Type(), min(len(n.Content)/2, firstItems)))
	for i := 0; i+1 < len(n.Content) && !d.truncated; i += 2 {
		key, value := resolveAlias(n.Content[i]), n.Content[i+1]
		d.withStep(step{key: key.Value}, func() {
			k := reflect.ValueOf(key.Value)
			switch {
			case key.Kind != yaml.ScalarNode || key.Value == "":
				d.errorf(key, "write a word", "%s where a name belongs", describe(key))
			case v.MapIndex(k).IsValid():
				d.errorf(key, "keep one of them", "name %s is written twice", key.Value)
			default:
				elem := reflect.New(v.Type().Elem()).Elem()
				d.value(value, elem, nil)
				if elem.Kind() == reflect.Slice && elem.IsNil() {
					elem.Set(reflect.MakeSlice(elem.Type(), 0, 0)) // a set without members is a set
				}
				v.SetMapIndex(k, elem)
			}
		})
	}
}

// text decodes a scalar by the type's own UnmarshalText.
func (d *decoder) text(n *yaml.Node, v reflect.Value, f *field) {
	if n.Kind != yaml.ScalarNode {
		d.errorf(n, "write one word", "%s where one value belongs", describe(n))
		return
	}
	var err error
	switch v.Type() {
	case addrType:
		var a netip.Addr
		if a, err = netip.ParseAddr(n.Value); err != nil {
			d.errorf(n, "write an address, for example 192.0.2.10 or 2001:db8::10", "%s: not an IP address", quoteEmpty(n.Value))
			return
		}
		v.Set(reflect.ValueOf(a))
	case prefixType:
		var p netip.Prefix
		if p, err = parsePrefix(n.Value); err != nil {
			d.errorf(n, "write a prefix or an address, for example 10.0.0.0/8 or 2001:db8::1", "%s: neither a prefix nor an address", quoteEmpty(n.Value))
			return
		}
		v.Set(reflect.ValueOf(p))
	default:
		err = v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(n.Value))
		if err == nil {
			return
		}
		cause, hint, _ := strings.Cut(err.Error(), ": write ")
		if f != nil && len(f.enum) > 0 {
			cause, hint = fmt.Sprintf("unknown %s %q", f.key, n.Value), hintOneOf(n.Value, f.enum)
		} else if hint != "" {
			hint = "write " + hint
		}
		d.errorf(n, hint, "%s", cause)
	}
}

func quoteEmpty(s string) string {
	if s == "" || len(s) > 64 {
		return strconv.Quote(s[:min(len(s), 64)])
	}
	return s
}

func (d *decoder) scalar(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.ScalarNode {
		d.errorf(n, "write one word", "%s where one value belongs", describe(n))
		return
	}
	switch {
	case v.Kind() == reflect.String:
		v.SetString(n.Value)
	case v.Kind() == reflect.Bool:
		d.boolean(n, v)
	case v.CanInt() || v.CanUint():
		d.integer(n, v)
	case v.CanFloat():
		x, err := strconv.ParseFloat(n.Value, 64)
		if err != nil || math.IsNaN(x) || math.IsInf(x, 0) {
			d.errorf(n, "write a number, for example 0.1", "%q: not a number", n.Value)
			return
		}
		v.SetFloat(x)
	}
}

func (d *decoder) boolean(n *yaml.Node, v reflect.Value) {
	switch strings.ToLower(n.Value) {
	case "true":
		v.SetBool(true)
	case "false":
	case "yes", "on", "y":
		d.errorf(n, "write true", "%s: neither true nor false", n.Value)
	case "no", "off", "n":
		d.errorf(n, "write false", "%s: neither true nor false", n.Value)
	default:
		d.errorf(n, "write true or false", "%q: neither true nor false", n.Value)
	}
}

// integer reads decimal and 0x numbers. It refuses YAML's octal and underscored forms: port 010 is
// rarely meant as 8.
func (d *decoder) integer(n *yaml.Node, v reflect.Value) {
	digits := strings.TrimPrefix(n.Value, "-")
	hex, isHex := strings.CutPrefix(digits, "0x")
	base := 10
	if isHex {
		digits, base = hex, 16
	} else if len(digits) > 1 && digits[0] == '0' {
		digits = ""
	}
	u, err := strconv.ParseUint(digits, base, 63)
	i := int64(u)
	if strings.HasPrefix(n.Value, "-") {
		i = -i
	}
	switch {
	case err == nil && n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) != 0:
		d.errorf(n, "write "+n.Value, "%q is a text, not a number", n.Value)
	case err != nil:
		d.errorf(n, "write a number without a unit", "%q: not a whole number", n.Value)
	case v.CanUint() && (i < 0 || v.OverflowUint(uint64(i))):
		d.errorf(n, fmt.Sprintf("write a number from 0 to %d", uint64(1)<<v.Type().Bits()-1), "%s is out of range", n.Value)
	case v.CanUint():
		v.SetUint(uint64(i))
	case v.OverflowInt(i) || i > math.MaxInt32 || i < math.MinInt32:
		d.errorf(n, fmt.Sprintf("write a number up to %d", math.MaxInt32), "%s is out of range", n.Value)
	default:
		v.SetInt(i)
	}
}

// target reads a list of addresses, or a mapping of address and port.
func (d *decoder) target(n *yaml.Node, t *Target) {
	switch n.Kind {
	case yaml.SequenceNode:
		d.sequence(n, reflect.ValueOf(&t.Addresses).Elem())
	case yaml.MappingNode:
		var e endpoint
		d.mapping(n, reflect.ValueOf(&e).Elem())
		t.Address, t.Port = e.Address, e.Port
	default:
		d.errorf(n, "write [192.0.2.1] for snat, {address: 10.0.0.2, port: 80} for port-forward",
			"%s where a list or a mapping belongs", describe(n))
	}
}

// words reads one word, or a list of words, into their comma-separated form.
func (d *decoder) words(n *yaml.Node, v reflect.Value, what, example string) {
	var words []string
	switch n.Kind {
	case yaml.SequenceNode:
		d.sequence(n, reflect.ValueOf(&words).Elem())
	case yaml.ScalarNode:
		words = []string{n.Value}
	default:
		d.errorf(n, "write "+example, "%s where %s belongs", describe(n), what)
	}
	for _, w := range words {
		if strings.Contains(w, ",") {
			d.errorf(n, fmt.Sprintf("write [%s], if several are meant", w), "%q: a comma in one word", w)
			return
		}
	}
	v.SetString(strings.Join(words, ","))
}

// endpoint is Target's form as a mapping.
type endpoint struct {
	Address netip.Addr `yaml:"address" json:"address" jsonschema:"type=string,required"`
	Port    uint16     `yaml:"port,omitempty" json:"port,omitempty"`
}

// describe names the kind of a node.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	if n.Value == "" {
		return "nothing"
	}
	return strconv.Quote(n.Value[:min(len(n.Value), 64)])
}
