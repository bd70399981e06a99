// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// path leads from the root of a configuration to a value: keys and indexes. It is built only for
// errors. The YAML tree provides the positions.
type path []step

// step is a key of a mapping, or an index of a sequence when key is empty.
type step struct {
	key   string
	index int
}

func at(key string) path { return path{{key: key}} }

// key returns p with one more key. The result shares nothing with p.
func (p path) key(k string) path { return p.with(step{key: k}) }

// index returns p with one more index. The result shares nothing with p.
func (p path) index(i int) path { return p.with(step{index: i}) }

func (p path) with(s step) path {
	q := make(path, len(p)+1)
	copy(q, p)
	q[len(p)] = s
	return q
}

// within reports whether p is q or lies inside it.
func (p path) within(q path) bool { return len(p) >= len(q) && slices.Equal(p[:len(q)], q) }

// String returns the path in the form "services[0].backends[1].weight".
func (p path) String() string {
	var b strings.Builder
	for _, s := range p {
		switch {
		case s.key == "":
			b.WriteString("[" + strconv.Itoa(s.index) + "]")
		case strings.ContainsAny(s.key, ". []"):
			b.WriteString("[" + strconv.Quote(s.key) + "]")
		default:
			if b.Len() > 0 {
				b.WriteByte('.')
			}
			b.WriteString(s.key)
		}
	}
	return b.String()
}

// setPosition sets e's position from the YAML tree: the position of the value, or of its nearest
// ancestor in the file.
func (e *Error) setPosition(n *yaml.Node) {
	e.Path = e.path.String()
	if e.Line > 0 || n == nil {
		return
	}
	place := n
	for i, s := range e.path {
		n = resolveAlias(n)
		if n == nil {
			break
		}
		key, value := child(n, s)
		if value == nil {
			break
		}
		place, n = value, value
		if key != nil && (e.atKey && i == len(e.path)-1 || value.Kind != yaml.ScalarNode) {
			place = key
		}
	}
	e.setNodePosition(place)
}

func (e *Error) setNodePosition(n *yaml.Node) {
	e.Line, e.Column, e.width = n.Line, n.Column, 1
	if n.Kind == yaml.ScalarNode {
		e.width = utf8.RuneCountInString(n.Value)
		if n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) != 0 {
			e.width += 2
		}
	}
}

// resolveAlias returns the target of an alias.
func resolveAlias(n *yaml.Node) *yaml.Node {
	for n != nil && n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// child returns the value at s and, in a mapping, its key.
func child(n *yaml.Node, s step) (key, value *yaml.Node) {
	switch {
	case n.Kind == yaml.SequenceNode && s.key == "" && s.index < len(n.Content):
		return nil, n.Content[s.index]
	case n.Kind == yaml.MappingNode && s.key != "":
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == s.key {
				return n.Content[i], n.Content[i+1]
			}
		}
	}
	return nil, nil
}

// objectName returns the names of the objects along p: "service web: backend a".
func objectName(c *Config, p path) string {
	var names []string
	for i := 0; i+1 < len(p); i++ {
		if name := objectAt(c, p[:i+2]); name != "" {
			names = append(names, name)
		}
	}
	return strings.Join(names, ": ")
}

// objectAt returns the name of the object at p, or "" if p is no named object.
func objectAt(c *Config, p path) string {
	last, n := p[len(p)-1].index, len(p)
	switch {
	case n == 2 && p[0].key == "services" && last < len(c.Services):
		return named("service", c.Services[last].Name, last)
	case n == 2 && p[0].key == "nat" && last < len(c.NAT):
		return named("NAT rule", c.NAT[last].Name, last)
	case n == 3 && p[0].key == "firewall" && p[1].key == "rules" && last < len(c.Firewall.Rules):
		return named("firewall rule", c.Firewall.Rules[last].Name, last)
	case n == 3 && p[0].key == "firewall" && p[1].key == "sets":
		return "set " + p[2].key
	case n == 4 && p[0].key == "services" && p[1].index < len(c.Services):
		s := &c.Services[p[1].index]
		if p[2].key == "backends" && last < len(s.Backends) {
			return named("backend", s.Backends[last].Name, last)
		}
		if p[2].key == "listen" && last < len(s.Listen) && s.Listen[last].Address.IsValid() {
			return "listener " + s.Listen[last].Address.String()
		}
	}
	return ""
}

func named(kind, name string, index int) string {
	if name == "" {
		return fmt.Sprintf("%s %d", kind, index+1)
	}
	return kind + " " + name
}
