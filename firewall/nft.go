// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// nft is the nf_tables state of a namespace, including rules of iptables-nft.
type nft struct {
	tables   []*nftables.Table
	chains   []*nftables.Chain
	rules    map[string][]*nftables.Rule // by chainKey, in order
	sets     *setReader
	flow     int  // Number of flowtables.
	hardware bool // A flowtable is offloaded to hardware.
	// strange names rules with an expression that could not be decoded.
	strange []string
}

// readAgain is the number of reads of a ruleset that changes during each read.
const readAgain = 5

// readTables reads the calling thread's namespace.
func readTables() (n *nft, err error) {
	for range readAgain {
		n = &nft{rules: map[string][]*nftables.Rule{}, sets: &setReader{}}
		if err = n.read(); !errors.Is(err, errInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	return n, nil
}

func (n *nft) read() error {
	err := dump(unix.NFT_MSG_GETTABLE, 0, nil, func(family nftables.TableFamily, a *mdnetlink.AttributeDecoder) error {
		t := &nftables.Table{Family: family}
		for a.Next() {
			if a.Type() == unix.NFTA_TABLE_NAME {
				t.Name = a.String()
			}
		}
		n.tables = append(n.tables, t)
		return nil
	})
	if err != nil || len(n.tables) == 0 {
		return err
	}
	if err := dump(unix.NFT_MSG_GETCHAIN, 0, nil, n.chain); err != nil {
		return err
	}
	chosen := map[string][]*expr.Objref{} // objects selected by a map, by chainKey of the map
	if err := dump(unix.NFT_MSG_GETRULE, 0, nil, func(family nftables.TableFamily, a *mdnetlink.AttributeDecoder) error {
		return n.rule(family, a, chosen)
	}); err != nil {
		return err
	}
	if err := n.objectTypes(chosen); err != nil {
		return err
	}
	err = dump(unix.NFT_MSG_GETFLOWTABLE, 0, nil, func(_ nftables.TableFamily, a *mdnetlink.AttributeDecoder) error {
		n.flow++
		for a.Next() {
			if a.Type() == nftables.NFTA_FLOWTABLE_FLAGS {
				n.hardware = n.hardware || nftables.FlowtableFlags(a.Uint32())&nftables.FlowtableFlagsHWOffload != 0
			}
		}
		return nil
	})
	if errors.Is(err, errInterrupted) {
		return err
	}
	return nil // a kernel without flowtables refuses the request
}

func (n *nft) chain(family nftables.TableFamily, a *mdnetlink.AttributeDecoder) error {
	c := &nftables.Chain{Table: &nftables.Table{Family: family}}
	for a.Next() {
		switch a.Type() {
		case unix.NFTA_CHAIN_TABLE:
			c.Table.Name = a.String()
		case unix.NFTA_CHAIN_NAME:
			c.Name = a.String()
		case unix.NFTA_CHAIN_TYPE:
			c.Type = nftables.ChainType(a.String())
		case unix.NFTA_CHAIN_POLICY:
			policy := nftables.ChainPolicy(a.Uint32())
			c.Policy = &policy
		case unix.NFTA_CHAIN_HOOK:
			a.Nested(func(hook *mdnetlink.AttributeDecoder) error {
				for hook.Next() {
					switch hook.Type() {
					case unix.NFTA_HOOK_HOOKNUM:
						c.Hooknum = nftables.ChainHookRef(nftables.ChainHook(hook.Uint32()))
					case unix.NFTA_HOOK_PRIORITY:
						c.Priority = nftables.ChainPriorityRef(nftables.ChainPriority(int32(hook.Uint32())))
					}
				}
				return nil
			})
		}
	}
	n.chains = append(n.chains, c)
	return nil
}

// rule decodes a rule. Undecodable expressions become opaque.
func (n *nft) rule(family nftables.TableFamily, a *mdnetlink.AttributeDecoder, chosen map[string][]*expr.Objref) error {
	r := &nftables.Rule{Table: &nftables.Table{Family: family}, Chain: &nftables.Chain{}}
	maps := map[*expr.Objref]string{}
	for a.Next() {
		switch a.Type() {
		case unix.NFTA_RULE_TABLE:
			r.Table.Name = a.String()
		case unix.NFTA_RULE_CHAIN:
			r.Chain.Name = a.String()
		case unix.NFTA_RULE_HANDLE:
			r.Handle = a.Uint64()
		case unix.NFTA_RULE_EXPRESSIONS:
			a.Nested(func(list *mdnetlink.AttributeDecoder) error {
				for list.Next() {
					e, from := decode(byte(family), list.Bytes())
					if ref, is := e.(*expr.Objref); is && from != "" {
						maps[ref] = from
					}
					r.Exprs = append(r.Exprs, e)
				}
				return nil
			})
		}
	}
	for ref, name := range maps {
		key := chainKey(r.Table, name)
		chosen[key] = append(chosen[key], ref)
	}
	for _, e := range r.Exprs {
		if o, is := e.(*undecodedExpr); is && o.err != nil {
			n.strange = append(n.strange, fmt.Sprintf("%s handle %d: %s: %v", chainName(r.Table, r.Chain.Name), r.Handle, o.name, o.err))
		}
	}
	key := chainKey(r.Table, r.Chain.Name)
	n.rules[key] = append(n.rules[key], r)
	return nil
}

// objectTypes sets the object type of expressions that select an object by a map, for example: ct helper set tcp
// dport map { 21 : "ftp" }. Only the map contains that type.
func (n *nft) objectTypes(chosen map[string][]*expr.Objref) error {
	if len(chosen) == 0 {
		return nil
	}
	return dump(unix.NFT_MSG_GETSET, 0, nil, func(family nftables.TableFamily, a *mdnetlink.AttributeDecoder) error {
		t, name, kind := &nftables.Table{Family: family}, "", uint32(0)
		for a.Next() {
			switch a.Type() {
			case unix.NFTA_SET_TABLE:
				t.Name = a.String()
			case unix.NFTA_SET_NAME:
				name = a.String()
			case unix.NFTA_SET_OBJ_TYPE:
				kind = a.Uint32()
			}
		}
		for _, ref := range chosen[chainKey(t, name)] {
			ref.Type = int(kind)
		}
		return nil
	})
}
