// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// String formats the ruleset like "nft list ruleset", in an order that depends on names only.
func (r *Ruleset) String() string {
	var b strings.Builder
	flat := flatten(r.Fragments)
	for _, f := range Families {
		flat.printTable(&b, f)
	}
	return b.String()
}

func (v *view) printTable(b *strings.Builder, f Family) {
	var sets, chains, objects []ID
	for id := range v.sets {
		sets = append(sets, id)
	}
	for id := range v.chains {
		chains = append(chains, id)
	}
	for id := range v.objects {
		objects = append(objects, id)
	}
	byName := func(ids []ID) []ID {
		ids = slices.DeleteFunc(ids, func(id ID) bool { return id.Table != f })
		slices.SortFunc(ids, func(a, b ID) int { return strings.Compare(a.Name, b.Name) })
		return ids
	}
	sets, chains, objects = byName(sets), byName(chains), byName(objects)
	if len(sets)+len(chains)+len(objects) == 0 {
		return
	}
	elements := make(map[ID][]Element)
	for _, e := range v.elements {
		elements[e.Set] = append(elements[e.Set], e.Element)
	}
	fmt.Fprintf(b, "table %s %s {\n", f, TableName)
	for _, id := range objects {
		b.WriteString(v.objects[id].String())
	}
	for _, id := range sets {
		v.sets[id].print(b, elements[id])
	}
	for _, id := range chains {
		v.chains[id].print(b)
	}
	b.WriteString("}\n")
}

func (s *Set) print(b *strings.Builder, elements []Element) {
	fmt.Fprintf(b, "\t%s\n", s.header())
	number := len(s.Key) == 1 && s.Key[0].Host
	slices.SortFunc(elements, func(x, y Element) int {
		if number {
			return cmp.Compare(binary.NativeEndian.Uint32([]byte(x.Key)), binary.NativeEndian.Uint32([]byte(y.Key)))
		}
		if c := strings.Compare(x.Key, y.Key); c != 0 {
			return c
		}
		return strings.Compare(x.End, y.End)
	})
	for i, e := range elements {
		lead, end := "\t\t\t     ", ",\n"
		if i == 0 {
			lead = "\t\telements = { "
		}
		if i == len(elements)-1 {
			end = " }\n"
		}
		b.WriteString(lead + s.Element(e) + end)
	}
	b.WriteString("\t}\n\n")
}

func (s *Set) header() string {
	var b strings.Builder
	word := "set"
	if s.Map() {
		word = "map"
	}
	fmt.Fprintf(&b, "%s %s {\n\t\ttype %s", word, s.Name, typeNames(s.Key))
	switch {
	case s.Verdicts:
		b.WriteString(" : verdict")
	case len(s.Data) > 0:
		b.WriteString(" : " + typeNames(s.Data))
	}
	if s.Size > 0 {
		fmt.Fprintf(&b, "\n\t\tsize %d", s.Size)
	}
	var flags []string
	if s.Interval {
		flags = append(flags, "interval")
	}
	if s.Dynamic {
		flags = append(flags, "dynamic")
	}
	if s.Timeout > 0 {
		flags = append(flags, "timeout")
	}
	if len(flags) > 0 {
		b.WriteString("\n\t\tflags " + strings.Join(flags, ","))
	}
	if s.Timeout > 0 {
		b.WriteString("\n\t\ttimeout " + seconds(s.Timeout))
	}
	if s.Counter {
		b.WriteString("\n\t\tcounter")
	}
	return b.String()
}

func typeNames(types []Type) string {
	names := make([]string, len(types))
	for i, t := range types {
		names[i] = t.Name
	}
	return strings.Join(names, " . ")
}

// Element formats an element of the set.
func (s *Set) Element(e Element) string {
	text := ""
	if e.End != "" {
		text = renderRange(s.Key, e.Key, e.End)
	} else {
		text = Render(s.Key, e.Key)
	}
	switch {
	case s.Verdicts:
		text += " : " + e.Verdict.String()
	case len(s.Data) > 0:
		text += " : " + Render(s.Data, e.Value)
	}
	return text
}

var priorityNames = map[int32]string{-300: "raw", -150: "mangle", -100: "dstnat", 0: "filter", 100: "srcnat"}

func (c *Chain) print(b *strings.Builder) {
	fmt.Fprintf(b, "\tchain %s {\n", c.Name)
	if h := c.Hook; h != nil {
		device := ""
		if h.Device != "" {
			device = fmt.Sprintf(" device %q", h.Device)
		}
		fmt.Fprintf(b, "\t\ttype %s hook %s%s priority %s; policy accept;\n", h.Type, h.Point, device, h.priority())
	}
	for _, r := range c.Rules {
		b.WriteString("\t\t" + r.String() + "\n")
	}
	b.WriteString("\t}\n\n")
}

// priority returns nft's keyword for a priority at a hook, or the number.
func (h *Hook) priority() string {
	name, ok := priorityNames[h.Priority]
	if !ok || name == "dstnat" && h.Point != "prerouting" || name == "srcnat" && h.Point != "postrouting" {
		return fmt.Sprint(h.Priority)
	}
	return name
}

// String formats the rule with its comment.
func (r Rule) String() string {
	if r.Comment == "" {
		return r.Text
	}
	return r.Text + fmt.Sprintf(" comment %q", r.Comment)
}
