// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// describe returns a delta as nft commands, at most limit lines.
func describe(d *ruleset.Delta, limit int) []string {
	l := &lines{limit: limit}
	for _, f := range d.AddTables {
		l.add("add table %s %s", f, ruleset.TableName)
	}
	for _, c := range d.FlushChains {
		l.add("flush chain %s", object(c.Of.ID))
	}
	for _, e := range d.DelElements {
		l.add("delete element %s { %s }", object(e.Of.Set), elementText(d, e.Of))
	}
	for _, s := range d.DelSets {
		l.add("delete %s %s", setWord(s.Of), object(s.Of.ID))
	}
	for _, c := range d.DelChains {
		l.add("delete chain %s", object(c.Of.ID))
	}
	for _, o := range d.DelObjects {
		l.add("delete %s %s", o.Of.Kind, object(o.Of.ID))
	}
	for _, o := range d.AddObjects {
		l.add("add %s %s", o.Of.Kind, object(o.Of.ID))
	}
	for _, s := range d.AddSets {
		l.add("add %s %s", setWord(s.Of), object(s.Of.ID))
	}
	for _, c := range d.AddChains {
		l.add("add chain %s", object(c.Of.ID))
	}
	for _, c := range d.AddRules {
		for _, r := range c.Of.Rules {
			l.add("add rule %s %s", object(c.Of.ID), r.String())
		}
	}
	for _, e := range d.AddElements {
		l.add("add element %s { %s }", object(e.Of.Set), elementText(d, e.Of))
	}
	for _, f := range d.DelTables {
		l.add("delete table %s %s", f, ruleset.TableName)
	}
	return l.text
}

type lines struct {
	text  []string
	limit int
}

func (l *lines) add(format string, args ...any) {
	if len(l.text) < l.limit {
		l.text = append(l.text, fmt.Sprintf(format, args...))
	}
}

// lineCount returns the number of lines that describe would return without a limit.
func lineCount(d *ruleset.Delta) int {
	n := len(d.AddTables) + len(d.FlushChains) + len(d.DelElements) + len(d.DelSets) + len(d.DelChains) + len(d.DelObjects) +
		len(d.AddObjects) + len(d.AddSets) + len(d.AddChains) + len(d.AddElements) + len(d.DelTables)
	for _, c := range d.AddRules {
		n += len(c.Of.Rules)
	}
	return n
}

func object(id ruleset.ID) string {
	return id.Table.String() + " " + ruleset.TableName + " " + id.Name
}

func setWord(s *ruleset.Set) string {
	if s.Map() {
		return "map"
	}
	return "set"
}

func elementText(d *ruleset.Delta, e ruleset.Element) string {
	if s := d.Sets[e.Set]; s != nil {
		return s.Element(e)
	}
	return fmt.Sprintf("%x", e.Key)
}
