// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// stateless rewrites addresses before connection tracking and exempts the packets from it. It uses
// the prerouting hook, because a packet on the ingress hook of the devices cannot be marked as
// untracked. Both hooks precede routing.
func (p *servicePart) stateless() error {
	if p.persist == nil && !p.svc.Scheduler.Hashes() && p.svc.Protocol != flow.UDP {
		return fmt.Errorf("scheduler %s in mode stateless sends the packets of one %s connection to different backends: use source-hash or maglev",
			p.svc.Scheduler, p.svc.Protocol)
	}
	p.addRefusedChain()
	p.memory()
	rules := append(p.accessRules(), p.backendRules()...)
	p.chain(p.table, p.prefix, rules...)
	p.listen(mapStateless, rs.Verdict{Code: rs.Goto, Chain: p.prefix})
	for i, b := range p.svc.Backends {
		if familyOf(b.Address) != p.family {
			continue
		}
		p.stateslessBackend(i)
	}
	p.clientErrors(mapClientErrors)
	return p.replies()
}

// clientErrors forwards ICMP errors about replies to the backend that sent the reply. The client's
// packets are sent to the same backend. name is the map with the service's addresses.
func (p *servicePart) clientErrors(name string) {
	at, chain := quotedFields(p.family), p.prefix+"/errors"
	var rules []rs.Rule
	if slices.ContainsFunc(p.svc.Sessions, func(s config.Session) bool { return familyOf(s.Client.Addr()) == p.family }) {
		rules = append(rules, p.rule().VerdictFrom(p.prefix+"/sessions", at.source).Rule(""))
	}
	if p.persist != nil {
		if key, ok := p.quotedKey(); ok {
			rules = append(rules, p.rule().Recall(p.prefix+"/clients", key...).VerdictFrom(p.prefix+"/backends", rs.Priority).Rule(""))
		}
	}
	for _, pick := range p.slotSelectors(rs.Slots{Count: len(p.Slots[p.family])}, at) {
		if p.persist != nil && !p.svc.Scheduler.Hashes() {
			break // only the persistence set contains the backend
		}
		rules = append(rules, pick.when.VerdictFrom(p.prefix+"/slots", pick.slot).Rule(""))
	}
	p.chain(p.table, chain, rules...)
	for _, l := range p.svc.Listen {
		if familyOf(l.Address) == p.family {
			endpoints(p.Service, p.table, name, endpoint{l.Address, p.svc.Protocol, portsOf(l), ""}, rs.Verdict{Code: rs.Goto, Chain: chain})
		}
	}
}

// errorTo returns the rules that translate an ICMP error: its own address, and the address and port
// of the quoted packet. Port 0 keeps the port.
func (p *servicePart) errorTo(outer rs.Selector, to netip.Addr, quoted, quotedPort rs.Selector, port uint16) []rs.Rule {
	rule := func(r *rs.Builder, summed bool) rs.Rule {
		r.Counter().Notrack().SetQuoted(p.family, quoted, to, quotedPort, port, summed)
		return r.SetField(outer, rs.Addr(to), 0, true).Accept().Rule("")
	}
	q := rs.QuotedIn(p.family)
	summed := rs.NewRule().Is(q.Protocol, rs.Proto(flow.UDP)).IsNot(q.UDPChecksum, rs.Port(0))
	switch p.svc.Protocol {
	case flow.UDP, flow.Any:
		return []rs.Rule{rule(summed, true), rule(rs.NewRule(), false)}
	}
	return []rs.Rule{rule(rs.NewRule(), false)}
}

// defragment returns the rule that reassembles fragments of untracked packets, because later
// fragments have no ports.
func (c *compiler) defragment(table rs.Family) rs.Rule {
	if c.env.Defragments {
		return rs.Defragment(table)
	}
	return rs.NewRule().State("untracked").Accept().Rule("puts fragments together") // connection tracking reassembles them
}

// udpChecksum is the checksum field of UDP; 0 means no checksum.
var udpChecksum = rs.Field("udp checksum", rs.InetService, 6)

// setPort returns the rules that overwrite a port. A UDP packet without a checksum must remain
// without one: the kernel would change the 0 into a wrong checksum.
func setPort(s rs.Selector, port uint16, protocol flow.Protocol) []rs.Rule {
	set := func(r *rs.Builder, fixChecksum bool) rs.Rule {
		return r.SetField(s, rs.Port(port), protocol, fixChecksum).Rule("")
	}
	if protocol != flow.UDP {
		return []rs.Rule{set(rs.NewRule(), true)}
	}
	return []rs.Rule{
		set(rs.NewRule().Is(udpChecksum, rs.Port(0)), false),
		set(rs.NewRule().IsNot(udpChecksum, rs.Port(0)), true),
	}
}

// errorsApart returns the rules of a backend's chain that send ICMP errors to a chain of their own.
// Senders of ICMP errors are not remembered as clients.
func (p *servicePart) errorsApart(i int) (rules []rs.Rule) {
	errors := []*rs.Builder{p.rule().Is(rs.L4Proto, icmpOf(p.family))} // the service has no packets of this protocol
	if p.svc.Protocol == flow.Any {
		errors = icmpErrors(p.family)
	}
	for _, r := range errors {
		rules = append(rules, r.Goto(p.backendChain(i)+"/error").Rule(""))
	}
	return rules
}

func (p *servicePart) stateslessBackend(i int) {
	b := p.svc.Backends[i]
	rules := p.errorsApart(i)
	if p.persist != nil {
		rules = append(rules, p.storeBackend(i))
	}
	port := uint16(0)
	if p.svc.Protocol != flow.Any {
		port = b.Port
	}
	q := rs.QuotedIn(p.family)
	p.chain(p.table, p.backendChain(i)+"/error", p.errorTo(rs.Dest(p.family), b.Address, q.Source, q.SourcePort, port)...)
	if b.Port != 0 && p.svc.Protocol != flow.Any {
		rules = append(rules, setPort(rs.DestPort, b.Port, p.svc.Protocol)...)
	}
	rules = append(rules, rs.NewRule().Counter().Notrack().SetField(rs.Dest(p.family), rs.Addr(b.Address), 0, true).Accept().Rule(""))
	p.chain(p.table, p.backendChain(i), rules...)
}

// replies translates replies of backends back to the listener that the client sent to.
func (p *servicePart) replies() error {
	chains := make(map[string]bool)
	for _, l := range p.svc.Listen {
		if familyOf(l.Address) != p.family {
			continue
		}
		for _, ports := range portsOf(l) {
			for _, b := range p.svc.Backends {
				if familyOf(b.Address) != p.family {
					continue
				}
				if err := p.replyFrom(b, l.Address, ports, chains); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (p *servicePart) replyFrom(b config.Backend, vip netip.Addr, ports flow.Ports, chains map[string]bool) error {
	from, to := ports, uint16(0)
	if b.Port != 0 && p.svc.Protocol != flow.Any {
		if ports.First != ports.Last || ports == (flow.Ports{}) {
			return fmt.Errorf("backend %s: port %d for the listener's ports %s: a stateless reply cannot tell which port was asked; leave the backend's port out",
				backendName(b), b.Port, ports)
		}
		from = flow.Ports{First: b.Port, Last: b.Port}
		if b.Port != ports.First {
			to = ports.First
		}
	}
	name := p.prefix + "/reply-" + identifier(vip.String())
	if to != 0 {
		name += "-" + ports.String()
	}
	if !chains[name] {
		chains[name] = true
		var rules []rs.Rule
		if to != 0 {
			rules = setPort(rs.SourcePort, to, p.svc.Protocol)
		}
		rules = append(rules, rs.NewRule().Counter().Notrack().SetField(rs.Source(p.family), rs.Addr(vip), 0, true).Accept().Rule(""))
		p.chain(p.table, name, rules...)
		q := rs.QuotedIn(p.family)
		p.chain(p.table, name+"/error", p.errorTo(rs.Source(p.family), vip, q.Dest, q.DestPort, to)...)
	}
	e := endpoint{b.Address, p.svc.Protocol, []flow.Ports{from}, ""}
	endpoints(p.Service, p.table, mapReplies, e, rs.Verdict{Code: rs.Goto, Chain: name})
	endpoints(p.Service, p.table, mapServerErrors, e, rs.Verdict{Code: rs.Goto, Chain: name + "/error"})
	p.reply = append(p.reply, replyKey{b.Address, p.svc.Protocol, from, "service " + p.svc.Name})
	return nil
}
