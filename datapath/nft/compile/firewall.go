// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"strconv"

	"github.com/sluice-lb/sluice/config"
	rs "github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// RuleName returns the name of a firewall rule in counters and messages: its own, or its position
// in the file, counted from 1.
func RuleName(r *config.FirewallRule, index int) string {
	if r.Name != "" {
		return r.Name
	}
	return "rule-" + strconv.Itoa(index+1)
}

// counterPrefix begins the names of the counters of firewall rules.
const counterPrefix = "rule/"

// firewall compiles the rules. At the ingress hook each family has its own rule. In the table inet
// a rule without addresses is compiled once for both families.
func (c *compiler) firewall(b *base) error {
	for i, r := range c.snapshot.Rules {
		name := RuleName(r, i)
		if err := CarriesRule(r); err != nil {
			return fmt.Errorf("firewall %s: %w", name, err)
		}
		families := []rs.Family{0}
		if f, both := matchFamily(r); !both {
			families = []rs.Family{f}
		} else if !r.Source.IsZero() || !r.Destination.IsZero() {
			families = []rs.Family{rs.IP, rs.IP6}
		}
		chain := ruleChain(r)
		counter := rs.ID{Table: chain.Table, Name: RuleCounter(name)}
		b.objects = append(b.objects, &rs.Object{ID: counter, Kind: rs.ObjectCounter})
		variants := []*config.FirewallRule{r}
		if r.Action == config.ActionReject && r.Protocol == flow.Any {
			tcp := *r
			tcp.Protocol = flow.TCP
			variants = []*config.FirewallRule{&tcp, r} // TCP is rejected by a reset, other protocols by an ICMP error
		}
		for _, f := range families {
			for _, v := range variants {
				b.chains[chain] = append(b.chains[chain], c.filter(b, v, chain.Table, f, counter.Name, name))
			}
		}
	}
	return nil
}

// matchFamily returns the family of the rule's prefixes; both is true if it has none.
func matchFamily(r *config.FirewallRule) (f rs.Family, both bool) {
	for _, m := range []config.Match{r.Source, r.Destination} {
		if m.Prefix.IsValid() {
			return familyOf(m.Prefix.Addr()), false
		}
	}
	return 0, true
}

// ruleChain returns the chain of a rule.
func ruleChain(r *config.FirewallRule) rs.ID {
	hook := r.Hook
	if hook == "" {
		hook = config.HookForward
		set := r.Source.Set != "" || r.Destination.Set != ""
		switch {
		case r.Action == config.ActionNotrack:
			hook = config.HookPrerouting
		case (r.Action == config.ActionDrop || r.Action == config.ActionAccept) && set:
			hook = config.HookIngress
		}
	}
	switch hook {
	case config.HookIngress:
		return rs.ID{Table: rs.Netdev, Name: "filter"}
	case config.HookPrerouting:
		return rs.ID{Table: rs.Inet, Name: "early"}
	}
	return rs.ID{Table: rs.Inet, Name: string(hook)}
}

// filter compiles a rule for one family, or for all families if f is 0.
func (c *compiler) filter(b *base, r *config.FirewallRule, table, f rs.Family, counter, name string) rs.Rule {
	out := rs.NewRule()
	if f != 0 {
		out.ForFamily(table, f)
	}
	if r.In != "" {
		out.Is(rs.InName, rs.Iface(r.In))
	}
	if r.Out != "" {
		out.Is(rs.OutName, rs.Iface(r.Out))
	}
	c.match(b, out, r.Source, table, f, rs.Source)
	c.match(b, out, r.Destination, table, f, rs.Dest)
	if r.Protocol != flow.Any {
		out.Is(rs.L4Proto, rs.Proto(r.Protocol))
	}
	if len(r.Ports) == 1 {
		out.Between(rs.DestPort, rs.Port(r.Ports[0].First), rs.Port(r.Ports[0].Last))
	} else if len(r.Ports) > 1 {
		set := rs.ID{Table: table, Name: "ports/" + identifier(name)}
		c.portSet(b, set, r.Ports)
		out.InSet(set.Name, rs.DestPort)
	}
	if !r.Rate.IsZero() {
		out.Limit(r.Rate.Count, r.Rate.Per, r.Burst, r.Action != config.ActionLog)
	}
	out.CountIn(counter)
	switch r.Action {
	case config.ActionDrop:
		out.Drop()
	case config.ActionAccept:
		if table == rs.Netdev {
			out.Return() // leaves the chain of rules; services of the ingress hook follow
		} else {
			out.Accept()
		}
	case config.ActionReject:
		if r.Protocol == flow.TCP {
			out.RejectReset()
		} else {
			out.RejectPort(table)
		}
	case config.ActionLog:
		level, word := logLevel(r.Level)
		out.Log(r.Prefix, level, word)
	case config.ActionNotrack:
		out.Notrack()
	case config.ActionMark:
		if table != rs.Netdev && ruleChain(r).Name != "early" { // connection tracking has not run there
			b.marks[r.Mark] = true
			out.SetCtMark(r.Mark)
		}
		out.SetMark(r.Mark)
	}
	return out.Rule(name)
}

func (c *compiler) match(b *base, out *rs.Builder, m config.Match, table, f rs.Family, field func(rs.Family) rs.Selector) {
	switch {
	case m.Set != "":
		id := listID(table, f, m.Set)
		b.needs[id] = setRef{identifier(m.Set), f}
		out.InSet(id.Name, field(f))
	case m.Prefix.IsValid():
		out.Within(field(f), m.Prefix)
	}
}

// portSet makes the set of ports of one rule, with overlapping ranges merged.
func (c *compiler) portSet(b *base, id rs.ID, ports []flow.Ports) {
	for _, s := range b.sets {
		if s.ID == id {
			return
		}
	}
	b.sets = append(b.sets, &rs.Set{ID: id, Key: []rs.Type{rs.InetService}, Interval: true})
	var member [65536]bool
	for _, r := range ports {
		last := r.Last
		if r == (flow.Ports{}) {
			last = 65535
		}
		for p := int(r.First); p <= int(last); p++ {
			member[p] = true
		}
	}
	for p := 0; p < len(member); p++ {
		if !member[p] {
			continue
		}
		first := p
		for p+1 < len(member) && member[p+1] {
			p++
		}
		b.extra = append(b.extra, rs.Element{Set: id, Key: rs.Port(uint16(first)).Raw, End: rs.Port(uint16(p)).Raw})
	}
}
