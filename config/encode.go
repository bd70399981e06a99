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

	"go.yaml.in/yaml/v3"
)

// Marshal writes c as YAML that Decode reads back to an equal Config. Small
// objects such as backends take one line each.
func Marshal(c *Config) ([]byte, error) {
	n, err := encode(reflect.ValueOf(c).Elem())
	if err != nil {
		return nil, err
	}
	if len(n.Content) == 0 {
		return []byte("{}\n"), nil
	}
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(n); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return b.Bytes(), enc.Close()
}

// oneLine are the types whose mappings are written in one line.
var oneLine = []reflect.Type{
	reflect.TypeFor[Listen](), reflect.TypeFor[Backend](), reflect.TypeFor[Check](),
	reflect.TypeFor[Persistence](), reflect.TypeFor[Session](), reflect.TypeFor[Limits](),
	reflect.TypeFor[Log](), reflect.TypeFor[Tunnel](), reflect.TypeFor[FirewallRule](),
	reflect.TypeFor[EAMEntry](), reflect.TypeFor[endpoint](),
}

// Lists of scalars up to this length are written in one line.
const oneLineItems = 16

func encode(v reflect.Value) (*yaml.Node, error) {
	t := v.Type()
	switch {
	case t == targetType:
		return encodeTarget(v.Interface().(Target))
	case t.Kind() == reflect.Pointer:
		return encode(v.Elem())
	case t.Implements(textMarshaler):
		b, err := v.Interface().(encoding.TextMarshaler).MarshalText()
		return text(string(b)), err
	case t.Kind() == reflect.Struct:
		return encodeStruct(v)
	case t.Kind() == reflect.Slice:
		return encodeSlice(v)
	case t.Kind() == reflect.Map:
		return encodeMap(v)
	case v.Kind() == reflect.String:
		return text(v.String()), nil
	case v.Kind() == reflect.Bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!bool", Value: strconv.FormatBool(v.Bool())}, nil
	case v.CanInt():
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatInt(v.Int(), 10)}, nil
	case v.CanUint():
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatUint(v.Uint(), 10)}, nil
	case v.CanFloat():
		return &yaml.Node{Kind: yaml.ScalarNode, Value: strconv.FormatFloat(v.Float(), 'g', -1, 64)}, nil
	}
	return nil, fmt.Errorf("configuration: type %s has no form in YAML", t)
}

// text is a string as a node; the emitter quotes it where a reader would take it
// for something else.
func text(s string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s}
	if number(s) {
		n.Tag = "!!int"
	}
	return n
}

// number reports whether s is a decimal number that every reader takes as the
// same digits; ports look better without quotes.
func number(s string) bool {
	n, err := strconv.ParseUint(s, 10, 31)
	return err == nil && strconv.FormatUint(n, 10) == s
}

func encodeStruct(v reflect.Value) (*yaml.Node, error) {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	if slices.Contains(oneLine, v.Type()) {
		n.Style = yaml.FlowStyle
	}
	for _, f := range layoutOf(v.Type()).fields {
		fv := v.Field(f.index)
		if f.omitempty && (fv.IsZero() || (fv.Kind() == reflect.Slice || fv.Kind() == reflect.Map) && fv.Len() == 0) {
			continue
		}
		value, err := encode(fv)
		if err != nil {
			return nil, err
		}
		if f.omitempty && value.Kind == yaml.MappingNode && len(value.Content) == 0 {
			continue
		}
		n.Content = append(n.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: f.key}, value)
	}
	return n, nil
}

func encodeSlice(v reflect.Value) (*yaml.Node, error) {
	n := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	scalars := true
	for i := range v.Len() {
		item, err := encode(v.Index(i))
		if err != nil {
			return nil, err
		}
		scalars = scalars && item.Kind == yaml.ScalarNode
		n.Content = append(n.Content, item)
	}
	if scalars && v.Len() <= oneLineItems {
		n.Style = yaml.FlowStyle
	}
	return n, nil
}

func encodeMap(v reflect.Value) (*yaml.Node, error) {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	keys := v.MapKeys()
	slices.SortFunc(keys, func(a, b reflect.Value) int { return bytes.Compare([]byte(a.String()), []byte(b.String())) })
	for _, k := range keys {
		value, err := encode(v.MapIndex(k))
		if err != nil {
			return nil, err
		}
		key := text(k.String())
		key.Tag = "!!str"
		n.Content = append(n.Content, key, value)
	}
	return n, nil
}

func encodeTarget(t Target) (*yaml.Node, error) {
	if t.Address.IsValid() {
		return encode(reflect.ValueOf(endpoint{t.Address, t.Port}))
	}
	return encode(reflect.ValueOf(t.Addresses))
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

// IsZero reports whether t names nothing.
func (t Target) IsZero() bool {
	return len(t.Addresses) == 0 && t.Address == netip.Addr{} && t.Port == 0
}
