// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"errors"
	"net/netip"
	"slices"
)

// Limits of the walk: a large Kubernetes node has 100,000 rules, and several paths may share a
// chain.
const (
	maxDepth = 32
	maxPaths = 200_000
)

// path is one path of a packet through the rules to an action.
type path struct {
	base  *chain
	place int     // Among the paths of the chain.
	via   []*rule // The jumps.
	rule  *rule   // The last one.
	// match is the conjunction of all conditions; except are packets that a return or accept
	// removed before.
	match  match
	except []exception
	marks  []setMark // marks set by earlier rules
}

// exception is a rule with which packets leave a chain before later rules.
type exception struct {
	rule  *rule
	match match
	ends  bool // leaves the base chain by another path
}

// setMark is a mark that a rule sets on matching packets.
type setMark struct {
	rule  *rule
	match match
	by    *rule // the rule itself, or the last jump
}

// name returns the name from the comment of the path's last rule with one.
func (p *path) name() string {
	if p.rule.name != "" {
		return p.rule.name
	}
	for _, r := range slices.Backward(p.via) {
		if r.name != "" {
			return r.name
		}
	}
	return ""
}

// walker follows chains.
type walker struct {
	set   *ruleset
	base  *chain
	paths []*path
	// ended has the packets that an accept removed from the base chain.
	ended byDestination[exception]
	marks byDestination[setMark]
	open  []*chain // against loops
	// barren has the jumps to chains without a matching rule.
	barren []*rule
	// never has the rules that no packet can reach.
	never []*rule
	err   error
}

// walkChain returns the paths of a base chain in the order in which a packet takes them.
func (s *ruleset) walkChain(base *chain) (*walker, error) {
	w := &walker{set: s, base: base}
	w.walk(base, match{family: base.family}, nil, nil)
	return w, w.err
}

var errTooMany = errors.New("the chains have more than 200,000 paths, or jumps more than 32 deep, as in a loop: import a part of the rules")

// walk follows a chain for packets that match m and none of except.
func (w *walker) walk(c *chain, m match, except []exception, via []*rule) {
	if len(via) > maxDepth || len(w.paths)+len(w.barren)+len(w.never) > maxPaths || slices.Contains(w.open, c) {
		w.err = errTooMany
	}
	if w.err != nil {
		return
	}
	w.open = append(w.open, c)
	defer func() { w.open = w.open[:len(w.open)-1] }()
	c.called = true
	for _, r := range c.rules {
		mm, possible := m.intersect(r.match)
		if !possible {
			w.never = append(w.never, r)
			continue
		}
		switch r.do {
		case doJump, doGoto:
			to := w.set.chains[chainID{c.id.table, r.to}]
			if to == nil || len(to.rules) == 0 {
				w.barren = append(w.barren, r)
				break
			}
			w.walk(to, mm, except, append(slices.Clip(via), r))
			if r.do == doGoto {
				except = append(slices.Clip(except), exception{r, mm, false})
			}
		case doReturn:
			if c == w.base {
				w.addPath(r, mm, except, via)
				w.ended.add(mm, exception{r, mm, true})
			} else {
				except = append(slices.Clip(except), exception{r, mm, false})
			}
		case doAccept:
			w.addPath(r, mm, except, via)
			w.ended.add(mm, exception{r, mm, true})
		case doNothing:
			w.never = append(w.never, r) // the rule has no verdict, for example a counter
		default:
			w.addPath(r, mm, except, via)
			if r.do == doMark {
				by := r
				if len(via) > 0 {
					by = via[len(via)-1]
				}
				w.marks.add(mm, setMark{r, mm, by})
			}
		}
	}
}

func (w *walker) addPath(r *rule, m match, except []exception, via []*rule) {
	all := except
	if w.base.nat { // for a filter, the order of its rules has the same effect
		all = append(slices.Clip(except), w.ended.candidates(m)...)
	}
	var relevant []exception
	for _, e := range all {
		if e.match.mayOverlap(m) {
			relevant = append(relevant, e)
		}
	}
	var marks []setMark
	for _, k := range w.marks.candidates(m) {
		if k.match.mayOverlap(m) {
			marks = append(marks, k)
		}
	}
	w.paths = append(w.paths, &path{base: w.base, place: len(w.paths), via: via, rule: r, match: m, except: relevant, marks: marks})
}

// byDestination is a list with an index by single destination: Kubernetes has thousands of
// addresses with rules of their own.
type byDestination[T any] struct {
	single map[netip.Prefix][]T
	others []T
	all    []T
}

func (l *byDestination[T]) add(m match, x T) {
	l.all = append(l.all, x)
	if !m.oneAddress() {
		l.others = append(l.others, x)
		return
	}
	if l.single == nil {
		l.single = map[netip.Prefix][]T{}
	}
	l.single[m.dst[0]] = append(l.single[m.dst[0]], x)
}

// candidates returns the elements with the destination of a match, and the elements without a single
// destination.
func (l *byDestination[T]) candidates(m match) []T {
	if !m.oneAddress() {
		return l.all
	}
	return append(slices.Clip(l.single[m.dst[0]]), l.others...)
}

func (m match) oneAddress() bool { return len(m.dst) == 1 && m.dst[0].IsSingleIP() }
