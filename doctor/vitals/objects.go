// SPDX-License-Identifier: Apache-2.0

package vitals

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// typeObjects gives the rules of a chain that choose objects by a map (ct helper set tcp
// dport map { 21 : "ftp" }) the type of those objects: the library reads neither the map's
// name nor what is in it.
func typeObjects(c *nftables.Chain, rules []*nftables.Rule) error {
	open := map[uint64][]*expr.Objref{} // by the rule's handle
	for _, rule := range rules {
		for _, e := range rule.Exprs {
			if ref, is := e.(*expr.Objref); is && ref.Type == unix.NFT_OBJECT_UNSPEC {
				open[rule.Handle] = append(open[rule.Handle], ref)
			}
		}
	}
	if len(open) == 0 {
		return nil
	}
	types := map[string]uint32{} // by the map's name
	err := nftDump(unix.NFT_MSG_GETSET, c.Table.Family, []mdnetlink.Attribute{
		{Type: unix.NFTA_SET_TABLE, Data: append([]byte(c.Table.Name), 0)},
	}, func(set *mdnetlink.AttributeDecoder) {
		name, kind := "", uint32(0)
		for set.Next() {
			switch set.Type() {
			case unix.NFTA_SET_NAME:
				name = set.String()
			case unix.NFTA_SET_OBJ_TYPE:
				kind = set.Uint32()
			}
		}
		types[name] = kind
	})
	if err != nil {
		return err
	}
	return nftDump(unix.NFT_MSG_GETRULE, c.Table.Family, []mdnetlink.Attribute{
		{Type: unix.NFTA_RULE_TABLE, Data: append([]byte(c.Table.Name), 0)},
		{Type: unix.NFTA_RULE_CHAIN, Data: append([]byte(c.Name), 0)},
	}, func(rule *mdnetlink.AttributeDecoder) {
		handle, maps := uint64(0), []string(nil)
		for rule.Next() {
			switch rule.Type() {
			case unix.NFTA_RULE_HANDLE:
				handle = rule.Uint64()
			case unix.NFTA_RULE_EXPRESSIONS:
				rule.Nested(func(list *mdnetlink.AttributeDecoder) error {
					for list.Next() {
						list.Nested(func(e *mdnetlink.AttributeDecoder) error {
							maps = append(maps, objectMap(e)...)
							return nil
						})
					}
					return nil
				})
			}
		}
		for i, ref := range open[handle][:min(len(open[handle]), len(maps))] {
			ref.Type = int(types[maps[i]])
		}
	})
}

// objectMap is the map of an expression that chooses an object by one.
func objectMap(e *mdnetlink.AttributeDecoder) (name []string) {
	chooses := false
	for e.Next() {
		switch e.Type() {
		case unix.NFTA_EXPR_NAME:
			chooses = e.String() == "objref"
		case unix.NFTA_EXPR_DATA:
			e.Nested(func(data *mdnetlink.AttributeDecoder) error {
				for data.Next() {
					if chooses && data.Type() == unix.NFTA_OBJREF_SET_NAME {
						name = append(name, data.String())
					}
				}
				return nil
			})
		}
	}
	return name
}

// nftDump calls visit with the attributes of everything that nf_tables answers.
func nftDump(kind int, family nftables.TableFamily, attributes []mdnetlink.Attribute, visit func(*mdnetlink.AttributeDecoder)) error {
	conn, err := mdnetlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	data, err := mdnetlink.MarshalAttributes(attributes)
	if err != nil {
		return err
	}
	messages, err := conn.Execute(mdnetlink.Message{
		Header: mdnetlink.Header{Type: mdnetlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: mdnetlink.Request | mdnetlink.Dump},
		Data:   slices.Concat([]byte{byte(family), 0, 0, 0}, data),
	})
	if err != nil {
		return err
	}
	for _, m := range messages {
		decoder, err := mdnetlink.NewAttributeDecoder(m.Data[min(len(m.Data), 4):])
		if err != nil {
			return err
		}
		decoder.ByteOrder = binary.BigEndian
		if visit(decoder); decoder.Err() != nil {
			return decoder.Err()
		}
	}
	return nil
}
