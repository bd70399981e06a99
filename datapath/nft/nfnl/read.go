// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Read returns the content of Sluice's tables as one fragment and its generation. Rules contain only expressions. The
// content belongs to one generation.
func (c *Conn) Read() (*ruleset.Fragment, uint32, error) {
	for range attempts {
		before, err := c.Generation()
		if err != nil {
			return nil, 0, err
		}
		f, err := c.readAll()
		if errors.Is(err, errInterrupted) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, 0, Explain(err)
		}
		after, err := c.Generation()
		if err != nil {
			return nil, 0, err
		}
		if before == after {
			return f, after, nil
		}
	}
	return nil, 0, fmt.Errorf("nf_tables: %w %d times: another program rewrites its rules without pause", errInterrupted, attempts)
}

func tableFilter(kind uint16) []byte {
	var a ruleset.Attrs
	a.String(kind, ruleset.TableName)
	return a
}

func isSupported(family uint8) bool { return slices.Contains(ruleset.Families, ruleset.Family(family)) }

func (c *Conn) readAll() (*ruleset.Fragment, error) {
	f := &ruleset.Fragment{}
	chains := make(map[ruleset.ID]*ruleset.Chain)
	err := c.dump(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, unix.AF_UNSPEC, nil, func(family uint8, attrs []byte) {
		if chain := decodeChain(family, attrs); chain != nil && isSupported(family) {
			f.Chains = append(f.Chains, chain)
			chains[chain.ID] = chain
		}
	})
	if err != nil {
		return nil, err
	}
	for _, family := range ruleset.Families {
		if err := c.readTable(f, family, chains); err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
	}
	for _, set := range f.Sets {
		if set.Dynamic {
			continue // elements are added by packets, not by the daemon
		}
		list, err := c.readElements(set)
		if err != nil {
			return nil, err
		}
		f.Elements = append(f.Elements, list...)
	}
	return f, nil
}

// readTable reads sets, objects and rules of one family's table. The kernel looks up a table by family and name.
func (c *Conn) readTable(f *ruleset.Fragment, family ruleset.Family, chains map[ruleset.ID]*ruleset.Chain) error {
	err := c.dump(unix.NFT_MSG_GETSET, unix.NLM_F_DUMP, uint8(family), tableFilter(unix.NFTA_SET_TABLE), func(family uint8, attrs []byte) {
		if set := decodeSet(family, attrs); set != nil {
			f.Sets = append(f.Sets, set)
		}
	})
	if err != nil {
		return err
	}
	err = c.dump(unix.NFT_MSG_GETOBJ, unix.NLM_F_DUMP, uint8(family), tableFilter(unix.NFTA_OBJ_TABLE), func(family uint8, attrs []byte) {
		if o, _ := decodeObject(family, attrs); o != nil {
			f.Objects = append(f.Objects, o)
		}
	})
	if err != nil {
		return err
	}
	err = c.dump(unix.NFT_MSG_GETFLOWTABLE, unix.NLM_F_DUMP, uint8(family), tableFilter(flowtableTable), func(family uint8, attrs []byte) {
		if o := decodeFlowtable(family, attrs); o != nil {
			f.Objects = append(f.Objects, o)
		}
	})
	if err != nil {
		return err
	}
	return c.dump(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, uint8(family), tableFilter(unix.NFTA_RULE_TABLE), func(family uint8, attrs []byte) {
		id, rule, ok := decodeRule(family, attrs)
		if chain := chains[id]; ok && chain != nil {
			chain.Rules = append(chain.Rules, rule)
		}
	})
}

// Chain reads the rules of one chain.
func (c *Conn) Chain(id ruleset.ID) (rules []ruleset.Rule, err error) {
	var a ruleset.Attrs
	a.String(unix.NFTA_RULE_TABLE, ruleset.TableName)
	a.String(unix.NFTA_RULE_CHAIN, id.Name)
	err = c.retry(func() error {
		rules = rules[:0]
		return c.dump(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, uint8(id.Table), a, func(family uint8, attrs []byte) {
			if _, r, ok := decodeRule(family, attrs); ok {
				rules = append(rules, r)
			}
		})
	})
	return rules, err
}

// retry repeats a read that spans two generations.
func (c *Conn) retry(read func() error) (err error) {
	for range attempts {
		if err = read(); !errors.Is(err, errInterrupted) {
			return err
		}
	}
	return err
}

// Elements reads all elements of a set.
func (c *Conn) Elements(set *ruleset.Set) (list []ruleset.Element, err error) {
	err = c.retry(func() error {
		list, err = c.readElements(set)
		return err
	})
	return list, err
}

func (c *Conn) readElements(set *ruleset.Set) ([]ruleset.Element, error) {
	var list []ruleset.Element
	var ends []string
	err := c.eachElement(set, func(e rawElement) {
		if e.intervalEnd {
			ends = append(ends, e.Key)
			return
		}
		list = append(list, e.Element)
	})
	if err != nil {
		return nil, err
	}
	if set.Interval && len(set.Key) == 1 {
		closeRanges(list, ends)
	}
	return list, nil
}

// closeRanges sets the last key of every range: the key before the next end, or the highest key.
func closeRanges(list []ruleset.Element, ends []string) {
	slices.Sort(ends)
	for i := range list {
		at, exact := slices.BinarySearch(ends, list[i].Key)
		if exact {
			at++ // the end of the previous range
		}
		if at < len(ends) {
			list[i].End = predecessor(ends[at])
		} else {
			list[i].End = strings.Repeat("\xff", len(list[i].Key))
		}
	}
}

// rawElement is an element in the kernel's form, with its counter.
type rawElement struct {
	ruleset.Element
	intervalEnd    bool
	packets, bytes uint64
}

func (c *Conn) eachElement(set *ruleset.Set, visit func(rawElement)) error {
	var a ruleset.Attrs
	a.String(unix.NFTA_SET_ELEM_LIST_TABLE, ruleset.TableName)
	a.String(unix.NFTA_SET_ELEM_LIST_SET, set.Name)
	return c.dump(unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP, uint8(set.Table), a, func(_ uint8, attrs []byte) {
		decodeElements(set.ID, attrs, visit)
	})
}

// Has returns the elements that are missing in the kernel or have a different value. It requests each element instead
// of reading the set.
func (c *Conn) Has(set *ruleset.Set, list []ruleset.Element) (missing []ruleset.Element, err error) {
	for _, e := range list {
		found := false
		err := c.element(set, e, func(r rawElement) { found = found || r.Element == e })
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
		if !found {
			missing = append(missing, e)
		}
	}
	return missing, nil
}

// element reads one element.
func (c *Conn) element(set *ruleset.Set, e ruleset.Element, visit func(rawElement)) error {
	var a ruleset.Attrs
	a.String(unix.NFTA_SET_ELEM_LIST_TABLE, ruleset.TableName)
	a.String(unix.NFTA_SET_ELEM_LIST_SET, set.Name)
	n := a.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	m := a.Nest(unix.NFTA_LIST_ELEM)
	a.ValueData(unix.NFTA_SET_ELEM_KEY, e.Key)
	if set.Interval && len(set.Key) > 1 {
		a.ValueData(setElemKeyEnd, e.End)
	}
	a.Close(m)
	a.Close(n)
	return c.dump(unix.NFT_MSG_GETSETELEM, unix.NLM_F_ACK, uint8(set.Table), a, func(_ uint8, attrs []byte) {
		decodeElements(set.ID, attrs, visit)
	})
}

// Tables returns the families with a table of Sluice.
func (c *Conn) Tables() (list []ruleset.Family, err error) {
	err = c.eachTable(func(family ruleset.Family, name string) {
		if name == ruleset.TableName && isSupported(uint8(family)) {
			list = append(list, family)
		}
	})
	return list, err
}

// OtherTables returns the names of other programs' tables.
func (c *Conn) OtherTables() (list []string, err error) {
	err = c.eachTable(func(family ruleset.Family, name string) {
		if name != ruleset.TableName {
			list = append(list, family.String()+" "+name)
		}
	})
	return list, err
}

func (c *Conn) eachTable(visit func(ruleset.Family, string)) error {
	type table struct {
		family ruleset.Family
		name   string
	}
	var list []table
	err := c.retry(func() error {
		list = list[:0]
		return c.dump(unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, unix.AF_UNSPEC, nil, func(family uint8, attrs []byte) {
			attrsOf(attrs, func(k uint16, v []byte) {
				if k == unix.NFTA_TABLE_NAME {
					list = append(list, table{ruleset.Family(family), cstring(v)})
				}
			})
		})
	})
	if err != nil {
		return Explain(err)
	}
	for _, t := range list {
		visit(t.family, t.name)
	}
	return nil
}
