// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// triState is yes, no, or unknown if the rules do not determine it.
type triState int

const (
	unknown triState = iota
	yes
	no
)

// owns reports whether an address is the host's own.
func (t *translator) owns(a netip.Addr) triState {
	if t.Addresses == nil {
		return unknown
	}
	for _, list := range t.Addresses {
		if slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Addr() == a }) {
			return yes
		}
	}
	return no
}

// interfaceOf returns the interface with a network that includes an address, or "" if unknown.
func (t *translator) interfaceOf(a netip.Addr) (name string) {
	bits := -1
	for i, list := range t.Addresses {
		for _, p := range list {
			if p.Contains(a) && (p.Bits() > bits || p.Bits() == bits && i < name) {
				name, bits = i, p.Bits()
			}
		}
	}
	return name
}

// isNetwork reports whether a prefix is one network of the host. If addresses are unknown, a prefix
// of up to 1,024 addresses counts as one.
func (t *translator) isNetwork(p netip.Prefix) bool {
	if t.Addresses == nil {
		return p.Addr().BitLen()-p.Bits() <= 10 || p.Addr().Is6() && p.Bits() >= 64
	}
	for _, list := range t.Addresses {
		if slices.ContainsFunc(list, func(a netip.Prefix) bool { return a.Masked() == p.Masked() }) {
			return true
		}
	}
	return false
}

// sourceTranslation describes the source translation of connections to the targets of a group in the postrouting
// chains.
type sourceTranslation struct {
	target netip.Addr
	// all is the path that replaces the source of all connections. pool has its addresses, or is
	// empty for masquerade.
	all  *path
	pool []config.AddressRange
	// guessed is true if the interface towards the target is an assumption.
	guessed bool
	// some has the paths that replace the source of some connections, or possibly of all.
	some   []*path
	object string
}

// wayOut follows the connections of a group to their targets through the postrouting chains.
func (t *translator) wayOut(g *group) (w sourceTranslation) {
	for i, p := range g.paths {
		one := t.wayTo(g, p.rule)
		if i == 0 {
			w = one
		} else if w.all != one.all {
			w.all, w.pool = nil, nil
			w.some = append(w.some, one.some...)
		}
	}
	return w
}

func (t *translator) wayTo(g *group, r *rule) (w sourceTranslation) {
	w.target = r.first
	host := netip.PrefixFrom(r.first, r.first.BitLen())
	v := match{family: g.match.family, src: g.match.src, notSrc: g.match.notSrc, srcSet: g.match.srcSet, proto: g.match.proto, dst: []netip.Prefix{host}, dport: g.match.dport}
	if r.ports.First != 0 && (r.shift == 0 || r.ports.Len() == 1) {
		v.dport = []flow.Ports{r.ports}
	}
	partly := false // some sources are exempt, or replaced by an earlier path
	for _, q := range t.leaving {
		bare := q.match
		bare.out, bare.notOut = nil, nil
		if t.byMark(q) || !bare.mayOverlap(v) {
			continue
		}
		leaves, guessed := t.leavesBy(q, r.first, g)
		if leaves == no {
			continue
		}
		whole := bare.includes(v) && leaves == yes
		switch q.rule.do {
		case doAccept, doReturn:
			if whole {
				return w
			}
			partly = true
		case doMasq, doSNAT:
			if slices.ContainsFunc(q.except, func(e exception) bool { return !e.ends && e.match.mayOverlap(v) }) {
				whole = false
			}
			if whole && !partly && !t.isHairpin(q, r.first) && r.first == r.last && q.rule.ports == (flow.Ports{}) && (q.rule.do == doMasq || q.rule.first.IsValid()) {
				w.all, w.guessed = q, guessed
				if q.rule.do == doSNAT {
					w.pool = []config.AddressRange{{First: q.rule.first, Last: q.rule.last}}
				}
				return w
			}
			partly = true
			w.some = append(w.some, q)
			if whole {
				return w
			}
		}
	}
	return w
}

// leavesBy reports whether packets to a target leave by the interfaces of a path. Guessed is true
// if that is an assumption about routes.
func (t *translator) leavesBy(q *path, target netip.Addr, g *group) (_ triState, guessed bool) {
	m := q.match
	var not []string
	for _, name := range m.notOut {
		if name != "lo" {
			not = append(not, name)
		}
	}
	if len(m.out)+len(not) == 0 {
		return yes, false
	}
	within := func(name string, list []string) bool {
		return slices.ContainsFunc(list, func(x string) bool { return nameWithin(name, x) })
	}
	if i := t.interfaceOf(target); i != "" {
		if (len(m.out) == 0 || within(i, m.out)) && !within(i, not) {
			return yes, false
		}
		return no, false
	}
	if len(not) == 1 && len(m.src) > 0 && slices.ContainsFunc(m.src, func(p netip.Prefix) bool { return p.Contains(target) }) && t.networkOf(not[0], m.src) {
		return no, false
	}
	if m.oneAddress() { // the rule names the target alone
		return yes, true
	}
	// Packets of the group arrive from the outside. Without addresses a private target is inside.
	outside := slices.Concat(g.match.in, t.Outside)
	private := target.IsPrivate() || target.IsLinkLocalUnicast()
	switch {
	case len(m.out) > 0 && private:
		if slices.ContainsFunc(m.out, func(x string) bool { return within(x, outside) }) || len(outside) == 0 && len(m.dst) == 0 && t.Addresses == nil {
			return no, true
		}
	case len(m.out) > 0 && t.Addresses == nil && slices.ContainsFunc(m.out, func(x string) bool { return len(outside) == 0 || within(x, outside) }):
		return yes, true
	case len(not) > 0 && private && slices.ContainsFunc(not, func(x string) bool { return within(x, outside) }):
		return yes, true
	}
	return unknown, true
}

// followWay records the source translation of an object's clients.
func (t *translator) followWay(w sourceTranslation, object string) {
	w.object = object
	t.ways = append(t.ways, &w)
	for _, f := range t.forwards {
		if f.object == object && slices.ContainsFunc(w.some, func(q *path) bool { return q.rule.do != doAccept && t.isHairpin(q, f.target) }) {
			f.hairpin = true
		}
	}
	if w.all != nil {
		t.forwardedTo[w.all] = append(t.forwardedTo[w.all], object)
		for _, r := range w.pool {
			t.noteUnowned(object, w.all.rule, r.First)
		}
	}
}

// noteWays adds notes about sources that the original replaced and the objects do not. A path that
// stays in the source's program still replaces them.
func (t *translator) noteWays() {
	for _, w := range t.ways {
		if q := w.all; q != nil && w.guessed && len(q.match.out)+len(q.match.notOut) > 0 {
			t.d.Changed(w.object, q.rule.line, q.rule.text, "the source of all clients is replaced, because the target is assumed to be behind an interface of this rule",
				"write mode: dnat if the target is behind another interface")
		}
		for _, q := range w.some {
			if !t.taken[q.rule] || t.lost[q.rule] || len(t.forwardedTo[q]) > 0 && slices.Contains(t.forwardedTo[q], w.object) {
				continue
			}
			if t.isHairpin(q, w.target) {
				continue
			}
			reason := "the rule also replaced the source of clients of the target; the object keeps it"
			if len(q.match.out) > 0 && t.interfaceOf(w.target) == "" {
				reason = "if the target is behind " + strings.Join(q.match.out, ", ") + ", the original replaced the source of clients; the object keeps it"
			}
			t.d.Changed(w.object, q.rule.line, q.rule.text, reason, "write mode: fullnat, which replaces the source of all clients, if the target does not route its replies through this host")
		}
	}
}
