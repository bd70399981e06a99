// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Names of the maps and chains of uplinks.
const (
	mapUplinks     = "uplinks"      // Address of a provider -> chain that selects its uplink.
	mapUplinkSlots = "uplink-slots" // Hash of a new connection -> chain that selects its uplink.
	chainChoice    = "uplink-choice"
	chainForeign   = "uplink-foreign"
	uplinkPrefix   = "uplink/"        // + name: sets the mark of the uplink.
	setTransit     = "uplink-transit" // Pairs of interfaces of two uplinks.
	commentForeign = "its source belongs to another uplink"
	commentTransit = "it came in by another uplink"
)

// Comments of the rules that select the uplink of a packet.
const (
	commentReply   = "replies leave by the uplink of the request"
	commentKept    = "its connection has an address of this uplink"
	commentSource  = "its source is an address of this uplink"
	commentOnly    = "only this uplink carries new connections"
	commentShared  = "source and destination share new connections by weight"
	commentMapping = "its rule translates to an address of this uplink: nat "
)

// uplinks adds the rules that select the uplink of each packet, before routing. The translated address of a connection
// is the record of its uplink: connection tracking keeps it as long as the connection, over restarts of the daemon,
// and no provider routes it over another uplink. A new connection hashes its two addresses. So all connections between
// two hosts have one source address, as protocols with several connections expect.
//
// After translation, two kinds of packets are dropped: those with an address of another uplink, and those that arrived by
// another uplink. The kernel forwards the latter while that uplink has no address, for example answers of its DHCP server.
func (c *compiler) uplinks(f *rs.Fragment, table rs.Family, head map[rs.ID][]rs.Rule) {
	list := c.snapshot.Uplinks
	if len(list) == 0 {
		return
	}
	choice, leaving := rs.ID{Table: table, Name: chainChoice}, rs.ID{Table: table, Name: chainForeign}
	add := func(to rs.ID, r *rs.Builder, comment string) { head[to] = append(head[to], r.Rule(comment)) }
	own := rs.ID{Table: table, Name: mapUplinks}
	f.Sets = append(f.Sets, &rs.Set{ID: own, Key: []rs.Type{addrType(table)}, Verdicts: true, Interval: true})

	const rst = 0x04
	add(choice, rs.NewRule().CutOffSource().TCPFlags(rst, 0, "tcp flags & rst == 0").Goto(chainCutOff), "")
	head[rs.ID{Table: table, Name: chainCutOff}] = []rs.Rule{rs.NewRule().Counter().RejectReset().Rule(commentCutOff)}
	add(choice, rs.NewRule().Reply().VerdictFrom(mapUplinks, rs.OriginalDest(table)), commentReply)
	add(choice, rs.NewRule().Initial().VerdictFrom(mapUplinks, rs.ReplyDest(table)), commentKept)
	add(choice, rs.NewRule().VerdictFrom(mapUplinks, rs.Source(table)), commentSource)
	for _, u := range list {
		add(choice, rs.NewRule().Is(rs.InName, rs.Iface(u.Interface)).Return(), "")
	}
	for _, n := range c.snapshot.NAT {
		if !n.Type.OneToOne() || familyOf(n.External.Addr()) != table {
			continue
		}
		for i := range list {
			if u := &list[i]; u.Usable[datapath.FamilyIndex(n.External.Addr())] && hasPrefix(u, n.External.Addr()) {
				add(choice, rs.NewRule().Within(rs.Source(table), n.Internal).Goto(uplinkChain(u)), commentMapping+n.Name)
			}
		}
	}
	for i := range list {
		u := &list[i]
		id := rs.ID{Table: table, Name: uplinkChain(u)}
		head[id] = []rs.Rule{rs.NewRule().SetMarkBits(config.UplinkMarks, u.Mark).Rule("")}
		for _, e := range prefixElements(own, table, u.Prefixes) {
			e.Verdict = rs.Verdict{Code: rs.Goto, Chain: id.Name}
			f.Elements = append(f.Elements, e)
		}
		foreign := rs.ID{Table: table, Name: uplinkChain(u) + "/foreign"}
		var others []netip.Prefix
		for j := range list {
			if j != i {
				others = append(others, list[j].Prefixes...)
			}
		}
		f.Sets = append(f.Sets, &rs.Set{ID: foreign, Key: []rs.Type{addrType(table)}, Interval: true})
		f.Elements = append(f.Elements, prefixElements(foreign, table, others)...)
		add(leaving, rs.NewRule().Is(rs.OutName, rs.Iface(u.Interface)).InSet(foreign.Name, rs.Source(table)).Counter().Drop(), commentForeign)
	}
	if len(list) > 1 {
		transit := rs.ID{Table: table, Name: setTransit}
		f.Sets = append(f.Sets, &rs.Set{ID: transit, Key: []rs.Type{rs.IfName, rs.IfName}})
		for i := range list {
			for j := range list {
				if i != j {
					f.Elements = append(f.Elements, rs.Element{Set: transit, Key: rs.Concat(rs.Iface(list[i].Interface), rs.Iface(list[j].Interface))})
				}
			}
		}
		add(leaving, rs.NewRule().Redirected().Accept(), "")
		add(leaving, rs.NewRule().InSet(transit.Name, rs.InName, rs.OutName).Counter().Drop(), commentTransit)
	}
	c.newConnections(f, table, head)
}

func uplinkChain(u *datapath.Uplink) string { return uplinkPrefix + identifier(u.Name) }

// UplinkOf returns the uplink that a chain selects, or "".
func UplinkOf(chain string, list []datapath.Uplink) string {
	for i := range list {
		if chain == uplinkChain(&list[i]) {
			return list[i].Name
		}
	}
	return ""
}

func hasPrefix(u *datapath.Uplink, a netip.Addr) bool {
	for _, p := range u.Prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// newConnections selects the uplink of packets without one. Without an uplink that carries connections of the family,
// the main routing table decides.
func (c *compiler) newConnections(f *rs.Fragment, table rs.Family, head map[rs.ID][]rs.Rule) {
	family := 0
	if table == rs.IP6 {
		family = 1
	}
	var members []balance.Member
	var chains []string
	for i := range c.snapshot.Uplinks {
		if u := &c.snapshot.Uplinks[i]; u.Carries[family] {
			members = append(members, balance.Member{Key: u.Name, Weight: u.Weight})
			chains = append(chains, uplinkChain(u))
		}
	}
	choice := rs.ID{Table: table, Name: chainChoice}
	switch len(chains) {
	case 0:
		return
	case 1:
		head[choice] = append(head[choice], rs.NewRule().Goto(chains[0]).Rule(commentOnly))
		return
	}
	set := rs.ID{Table: table, Name: mapUplinkSlots}
	f.Sets = append(f.Sets, &rs.Set{ID: set, Key: []rs.Type{rs.Mark}, Verdicts: true})
	slots := balance.Maglev(members, balance.TableSize(len(c.snapshot.Uplinks)))
	for n, i := range slots {
		f.Elements = append(f.Elements, rs.Element{Set: set, Key: rs.Number(uint32(n)).Raw, Verdict: rs.Verdict{Code: rs.Goto, Chain: chains[i]}})
	}
	pick := rs.Hash(rs.Slots{Count: len(slots)}, balance.Seed, rs.Source(table), rs.Dest(table))
	head[choice] = append(head[choice], rs.NewRule().VerdictFrom(set.Name, pick).Rule(commentShared), rs.NewRule().Goto(chains[0]).Rule(noSlot))
}
