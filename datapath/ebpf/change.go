// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"slices"
	"sort"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/datapath"
)

const maxLines = 300 // of a change that is told line by line

// changes describes what differs between two desired states; have may be nil. lines are told too.
func changes(have, want *desired, lines []string) *datapath.Change {
	c := &datapath.Change{}
	if have == nil {
		have = &desired{}
	}
	note := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for id, w := range want.services {
		old, ok := have.services[id]
		slotChange(c, want, have, id)
		switch {
		case !ok:
			c.Rules.Added++
			note("add service %s", want.names.service[id])
		case old != w:
			c.Rules.Changed++
			note("change service %s", want.names.service[id])
		}
	}
	for id := range have.services {
		if _, ok := want.services[id]; !ok {
			c.Rules.Removed++
			note("remove service %s", have.names.service[id])
		}
	}
	for n, w := range want.backends {
		old, ok := have.backends[n]
		name := want.names.service[uint32(w.Service)] + "/" + want.names.backend[n]
		switch {
		case !ok:
			c.Elements.Added++
			note("add backend %s state %s", name, stateName(w.State))
		case old != w:
			c.Elements.Changed++
			note("change backend %s state %s", name, stateName(w.State))
		}
	}
	for n, w := range have.backends {
		if _, ok := want.backends[n]; !ok {
			c.Elements.Removed++
			note("remove backend %s/%s", have.names.service[uint32(w.Service)], have.names.backend[n])
		}
	}
	sourceChange(&c.Rules, have, want, note)
	common := func(x, y *desired) []uint32 {
		return slices.DeleteFunc(slices.Clone(x.order), func(id uint32) bool { return !slices.Contains(y.order, id) })
	}
	if !slices.Equal(common(have, want), common(want, have)) {
		c.Rules.Changed++
		note("change the order of nat rules")
	}
	tally(&c.Elements, have.listeners, want.listeners, nil)
	tally(&c.Elements, have.ranges, want.ranges, nil)
	tally(&c.Elements, have.doors, want.doors, nil)
	tally(&c.Elements, have.members, want.members, nil)
	tally(&c.Elements, have.hosts, want.hosts, nil)
	tally(&c.Elements, have.prefixes, want.prefixes, nil)
	tally(&c.Elements, have.sessions, want.sessions, nil)
	sort.Strings(lines)
	if len(lines) > maxLines {
		c.Truncated = len(lines) - maxLines
		lines = lines[:maxLines]
	}
	c.Lines = lines
	return c
}

// sourceChange tells which rules that translate sources change. A masquerade rule may be several
// in the table, one for each interface and outside address: it is one for whom is told.
func sourceChange(c *datapath.Count, have, want *desired, note func(format string, args ...any)) {
	was, is := have.sourceParts(), want.sourceParts()
	for name, parts := range is {
		switch before, ok := was[name]; {
		case !ok:
			c.Added++
			note("add nat %s", name)
		case !maps.Equal(before, parts):
			c.Changed++
			note("change nat %s", name)
		}
	}
	for name := range was {
		if _, ok := is[name]; !ok {
			c.Removed++
			note("remove nat %s", name)
		}
	}
}

// sourceParts lists the entries of each such rule by its name.
func (d *desired) sourceParts() map[string]map[uint32]wireNatRule {
	out := map[string]map[uint32]wireNatRule{}
	for id, r := range d.rules {
		name := d.names.source[id]
		if out[name] == nil {
			out[name] = map[uint32]wireNatRule{}
		}
		out[name][id] = r
	}
	return out
}

func slotChange(c *datapath.Change, want, have *desired, id uint32) {
	if slices.Equal(want.slots[id], have.slots[id]) {
		c.SlotsTotal += len(want.slots[id])
		return
	}
	slots := func(x *desired) []string {
		out := make([]string, len(x.slots[id]))
		for i, n := range x.slots[id] {
			out[i] = fmt.Sprint(n)
		}
		return out
	}
	c.SlotsTotal += len(want.slots[id])
	c.Slots += balance.Moved(slots(have), slots(want))
}

func stateName(s uint8) string {
	switch s {
	case BackendUp:
		return "up"
	case BackendDrain:
		return "drain"
	}
	return "down"
}

func tally[K comparable, V comparable](c *datapath.Count, have, want map[K]V, note func(string, K)) {
	if note == nil {
		note = func(string, K) {}
	}
	for k, v := range want {
		old, ok := have[k]
		switch {
		case !ok:
			c.Added++
			note("add", k)
		case old != v:
			c.Changed++
			note("change", k)
		}
	}
	for k := range have {
		if _, ok := want[k]; !ok {
			c.Removed++
			note("remove", k)
		}
	}
}
