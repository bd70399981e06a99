// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"slices"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// Chains for packets that no rule translates.
const (
	chainInvalid = "invalid" // Packets without a connection, from and to endpoints with translation.
	chainLeaving = "leaving" // Packets without a connection, from inside hosts to the outside.
	chainCutOff  = "cut-off" // Connections to a backend that is now down.
	ownedPrefix  = "owned/"  // + the answer.
	ownedPool    = ownedPrefix + "pool"
)

// Comments of the rules that drop these packets. CommentReason maps them to reasons for sluice
// explain.
const (
	commentInvalid = "no connection that it belongs to"
	commentCutOff  = "the backend of its connection went down"
	commentOwned   = "no service listens there"
	commentPool    = "no mapping of this outside address"
)

// StrayReason returns the reason why a chain drops packets, or "" for other chains.
func StrayReason(id rs.ID) string {
	switch {
	case id.Table != rs.IP && id.Table != rs.IP6:
		return ""
	case id.Name == chainInvalid, id.Name == chainLeaving:
		return "invalid"
	case id.Name == chainCutOff:
		return "no-flow"
	case id.Name == ownedPool:
		return "no-binding"
	case len(id.Name) > len(ownedPrefix) && id.Name[:len(ownedPrefix)] == ownedPrefix:
		return "unserved"
	}
	return ""
}

// CommentReason returns the reason for a rule's comment, or "" for other comments.
func CommentReason(comment string) string {
	return map[string]string{commentInvalid: "invalid", commentCutOff: "no-flow", commentOwned: "unserved", commentPool: "no-binding"}[comment]
}

// addUntranslated adds the rules for packets that no rule has translated:
//
//   - Invalid segments, such as a late retransmission outside of the window, bypass NAT. They are
//     dropped, since either recipient would end the connection. A client would get the server's
//     own address as source. The stack of the host itself would reply with a reset.
//   - Segments of connections to a backend that is down are answered by a reset to both sides. A
//     reset sent by either side is forwarded to the other.
//   - Packets to owned addresses without a listener (see datapath.Owned) are refused before
//     routing, if a rule can look up local addresses there. After routing the kernel would also
//     send ICMP redirects, which count against the rate limit of its errors.
func (c *compiler) addUntranslated(b *base, p *peers, table rs.Family, head map[rs.ID][]rs.Rule) {
	early, forward := rs.ID{Table: table, Name: "untranslated"}, rs.ID{Table: table, Name: "forward"}
	invalid, egressRules := rs.ID{Table: table, Name: chainInvalid}, rs.ID{Table: table, Name: chainLeaving}
	rules := append(c.invalidRules(p, table), head[invalid]...)
	tracked := len(rules)+len(head[egressRules]) > 0
	known := rs.NewRule().Known().Accept().Rule("")
	strange := func(chain string) rs.Rule { return rs.NewRule().State("invalid").Goto(chain).Rule("") }
	add := func(to rs.ID, rule rs.Rule) {
		first := len(head[to]) == 0 || to == forward && !slices.ContainsFunc(head[forward], known.Equal)
		if first && tracked {
			head[to] = append(head[to], known)
		}
		head[to] = append(head[to], rule)
	}
	if len(rules) > 0 {
		head[invalid] = rules
		if p.used[rs.ID{Table: table, Name: setServers}] || p.used[rs.ID{Table: table, Name: setServers + ranges}] {
			const rst = 0x04
			// The first rule decides for nearly all packets, and with a single expression.
			head[early] = []rs.Rule{rs.NewRule().TranslatedOpen().Accept().Rule(""), rs.NewRule().KnownOpen().Accept().Rule(""),
				rs.NewRule().CutOff().TCPFlags(rst, 0, "tcp flags & rst == 0").Goto(chainCutOff).Rule("")}
			head[rs.ID{Table: table, Name: chainCutOff}] = []rs.Rule{rs.NewRule().Counter().RejectReset().Rule(commentCutOff)}
		}
		add(early, strange(chainInvalid))
	}
	if len(head[egressRules]) > 0 {
		add(forward, strange(chainLeaving))
	}
	to, at := rs.Dest(table), early
	if !c.env.FIB {
		at = forward
	}
	if p.used[rs.ID{Table: table, Name: setOwnedPools}] {
		add(at, rs.NewRule().InSet(setOwnedPools, to).Goto(ownedPool).Rule(""))
		head[rs.ID{Table: table, Name: ownedPool}] = c.notLocal(rs.NewRule().Counter().Drop().Rule(commentPool))
	}
	if p.used[rs.ID{Table: table, Name: mapOwned}] {
		add(at, rs.NewRule().VerdictFrom(mapOwned, to).Rule(""))
	}
	if p.used[rs.ID{Table: table, Name: mapOwnedBound}] {
		add(forward, rs.NewRule().InSet(setSameLink, rs.InName, rs.OutName).VerdictFrom(mapOwnedBound, to).Rule(""))
	}
	for _, answer := range p.answers(table) {
		head[rs.ID{Table: table, Name: ownedPrefix + string(answer)}] = c.notLocal(refusalRules(table, answer)...)
	}
}

// notLocal exempts packets to the host itself from the rules.
func (c *compiler) notLocal(rules ...rs.Rule) []rs.Rule {
	if !c.env.FIB {
		return rules
	}
	return append([]rs.Rule{rs.NewRule().ToLocal().Accept().Rule("")}, rules...)
}

// answers returns the kinds of answers that the virtual addresses use.
func (p *peers) answers(table rs.Family) (answers []config.WhenDown) {
	for _, e := range p.fragment.Elements {
		for _, a := range []config.WhenDown{config.WhenDownReset, config.WhenDownReject, config.WhenDownDrop} {
			if e.Set.Table == table && e.Verdict.Chain == ownedPrefix+string(a) && !slices.Contains(answers, a) {
				answers = append(answers, a)
			}
		}
	}
	return answers
}

// refusalRules returns the rules that refuse packets to an owned address without a listener.
func refusalRules(table rs.Family, answer config.WhenDown) []rs.Rule {
	switch answer {
	case config.WhenDownDrop:
		return []rs.Rule{rs.NewRule().Counter().Drop().Rule(commentOwned)}
	case config.WhenDownReject:
		return []rs.Rule{rs.NewRule().Counter().RejectPort(table).Rule(commentOwned)}
	}
	return []rs.Rule{
		rs.NewRule().Is(rs.L4Proto, rs.Proto(flow.TCP)).Counter().RejectReset().Rule(commentOwned),
		rs.NewRule().Counter().RejectPort(table).Rule(commentOwned),
	}
}

// invalidRules returns the rules for packets without a connection, from and to tracked endpoints. An
// ICMP error of a server is identified by the quoted packet, which was sent to the server.
func (c *compiler) invalidRules(p *peers, table rs.Family) (rules []rs.Rule) {
	drop := func(r *rs.Builder) { rules = append(rules, r.Counter().Drop().Rule(commentInvalid)) }
	all := func(rs.Family) []*rs.Builder { return []*rs.Builder{rs.NewRule()} }
	sets := func(name string, key []rs.Selector, start func(rs.Family) []*rs.Builder) {
		for _, set := range []string{name, name + ranges} {
			if p.used[rs.ID{Table: table, Name: set}] {
				for _, r := range start(table) {
					drop(r.InSet(set, key...))
				}
			}
		}
	}
	sets(setListeners, byDest(table), all)
	if p.used[rs.ID{Table: table, Name: setListeners + interfaces}] {
		drop(rs.NewRule().InSet(setListeners+interfaces, append([]rs.Selector{rs.InName}, byDest(table)...)...))
	}
	sets(setServers, bySource(table), all)
	sets(setServers, byQuotedDest(table), icmpErrors)
	return rules
}

// dropUntranslated drops the packets without a connection that match a source translation. NAT does
// not translate them, and they must not leave with their inside address.
func (b *base) dropUntranslated(f rs.Family, r *rs.Builder) {
	id := rs.ID{Table: f, Name: chainLeaving}
	b.chains[id] = append(b.chains[id], r.Counter().Drop().Rule(commentInvalid))
}
