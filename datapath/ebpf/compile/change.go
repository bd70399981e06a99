// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"maps"
	"slices"
	"sort"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

const maxLines = 300 // limit of the lines that describe one change

// Changes describes the difference between two desired states and appends it to lines. have may be
// nil.
func Changes(have, want *Desired, lines []string) *datapath.Change {
	c := &datapath.Change{}
	if have == nil {
		have = &Desired{}
	}
	note := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for id, w := range want.Services {
		old, ok := have.Services[id]
		slotChange(c, want, have, id)
		switch {
		case !ok:
			c.Rules.Added++
			note("add service %s", want.Names.Service[id])
		case old != w:
			c.Rules.Changed++
			note("change service %s", want.Names.Service[id])
		}
	}
	for id := range have.Services {
		if _, ok := want.Services[id]; !ok {
			c.Rules.Removed++
			note("remove service %s", have.Names.Service[id])
		}
	}
	for n, w := range want.Backends {
		old, ok := have.Backends[n]
		name := want.Names.Service[uint32(w.Service)] + "/" + want.Names.Backend[n]
		switch {
		case !ok:
			c.Elements.Added++
			note("add backend %s state %s", name, stateName(w.State))
		case old != w:
			c.Elements.Changed++
			note("change backend %s state %s", name, stateName(w.State))
		}
	}
	for n, w := range have.Backends {
		if _, ok := want.Backends[n]; !ok {
			c.Elements.Removed++
			note("remove backend %s/%s", have.Names.Service[uint32(w.Service)], have.Names.Backend[n])
		}
	}
	sourceChange(&c.Rules, have, want, note)
	common := func(x, y *Desired) []uint32 {
		return slices.DeleteFunc(slices.Clone(x.Order), func(id uint32) bool { return !slices.Contains(y.Order, id) })
	}
	if !slices.Equal(common(have, want), common(want, have)) {
		c.Rules.Changed++
		note("change the order of nat rules")
	}
	tally(&c.Elements, have.Listeners, want.Listeners, nil)
	tally(&c.Elements, have.Ranges, want.Ranges, nil)
	tally(&c.Elements, have.IfaceListeners, want.IfaceListeners, nil)
	tally(&c.Elements, have.Members, want.Members, nil)
	tally(&c.Elements, have.Hosts, want.Hosts, nil)
	for g, prefixes := range want.Denied {
		deniedChange(&c.Elements, have.Denied[g], prefixes)
	}
	for g, prefixes := range have.Denied {
		if want.Denied[g] == nil {
			c.Elements.Removed += len(prefixes)
		}
	}
	tally(&c.Elements, have.Prefixes, want.Prefixes, nil)
	tally(&c.Elements, have.Sessions, want.Sessions, nil)
	sort.Strings(lines)
	if len(lines) > maxLines {
		c.Truncated = len(lines) - maxLines
		lines = lines[:maxLines]
	}
	c.Lines = lines
	return c
}

// sourceChange counts changes of rules that translate sources. A masquerade rule may have several
// table entries, one per interface and outside address. The operator sees them as one rule.
func sourceChange(c *datapath.Count, have, want *Desired, note func(format string, args ...any)) {
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

// sourceParts groups the entries of d.Rules by the name of the configured rule.
func (d *Desired) sourceParts() map[string]map[uint32]wire.NatRule {
	out := map[string]map[uint32]wire.NatRule{}
	for id, r := range d.Rules {
		name := d.Names.Source[id]
		if out[name] == nil {
			out[name] = map[uint32]wire.NatRule{}
		}
		out[name][id] = r
	}
	return out
}

func slotChange(c *datapath.Change, want, have *Desired, id uint32) {
	if slices.Equal(want.Slots[id], have.Slots[id]) {
		c.SlotsTotal += len(want.Slots[id])
		return
	}
	slots := func(x *Desired) []string {
		out := make([]string, len(x.Slots[id]))
		for i, n := range x.Slots[id] {
			out[i] = fmt.Sprint(n)
		}
		return out
	}
	c.SlotsTotal += len(want.Slots[id])
	c.Slots += balance.Moved(slots(have), slots(want))
}

func stateName(s uint8) string {
	switch s {
	case wire.BackendUp:
		return "up"
	case wire.BackendDrain:
		return "drain"
	}
	return "down"
}

// deniedChange counts the changes between two sorted lists.
func deniedChange(c *datapath.Count, have, want []wire.DeniedPrefix) {
	for len(have) > 0 && len(want) > 0 {
		order := have[0].Compare(want[0])
		if order <= 0 {
			have = have[1:]
		}
		if order >= 0 {
			want = want[1:]
		}
		if order < 0 {
			c.Removed++
		} else if order > 0 {
			c.Added++
		}
	}
	c.Removed += len(have)
	c.Added += len(want)
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
