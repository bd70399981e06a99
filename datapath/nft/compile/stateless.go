// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// stateless rewrites addresses before connection tracking and keeps the packets
// out of it. It stands on the prerouting hook and not on the ingress hook of the
// devices because only there a packet can be marked as untracked; both come
// before the routing decision.
func (p *part) stateless() error {
	if p.persist == nil && !Hashes(p.svc.Scheduler) && p.svc.Protocol != flow.UDP {
		return fmt.Errorf("scheduler %s in mode stateless sends the packets of one %s connection to different backends: use source-hash or maglev",
			p.svc.Scheduler, p.svc.Protocol)
	}
	p.refuse()
	p.memory()
	rules := append(p.access(), p.choose()...)
	p.chain(p.table, p.prefix, rules...)
	p.listen(mapStateless, rs.Verdict{Code: rs.Goto, Chain: p.prefix})
	for i, b := range p.svc.Backends {
		if familyOf(b.Address) != p.family {
			continue
		}
		p.stateslessBackend(i)
	}
	return p.replies()
}

// Hashes reports whether the scheduler gives all packets of a connection the
// same backend without remembering it.
func Hashes(s config.Scheduler) bool {
	switch s {
	case config.SchedulerSourceHash, config.SchedulerSymmetricHash, config.SchedulerMaglev:
		return true
	}
	return false
}

// udpChecksum is the checksum field of UDP; 0 says that there is none.
var udpChecksum = rs.Field("udp checksum", rs.InetService, 6)

// setPort are the rules that overwrite a port. A UDP packet without a checksum
// must stay without: the kernel would mend the 0 into a wrong one.
func setPort(s rs.Selector, port uint16, protocol flow.Protocol) []rs.Rule {
	set := func(r *rs.Builder, mend bool) rs.Rule {
		return r.SetField(s, rs.Port(port), protocol, mend).Rule("")
	}
	if protocol != flow.UDP {
		return []rs.Rule{set(rs.NewRule(), true)}
	}
	return []rs.Rule{
		set(rs.NewRule().Is(udpChecksum, rs.Port(0)), false),
		set(rs.NewRule().IsNot(udpChecksum, rs.Port(0)), true),
	}
}

func (p *part) stateslessBackend(i int) {
	b := p.svc.Backends[i]
	var rules []rs.Rule
	if p.persist != nil {
		rules = append(rules, p.remember(i))
	}
	if b.Port != 0 && p.svc.Protocol != flow.Any {
		rules = append(rules, setPort(rs.DestPort, b.Port, p.svc.Protocol)...)
	}
	rules = append(rules, rs.NewRule().Counter().Notrack().SetField(rs.Dest(p.family), rs.Addr(b.Address), 0, true).Accept().Rule(""))
	p.chain(p.table, p.backendChain(i), rules...)
}

// replies translate what backends answer back to the endpoint that was asked.
func (p *part) replies() error {
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

func (p *part) replyFrom(b config.Backend, vip netip.Addr, ports flow.Ports, chains map[string]bool) error {
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
	}
	endpoints(p.Service, p.table, mapReplies, endpoint{b.Address, p.svc.Protocol, []flow.Ports{from}, ""}, rs.Verdict{Code: rs.Goto, Chain: name})
	p.reply = append(p.reply, replyKey{b.Address, p.svc.Protocol, from, "service " + p.svc.Name})
	return nil
}
