// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Marshal writes c as YAML that Decode reads back to an equal Config. Small
// objects such as backends take one line each.
//
// Marshal does not use the emitter of the YAML library, which retains every emitted event: 10,000
// services would cost 1.4 GB.
func Marshal(c *Config) ([]byte, error) {
	w := writer{}
	w.mapping(reflect.ValueOf(c).Elem(), 0)
	if w.err != nil {
		return nil, fmt.Errorf("configuration: %w", w.err)
	}
	if w.Len() == 0 {
		return []byte("{}\n"), nil
	}
	w.WriteByte('\n')
	return w.Bytes(), nil
}

// oneLine lists the types that are written in one line.
var oneLine = []reflect.Type{
	reflect.TypeFor[Listen](), reflect.TypeFor[Backend](), reflect.TypeFor[Check](),
	reflect.TypeFor[Persistence](), reflect.TypeFor[Session](), reflect.TypeFor[Limits](),
	reflect.TypeFor[Log](), reflect.TypeFor[Tunnel](), reflect.TypeFor[FirewallRule](),
	reflect.TypeFor[EAMEntry](), reflect.TypeFor[endpoint](), reflect.TypeFor[BackendsFrom](),
}

// Lists of scalars up to this length are written in one line.
const oneLineItems = 16

// writer writes values as YAML, block style outside and flow style inside.
type writer struct {
	bytes.Buffer
	err error
}

// entries calls f for each key of a struct that is written.
func entries(v reflect.Value, f func(key string, value reflect.Value)) {
	for _, field := range layoutOf(v.Type()).fields {
		fv := v.Field(field.index)
		empty := fv.IsZero() || (fv.Kind() == reflect.Slice || fv.Kind() == reflect.Map) && fv.Len() == 0
		if field.omitempty && empty {
			continue
		}
		f(field.key, resolveShape(fv))
	}
}

// resolveShape resolves pointers and the two shapes of Target, PortSet, Interfaces and Helpers.
func resolveShape(v reflect.Value) reflect.Value {
	if v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	if v.Type() == portSetType && v.Len() == 1 {
		return v.Index(0)
	}
	if v.Type() == interfacesType || v.Type() == helpersType {
		if words := splitWords(v.String()); len(words) > 1 {
			return reflect.ValueOf(words)
		}
	}
	if v.Type() != targetType {
		return v
	}
	t := v.Interface().(Target)
	if t.Address.IsValid() {
		return reflect.ValueOf(endpoint{t.Address, t.Port})
	}
	return reflect.ValueOf(t.Addresses)
}

// isScalar reports whether values of t are written as one word.
func isScalar(t reflect.Type) bool {
	return isText(t) || t.Kind() != reflect.Struct && t.Kind() != reflect.Slice && t.Kind() != reflect.Map
}

// inOneLine reports whether v is written in flow style.
func inOneLine(v reflect.Value) bool {
	t := v.Type()
	switch {
	case isScalar(t) || slices.Contains(oneLine, t):
		return true
	case t.Kind() == reflect.Slice:
		return v.Len() == 0 || v.Len() <= oneLineItems && isScalar(t.Elem())
	}
	return false
}

// mapping writes the keys of a struct or map, one a line. The first key continues the current line.
func (w *writer) mapping(v reflect.Value, indent int) {
	first := true
	entry := func(key string, value reflect.Value) {
		if !first {
			w.newLine(indent)
		}
		first = false
		w.WriteString(key + ":")
		w.value(value, indent)
	}
	if v.Kind() == reflect.Map {
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, k := range keys {
			entry(quoteIfNeeded(k.String()), v.MapIndex(k))
		}
		return
	}
	entries(v, entry)
}

// value writes the value of a key.
func (w *writer) value(v reflect.Value, indent int) {
	switch {
	case inOneLine(v):
		w.WriteByte(' ')
		w.flow(v)
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			w.newLine(indent + 2)
			w.WriteString("- ")
			if item := v.Index(i); inOneLine(item) {
				w.flow(item)
			} else {
				w.mapping(item, indent+4)
			}
		}
	default:
		w.newLine(indent + 2)
		w.mapping(v, indent+2)
	}
}

func (w *writer) newLine(indent int) {
	w.WriteByte('\n')
	w.WriteString(strings.Repeat(" ", indent))
}

// flow writes v in one line.
func (w *writer) flow(v reflect.Value) {
	separator := ""
	item := func(f func()) {
		w.WriteString(separator)
		separator = ", "
		f()
	}
	entry := func(key string, value reflect.Value) {
		item(func() {
			w.WriteString(key + ": ")
			w.flow(value)
		})
	}
	switch {
	case isScalar(v.Type()):
		w.scalar(v)
	case v.Kind() == reflect.Slice:
		w.WriteByte('[')
		for i := range v.Len() {
			item(func() { w.flow(v.Index(i)) })
		}
		w.WriteByte(']')
	case v.Kind() == reflect.Map:
		w.WriteByte('{')
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, k := range keys {
			entry(quoteIfNeeded(k.String()), v.MapIndex(k))
		}
		w.WriteByte('}')
	default:
		w.WriteByte('{')
		entries(v, entry)
		w.WriteByte('}')
	}
}

func (w *writer) scalar(v reflect.Value) {
	switch m, ok := v.Interface().(encoding.TextMarshaler); {
	case ok:
		b, err := m.MarshalText()
		w.err = errors.Join(w.err, err)
		if s := string(b); strings.IndexFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == ':' || r == '@' }) >= 0 {
			w.WriteString(quote(s))
		} else {
			w.Write(b) // numbers with dots, dashes, slashes or units: plain for every reader
		}
	case v.Kind() == reflect.String:
		if !utf8.ValidString(v.String()) {
			w.err = errors.Join(w.err, fmt.Errorf("text %q is not UTF-8", v.String()))
		}
		w.WriteString(quoteIfNeeded(v.String()))
	default:
		fmt.Fprint(w, v.Interface())
	}
}

// quoteIfNeeded returns s unquoted if every YAML parser reads the same text, and quoted otherwise. Numbers
// remain unquoted: the schema accepts them as statuses.
func quoteIfNeeded(s string) string {
	if n, err := strconv.ParseUint(s, 10, 31); err == nil && strconv.FormatUint(n, 10) == s {
		return s
	}
	switch strings.ToLower(s) {
	case "", "true", "false", "yes", "no", "on", "off", "y", "n", "null":
		return quote(s)
	}
	for i, r := range s {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r == '/' || r == '_'
		if !letter && (i == 0 || !(r >= '0' && r <= '9' || r == '-' || r == '.')) {
			return quote(s)
		}
	}
	return s
}

// quote returns s in double quotes, with all characters escaped that are neither printable ASCII
// nor printable letters (YAML 1.2 §5.7).
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == '\t':
			b.WriteString(`\t`)
		case strconv.IsPrint(r):
			b.WriteRune(r)
		case r < 0x100:
			fmt.Fprintf(&b, `\x%02x`, r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// MarshalJSON writes t as a list of addresses or as an object.
func (t Target) MarshalJSON() ([]byte, error) {
	if t.Address.IsValid() {
		return json.Marshal(endpoint{t.Address, t.Port})
	}
	return json.Marshal(t.Addresses)
}

// UnmarshalJSON is the inverse of MarshalJSON.
func (t *Target) UnmarshalJSON(b []byte) error {
	*t = Target{}
	if err := json.Unmarshal(b, &t.Addresses); err == nil {
		return nil
	}
	var e endpoint
	if err := json.Unmarshal(b, &e); err != nil {
		return errors.New("to: neither a list of addresses nor an object with address and port")
	}
	t.Address, t.Port = e.Address, e.Port
	return nil
}

// IsZero reports whether t is empty.
func (t Target) IsZero() bool {
	return len(t.Addresses) == 0 && t.Address == netip.Addr{} && t.Port == 0
}
