// SPDX-License-Identifier: Apache-2.0

package ruleset

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestDiffLeadsToTheOther applies the delta of two random rulesets to the first,
// in the order that the fields of Delta promise, and expects the second.
func TestDiffLeadsToTheOther(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		old, want := randomRuleset(t, "old"), randomRuleset(t, "new")
		// Fragments that both share must not be looked at.
		if rapid.Bool().Draw(t, "shared") && len(old.Fragments) > 1 && len(want.Fragments) > 1 {
			want.Fragments[1] = old.Fragments[1]
		}
		got := apply(old, Diff(old, want))
		if got != text(flatten(want.Fragments)) {
			t.Fatalf("got\n%s\nwant\n%s", got, text(flatten(want.Fragments)))
		}
		if d := Diff(want, want); !d.Empty() {
			t.Fatalf("a ruleset differs from itself: %+v", d)
		}
	})
}

// randomRuleset has a shared fragment with a map and up to three owners.
func randomRuleset(t *rapid.T, label string) *Ruleset {
	draw := func(n int) int { return rapid.IntRange(0, n).Draw(t, label) }
	shared := ID{IP, "shared"}
	r := &Ruleset{Fragments: []*Fragment{{
		Sets:   []*Set{{ID: shared, Key: []Type{Mark}, Data: []Type{Mark}}},
		Chains: []*Chain{{ID: ID{IP, "base"}, Hook: &Hook{Type: "filter", Point: "forward", Priority: int32(draw(1))}}},
	}}}
	for owner := range 3 {
		f := &Fragment{Owner: fmt.Sprint("service ", owner)}
		for c := range draw(2) {
			chain := &Chain{ID: ID{IP, fmt.Sprint(owner, "/", c)}}
			for range draw(2) {
				chain.Rules = append(chain.Rules, NewRule().SetMark(uint32(draw(1))).Rule(""))
			}
			f.Chains = append(f.Chains, chain)
		}
		if draw(1) == 1 {
			f.Sets = append(f.Sets, &Set{ID: ID{IP, fmt.Sprint(owner, "/set")}, Key: []Type{Mark}, Size: draw(1)})
			f.Elements = append(f.Elements, Element{Set: f.Sets[0].ID, Key: Number(uint32(draw(1))).Raw})
		}
		for e := range draw(3) {
			f.Elements = append(f.Elements, Element{Set: shared, Key: Number(uint32(10*owner + e)).Raw, Value: Number(uint32(draw(1))).Raw})
		}
		r.Fragments = append(r.Fragments, f)
	}
	return r
}

// apply plays the kernel.
func apply(r *Ruleset, d *Delta) string {
	v := flatten(r.Fragments)
	for _, c := range d.FlushChains {
		v.chains[c.Of.ID] = &Chain{ID: c.Of.ID, Hook: c.Of.Hook}
	}
	for _, e := range d.DelElements {
		delete(v.elements, e.Of.key())
	}
	for _, s := range d.DelSets {
		delete(v.sets, s.Of.ID)
		maps.DeleteFunc(v.elements, func(k Element, _ ownedElement) bool { return k.Set == s.Of.ID })
	}
	for _, c := range d.DelChains {
		delete(v.chains, c.Of.ID)
	}
	for _, s := range d.AddSets {
		v.sets[s.Of.ID] = s.Of
	}
	for _, c := range append(d.AddChains, d.AddRules...) {
		v.chains[c.Of.ID] = c.Of
	}
	for _, e := range d.AddElements {
		v.elements[e.Of.key()] = ownedElement{Element: e.Of}
	}
	return text(v)
}

// text is everything in a view, sorted.
func text(v *view) string {
	var lines []string
	for id, c := range v.chains {
		lines = append(lines, fmt.Sprintf("chain %v %+v %q", id, c.Hook, c.Rules))
	}
	for id, s := range v.sets {
		lines = append(lines, fmt.Sprintf("set %v %d", id, s.Size))
	}
	for _, e := range v.elements {
		lines = append(lines, fmt.Sprintf("element %+v", e.Element))
	}
	slices.Sort(lines)
	out := ""
	for _, l := range lines {
		out += l + "\n"
	}
	return out
}

func TestRulesReadBackMayHoldMore(t *testing.T) {
	written := NewRule().Counter().SetMark(1).Rule("c")
	var a Attrs
	a.expr("counter", func(a *Attrs) { a.Uint64(1, 7) })
	a.immediate(0, Number(1).Raw)
	a.metaStore(3, 0)
	read := Rule{Exprs: string(a), Comment: "c", Read: true}
	if !written.Equal(read) || !read.Equal(written) {
		t.Error("a counter that has counted makes a rule another one")
	}
	other := NewRule().Counter().SetMark(2).Rule("c")
	more := Rule{Exprs: string(a) + string(a), Comment: "c", Read: true}
	if other.Equal(read) || written.Equal(more) || written.Equal(Rule{Exprs: string(a), Read: true}) {
		t.Error("rules that differ are equal")
	}
}
