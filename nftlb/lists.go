// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// deny returns the names of the sets with denied sources. nftlb evaluates its lists in order: a source on a whitelist
// is not checked against later lists.
func (p *portion) deny(name string, lists []*policy, verdict string) []string {
	if len(lists) == 0 {
		return nil
	}
	if !hasWord(verdict, "drop") {
		p.addWarning("verdict %s: blacklists drop nothing, and are not in force", verdict)
		return nil
	}
	var names []string
	var allowed, denied ranges
	mixed := false
	for _, l := range lists {
		switch {
		case l.Attributes["type"] == "whitelist" && hasWord(verdict, "accept"):
			allowed, mixed = allowed.add(l.Elements...), true
		case l.Attributes["type"] == "blacklist":
			denied = denied.add(ranges{}.add(l.Elements...).remove(allowed...)...)
			if len(l.Elements) > 0 && !slices.Contains(names, owned+l.Name) {
				names = append(names, owned+l.Name)
				p.set(owned+l.Name, l.Elements)
			}
		}
	}
	if !mixed || len(names) == 0 {
		return names
	}
	p.sets = nil
	if len(denied) == 0 {
		return nil
	}
	p.set(owned+name+"-deny", denied)
	return []string{owned + name + "-deny"}
}

func (p *portion) set(name string, elements ranges) {
	if p.sets == nil {
		p.sets = map[string][]netip.Prefix{}
	}
	p.sets[name] = nil
	for _, r := range elements {
		p.sets[name] = append(p.sets[name], prefixes(r)...)
	}
}

// prefixes returns the minimal list of prefixes for a range.
func prefixes(r config.AddressRange) []netip.Prefix {
	var list []netip.Prefix
	for first := r.First; first.IsValid() && !r.Last.Less(first); {
		next := netip.PrefixFrom(first, first.BitLen())
		for next.Bits() > 0 {
			wider := netip.PrefixFrom(first, next.Bits()-1)
			if wider.Masked().Addr() != first || r.Last.Less(lastAddress(wider)) {
				break
			}
			next = wider
		}
		list = append(list, next)
		first = lastAddress(next).Next()
	}
	return list
}

// lastAddress returns the highest address of a prefix.
func lastAddress(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// filter drops packets from listed sources to addresses that no service listens on.
func (p *portion) filter(name string, addresses []*address, lists []*policy, verdict string) {
	sets := p.deny(name, lists, verdict)
	for _, a := range addresses {
		for _, l := range p.listeners(a) {
			for _, set := range sets {
				rule := config.FirewallRule{
					Name: owned + name + "-" + set[len(owned):], Action: config.ActionDrop, Source: config.Match{Set: set},
					Destination: config.Match{Prefix: netip.PrefixFrom(l.Address, l.Address.BitLen())}, Ports: l.Ports,
				}
				if l.protocol != flow.Any {
					rule.Protocol = l.protocol
				}
				if len(addresses) > 1 || len(p.rules) > 0 {
					rule.Name += "-" + l.Address.String() + "-" + l.protocol.String()
				}
				p.rules = append(p.rules, rule)
			}
		}
	}
}
