// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

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
	o := &ruleset.Object{ID: ruleset.ID{Table: ruleset.Family(family)}, Read: true}
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
	switch o.Kind {
	case ruleset.ObjectCounter:
		return o, decodeCounts(data)
	case ruleset.ObjectHelper:
		attrsOf(data, func(k uint16, v []byte) {
			switch k {
			case unix.NFTA_CT_HELPER_NAME:
				o.Helper = cstring(v)
			case unix.NFTA_CT_HELPER_L4PROTO:
				o.Protocol = v[0]
			}
		})
	case ruleset.ObjectTimeout:
		attrsOf(data, func(k uint16, v []byte) {
			switch k {
			case ctTimeoutProtocol:
				o.Protocol = v[0]
			case ctTimeoutData:
				o.Policy = string(v)
			}
		})
	}
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
		e.Verdict = decodeVerdict(body)
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

func decodeVerdict(attrs []byte) (verdict ruleset.Verdict) {
	attrsOf(attrs, func(k uint16, v []byte) {
		switch k {
		case unix.NFTA_VERDICT_CODE:
			verdict.Code = int32(be32(v))
		case unix.NFTA_VERDICT_CHAIN:
			verdict.Chain = cstring(v)
		}
	})
	return verdict
}
