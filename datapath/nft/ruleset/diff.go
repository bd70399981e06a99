// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"slices"
)

// ownedElement is an element with the owner of its fragment.
type ownedElement struct {
	Element
	owner string
}

// view is the sum of a list of fragments.
type view struct {
	chains   map[ID]*Chain
	sets     map[ID]*Set
	objects  map[ID]*Object
	elements map[Element]ownedElement
	owners   map[ID]string // of chains, sets and objects; the kinds have separate names
	order    struct{ chains, sets, objects []ID }
	entries  []Element // keys of elements in the order of the fragments
}

func flatten(fragments []*Fragment) *view {
	nc, ns, no, ne := 0, 0, 0, 0
	for _, f := range fragments {
		nc, ns, no, ne = nc+len(f.Chains), ns+len(f.Sets), no+len(f.Objects), ne+len(f.Elements)
	}
	v := &view{
		chains: make(map[ID]*Chain, nc), sets: make(map[ID]*Set, ns),
		objects: make(map[ID]*Object, no), elements: make(map[Element]ownedElement, ne),
		owners:  make(map[ID]string, nc+ns+no),
		entries: make([]Element, 0, ne),
	}
	for _, f := range fragments {
		for _, c := range f.Chains {
			v.chains[c.ID], v.owners[c.ID] = c, f.Owner
			v.order.chains = append(v.order.chains, c.ID)
		}
		for _, s := range f.Sets {
			v.sets[s.ID], v.owners[s.ID] = s, f.Owner
			v.order.sets = append(v.order.sets, s.ID)
		}
		for _, o := range f.Objects {
			v.objects[o.ID], v.owners[o.ID] = o, f.Owner
			v.order.objects = append(v.order.objects, o.ID)
		}
		for _, e := range f.Elements {
			k := e.key()
			v.elements[k] = ownedElement{e, f.Owner}
			v.entries = append(v.entries, k)
		}
	}
	return v
}

// Item is one object of a change with the text of its owner.
type Item[T any] struct {
	Of    T
	Owner string
}

// Delta lists the changes from one ruleset to another, in the order of its fields.
type Delta struct {
	AddTables []Family

	FlushChains []Item[*Chain] // chains of the old ruleset with rules to remove
	DelElements []Item[Element]
	DelChains   []Item[*Chain]
	DelSets     []Item[*Set]
	DelObjects  []Item[*Object]

	AddObjects  []Item[*Object]
	AddSets     []Item[*Set]
	AddChains   []Item[*Chain]
	AddRules    []Item[*Chain] // chains of the new ruleset with rules to write
	AddElements []Item[Element]

	DelTables []Family

	// Sets contains the definition of every set with changed elements.
	Sets map[ID]*Set
	// RulesAdded and RulesRemoved count different rules; a chain is always written completely.
	RulesAdded, RulesRemoved int
}

// Empty reports whether there is no change.
func (d *Delta) Empty() bool {
	return len(d.AddTables)+len(d.FlushChains)+len(d.DelElements)+len(d.DelChains)+len(d.DelSets)+len(d.DelObjects)+
		len(d.AddObjects)+len(d.AddSets)+len(d.AddChains)+len(d.AddRules)+len(d.AddElements)+len(d.DelTables) == 0
}

// Diff returns the changes from old to new. It skips fragments that both contain. old and new may be nil.
func Diff(old, new *Ruleset) *Delta {
	before, after := fragmentsOf(old), fragmentsOf(new)
	d := &Delta{Sets: make(map[ID]*Set)}
	d.tables(before, after)
	known := make(map[*Fragment]bool, len(before))
	for _, f := range before {
		known[f] = true
	}
	var gone, come []*Fragment
	kept := make(map[*Fragment]bool, len(after))
	for _, f := range after {
		if known[f] {
			kept[f] = true
		} else {
			come = append(come, f)
		}
	}
	for _, f := range before {
		if !kept[f] {
			gone = append(gone, f)
		} else if f.Owner == "" {
			d.addFragment(f)
		}
	}
	for _, f := range gone {
		d.addFragment(f)
	}
	for _, f := range come {
		d.addFragment(f)
	}
	gone, come = trim(gone, come)
	a, b := flatten(gone), flatten(come)
	d.sets(a, b)
	d.objects(a, b)
	d.chains(a, b)
	d.elements(a, b)
	return d
}

// trim removes elements at about the same position in the shared fragments of both rulesets: of many elements, one
// may have changed.
func trim(gone, come []*Fragment) (a, b []*Fragment) {
	a, b = slices.Clone(gone), slices.Clone(come)
	shared := func(f *Fragment) bool { return f.Owner == "" }
	i, j := slices.IndexFunc(a, shared), slices.IndexFunc(b, shared)
	for i >= 0 && j >= 0 {
		x, y := *a[i], *b[j]
		if slices.EqualFunc(x.Sets, y.Sets, (*Set).Equal) { // otherwise the sets are recreated with all elements
			x.Elements, y.Elements = withoutEqual(x.Elements, y.Elements)
			a[i], b[j] = &x, &y
		}
		next, more := slices.IndexFunc(a[i+1:], shared), slices.IndexFunc(b[j+1:], shared)
		if next < 0 || more < 0 {
			break
		}
		i, j = i+1+next, j+1+more
	}
	return a, b
}

// withoutEqual removes equal elements from two lists with parallel order.
func withoutEqual(a, b []Element) (x, y []Element) {
	for len(a) > 0 && len(b) > 0 {
		switch {
		case a[0] == b[0]:
			a, b = a[1:], b[1:]
		case len(b) > 1 && a[0] == b[1]:
			y, b = append(y, b[0]), b[1:]
		case len(a) > 1 && a[1] == b[0]:
			x, a = append(x, a[0]), a[1:]
		default:
			x, y, a, b = append(x, a[0]), append(y, b[0]), a[1:], b[1:]
		}
	}
	return append(x, a...), append(y, b...)
}

func fragmentsOf(r *Ruleset) []*Fragment {
	if r == nil {
		return nil
	}
	return r.Fragments
}

func (d *Delta) addFragment(f *Fragment) {
	for _, s := range f.Sets {
		d.Sets[s.ID] = s
	}
}

// tables compares the families in use.
func (d *Delta) tables(before, after []*Fragment) {
	had, has := tablesOf(before), tablesOf(after)
	for _, f := range Families {
		switch {
		case has[f] && !had[f]:
			d.AddTables = append(d.AddTables, f)
		case had[f] && !has[f]:
			d.DelTables = append(d.DelTables, f)
		}
	}
}

// tablesOf returns the families with a chain or a set. Other fragments than the shared ones contain only objects of
// tables that a shared one uses.
func tablesOf(fragments []*Fragment) map[Family]bool {
	t := make(map[Family]bool)
	for _, f := range fragments {
		if f.Owner != "" {
			continue
		}
		for _, c := range f.Chains {
			t[c.Table] = true
		}
		for _, s := range f.Sets {
			t[s.Table] = true
		}
	}
	return t
}

func (d *Delta) sets(a, b *view) {
	for _, id := range a.order.sets {
		if s := b.sets[id]; s == nil || !s.Equal(a.sets[id]) {
			d.DelSets = append(d.DelSets, Item[*Set]{a.sets[id], a.owners[id]})
		}
	}
	for _, id := range b.order.sets {
		if s := a.sets[id]; s == nil || !s.Equal(b.sets[id]) {
			d.AddSets = append(d.AddSets, Item[*Set]{b.sets[id], b.owners[id]})
		}
	}
}

func (d *Delta) objects(a, b *view) {
	same := func(x, y *Object) bool { return x != nil && y != nil && x.Equal(y) }
	for _, id := range a.order.objects {
		if !same(a.objects[id], b.objects[id]) {
			d.DelObjects = append(d.DelObjects, Item[*Object]{a.objects[id], a.owners[id]})
		}
	}
	for _, id := range b.order.objects {
		if !same(a.objects[id], b.objects[id]) {
			d.AddObjects = append(d.AddObjects, Item[*Object]{b.objects[id], b.owners[id]})
		}
	}
}

func (d *Delta) chains(a, b *view) {
	// The removal of a set or object requires the removal of the rules that refer to it. So the chains of its owner
	// are rewritten.
	renewed := make(map[string]bool)
	for _, s := range d.DelSets {
		renewed[s.Owner] = true
	}
	for _, o := range d.DelObjects {
		renewed[o.Owner] = true
	}
	for _, id := range a.order.chains {
		was, is := a.chains[id], b.chains[id]
		switch {
		case is == nil || !sameHook(was.Hook, is.Hook):
			d.FlushChains = append(d.FlushChains, Item[*Chain]{was, a.owners[id]})
			d.DelChains = append(d.DelChains, Item[*Chain]{was, a.owners[id]})
			d.RulesRemoved += len(was.Rules)
		case !slices.EqualFunc(was.Rules, is.Rules, Rule.Equal) || renewed[a.owners[id]]:
			d.FlushChains = append(d.FlushChains, Item[*Chain]{was, a.owners[id]})
			d.AddRules = append(d.AddRules, Item[*Chain]{is, b.owners[id]})
			d.countRules(was.Rules, is.Rules)
		}
	}
	for _, id := range b.order.chains {
		was, is := a.chains[id], b.chains[id]
		if was == nil || !sameHook(was.Hook, is.Hook) {
			d.AddChains = append(d.AddChains, Item[*Chain]{is, b.owners[id]})
			d.AddRules = append(d.AddRules, Item[*Chain]{is, b.owners[id]})
			d.RulesAdded += len(is.Rules)
		}
	}
}

// countRules counts the differences between two lists without their common prefix and suffix.
func (d *Delta) countRules(was, is []Rule) {
	for len(was) > 0 && len(is) > 0 && was[0].Equal(is[0]) {
		was, is = was[1:], is[1:]
	}
	for len(was) > 0 && len(is) > 0 && was[len(was)-1].Equal(is[len(is)-1]) {
		was, is = was[:len(was)-1], is[:len(is)-1]
	}
	d.RulesRemoved += len(was)
	d.RulesAdded += len(is)
}

func sameHook(a, b *Hook) bool {
	return a == nil && b == nil || a != nil && b != nil && *a == *b
}

func (d *Delta) elements(a, b *view) {
	remade := make(map[ID]bool)
	for _, s := range d.DelSets {
		remade[s.Of.ID] = true // its elements are removed with it
	}
	for _, k := range a.entries {
		was := a.elements[k]
		if remade[k.Set] {
			continue
		}
		if is, ok := b.elements[k]; !ok || is.Element != was.Element {
			d.DelElements = append(d.DelElements, Item[Element]{was.Element, was.owner})
		}
	}
	for _, k := range b.entries {
		is := b.elements[k]
		if was, ok := a.elements[k]; !ok || was.Element != is.Element || remade[k.Set] {
			d.AddElements = append(d.AddElements, Item[Element]{is.Element, is.owner})
		}
	}
}
