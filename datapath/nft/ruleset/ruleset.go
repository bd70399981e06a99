// SPDX-License-Identifier: Apache-2.0

// Package ruleset represents nf_tables rulesets as Go values: tables, chains, rules, sets, maps and elements. It
// formats them like "nft list ruleset", encodes their expressions for the kernel, and computes the changes between
// two rulesets. It is pure and does not access the kernel.
package ruleset

import (
	"time"
)

// Family is the nf_tables family of a table. All tables of Sluice are named TableName, so a family identifies a
// table.
type Family uint8

// Families; the numbers are the kernel's NFPROTO_*.
const (
	Inet   Family = 1
	IP     Family = 2
	Netdev Family = 5
	IP6    Family = 10
)

// TableName is the name of every table that Sluice owns.
const TableName = "sluice"

// Families lists the families in the order in which tables are printed.
var Families = []Family{IP, IP6, Inet, Netdev}

// String returns the family's name in nft's words.
func (f Family) String() string {
	switch f {
	case Inet:
		return "inet"
	case IP:
		return "ip"
	case Netdev:
		return "netdev"
	case IP6:
		return "ip6"
	}
	return "unknown"
}

// Ruleset is a complete desired state. Every object belongs to one fragment, so that an error can name the affected
// owner. Fragments are immutable and compared by pointer first, so a change to one service is found without
// inspecting the others.
type Ruleset struct {
	Fragments []*Fragment
}

// Fragment is the contribution of one service or rule to the ruleset.
type Fragment struct {
	// Owner in words for messages: "service web", "nat office"; empty for shared objects.
	Owner    string
	Chains   []*Chain
	Sets     []*Set
	Objects  []*Object
	Elements []Element
}

// ID names a chain, set or object within the tables of Sluice.
type ID struct {
	Table Family
	Name  string
}

// Chain is a list of rules. Base chains have a Hook.
type Chain struct {
	ID
	Hook  *Hook
	Rules []Rule
}

// Hook attaches a base chain to a point of the packet's path.
type Hook struct {
	Type     string // Filter, nat.
	Point    string // Prerouting, input, forward, output, postrouting, ingress.
	Priority int32
	Device   string // ingress only
}

// Rule is one line of a chain.
type Rule struct {
	Text  string
	Exprs string // netlink attributes of NFTA_RULE_EXPRESSIONS, without its header
	// Comment is stored in the kernel with the rule; nft prints it.
	Comment string
	// Read marks a rule read from the kernel. Its Exprs contain additional attributes (defaults, counts), and Text is
	// empty.
	Read bool
}

// Equal reports whether the two rules have the same effect. A rule read from the kernel must contain every attribute
// of the compiled rule.
func (r Rule) Equal(o Rule) bool {
	switch {
	case r.Comment != o.Comment:
		return false
	case r.Read == o.Read:
		return r.Exprs == o.Exprs
	case r.Read:
		return contains(r.Exprs, o.Exprs)
	}
	return contains(o.Exprs, r.Exprs)
}

// Set is a set or, with Data or Verdicts, a map.
type Set struct {
	ID
	Key      []Type
	Data     []Type // Values of a map.
	Verdicts bool   // Values are verdicts.
	Interval bool   // Keys are ranges.
	// Dynamic sets are filled by packets; Diff ignores their elements.
	Dynamic bool
	// Timeout of elements added by packets; 0 for none.
	Timeout time.Duration
	// Size bounds the number of elements; 0 for no bound.
	Size int
	// Counter adds a packet and byte counter to every element.
	Counter bool
}

// Map reports whether elements have values.
func (s *Set) Map() bool { return s.Verdicts || len(s.Data) > 0 }

// Equal reports whether the two definitions are equal in the kernel.
func (s *Set) Equal(o *Set) bool {
	return s.ID == o.ID && keyType(s.Key) == keyType(o.Key) && keyType(s.Data) == keyType(o.Data) &&
		Width(s.Key) == Width(o.Key) && s.Verdicts == o.Verdicts && s.Interval == o.Interval &&
		s.Dynamic == o.Dynamic && s.Timeout == o.Timeout && s.Size == o.Size && s.Counter == o.Counter
}

// Element is one entry of a set. Keys and values are the kernel's bytes: network byte order except for types marked
// Host, every field of a concatenation padded to four bytes.
type Element struct {
	Set     ID
	Key     string
	End     string // Last key of a range, inclusive; empty outside interval sets.
	Value   string // of a map
	Verdict Verdict
}

// key identifies the element within all sets.
func (e Element) key() Element { return Element{Set: e.Set, Key: e.Key, End: e.End} }

// Verdict is the action of a rule on a packet.
type Verdict struct {
	Code  int32
	Chain string // for Jump and Goto
}

// Verdict codes of the kernel (enum nft_verdicts and NF_*).
const (
	Drop   int32 = 0
	Accept int32 = 1
	Jump   int32 = -3
	Goto   int32 = -4
	Return int32 = -5
)
