// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Read returns what the tables of Sluice hold, as one fragment; rules have
// only their expressions. The answer is of one generation, which is returned too.
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

func ours(family uint8) bool { return slices.Contains(ruleset.Families, ruleset.Family(family)) }

func (c *Conn) readAll() (*ruleset.Fragment, error) {
	f := &ruleset.Fragment{}
	chains := make(map[ruleset.ID]*ruleset.Chain)
	err := c.dump(unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, unix.AF_UNSPEC, nil, func(family uint8, attrs []byte) {
		if chain := decodeChain(family, attrs); chain != nil && ours(family) {
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
			continue // packets fill it
		}
		list, err := c.readElements(set)
		if err != nil {
			return nil, err
		}
		f.Elements = append(f.Elements, list...)
	}
	return f, nil
}

// readTable reads sets, objects and rules of one family's table: the kernel
// looks a table up by family and name.
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

// Chain reads the rules of one chain back.
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

// retry repeats a read that saw two generations.
func (c *Conn) retry(read func() error) (err error) {
	for range attempts {
		if err = read(); !errors.Is(err, errInterrupted) {
			return err
		}
	}
	return err
}

// Elements reads all elements of a set back.
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

// closeRanges gives every first key the last key of its range: the one before
// the next end above it, or the highest key.
func closeRanges(list []ruleset.Element, ends []string) {
	slices.Sort(ends)
	for i := range list {
		at, exact := slices.BinarySearch(ends, list[i].Key)
		if exact {
			at++ // the end of the range before
		}
		if at < len(ends) {
			list[i].End = predecessor(ends[at])
		} else {
			list[i].End = strings.Repeat("\xff", len(list[i].Key))
		}
	}
}

// rawElement is an element as the kernel reports it, with its counter.
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

// Has reports which of the elements the kernel holds with the same value, by
// asking for each of them instead of reading the set.
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

// element asks for one element.
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

// attrsOf calls visit for every attribute.
func attrsOf(b []byte, visit func(kind uint16, v []byte)) {
	for {
		k, _, v, rest, ok := ruleset.NextAttr(b)
		if !ok {
			return
		}
		visit(k, v)
		b = rest
	}
}

func decodeChain(family uint8, attrs []byte) *ruleset.Chain {
	c := &ruleset.Chain{ID: ruleset.ID{Table: ruleset.Family(family)}}
	table, kind := "", ""
	var hook *ruleset.Hook
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case unix.NFTA_CHAIN_TABLE:
			table = cstring(v)
		case unix.NFTA_CHAIN_NAME:
			c.Name = cstring(v)
		case unix.NFTA_CHAIN_TYPE:
			kind = cstring(v)
		case unix.NFTA_CHAIN_HOOK:
			hook = &ruleset.Hook{}
			decodeHook(hook, ruleset.Family(family), v)
		}
	})
	if table != ruleset.TableName {
		return nil
	}
	if hook != nil {
		hook.Type = kind
		c.Hook = hook
	}
	return c
}

func decodeHook(h *ruleset.Hook, f ruleset.Family, attrs []byte) {
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case unix.NFTA_HOOK_HOOKNUM:
			for name, n := range hookNumbers {
				if n == be32(v) {
					h.Point = name
				}
			}
			if f == ruleset.Netdev {
				h.Point = "ingress"
			}
		case unix.NFTA_HOOK_PRIORITY:
			h.Priority = int32(be32(v))
		case unix.NFTA_HOOK_DEV:
			h.Device = cstring(v)
		}
	})
}

func decodeSet(family uint8, attrs []byte) *ruleset.Set {
	s := &ruleset.Set{ID: ruleset.ID{Table: ruleset.Family(family)}}
	table := ""
	var keyType, keyLen, dataType, dataLen, flags uint32
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case unix.NFTA_SET_TABLE:
			table = cstring(v)
		case unix.NFTA_SET_NAME:
			s.Name = cstring(v)
		case unix.NFTA_SET_FLAGS:
			flags = be32(v)
		case unix.NFTA_SET_KEY_TYPE:
			keyType = be32(v)
		case unix.NFTA_SET_KEY_LEN:
			keyLen = be32(v)
		case unix.NFTA_SET_DATA_TYPE:
			dataType = be32(v)
		case unix.NFTA_SET_DATA_LEN:
			dataLen = be32(v)
		case unix.NFTA_SET_TIMEOUT:
			s.Timeout = time.Duration(be64(v)) * time.Millisecond
		case setExpr:
			s.Counter = true
		case unix.NFTA_SET_DESC:
			attrsOf(v, func(k uint16, v []byte) {
				if k == unix.NFTA_SET_DESC_SIZE {
					s.Size = int(be32(v))
				}
			})
		}
	})
	if table != ruleset.TableName {
		return nil
	}
	s.Key = ruleset.TypesOf(keyType, int(keyLen))
	s.Interval = flags&unix.NFT_SET_INTERVAL != 0
	s.Dynamic = flags&unix.NFT_SET_EVAL != 0
	if flags&unix.NFT_SET_MAP != 0 {
		if s.Verdicts = dataType == dataVerdict; !s.Verdicts {
			s.Data = ruleset.TypesOf(dataType, int(dataLen))
		}
	}
	return s
}

// Counts of a named counter or a rule.
type Counts struct{ Packets, Bytes uint64 }

func decodeCounts(attrs []byte) (n Counts) {
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case unix.NFTA_COUNTER_PACKETS:
			n.Packets = be64(v)
		case unix.NFTA_COUNTER_BYTES:
			n.Bytes = be64(v)
		}
	})
	return n
}

func decodeObject(family uint8, attrs []byte) (*ruleset.Object, Counts) {
	o := &ruleset.Object{ID: ruleset.ID{Table: ruleset.Family(family)}}
	table := ""
	var data []byte
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case unix.NFTA_OBJ_TABLE:
			table = cstring(v)
		case unix.NFTA_OBJ_NAME:
			o.Name = cstring(v)
		case unix.NFTA_OBJ_TYPE:
			o.Kind = ruleset.ObjectKind(be32(v))
		case unix.NFTA_OBJ_DATA:
			data = v
		}
	})
	if table != ruleset.TableName {
		return nil, Counts{}
	}
	if o.Kind == ruleset.ObjectCounter {
		return o, decodeCounts(data)
	}
	attrsOf(data, func(k uint16, v []byte) {
		switch k {
		case unix.NFTA_CT_HELPER_NAME:
			o.Helper = cstring(v)
		case unix.NFTA_CT_HELPER_L4PROTO:
			o.Protocol = v[0]
		}
	})
	return o, Counts{}
}

func decodeFlowtable(family uint8, attrs []byte) *ruleset.Object {
	o := &ruleset.Object{ID: ruleset.ID{Table: ruleset.Family(family)}, Kind: ruleset.ObjectFlowtable}
	table, devices := "", []string(nil)
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case flowtableTable:
			table = cstring(v)
		case flowtableName:
			o.Name = cstring(v)
		case flowtableHook:
			attrsOf(v, func(k uint16, v []byte) {
				if k == flowtableHookDevs {
					attrsOf(v, func(_ uint16, v []byte) { devices = append(devices, cstring(v)) })
				}
			})
		}
	})
	if table != ruleset.TableName {
		return nil
	}
	slices.Sort(devices)
	o.Devices = strings.Join(devices, " ")
	return o
}

func decodeRule(family uint8, attrs []byte) (chain ruleset.ID, r ruleset.Rule, ok bool) {
	chain.Table = ruleset.Family(family)
	r.Read = true
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case unix.NFTA_RULE_TABLE:
			ok = cstring(v) == ruleset.TableName
		case unix.NFTA_RULE_CHAIN:
			chain.Name = cstring(v)
		case unix.NFTA_RULE_EXPRESSIONS:
			r.Exprs = string(v)
		case unix.NFTA_RULE_USERDATA:
			if len(v) > 2 && v[0] == userComment {
				r.Comment = cstring(v[2:])
			}
		}
	})
	return chain, r, ok
}

func decodeElements(set ruleset.ID, attrs []byte, visit func(rawElement)) {
	attrsOf(attrs, func(k uint16, v []byte) {
		if k != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return
		}
		attrsOf(v, func(_ uint16, v []byte) {
			e := rawElement{Element: ruleset.Element{Set: set}}
			attrsOf(v, e.attribute)
			visit(e)
		})
	})
}

func (e *rawElement) attribute(k uint16, v []byte) {
	switch k {
	case unix.NFTA_SET_ELEM_KEY:
		e.Key = dataValue(v)
	case setElemKeyEnd:
		e.End = dataValue(v)
	case unix.NFTA_SET_ELEM_FLAGS:
		e.intervalEnd = be32(v)&unix.NFT_SET_ELEM_INTERVAL_END != 0
	case unix.NFTA_SET_ELEM_DATA:
		kind, _, body, _, _ := ruleset.NextAttr(v)
		if kind == unix.NFTA_DATA_VALUE {
			e.Value = string(body)
			return
		}
		attrsOf(body, func(k uint16, v []byte) {
			switch k {
			case unix.NFTA_VERDICT_CODE:
				e.Verdict.Code = int32(be32(v))
			case unix.NFTA_VERDICT_CHAIN:
				e.Verdict.Chain = cstring(v)
			}
		})
	case unix.NFTA_SET_ELEM_EXPR:
		attrsOf(v, func(k uint16, v []byte) {
			if k == unix.NFTA_EXPR_DATA {
				n := decodeCounts(v)
				e.packets, e.bytes = n.Packets, n.Bytes
			}
		})
	}
}

func dataValue(v []byte) string {
	_, _, body, _, _ := ruleset.NextAttr(v)
	return string(body)
}

// Tables returns the families in which there is a table of Sluice.
func (c *Conn) Tables() (list []ruleset.Family, err error) {
	err = c.retry(func() error {
		list = list[:0]
		return c.dump(unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, unix.AF_UNSPEC, nil, func(family uint8, attrs []byte) {
			attrsOf(attrs, func(k uint16, v []byte) {
				if k == unix.NFTA_TABLE_NAME && cstring(v) == ruleset.TableName && ours(family) {
					list = append(list, ruleset.Family(family))
				}
			})
		})
	})
	if err != nil {
		return nil, Explain(err)
	}
	return list, nil
}
