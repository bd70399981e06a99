// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// namesInside reports whether a source translation identifies the inside hosts. The source of such
// a host is then translated on its way to a port-forward target behind its own interface.
func namesInside(n *config.NATRule) bool {
	return n.Type.RewritesSource() && n.Hairpin != config.SwitchOff && len(n.Source)+len(n.In) > 0
}

// keepSources accepts connections to services and port-forwards before the rules that translate
// sources. Servers then see their clients even if they are behind a masqueraded interface.
func (c *compiler) keepSources(b *base, p *peers, table rs.Family, head map[rs.ID][]rs.Rule) {
	post := rs.ID{Table: table, Name: "postrouting"}
	if len(b.chains[post]) == 0 {
		return
	}
	keep := func(set string, key ...rs.Selector) {
		if p.used[rs.ID{Table: table, Name: set}] {
			head[post] = append(head[post], rs.NewRule().Redirected().InSet(set, key...).Accept().Rule(""))
		}
	}
	keep(setListeners, byOriginal(table)...)
	keep(setListeners+ranges, byOriginal(table)...)
	keep(setListeners+interfaces, append([]rs.Selector{rs.InName}, byOriginal(table)...)...)
}

// sameLinks makes the set that matches packets with equal input and output interface: nf_tables
// cannot compare two fields of a packet.
func (c *compiler) sameLinks(b *base, table rs.Family) {
	id := rs.ID{Table: table, Name: setSameLink}
	if b.used[id] {
		return
	}
	b.used[id] = true
	for _, i := range c.env.Interfaces {
		b.extra = append(b.extra, rs.Element{Set: id, Key: rs.Concat(rs.Iface(i.Name), rs.Iface(i.Name))})
	}
}

// sameNetworks writes the set of the backends' networks, each paired with itself. A backend would
// reply directly to a client on its network, with its own address as source. The entry of a backend
// behind a router has the backend alone.
func (c *compiler) sameNetworks(s *Service, table rs.Family) {
	id := rs.ID{Table: table, Name: setSameNet}
	s.addReference(id)
	var networks []netip.Prefix
	for i := range c.snapshot.Services {
		if svc := &c.snapshot.Services[i]; datapath.Turns(svc.Service) {
			for _, to := range svc.Backends {
				if familyOf(to.Address) == table {
					p, _ := datapath.Connected(c.env.Networks, to.Address)
					networks = append(networks, p)
				}
			}
		}
	}
	for _, n := range c.snapshot.NAT {
		if n.Type.Forwards() && n.Hairpin != config.SwitchOff && familyOf(n.To.Address) == table {
			p, _ := datapath.Connected(c.env.Networks, n.To.Address)
			networks = append(networks, p)
		}
	}
	for _, p := range withoutNested(networks) {
		first, last := rs.Addr(p.Addr()), rs.Addr(rs.LastAddr(p))
		s.element(rs.Element{Set: id, Key: rs.Concat(first, first), End: rs.Concat(last, last)})
	}
}

// withoutNested returns the prefixes in order, without those inside another one.
func withoutNested(list []netip.Prefix) (out []netip.Prefix) {
	slices.SortFunc(list, netip.Prefix.Compare)
	for _, p := range list {
		if len(out) == 0 || !out[len(out)-1].Overlaps(p) {
			out = append(out, p)
		}
	}
	return out
}
