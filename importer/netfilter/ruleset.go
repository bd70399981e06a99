// SPDX-License-Identifier: Apache-2.0

// Package netfilter imports the rules of iptables and nftables. It reads both into one form,
// follows the chains as a packet does, and makes NAT rules, services and firewall rules of the
// paths. It is pure.
//
// It has more than 3,000 lines because the two readers share this form, and every rule that is followed
// must be understood by both.
package netfilter

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/flow"
)

// ruleset has the rules of either program.
type ruleset struct {
	chains map[chainID]*chain
	order  []*chain // in the order of declaration
	sets   map[string][]netip.Prefix
	// setLines are the lines of the sets.
	setLines map[string][]int
}

// chainID names a chain.
type chainID struct {
	table string // with its family: "nat", "ip6 nat", "inet fw4"
	name  string
}

// hook is the netfilter hook of a base chain.
type hook string

const (
	hookIngress     hook = "ingress"
	hookPrerouting  hook = "prerouting"
	hookInput       hook = "input"
	hookForward     hook = "forward"
	hookOutput      hook = "output"
	hookPostrouting hook = "postrouting"
)

// chain is a list of rules.
type chain struct {
	id     chainID
	line   int
	family int  // 4, 6, or 0 for both.
	hook   hook // Empty: other rules lead to it.
	nat    bool // of type nat
	early  bool // Before connection tracking.
	drops  bool // Its policy is drop.
	open   bool // Its policy drop became a firewall rule.
	device string
	rules  []*rule
	called bool
}

// verdict is the action of a rule.
type verdict string

const (
	doNothing  verdict = ""
	doAccept   verdict = "accept"
	doDrop     verdict = "drop"
	doReject   verdict = "reject"
	doReturn   verdict = "return"
	doJump     verdict = "jump"
	doGoto     verdict = "goto"
	doDNAT     verdict = "dnat"
	doSNAT     verdict = "snat"
	doMasq     verdict = "masquerade"
	doNetmap   verdict = "netmap"
	doRedirect verdict = "redirect"
	doLog      verdict = "log"
	doMark     verdict = "mark"
	doNotrack  verdict = "notrack"
	doClamp    verdict = "mss-clamp"
	doHelper   verdict = "helper"
	doOther    verdict = "other" // a target without an equivalent
)

// rule is one rule.
type rule struct {
	line int
	text string
	name string // from a comment
	// match has the conditions of the rule.
	match match
	do    verdict
	to    string // the chain of jump and goto
	// target of a translation.
	addresses []netip.Prefix // of netmap
	first     netip.Addr
	last      netip.Addr
	ports     flow.Ports // Zero: kept.
	shift     uint16     // The port that leads to the first of ports, the next to the next; 0 is none.
	random    bool
	// reset: reject answers TCP with a reset. unreachable: with port unreachable.
	reset       bool
	unreachable bool
	log         logLine
	mark        uint32
	mask        uint32 // of mark: 0 is all bits
	helper      string
	// lost are parts of the rule that have no equivalent and do not change which packets match:
	// each with what to write instead.
	lost []missingPart
}

// missingPart is a part of a rule that has no equivalent.
type missingPart struct {
	text, next string
	// effect is the consequence of leaving the part out.
	effect string
}

type logLine struct {
	prefix string
	level  string
}

// match is a conjunction of conditions; the zero value matches all.
type match struct {
	family int // 4 or 6, 0 for both
	// in and out are alternative interface names; a final * matches all names with that
	// beginning; nil is any. notIn and notOut exclude names.
	in, out       []string
	notIn, notOut []string
	// The source is in one of src (nil: any) and in none of notSrc; the destination likewise.
	src, dst       []netip.Prefix
	notSrc, notDst []netip.Prefix
	srcSet, dstSet string
	// dstLocal: the destination is an address of the host; srcLocal: the source is.
	dstLocal, srcLocal bool
	proto              flow.Protocol
	sport, dport       []flow.Ports // alternatives, nil is any
	mark, notMark      *packetMark
	rate               string // at most that much, of limit
	burst              int
	// share is the fraction of packets that a statistic or numgen condition selects; 0 means all.
	share    float64
	inOrder  bool // The fraction is selected by count, not at random.
	remember int  // Seconds: clients that were seen within that time (recent --rcheck).
	// other are conditions that have no equivalent.
	other []string
	never bool // no packet matches
}

// packetMark is a packet mark with its mask.
type packetMark struct{ value, mask uint32 }

// intersect returns the conjunction of both; possible is false when no packet matches.
func (m match) intersect(o match) (_ match, possible bool) {
	r := m
	possible = true
	unless := func(ok bool) { possible = possible && ok }
	if m.family != 0 && o.family != 0 {
		unless(m.family == o.family)
	} else {
		r.family = m.family + o.family
	}
	r.in, r.out = intersectLists(m.in, o.in, narrowName, unless), intersectLists(m.out, o.out, narrowName, unless)
	r.notIn, r.notOut = union(m.notIn, o.notIn), union(m.notOut, o.notOut)
	r.in, r.out = removeNames(r.in, r.notIn, unless), removeNames(r.out, r.notOut, unless)
	r.src, r.dst = intersectLists(m.src, o.src, narrowPrefix, unless), intersectLists(m.dst, o.dst, narrowPrefix, unless)
	r.notSrc, r.notDst = union(m.notSrc, o.notSrc), union(m.notDst, o.notDst)
	r.src, r.dst = removeInside(r.src, r.notSrc, unless), removeInside(r.dst, r.notDst, unless)
	r.srcSet, r.dstSet = oneOf(&r, m.srcSet, o.srcSet, "source set "), oneOf(&r, m.dstSet, o.dstSet, "destination set ")
	r.dstLocal, r.srcLocal = m.dstLocal || o.dstLocal, m.srcLocal || o.srcLocal
	if m.proto != flow.Any && o.proto != flow.Any {
		unless(m.proto == o.proto)
	} else {
		r.proto = m.proto + o.proto
	}
	r.sport, r.dport = intersectLists(m.sport, o.sport, narrowPorts, unless), intersectLists(m.dport, o.dport, narrowPorts, unless)
	if r.mark == nil {
		r.mark = o.mark
	} else if o.mark != nil && *o.mark != *r.mark {
		r.other = append(slices.Clone(r.other), "two marks")
	}
	if r.notMark == nil {
		r.notMark = o.notMark
	}
	if r.rate == "" {
		r.rate, r.burst = o.rate, o.burst
	} else if o.rate != "" {
		r.other = append(slices.Clone(r.other), "limit "+o.rate)
	}
	if r.share == 0 {
		r.share, r.inOrder = o.share, o.inOrder
	} else if o.share != 0 {
		r.share *= o.share
	}
	r.remember = max(m.remember, o.remember)
	r.other = union(r.other, o.other)
	r.never = m.never || o.never
	return r, possible && !r.never
}

func oneOf(r *match, a, b, what string) string {
	if a != "" && b != "" && a != b {
		r.other = append(slices.Clone(r.other), what+b)
	}
	if a != "" {
		return a
	}
	return b
}

// intersectLists returns the intersection of two lists of alternatives; nil is everything.
func intersectLists[T comparable](a, b []T, narrow func(T, T) (T, bool), unless func(bool)) []T {
	if len(a) == 0 {
		return b
	}
	if len(b) == 0 {
		return a
	}
	var list []T
	for _, x := range a {
		for _, y := range b {
			if z, ok := narrow(x, y); ok && !slices.Contains(list, z) {
				list = append(list, z)
			}
		}
	}
	unless(len(list) > 0)
	return list
}

// removeInside removes prefixes inside one of not from a list of alternatives.
func removeInside(list, not []netip.Prefix, unless func(bool)) []netip.Prefix {
	if len(list) == 0 || len(not) == 0 {
		return list
	}
	var kept []netip.Prefix
	for _, p := range list {
		if !slices.ContainsFunc(not, func(n netip.Prefix) bool { return containsPrefix(p, n) }) {
			kept = append(kept, p)
		}
	}
	unless(len(kept) > 0)
	return kept
}

// removeNames removes names from a list of alternatives.
func removeNames(list, not []string, unless func(bool)) []string {
	if len(list) == 0 || len(not) == 0 {
		return list
	}
	var kept []string
	for _, n := range list {
		if !slices.ContainsFunc(not, func(x string) bool { return nameWithin(n, x) }) {
			kept = append(kept, n)
		}
	}
	unless(len(kept) > 0)
	return kept
}

func union[T comparable](a, b []T) []T {
	if len(b) == 0 {
		return a
	}
	list := slices.Clone(a)
	for _, x := range b {
		if !slices.Contains(list, x) {
			list = append(list, x)
		}
	}
	return list
}

// nameWithin reports whether every interface that a names is also named by b.
func nameWithin(a, b string) bool {
	if n := len(b); n > 0 && b[n-1] == '*' {
		return len(a) >= n-1 && a[:n-1] == b[:n-1]
	}
	return a == b
}

func narrowName(a, b string) (string, bool) {
	switch {
	case nameWithin(a, b):
		return a, true
	case nameWithin(b, a):
		return b, true
	}
	return "", false
}

func containsPrefix(a, b netip.Prefix) bool { return a.Bits() >= b.Bits() && b.Contains(a.Addr()) }

func narrowPrefix(a, b netip.Prefix) (netip.Prefix, bool) {
	switch {
	case containsPrefix(a, b):
		return a, true
	case containsPrefix(b, a):
		return b, true
	}
	return netip.Prefix{}, false
}

func narrowPorts(a, b flow.Ports) (flow.Ports, bool) {
	r := flow.Ports{First: max(a.First, b.First), Last: min(a.Last, b.Last)}
	return r, r.First <= r.Last
}

// mayOverlap reports whether a packet can match both. Conditions without an equivalent count as
// true.
func (m match) mayOverlap(o match) bool {
	_, possible := m.intersect(o)
	return possible
}

// includes reports whether every packet that o matches is matched by m. It is false in doubt.
func (m match) includes(o match) bool {
	within := func(a, b []netip.Prefix) bool { // a is a subset of b
		return len(b) == 0 || len(a) > 0 && !slices.ContainsFunc(a, func(x netip.Prefix) bool {
			return !slices.ContainsFunc(b, func(y netip.Prefix) bool { return containsPrefix(x, y) })
		})
	}
	names := func(a, b []string) bool {
		return len(b) == 0 || len(a) > 0 && !slices.ContainsFunc(a, func(x string) bool {
			return !slices.ContainsFunc(b, func(y string) bool { return nameWithin(x, y) })
		})
	}
	ports := func(a, b []flow.Ports) bool {
		return len(b) == 0 || len(a) > 0 && !slices.ContainsFunc(a, func(x flow.Ports) bool {
			return !slices.ContainsFunc(b, func(y flow.Ports) bool { return y.First <= x.First && x.Last <= y.Last })
		})
	}
	subset := func(need, have []netip.Prefix) bool {
		return !slices.ContainsFunc(need, func(x netip.Prefix) bool { return !slices.Contains(have, x) })
	}
	return !m.never && (m.family == 0 || m.family == o.family) && names(o.in, m.in) && names(o.out, m.out) &&
		namesIn(m.notIn, o.notIn) && namesIn(m.notOut, o.notOut) &&
		within(o.src, m.src) && within(o.dst, m.dst) && subset(m.notSrc, o.notSrc) && subset(m.notDst, o.notDst) &&
		(m.srcSet == "" || m.srcSet == o.srcSet) && (m.dstSet == "" || m.dstSet == o.dstSet) &&
		(!m.dstLocal || o.dstLocal) && (!m.srcLocal || o.srcLocal) && (m.proto == flow.Any || m.proto == o.proto) &&
		ports(o.sport, m.sport) && ports(o.dport, m.dport) && m.mark == nil && m.notMark == nil && m.rate == "" && m.share == 0 &&
		m.remember == 0 && len(m.other) == 0
}

func namesIn(need, have []string) bool {
	return !slices.ContainsFunc(need, func(x string) bool { return !slices.Contains(have, x) })
}

// stateCondition matches a condition on the connection state, as the readers write it.
var stateCondition = regexp.MustCompile(`^(?:-m (?:conntrack --ctstate|state --state)|ct state(?: in)?) (?:\{ )?([\w, ]+?)(?: \})?$`)

// ofNew removes state conditions that are true for every packet in a nat chain, which sees only the
// first packet of a connection. A condition on another state makes the match empty.
func (m *match) ofNew() {
	var kept []string
	for _, c := range m.other {
		s := stateCondition.FindStringSubmatch(c)
		if s == nil {
			kept = append(kept, c)
			continue
		}
		states := strings.FieldsFunc(strings.ToLower(s[1]), func(r rune) bool { return r == ',' || r == ' ' })
		switch {
		case slices.Contains(states, "new"):
		case slices.Contains(states, "related"):
			kept = append(kept, c)
		default:
			m.never = true
		}
	}
	m.other = kept
}
