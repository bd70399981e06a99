// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// backendRules returns the rules that pick a backend: for pinned clients, for remembered clients, then by
// the scheduler.
//
// Plain services share a fixed number of maps of addresses (see shard). The kernel finds a set in a
// list of all sets of the table, and checks every element of a map against every rule that uses the
// map. With one map per service, and also with one map for all, 10,000 services cost seconds
// (figures in docs/internals/nftables.md). Maps of verdicts are not shared, because the kernel also
// follows each of their elements for every rule.
func (p *servicePart) backendRules() []rs.Rule {
	var rules []rs.Rule
	if r, ok := p.sessions(); ok {
		rules = append(rules, r)
	}
	if p.persist != nil {
		rules = append(rules, p.recallRules()...)
		rules = append(rules,
			p.rule().Forget(p.prefix+"/clients", p.clientKey()...).Rule(""))
	}
	if p.plain {
		return append(rules, p.choosePlain()...)
	}
	owners := p.schedule()
	set := rs.ID{Table: p.table, Name: p.prefix + "/slots"}
	p.Fragment.Sets = append(p.Fragment.Sets, &rs.Set{ID: set, Key: []rs.Type{rs.Mark}, Verdicts: true})
	for n, i := range owners {
		p.Fragment.Elements = append(p.Fragment.Elements, rs.Element{
			Set: set, Key: rs.Number(uint32(n)).Raw, Verdict: rs.Verdict{Code: rs.Goto, Chain: p.backendChain(i)},
		})
	}
	for _, pick := range p.slotSelectors(rs.Slots{Count: len(owners)}, packetFields(p.family)) {
		rules = append(rules, pick.when.VerdictFrom(set.Name, pick.slot).Rule(""))
	}
	if p.perPacket() {
		return append(rules, rs.NewRule().Drop().Rule(noSlot))
	}
	return append(rules, rs.NewRule().Goto(p.backendChain(p.active[0])).Rule(noSlot))
}

// noSlot is the comment of the rule for a packet without an entry in the map of slots. A packet
// walks the rules that were active when it arrived, but looks up the current elements of the map
// (nft_do_chain and nft_lookup_eval of Linux). If a change reduces the number of slots, such a
// packet may look up a removed slot. Without this rule the host would accept the connection itself
// and refuse it, or an inside address would leave untranslated.
const noSlot = "came while the map changed"

// perPacket reports whether each packet of a flow is scheduled. A packet without a slot is then
// dropped, and its client retransmits it: another backend would reset the connection.
func (p *servicePart) perPacket() bool {
	return (p.svc.Mode == config.ModeDSR || p.svc.Mode == config.ModeStateless) && p.svc.Scheduler.Hashes()
}

// shard returns the suffix of the map with the slots of a plain service, one of 256 maps.
func shard(name string) string { return fmt.Sprintf("-%02x", number(name)&0xff) }

// choosePlain returns the rules that translate a connection to the address in its slot.
func (p *servicePart) choosePlain() []rs.Rule {
	owners := p.schedule()
	set := rs.ID{Table: p.table, Name: mapHosts + shard(p.svc.Name)}
	ports := p.svc.Backends[0].Port != 0
	if ports {
		set.Name = mapTargets + shard(p.svc.Name)
	}
	p.addReference(set)
	for n, i := range owners {
		b := p.svc.Backends[i]
		value := rs.Concat(rs.Addr(b.Address))
		if ports {
			value = rs.Concat(rs.Addr(b.Address), rs.Port(b.Port))
		}
		p.Fragment.Elements = append(p.Fragment.Elements, rs.Element{Set: set, Key: rs.Number(p.id + uint32(n)).Raw, Value: value})
	}
	var rules []rs.Rule
	for _, pick := range p.slotSelectors(rs.Slots{First: p.id, Count: len(owners)}, packetFields(p.family)) {
		rules = append(rules, pick.when.DNATFrom(p.family, set.Name, ports, pick.slot).Rule(""))
	}
	first := p.svc.Backends[p.active[0]]
	return append(rules, rs.NewRule().DNAT(p.family, first.Address, first.Port).Rule(noSlot))
}

// rule starts a rule that reads the network header.
func (p *servicePart) rule() *rs.Builder { return rs.NewRule().ForFamily(p.table, p.family) }

// schedule returns the backend of every slot.
func (p *servicePart) schedule() []int {
	owners := p.svc.Slots(p.active)
	keys := make([]string, len(owners))
	for n, i := range owners {
		keys[n] = p.svc.Backends[i].Key()
	}
	p.Slots[p.family] = keys
	return owners
}

// pick is one way to select a slot, for the packets that the rule when matches.
type pick struct {
	when *rs.Builder
	slot rs.Selector
}

// fields are the selectors of the fields of a client's packet to a service.
type fields struct{ source, sourcePort, dest, destPort, protocol rs.Selector }

func packetFields(f rs.Family) fields {
	return fields{rs.Source(f), rs.SourcePort, rs.Dest(f), rs.DestPort, rs.L4Proto}
}

// quotedFields returns the selectors for the reply that an ICMP error quotes. Source and
// destination are exchanged: the fields are the ones of the client's packet.
func quotedFields(f rs.Family) fields {
	q := rs.QuotedIn(f)
	return fields{q.Dest, q.DestPort, q.Source, q.SourcePort, q.Protocol}
}

// slotSelectors returns the ways to select a slot. The first one that matches a packet applies.
func (p *servicePart) slotSelectors(slots rs.Slots, at fields) []pick {
	source, dest := at.source, at.dest
	forward := rs.Hash(slots, balance.Seed, source, at.sourcePort, dest, at.destPort)
	switch p.svc.Scheduler {
	case config.SchedulerRandom:
		return []pick{{p.rule(), rs.Random(slots)}}
	case config.SchedulerSourceHash:
		return []pick{{p.rule(), rs.Hash(slots, balance.Seed, source)}}
	case config.SchedulerMaglev:
		return p.picksByPort([]pick{{p.rule(), forward}}, slots, at)
	case config.SchedulerSymmetricHash:
		// The smaller endpoint is hashed first, so that both directions have the same hash. The
		// kernel cannot compare two fields, but the destination is one of few addresses.
		backward := rs.Hash(slots, balance.Seed, dest, at.destPort, source, at.sourcePort)
		var ways []pick
		for _, l := range p.svc.Listen {
			if next := l.Address.Next(); familyOf(l.Address) == p.family && next.IsValid() {
				last := rs.LastAddr(netip.PrefixFrom(l.Address, 0))
				ways = append(ways, pick{p.rule().Is(dest, rs.Addr(l.Address)).Between(source, rs.Addr(next), rs.Addr(last)), backward})
			}
		}
		return p.picksByPort(append(ways, pick{p.rule(), forward}), slots, at)
	}
	return []pick{{p.rule(), rs.Next(slots)}}
}

// picksByPort puts a hash without ports first, for packets of protocols without ports, if the
// service takes any protocol.
func (p *servicePart) picksByPort(ways []pick, slots rs.Slots, at fields) []pick {
	if p.svc.Protocol != flow.Any {
		return ways
	}
	none := p.rule()
	for _, proto := range []flow.Protocol{flow.TCP, flow.UDP, flow.SCTP, flow.UDPLite} {
		none.IsNot(at.protocol, rs.Proto(proto))
	}
	return append([]pick{{none, rs.Hash(slots, balance.Seed, at.source, at.dest)}}, ways...)
}

// capacity returns the maximum number of slots of a service with this configuration.
func capacity(s *config.Service) int {
	if s.Scheduler.Hashes() {
		return balance.TableSize(len(s.Backends))
	}
	n := 0
	for _, b := range s.Backends {
		n += max(b.Weight, 1)
	}
	n *= datapath.SlowScale(s)
	return max(n, 1)
}
