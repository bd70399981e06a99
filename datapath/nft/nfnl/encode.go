// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"encoding/binary"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// delta encodes a delta as messages. An object is created after the objects that it refers to, and removed after the
// objects that refer to it.
func (b *batch) delta(d *ruleset.Delta) {
	for _, f := range d.AddTables {
		a, s := b.begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, f, sentMessage{object: "table " + f.String() + " " + ruleset.TableName})
		a.String(unix.NFTA_TABLE_NAME, ruleset.TableName)
		b.end(a, s)
	}
	for _, c := range d.FlushChains {
		a, s := b.begin(unix.NFT_MSG_DELRULE, 0, c.Of.Table, sentMessage{owner: c.Owner, object: "rules of chain " + c.Of.Name})
		a.String(unix.NFTA_RULE_TABLE, ruleset.TableName)
		a.String(unix.NFTA_RULE_CHAIN, c.Of.Name)
		b.end(a, s)
	}
	b.elements(unix.NFT_MSG_DELSETELEM, 0, d.DelElements, d.Sets)
	for _, s := range d.DelSets {
		b.deleteNamed(unix.NFT_MSG_DELSET, "delete set ", s.Owner, s.Of.ID)
	}
	for _, c := range d.DelChains {
		b.deleteNamed(unix.NFT_MSG_DELCHAIN, "delete chain ", c.Owner, c.Of.ID)
	}
	for _, o := range d.DelObjects {
		if o.Of.Kind == ruleset.ObjectFlowtable {
			a, s := b.begin(unix.NFT_MSG_DELFLOWTABLE, 0, o.Of.Table, sentMessage{owner: o.Owner, object: "delete flowtable " + o.Of.Name})
			a.String(flowtableTable, ruleset.TableName)
			a.String(flowtableName, o.Of.Name)
			b.end(a, s)
			continue
		}
		a, s := b.begin(unix.NFT_MSG_DELOBJ, 0, o.Of.Table, sentMessage{owner: o.Owner, object: "delete object " + o.Of.Name})
		a.String(unix.NFTA_OBJ_TABLE, ruleset.TableName)
		a.String(unix.NFTA_OBJ_NAME, o.Of.Name)
		a.Uint32(unix.NFTA_OBJ_TYPE, uint32(o.Of.Kind))
		b.end(a, s)
	}
	for _, o := range d.AddObjects {
		b.object(o)
	}
	for i, s := range d.AddSets {
		b.set(s, uint32(i+1))
	}
	for _, c := range d.AddChains {
		b.chain(c)
	}
	for _, c := range d.AddRules {
		b.rules(c)
	}
	b.elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, d.AddElements, d.Sets)
	for _, f := range d.DelTables {
		a, s := b.begin(unix.NFT_MSG_DELTABLE, 0, f, sentMessage{object: "delete table " + f.String() + " " + ruleset.TableName})
		a.String(unix.NFTA_TABLE_NAME, ruleset.TableName)
		b.end(a, s)
	}
}

// deleteNamed deletes a chain or a set, which both have table and name as attributes 1 and 2 or 3.
func (b *batch) deleteNamed(msg int, words, owner string, id ruleset.ID) {
	name := uint16(unix.NFTA_SET_NAME)
	if msg == unix.NFT_MSG_DELCHAIN {
		name = unix.NFTA_CHAIN_NAME
	}
	a, s := b.begin(msg, 0, id.Table, sentMessage{owner: owner, object: words + id.Name})
	a.String(1, ruleset.TableName)
	a.String(name, id.Name)
	b.end(a, s)
}

// flowtablePriority orders flowtables after the chains of the same hook with priority 0. Packets denied at ingress
// are then denied for offloaded flows too.
const flowtablePriority = 10

// flowtable creates a flowtable on devices.
func (b *batch) flowtable(o ruleset.Item[*ruleset.Object]) {
	a, s := b.begin(unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, o.Of.Table, sentMessage{owner: o.Owner, object: "flowtable " + o.Of.Name, made: o.Of})
	a.String(flowtableTable, ruleset.TableName)
	a.String(flowtableName, o.Of.Name)
	n := a.Nest(flowtableHook)
	a.Uint32(flowtableHookNum, 0)
	a.Uint32(flowtableHookPriority, flowtablePriority)
	m := a.Nest(flowtableHookDevs)
	for _, dev := range strings.Fields(o.Of.Devices) {
		a.String(deviceName, dev)
	}
	a.Close(m)
	a.Close(n)
	b.end(a, s)
}

func (b *batch) object(o ruleset.Item[*ruleset.Object]) {
	if o.Of.Kind == ruleset.ObjectFlowtable {
		b.flowtable(o)
		return
	}
	words := o.Of.Kind.String() + " " + o.Of.Name
	if o.Of.Kind == ruleset.ObjectHelper {
		words = "connection tracking helper " + o.Of.Helper
	}
	a, s := b.begin(unix.NFT_MSG_NEWOBJ, unix.NLM_F_CREATE, o.Of.Table, sentMessage{owner: o.Owner, object: words, made: o.Of})
	a.String(unix.NFTA_OBJ_TABLE, ruleset.TableName)
	a.String(unix.NFTA_OBJ_NAME, o.Of.Name)
	a.Uint32(unix.NFTA_OBJ_TYPE, uint32(o.Of.Kind))
	n := a.Nest(unix.NFTA_OBJ_DATA)
	switch o.Of.Kind {
	case ruleset.ObjectHelper:
		a.String(unix.NFTA_CT_HELPER_NAME, o.Of.Helper)
		a.Uint16(ctHelperFamily, uint16(o.Of.Table))
		a.Uint8(unix.NFTA_CT_HELPER_L4PROTO, o.Of.Protocol)
	case ruleset.ObjectTimeout:
		a.Uint16(ctTimeoutFamily, uint16(o.Of.Table))
		a.Uint8(ctTimeoutProtocol, o.Of.Protocol)
		a.Raw(ctTimeoutData|unix.NLA_F_NESTED, o.Of.Policy)
	}
	a.Close(n)
	b.end(a, s)
}

func (b *batch) set(item ruleset.Item[*ruleset.Set], id uint32) {
	set := item.Of
	a, start := b.begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, set.Table, sentMessage{owner: item.Owner, object: "set " + set.Name})
	a.String(unix.NFTA_SET_TABLE, ruleset.TableName)
	a.String(unix.NFTA_SET_NAME, set.Name)
	a.Uint32(unix.NFTA_SET_ID, id)
	a.Uint32(unix.NFTA_SET_FLAGS, setFlags(set))
	a.Uint32(unix.NFTA_SET_KEY_TYPE, ruleset.TypeNumber(set.Key))
	a.Uint32(unix.NFTA_SET_KEY_LEN, uint32(ruleset.Width(set.Key)))
	switch {
	case set.Verdicts:
		a.Uint32(unix.NFTA_SET_DATA_TYPE, dataVerdict)
	case len(set.Data) > 0:
		a.Uint32(unix.NFTA_SET_DATA_TYPE, ruleset.TypeNumber(set.Data))
		a.Uint32(unix.NFTA_SET_DATA_LEN, uint32(ruleset.Width(set.Data)))
	}
	if set.Timeout > 0 {
		a.Uint64(unix.NFTA_SET_TIMEOUT, uint64(set.Timeout/time.Millisecond))
	}
	concat := set.Interval && len(set.Key) > 1
	if set.Size > 0 || concat {
		n := a.Nest(unix.NFTA_SET_DESC)
		if set.Size > 0 {
			a.Uint32(unix.NFTA_SET_DESC_SIZE, uint32(set.Size))
		}
		if concat {
			m := a.Nest(setDescConcat)
			for _, t := range set.Key {
				l := a.Nest(unix.NFTA_LIST_ELEM)
				a.Uint32(setFieldLen, uint32(t.Len))
				a.Close(l)
			}
			a.Close(m)
		}
		a.Close(n)
	}
	a.Bytes(unix.NFTA_SET_USERDATA, byteOrders(set))
	if set.Counter {
		n := a.Nest(setExpr)
		a.String(unix.NFTA_EXPR_NAME, "counter")
		m := a.Nest(unix.NFTA_EXPR_DATA)
		a.Close(m)
		a.Close(n)
	}
	b.end(a, start)
}

// byteOrders returns nft's userdata about the byte order of keys and values (NFTNL_UDATA_SET_KEYBYTEORDER and
// NFTNL_UDATA_SET_DATABYTEORDER: 1 is host order, 2 network order). nft prints by it.
func byteOrders(set *ruleset.Set) []byte {
	order := func(types []ruleset.Type) uint32 {
		if len(types) == 1 && types[0].Host {
			return 1
		}
		return 2
	}
	b := binary.NativeEndian.AppendUint32([]byte{0, 4}, order(set.Key))
	return binary.NativeEndian.AppendUint32(append(b, 1, 4), order(set.Data))
}

func setFlags(set *ruleset.Set) (flags uint32) {
	if set.Map() {
		flags |= unix.NFT_SET_MAP
	}
	if set.Interval {
		flags |= unix.NFT_SET_INTERVAL
		if len(set.Key) > 1 {
			flags |= setFlagConcat
		}
	}
	if set.Dynamic {
		flags |= unix.NFT_SET_EVAL
	}
	if set.Timeout > 0 {
		flags |= unix.NFT_SET_TIMEOUT
	}
	return flags
}

var hookNumbers = map[string]uint32{"prerouting": 0, "input": 1, "forward": 2, "output": 3, "postrouting": 4}

func (b *batch) chain(c ruleset.Item[*ruleset.Chain]) {
	a, s := b.begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, c.Of.Table, sentMessage{owner: c.Owner, object: "chain " + c.Of.Name})
	a.String(unix.NFTA_CHAIN_TABLE, ruleset.TableName)
	a.String(unix.NFTA_CHAIN_NAME, c.Of.Name)
	if h := c.Of.Hook; h != nil {
		n := a.Nest(unix.NFTA_CHAIN_HOOK)
		a.Uint32(unix.NFTA_HOOK_HOOKNUM, hookNumbers[h.Point]) // ingress is 0 in family netdev
		a.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(h.Priority))
		if h.Device != "" {
			a.String(unix.NFTA_HOOK_DEV, h.Device)
		}
		a.Close(n)
		a.Uint32(unix.NFTA_CHAIN_POLICY, 1 /* NF_ACCEPT */)
		a.String(unix.NFTA_CHAIN_TYPE, h.Type)
	}
	b.end(a, s)
}

func (b *batch) rules(c ruleset.Item[*ruleset.Chain]) {
	for _, r := range c.Of.Rules {
		a, s := b.begin(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, c.Of.Table,
			sentMessage{owner: c.Owner, object: "rule \"" + r.Text + "\" in chain " + c.Of.Name})
		a.String(unix.NFTA_RULE_TABLE, ruleset.TableName)
		a.String(unix.NFTA_RULE_CHAIN, c.Of.Name)
		n := a.Nest(unix.NFTA_RULE_EXPRESSIONS)
		a = append(a, r.Exprs...)
		a.Close(n)
		if r.Comment != "" {
			a.Bytes(unix.NFTA_RULE_USERDATA, comment(r.Comment))
		}
		b.end(a, s)
	}
}

// maxComment is nft's NFTNL_UDATA_COMMENT_MAXLEN.
const maxComment = 128

func comment(text string) []byte {
	text = text[:min(len(text), maxComment-1)]
	return append(append([]byte{userComment, byte(len(text) + 1)}, text...), 0)
}

func (b *batch) elements(msg int, flags uint16, list []ruleset.Item[ruleset.Element], sets map[ruleset.ID]*ruleset.Set) {
	grouped := make(map[ruleset.ID][]ruleset.Item[ruleset.Element])
	var order []ruleset.ID
	for _, e := range list {
		if grouped[e.Of.Set] == nil {
			order = append(order, e.Of.Set)
		}
		grouped[e.Of.Set] = append(grouped[e.Of.Set], e)
	}
	for _, id := range order {
		for rest := grouped[id]; len(rest) > 0; {
			rest = b.elementMessage(msg, flags, sets[id], rest)
		}
	}
}

// elementMessage writes as many elements as fit in one message and returns the rest.
func (b *batch) elementMessage(msg int, flags uint16, set *ruleset.Set, list []ruleset.Item[ruleset.Element]) []ruleset.Item[ruleset.Element] {
	words := "element of " + set.Name
	if msg == unix.NFT_MSG_DELSETELEM {
		words = "delete element of " + set.Name
	}
	a, start := b.begin(msg, flags, set.Table, sentMessage{object: words, set: set, owner: list[0].Owner})
	what := &b.log[len(b.log)-1]
	a.String(unix.NFTA_SET_ELEM_LIST_TABLE, ruleset.TableName)
	a.String(unix.NFTA_SET_ELEM_LIST_SET, set.Name)
	n := a.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	i := 0
	for ; i < len(list) && len(a)-n < maxElements; i++ {
		what.offsets = append(what.offsets, len(a)-start)
		element(&a, set, list[i].Of, msg == unix.NFT_MSG_NEWSETELEM)
	}
	what.elements = list[:i]
	a.Close(n)
	b.end(a, start)
	return list[i:]
}

// element appends one entry. A range of a single field consists of two entries in the kernel: its first key, and the
// key after its last one with an end flag.
func element(a *ruleset.Attrs, set *ruleset.Set, e ruleset.Element, value bool) {
	n := a.Nest(unix.NFTA_LIST_ELEM)
	a.ValueData(unix.NFTA_SET_ELEM_KEY, e.Key)
	if set.Interval && len(set.Key) > 1 {
		a.ValueData(setElemKeyEnd, e.End)
	}
	switch {
	case !value:
	case set.Verdicts:
		a.VerdictData(unix.NFTA_SET_ELEM_DATA, e.Verdict)
	case len(set.Data) > 0:
		a.ValueData(unix.NFTA_SET_ELEM_DATA, e.Value)
	}
	a.Close(n)
	if !set.Interval || len(set.Key) > 1 {
		return
	}
	if after, ok := nextKey(e.End); ok {
		n := a.Nest(unix.NFTA_LIST_ELEM)
		a.ValueData(unix.NFTA_SET_ELEM_KEY, after)
		a.Uint32(unix.NFTA_SET_ELEM_FLAGS, unix.NFT_SET_ELEM_INTERVAL_END)
		a.Close(n)
	}
}

// nextKey returns the next higher key, and false for the highest.
func nextKey(key string) (string, bool) {
	b := []byte(key)
	for i := len(b) - 1; i >= 0; i-- {
		if b[i]++; b[i] != 0 {
			return string(b), true
		}
	}
	return "", false
}

// predecessor returns the next lower key.
func predecessor(key string) string {
	b := []byte(key)
	for i := len(b) - 1; i >= 0; i-- {
		if b[i]--; b[i] != 0xff {
			break
		}
	}
	return string(b)
}
