// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding"
	"fmt"
	"net/netip"
	"reflect"
	"strconv"
	"strings"
	"sync"

	"github.com/sluice-lb/sluice/flow"
)

// field is the parsed tags of a struct field: its key in YAML and its limits. The JSON Schema is
// generated from the same tags, so that decoder and schema cannot disagree.
type field struct {
	key       string
	index     int // in the struct
	nth       int // in the layout
	omitempty bool
	required  bool
	// zeroCounts marks types with a meaningful zero value (protocol any).
	zeroCounts bool
	enum       []string
	min, max   *int64
	maxItems   *int64
}

// layout lists the keys of a struct type.
type layout struct {
	fields   []field
	byKey    map[string]*field
	keys     []string
	required []*field
}

var layouts sync.Map // reflect.Type → *layout

func layoutOf(t reflect.Type) *layout {
	if l, ok := layouts.Load(t); ok {
		return l.(*layout)
	}
	l := &layout{byKey: map[string]*field{}}
	for i := range t.NumField() {
		sf := t.Field(i)
		key, opts, _ := strings.Cut(sf.Tag.Get("yaml"), ",")
		if key == "" || key == "-" {
			continue
		}
		f := field{key: key, index: i, nth: len(l.fields), omitempty: strings.Contains(opts, "omitempty"),
			zeroCounts: sf.Type == reflect.TypeFor[flow.Protocol]()}
		f.schemaTag(sf.Tag.Get("jsonschema"))
		l.fields = append(l.fields, f)
		l.keys = append(l.keys, key)
	}
	for i := range l.fields {
		f := &l.fields[i]
		l.byKey[f.key] = f
		if f.required {
			l.required = append(l.required, f)
		}
	}
	actual, _ := layouts.LoadOrStore(t, l)
	return actual.(*layout)
}

func (f *field) schemaTag(tag string) {
	for part := range strings.SplitSeq(tag, ",") {
		name, value, _ := strings.Cut(part, "=")
		switch name {
		case "required":
			f.required = true
		case "enum":
			f.enum = append(f.enum, value)
		case "minimum":
			f.min = parseBound(value)
		case "maximum":
			f.max = parseBound(value)
		case "maxItems":
			f.maxItems = parseBound(value)
		}
	}
}

func parseBound(s string) *int64 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		panic("config: jsonschema tag: " + err.Error())
	}
	return &n
}

var (
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
	addrType        = reflect.TypeFor[netip.Addr]()
	prefixType      = reflect.TypeFor[netip.Prefix]()
	targetType      = reflect.TypeFor[Target]()
	interfacesType  = reflect.TypeFor[Interfaces]()
	portSetType     = reflect.TypeFor[PortSet]()
	helpersType     = reflect.TypeFor[Helpers]()
)

// isText reports whether values of t are written as one scalar by their own
// methods.
func isText(t reflect.Type) bool { return reflect.PointerTo(t).Implements(textUnmarshaler) }

// check compares v with the enum, minimum, maximum and maxItems of f.
func (f *field) check(v reflect.Value) (cause, hint string) {
	switch {
	case len(f.enum) > 0:
		s := textOf(v)
		for _, e := range f.enum {
			if s == e {
				return "", ""
			}
		}
		return fmt.Sprintf("unknown %s %q", f.key, s), hintOneOf(s, f.enum)
	case f.maxItems != nil && v.Kind() == reflect.Slice:
		if n := v.Len(); int64(n) > *f.maxItems {
			return fmt.Sprintf("%s has %d items", f.key, n), fmt.Sprintf("write up to %d", *f.maxItems)
		}
	case f.min == nil && f.max == nil:
		return "", ""
	case v.CanInt():
		n := v.Int()
		low, high := f.min != nil && n < *f.min, f.max != nil && n > *f.max
		if !low && !high {
			return "", ""
		}
		if f.max == nil {
			return fmt.Sprintf("%s %d is out of range", f.key, n), fmt.Sprintf("write %d or more", *f.min)
		}
		hint := fmt.Sprintf("write a number from %d to %d", *f.min, *f.max)
		if f.key == "weight" && n == 0 {
			hint += ", or drain: true, by which it gets no new flows"
		}
		return fmt.Sprintf("%s %d is out of range", f.key, n), hint
	}
	return "", ""
}

func textOf(v reflect.Value) string {
	if m, ok := v.Interface().(encoding.TextMarshaler); ok {
		b, _ := m.MarshalText()
		return string(b)
	}
	return v.String()
}
