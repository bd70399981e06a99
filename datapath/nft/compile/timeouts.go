// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"time"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// timeoutsName returns the name of a protocol's timeout object, and of the chain that assigns it to
// new connections. Services and NAT rules jump to this chain. The kernel cannot change timeouts in
// place, so a change rewrites only these chains.
func timeoutsName(p flow.Protocol) string { return "timeouts/" + p.String() }

// assignTimeouts returns the rules that assign timeouts to new connections of a service or a NAT
// rule. It returns none if the kernel does not support them.
func (c *compiler) assignTimeouts(s *Service, table rs.Family, protocol flow.Protocol) (rules []rs.Rule) {
	if !c.env.Timeouts {
		return nil
	}
	for _, t := range timeoutsOf(c.snapshot.Config.Timeouts, table) {
		if protocol != t.protocol && protocol != flow.Any {
			continue
		}
		r := rs.NewRule()
		if protocol == flow.Any {
			r.Is(rs.L4Proto, rs.Proto(t.protocol))
		}
		rules = append(rules, r.Jump(timeoutsName(t.protocol)).Rule(""))
		s.addReference(rs.ID{Table: table, Name: timeoutsName(t.protocol)})
	}
	return rules
}

// timeouts writes the chains in use and their timeout objects.
func (c *compiler) timeouts(b *base) {
	for _, table := range []rs.Family{rs.IP, rs.IP6} {
		for _, t := range timeoutsOf(c.snapshot.Config.Timeouts, table) {
			id := rs.ID{Table: table, Name: timeoutsName(t.protocol)}
			if !b.used[id] {
				continue
			}
			b.chains[id] = []rs.Rule{}
			if len(t.states) > 0 {
				b.objects = append(b.objects, rs.NewTimeout(id, uint8(t.protocol), t.states...))
				b.chains[id] = append(b.chains[id], rs.NewRule().Timeout(id.Name).Rule(""))
			}
		}
	}
}

type timeouts struct {
	protocol flow.Protocol
	states   []rs.Timeout
}

// defaultUDP is the default of timeouts.udp.
const defaultUDP = 5 * time.Minute

// timeoutsOf translates the configuration to the states of connection tracking, with the numbers of
// include/uapi/linux/netfilter/nfnetlink_cttimeout.h. Zero values and other states keep the
// kernel's sysctls.
//
// A TCP connection is established until both sides have sent FIN (RFC 5382 section 5), and
// transitory before and after. After a reset the kernel's ten seconds apply. The default of UDP
// applies to streams only: single exchanges keep the kernel's 30 s. With the five minutes of RFC
// 4787, a thousand DNS queries per second would fill the table of most hosts. Any other value
// applies to both.
func timeoutsOf(t config.Timeouts, table rs.Family) (list []timeouts) {
	add := func(p flow.Protocol, all ...rs.Timeout) {
		states := all[:0]
		for _, t := range all {
			if t.After > 0 {
				states = append(states, t)
			}
		}
		list = append(list, timeouts{p, states})
	}
	established, transitory := t.TCPEstablished.D(), t.TCPTransitory.D()
	add(flow.TCP,
		rs.Timeout{State: 1, Name: "syn_sent", After: transitory}, rs.Timeout{State: 2, Name: "syn_recv", After: transitory},
		rs.Timeout{State: 3, Name: "established", After: established}, rs.Timeout{State: 4, Name: "fin_wait", After: established},
		rs.Timeout{State: 5, Name: "close_wait", After: established}, rs.Timeout{State: 6, Name: "last_ack", After: transitory},
		rs.Timeout{State: 7, Name: "time_wait", After: transitory}, rs.Timeout{State: 9, Name: "syn_sent2", After: transitory})
	single := t.UDP.D()
	if single == defaultUDP {
		single = 0
	}
	add(flow.UDP, rs.Timeout{State: 1, Name: "unreplied", After: single}, rs.Timeout{State: 2, Name: "replied", After: t.UDP.D()})
	icmp := flow.ICMP
	if table == rs.IP6 {
		icmp = flow.ICMPv6
	}
	add(icmp, rs.Timeout{State: 1, Name: "timeout", After: t.ICMP.D()})
	add(flow.SCTP, rs.Timeout{State: 4, Name: "established", After: t.Other.D()})
	return list
}
