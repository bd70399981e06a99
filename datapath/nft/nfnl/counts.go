// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// EachCount calls visit with the counter of every rule of Sluice that has one.
func (c *Conn) EachCount(visit func(chain ruleset.ID, n Counts)) error {
	for _, family := range ruleset.Families {
		err := c.dumpConsistent(unix.NFT_MSG_GETRULE, family, tableFilter(unix.NFTA_RULE_TABLE), func(family uint8, attrs []byte) {
			id, rule, ok := decodeRule(family, attrs)
			if n, counted := countOf(rule.Exprs); ok && counted {
				visit(id, n)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// dumpConsistent repeats a dump until it belongs to one generation, and calls visit for its answers. A missing table
// has no answers.
func (c *Conn) dumpConsistent(msg int, family ruleset.Family, filter []byte, visit func(uint8, []byte)) error {
	type answer struct {
		family uint8
		attrs  []byte
	}
	var answers []answer
	err := c.retry(func() error {
		answers = answers[:0]
		return c.dump(msg, unix.NLM_F_DUMP, uint8(family), filter, func(f uint8, attrs []byte) {
			answers = append(answers, answer{f, append([]byte(nil), attrs...)})
		})
	})
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	for _, a := range answers {
		visit(a.family, a.attrs)
	}
	return nil
}

// HasCounter reports whether a rule counts packets.
func HasCounter(r ruleset.Rule) bool {
	_, found := countOf(r.Exprs)
	return found
}

// countOf returns the count of the first counter among a rule's expressions.
func countOf(exprs string) (n Counts, found bool) {
	attrsOf([]byte(exprs), func(_ uint16, expr []byte) {
		name, data := "", []byte(nil)
		attrsOf(expr, func(k uint16, v []byte) {
			switch k {
			case unix.NFTA_EXPR_NAME:
				name = cstring(v)
			case unix.NFTA_EXPR_DATA:
				data = v
			}
		})
		if name == "counter" && !found {
			n, found = decodeCounts(data), true
		}
	})
	return n, found
}

// ChainCounts returns the sum of the counters of one chain's rules.
func (c *Conn) ChainCounts(id ruleset.ID) (sum Counts, err error) {
	rules, err := c.Chain(id)
	for _, r := range rules {
		if n, ok := countOf(r.Exprs); ok {
			sum.Packets += n.Packets
			sum.Bytes += n.Bytes
		}
	}
	return sum, err
}

// EachElementCount calls visit with every element of a set and its counter.
func (c *Conn) EachElementCount(set *ruleset.Set, visit func(ruleset.Element, Counts)) error {
	var list []rawElement
	err := c.retry(func() error {
		list = list[:0]
		return c.eachElement(set, func(e rawElement) { list = append(list, e) })
	})
	for _, e := range list {
		visit(e.Element, Counts{e.packets, e.bytes})
	}
	return err
}

// ElementCounts returns the counter of one element.
func (c *Conn) ElementCounts(set *ruleset.Set, e ruleset.Element) (n Counts, err error) {
	err = c.element(set, e, func(r rawElement) { n = Counts{r.packets, r.bytes} })
	return n, err
}

// EachCounter calls visit with every named counter. Counters with the same name in several tables are visited
// separately.
func (c *Conn) EachCounter(visit func(name string, n Counts)) error {
	for _, family := range ruleset.Families {
		err := c.dumpConsistent(unix.NFT_MSG_GETOBJ, family, tableFilter(unix.NFTA_OBJ_TABLE), func(family uint8, attrs []byte) {
			if o, n := decodeObject(family, attrs); o != nil && o.Kind == ruleset.ObjectCounter {
				visit(o.Name, n)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}
