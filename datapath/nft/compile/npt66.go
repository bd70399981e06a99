// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// npt66 compiles a prefix translation by RFC 6296, without state and neutral to the checksums of
// all layer 4 protocols. It overwrites the prefix and compensates the change of the address's ones'
// complement sum in one 16-bit word. With prefixes of up to 48 bits this is word 3, the subnet
// (section 3.4). With longer ones it is the first of words 4 to 7 that is not 0xffff (section 3.5).
//
// nf_tables cannot add. A 16-bit addition is therefore done as two 8-bit ones, and an 8-bit
// addition of a constant is a map of 256 entries.
func (c *compiler) npt66(s *Service, n *config.NATRule, b *base, chain string) {
	inside, outside := n.Internal.Masked(), n.External.Masked()
	source, dest := rs.Source(rs.IP6), rs.Dest(rs.IP6)
	raw, post := rs.ID{Table: rs.IP6, Name: "raw"}, rs.ID{Table: rs.IP6, Name: "translate"}

	in, notrack := rs.NewRule().Within(dest, outside), rs.NewRule()
	tracks, outs := egressRules(n.In, ""), egressRules(n.In, n.Out)
	for _, r := range slices.Concat(tracks, outs) {
		r.Within(source, inside).NotWithin(dest, inside)
	}
	if len(n.Except) > 0 {
		set := rs.ID{Table: rs.IP6, Name: chain + "/except"}
		s.intervals(set, rs.IP6, n.Except)
		for _, r := range slices.Concat(tracks, outs) {
			r.NotInSet(set.Name, dest)
		}
	}
	// Both directions of connections that connection tracking translates must stay tracked.
	if listeners, servers := c.trackedEndpoints6(); len(listeners) > 0 {
		to, from := rs.ID{Table: rs.IP6, Name: chain + "/listeners"}, rs.ID{Table: rs.IP6, Name: chain + "/servers"}
		s.intervals(to, rs.IP6, listeners)
		s.intervals(from, rs.IP6, servers)
		in.NotInSet(to.Name, dest)
		for _, track := range tracks {
			track.NotInSet(to.Name, dest).NotInSet(from.Name, source)
		}
		notrack.NotInSet(from.Name, dest) // both directions of a connection or none
	}
	b.chains[raw] = append(b.chains[raw], in.Goto(chain+"/in").Rule(""))
	for _, track := range tracks {
		b.chains[raw] = append(b.chains[raw], track.Notrack().Rule("nat "+n.Name))
	}
	for _, out := range outs {
		b.chains[post] = append(b.chains[post], out.Goto(chain+"/out").Rule(""))
	}
	b.clamp(n, rs.IP6)

	word := 3
	if inside.Bits() > 48 || outside.Bits() > 48 {
		word = 4
	}
	s.rewrite(chain+"/in", dest, outside, inside, word, notrack)
	s.rewrite(chain+"/out", source, inside, outside, word, nil)
}

// trackedEndpoints6 returns the IPv6 listeners and servers of services and port-forwards with tracked
// connections.
func (c *compiler) trackedEndpoints6() (listeners, servers []netip.Prefix) {
	add := func(list *[]netip.Prefix, a netip.Addr) {
		if p := netip.PrefixFrom(a, a.BitLen()); a.Is6() && !slices.Contains(*list, p) {
			*list = append(*list, p)
		}
	}
	for _, s := range c.snapshot.Services {
		if s.Mode != config.ModeDNAT && s.Mode != config.ModeFullNAT {
			continue
		}
		for _, l := range s.Listen {
			add(&listeners, l.Address)
		}
		for _, b := range s.Backends {
			add(&servers, b.Address)
		}
	}
	for _, n := range c.snapshot.NAT {
		if n.Type.Forwards() {
			add(&listeners, n.Listen.Address)
			add(&servers, n.To.Address)
		}
	}
	return listeners, servers
}

// addressSum returns the ones' complement sum of the 16-bit words of an address.
func addressSum(a netip.Addr) uint16 {
	b := a.As16()
	sum := uint32(0)
	for i := 0; i < 16; i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// subtractSum subtracts in ones' complement arithmetic.
func subtractSum(a, b uint16) uint16 {
	sum := uint32(a) + uint32(^b)
	return uint16(sum&0xffff + sum>>16)
}

// rewrite writes the chain that compensates the sum in a word of the address and overwrites the
// prefix. If notrack is not nil, that rule then exempts the packet from connection tracking.
func (s *Service) rewrite(chain string, sel rs.Selector, from, to netip.Prefix, word int, notrack *rs.Builder) {
	adjust := subtractSum(addressSum(from.Addr()), addressSum(to.Addr()))
	finish := []rs.Rule{rs.NewRule().Counter().SetPrefix(sel, to, false).Rule("")}
	if notrack != nil {
		finish = append(finish, notrack.Notrack().Rule(""))
	}
	s.chain(rs.IP6, chain+"/prefix", finish...)
	if word == 3 {
		s.addWord(chain, chain, sel, word, adjust)
		own := s.Fragment.Chains[len(s.Fragment.Chains)-1] // subnet 0xffff cannot be mapped; section 3.4
		own.Rules = append([]rs.Rule{rs.NewRule().Is(rs.Word(sel, word), rs.Port(0xffff)).Drop().Rule("RFC 6296 section 3.4")}, own.Rules...)
		return
	}
	var rules []rs.Rule
	for w := word; w <= 7; w++ {
		step := fmt.Sprintf("%s/word%d", chain, w)
		s.addWord(chain, step, sel, w, adjust)
		rules = append(rules, rs.NewRule().IsNot(rs.Word(sel, w), rs.Port(0xffff)).Goto(step).Rule(""))
	}
	// An interface identifier of only ones cannot be mapped; section 3.5.
	s.chain(rs.IP6, chain, append(rules, rs.NewRule().Drop().Rule("RFC 6296 section 3.5"))...)
}

// addWord writes a chain that adds a constant to a word in ones' complement arithmetic: a carry is
// added to the result, and 0xffff is written as 0.
func (s *Service) addWord(chain, step string, sel rs.Selector, word int, add uint16) {
	if add == 0xffff {
		add = 0
	}
	zero := 0xffff - add // the word that gives the sum 0xffff
	rules := []rs.Rule{rs.NewRule().Is(rs.Word(sel, word), rs.Port(zero)).SetField(rs.Word(sel, word), rs.Port(0), 0, false).Goto(chain + "/prefix").Rule("")}
	if zero < 0xffff {
		round := rs.NewRule().Between(rs.Word(sel, word), rs.Port(zero+1), rs.Port(0xffff)).Goto(step + "/round").Rule("")
		rules = append(rules, round)
		s.chain(rs.IP6, step+"/round", s.addBytes(chain, sel, word, add+1)...)
	}
	s.chain(rs.IP6, step, append(rules, s.addBytes(chain, sel, word, add)...)...)
}

// addBytes adds a constant modulo 65536, with the carry from the low byte to the high byte.
func (s *Service) addBytes(chain string, sel rs.Selector, word int, add uint16) []rs.Rule {
	high, low := rs.Byte(sel, 2*word), rs.Byte(sel, 2*word+1)
	hi, lo := byte(add>>8), byte(add)
	var rules []rs.Rule
	sum := func(r *rs.Builder, hi byte) rs.Rule {
		r.SetFrom(high, s.byteAddMap(chain, hi), high).SetFrom(low, s.byteAddMap(chain, lo), low)
		return r.Goto(chain + "/prefix").Rule("")
	}
	if lo != 0 {
		first := byte(256 - int(lo))
		rules = append(rules, sum(rs.NewRule().Between(low, rs.Uint8(first), rs.Uint8(255)), hi+1))
	}
	return append(rules, sum(rs.NewRule(), hi))
}

// byteAddMap makes the map that adds a constant to a byte, and returns its name.
func (s *Service) byteAddMap(chain string, add byte) string {
	id := rs.ID{Table: rs.IP6, Name: fmt.Sprintf("%s/plus-%d", chain, add)}
	for _, set := range s.Fragment.Sets {
		if set.ID == id {
			return id.Name
		}
	}
	s.Fragment.Sets = append(s.Fragment.Sets, &rs.Set{ID: id, Key: []rs.Type{rs.Integer8}, Data: []rs.Type{rs.Integer8}, Size: 256})
	for n := range 256 {
		s.Fragment.Elements = append(s.Fragment.Elements, rs.Element{Set: id, Key: rs.Uint8(byte(n)).Raw, Value: rs.Uint8(byte(n) + add).Raw})
	}
	return id.Name
}
