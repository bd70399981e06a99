// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// Targets are the destination addresses that rules translate to.
type Targets struct {
	Addresses map[netip.Addr]bool
	// Unclear counts sources of further targets: ranges, redirects, networks, computed addresses, unread maps, IPVS.
	Unclear int
}

func (t *Targets) add(from, to netip.Addr) {
	if !from.IsValid() || to.IsValid() && from != to {
		t.Unclear++
		return
	}
	if t.Addresses == nil {
		t.Addresses = map[netip.Addr]bool{}
	}
	t.Addresses[from.Unmap()] = true
}

// readNft adds the targets of nftables rules, including iptables-nft.
func (t *Targets) readNft(maps *setReader, rules map[string][]*nftables.Rule) {
	for _, list := range rules {
		for _, rule := range list {
			for i, e := range rule.Exprs {
				switch e := e.(type) {
				case *expr.NAT:
					if e.Type == expr.NATTypeDestNAT {
						t.nat(maps, rule, rule.Exprs[:i], e)
					}
				case *expr.Redir:
					t.Unclear++
				case *expr.Target:
					t.target(e)
				}
			}
		}
	}
}

// nat adds the target of a rule. An immediate or a map has loaded its address into a register.
func (t *Targets) nat(maps *setReader, rule *nftables.Rule, before []expr.Any, e *expr.NAT) {
	if e.RegAddrMin == 0 || e.RegAddrMax != 0 && e.RegAddrMax != e.RegAddrMin {
		t.Unclear++
		return
	}
	size := 4
	if e.Family == uint32(nftables.TableFamilyIPv6) {
		size = 16
	}
	for _, filled := range slices.Backward(before) {
		switch by := filled.(type) {
		case *expr.Immediate:
			if by.Register == e.RegAddrMin {
				t.addBytes(by.Data, size)
				return
			}
		case *expr.Lookup:
			if by.IsDestRegSet && by.DestRegister == e.RegAddrMin {
				t.readMap(maps, rule.Table, by.SetName, size)
				return
			}
		}
	}
	t.Unclear++
}

// readMap adds the leading addresses of a map's elements.
func (t *Targets) readMap(maps *setReader, table *nftables.Table, name string, size int) {
	elements, read := maps.elements(table, name)
	if !read {
		t.Unclear++
	}
	for _, e := range elements {
		if !e.IntervalEnd {
			t.addBytes(e.Val, size)
		}
	}
}

func (t *Targets) addBytes(b []byte, size int) {
	addr, _ := netip.AddrFromSlice(b[:min(len(b), size)])
	t.add(addr, netip.Addr{})
}

// target adds the target of an iptables rule in iptables-nft.
func (t *Targets) target(e *expr.Target) {
	r := natRange(e)
	switch {
	case e.Name == "REDIRECT" || e.Name == "NETMAP" || e.Name == "DNAT" && r == nil:
		t.Unclear++
	case e.Name == "DNAT":
		from, _ := netip.AddrFromSlice(r.MinIP)
		to, _ := netip.AddrFromSlice(r.MaxIP)
		t.add(from, to)
	}
}

// addLegacyLine adds the target of a line of iptables-legacy-save.
func (t *Targets) addLegacyLine(words []string) {
	if slices.Contains(words, "REDIRECT") || slices.Contains(words, "NETMAP") {
		t.Unclear++
	}
	if !slices.Contains(words, "DNAT") {
		return
	}
	t.add(legacyTarget(words), netip.Addr{})
}
