// SPDX-License-Identifier: Apache-2.0

package draft

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Value is a JSON value with its line number.
type Value struct {
	Line int
	// Text of a string, a number, true, false or null; empty for others.
	Text string
	// IsString reports whether Text was quoted.
	IsString bool
	// Fields of an object in the order of the text, Items of an array.
	Fields []Field
	Items  []*Value
	kind   byte // '{', '[', or 0
}

// Field is one key of an object.
type Field struct {
	Key   string
	Value *Value
}

// maxDepth is the maximum nesting of values.
const maxDepth = 64

// JSON parses all values of a text in sequence.
func JSON(text string) (list []*Value, err error) {
	p := &jsonReader{Decoder: json.NewDecoder(strings.NewReader(text)), text: text, line: 1}
	p.UseNumber()
	for {
		t, err := p.Token()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, p.positionedError(err)
		}
		v, err := p.value(t, 0)
		if err != nil {
			return nil, p.positionedError(err)
		}
		list = append(list, v)
	}
}

type jsonReader struct {
	*json.Decoder
	text     string
	at, line int // offset and line of the last count
}

func (p *jsonReader) positionedError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the text is incomplete")
	}
	return fmt.Errorf("line %d: not JSON: %w", p.currentLine(), err)
}

// currentLine returns the current line.
func (p *jsonReader) currentLine() int {
	to := min(int(p.InputOffset()), len(p.text))
	p.line += strings.Count(p.text[p.at:to], "\n")
	p.at = to
	return p.line
}

func (p *jsonReader) value(t json.Token, depth int) (*Value, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("values are nested more than %d deep", maxDepth)
	}
	v := &Value{Line: p.currentLine()}
	switch t := t.(type) {
	case json.Delim:
		v.kind = byte(t)
		for p.More() {
			key := ""
			if v.kind == '{' {
				k, err := p.Token()
				if err != nil {
					return nil, err
				}
				key, _ = k.(string)
			}
			next, err := p.Token()
			if err != nil {
				return nil, err
			}
			inner, err := p.value(next, depth+1)
			if err != nil {
				return nil, err
			}
			if v.kind == '{' {
				v.Fields = append(v.Fields, Field{key, inner})
			} else {
				v.Items = append(v.Items, inner)
			}
		}
		_, err := p.Token() // the closing bracket
		return v, err
	case string:
		v.Text, v.IsString = t, true
	case nil:
		v.Text = "null"
	default:
		v.Text = fmt.Sprint(t)
	}
	return v, nil
}

// Get returns the value of a key. It returns nil if the key is missing or v is not an object.
func (v *Value) Get(keys ...string) *Value {
	for _, key := range keys {
		if v == nil {
			return nil
		}
		var next *Value
		for _, f := range v.Fields {
			if f.Key == key {
				next = f.Value
			}
		}
		v = next
	}
	return v
}

// Str returns the text of a string, a number or a truth value, "" for null and others.
func (v *Value) Str() string {
	if v == nil || v.Text == "null" && !v.IsString {
		return ""
	}
	return v.Text
}

// IsObject reports whether the value is an object.
func (v *Value) IsObject() bool { return v != nil && v.kind == '{' }

// IsArray reports whether the value is an array.
func (v *Value) IsArray() bool { return v != nil && v.kind == '[' }

// List returns the items of an array, or any other value as the only item.
func (v *Value) List() []*Value {
	switch {
	case v == nil:
		return nil
	case v.IsArray():
		return v.Items
	}
	return []*Value{v}
}
