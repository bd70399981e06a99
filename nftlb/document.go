// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/sluice-lb/sluice/config"
)

// node is a part of a document with ordered keys.
type node struct {
	kind    byte // '{', '[', 's' for text, 0 for numbers and other values, which nftlb skips
	text    string
	members []namedField
	items   []node
}

type namedField struct {
	key  string
	node node
}

// maxDepth bounds how deep a document is nested, and maxMembers the members of an object. The API needs 5
// and fewer than 100.
const (
	maxDepth   = 100
	maxMembers = 1000
)

var errDocument = errors.New("not a JSON document")

// read parses a document that consists of one object or list.
func read(raw []byte) (node, error) {
	if !utf8.Valid(raw) || config.Bounded(raw) != nil {
		return node{}, errDocument
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	n, err := readNode(d, 0)
	if err != nil {
		return node{}, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) || n.kind != '{' && n.kind != '[' {
		return node{}, errDocument
	}
	return n, nil
}

func readNode(d *json.Decoder, depth int) (node, error) {
	if depth > maxDepth {
		return node{}, errDocument
	}
	token, err := d.Token()
	if err != nil {
		return node{}, err
	}
	switch t := token.(type) {
	case string:
		text, _, _ := strings.Cut(t, "\x00") // nftlb is a C program: its strings end at a NUL byte
		return node{kind: 's', text: text}, nil
	case json.Delim:
		n := node{kind: byte(t)}
		for d.More() {
			if t == '[' {
				item, err := readNode(d, depth+1)
				if err != nil {
					return node{}, err
				}
				n.items = append(n.items, item)
				continue
			}
			key, err := d.Token()
			if err != nil {
				return node{}, err
			}
			value, err := readNode(d, depth+1)
			if err != nil {
				return node{}, err
			}
			if n.put(key.(string), value); len(n.members) > maxMembers {
				return node{}, errDocument // put takes time for each member
			}
		}
		_, err := d.Token()
		return n, err
	}
	return node{}, nil
}

// put adds a member. An existing member keeps its position and gets the new value.
func (n *node) put(key string, value node) {
	for i := range n.members {
		if n.members[i].key == key {
			n.members[i].node = value
			return
		}
	}
	n.members = append(n.members, namedField{key, value})
}

// indent is the indentation per level of an answer.
const indent = "        "

// text formats a list of objects under its name in the format of nftlb's answers.
func text(name string, list []object) []byte {
	var b bytes.Buffer
	writeObject(&b, object{{name, list}}, "")
	return b.Bytes()
}

func writeObject(b *bytes.Buffer, o object, margin string) {
	b.WriteString("{")
	for i, m := range o {
		if i > 0 {
			b.WriteString(",")
		}
		b.WriteString("\n" + margin + indent)
		b.Write(quoteJSON(m.key))
		b.WriteString(": ")
		if s, is := m.value.(string); is {
			b.Write(quoteJSON(s))
			continue
		}
		list := m.value.([]object)
		b.WriteString("[")
		for j, item := range list {
			if j > 0 {
				b.WriteString(",")
			}
			b.WriteString("\n" + margin + indent + indent)
			writeObject(b, item, margin+indent+indent)
		}
		if len(list) > 0 {
			b.WriteString("\n" + margin + indent)
		}
		b.WriteString("]")
	}
	b.WriteString("\n" + margin + "}")
}

// quoteJSON returns a JSON string without HTML escaping.
func quoteJSON(s string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // encoding a string never fails
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
