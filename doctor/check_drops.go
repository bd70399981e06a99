// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// ruleDrops judges the drops of a firewall rule. The rate alone does not decide, because one packet
// may be a fault.
func (c *Case) ruleDrops(all trace.DropGroup) Finding {
	g := c.wanted(all)
	if f, is := c.controlDrops(g); is {
		return f
	}
	if g.Packets == 0 {
		return found(Info, "a firewall rule dropped %s that nobody waits for: broadcasts, group messages or scans%s", plural(int(all.Packets), "packet"), ruleText(all))
	}
	f := found(c.unwanted(g), "a firewall rule drops %.0f packets/s%s", g.PerSecond, ruleText(g)).losing(g.PerSecond)
	if g.PerSecond < 1 {
		f.Summary = fmt.Sprintf("a firewall rule dropped %s%s", plural(int(g.Packets), "packet"), ruleText(g))
	}
	if l, network, to := c.downTowards(g); l != "" {
		f.Verdict = Warn
		f.Summary += fmt.Sprintf("; %s is in the network %s of %s, which is down, so that its packets take another way", to, network, l)
		f.Remedy = &Remedy{Do: "set the interface up", Commands: []string{"ip link set " + l + " up"}, Risk: "none, unless it was set down on purpose"}
		return f
	}
	if c.nobodyListens(g) {
		f.Verdict = Info
		f.Summary += "; no program listens at the ports"
		return f
	}
	if n := sourcesOf(g); n >= manyBanned && bySource(g) && (strings.Contains(g.Rules[0].Text, "saddr @") || strings.Contains(g.Rules[0].Text, "--match-set")) {
		f.Verdict = Info
		f.Summary += fmt.Sprintf("; its set bans %d sources, as it is meant to", n)
		return f
	}
	// RFC 2979 §3.1.1: a firewall must not drop the errors by which path MTU discovery works.
	for _, s := range g.Sampled {
		switch kind, code, _ := s.ICMP(); {
		case s.TooBig():
			f.Verdict = max(f.Verdict, Warn)
			f.Summary = fmt.Sprintf("a firewall rule drops ICMP errors that say \"packet too big\" (type %d code %d, from %s)%s: senders do not learn the MTU of the path", kind, code, s.Packet.Source.Addr(), ruleText(g))
			f.Symptom = "small requests work, large transfers hang"
			f.Remedy = &Remedy{Do: "accept them before the rule named above: in nftables icmp type destination-unreachable and icmpv6 type packet-too-big, or ct state related", Risk: "none: tracking lets only errors about known connections be related"}
			return f
		case s.Error() && s.Tracked == trace.TrackedConfirmed:
			f.Verdict = max(f.Verdict, Warn)
			f.Summary = fmt.Sprintf("a firewall rule drops ICMP errors about known connections (type %d code %d, from %s)%s: their clients wait instead of failing at once", kind, code, s.Packet.Source.Addr(), ruleText(g))
			f.Remedy = &Remedy{Do: "accept ct state related before the rule named above", Risk: "none: only errors about known connections are related"}
		}
	}
	if pair, seen := c.dataOfFTP(g); seen && f.Verdict >= Warn && len(c.NS.Rules.Chains) > 0 && c.NS.Rules.Helpers == 0 {
		f.Verdict = Info
		f.Summary += fmt.Sprintf("; among them data connections of FTP to %s, see RL07", pair.Server)
	}
	if c.asymmetric() && strings.Contains(ruleText(g), "invalid") {
		f.Verdict = Info
		f.Summary += "; routes are asymmetric, see ST08"
		return f
	}
	if target, n := c.deadPublished(g); n >= 2 && !bySource(g) {
		f.Verdict = max(f.Verdict, Warn)
		if len(g.Rules) == 1 && strings.HasPrefix(g.Rules[0].Text, "policy") {
			f.Verdict = Critical
		}
		f.Summary = fmt.Sprintf("a firewall rule drops every new connection to %s, to which another rule forwards a port%s", target, ruleText(g))
		f.Symptom = "a published port is dead"
		f.Remedy = &Remedy{Do: "accept what is forwarded by DNAT before the rule named above (Docker: in DOCKER-USER), or delete the port forward", Risk: "the service is open to whoever reaches the port"}
		if chain, is := nftChain(g); is {
			f.Remedy.Commands = []string{fmt.Sprintf("nft insert rule %s ct status dnat accept", chain)}
		}
	}
	return c.bridged(f, g)
}

// unheard judges a rule that drops questions for link addresses, or their answers, if packets wait for them in vain.
func (c *Case) unheard(g trace.DropGroup) (Finding, bool) {
	if c.NS.Traffic == nil {
		return Finding{}, false
	}
	for i := range c.NS.Traffic.Classes {
		class := &c.NS.Traffic.Classes[i]
		hop := class.Reason.Unresolved
		if !class.Reason.Unheard || class.Reason.Drop.Cause.ID != g.Cause.ID {
			continue
		}
		g.Sampled = slices.DeleteFunc(slices.Clone(g.Sampled), func(s *trace.DropSample) bool {
			return s.EthType != trace.EtherARP && c.control(s) != discovery
		})
		g.Rules = slices.DeleteFunc(slices.Clone(g.Rules), func(r firewall.Rule) bool {
			return !slices.ContainsFunc(g.Sampled, func(s *trace.DropSample) bool { return slices.Contains(s.Blamed, r.ID()) })
		})
		f := found(Warn, "a firewall rule drops %s for %s on %s, so that its hardware address is not learned%s", asks(hop), hop, class.Reason.UnresolvedOn, ruleText(g)).
			concerning(Concerns{NextHops: []netip.Addr{hop}})
		f.Symptom = "hosts of the link cannot be reached once their addresses are forgotten"
		f.Remedy = &Remedy{Do: "accept these messages before the rule named above", Risk: "a host of the link can claim addresses of others"}
		if family, _, _ := strings.Cut(ruleChain(g), " "); family == "arp" {
			f.Remedy.Commands = []string{fmt.Sprintf("nft insert rule %s arp saddr ip %s accept", ruleChain(g), hop)}
		} else if hop.Is6() {
			f.Remedy.Commands = c.accept(g, acceptDiscovery, "-p icmpv6")
		}
		return f, true
	}
	return Finding{}, false
}

// downTowards finds a link that is down although most dropped packets go to a host of its network.
func (c *Case) downTowards(g trace.DropGroup) (link string, network netip.Prefix, to netip.Addr) {
	for _, l := range c.NS.After.Links {
		for _, p := range l.Addresses {
			n := 0
			for _, s := range g.Sampled {
				if a := s.Packet.Dest.Addr(); !l.Up && p.Contains(a) && !p.IsSingleIP() && p.Addr() != a {
					n, to = n+1, a
				}
			}
			if n >= fewLost && 2*n > len(g.Sampled) {
				return l.Name, p.Masked(), to
			}
		}
	}
	return "", network, to
}

// manyBanned is from how many sources on a set of them is a list of attackers.
const manyBanned = 8

// nobodyListens reports whether a policy drops packets to ports of this host at which no program listens.
func (c *Case) nobodyListens(g trace.DropGroup) bool {
	return len(g.Rules) == 1 && strings.HasPrefix(g.Rules[0].Text, "policy") && !c.NS.After.Cut && !slices.ContainsFunc(g.Sampled, func(s *trace.DropSample) bool {
		return !s.Packet.Protocol.HasPorts() || c.linkOf(s.Packet.Dest.Addr()) == "" || s.Tracked != trace.TrackedNew || c.listens(s.Packet.Protocol, s.Packet.Dest.Port())
	})
}

// sourcesOf counts the sources of dropped packets.
func sourcesOf(g trace.DropGroup) int {
	sources := map[netip.Addr]bool{}
	for _, s := range g.Sampled {
		sources[s.Packet.Source.Addr()] = true
	}
	return len(sources)
}

// bridged says that dropped packets are frames between ports of a bridge.
func (c *Case) bridged(f Finding, g trace.DropGroup) Finding {
	i := slices.IndexFunc(g.Sampled, (*trace.DropSample).Bridged)
	if i < 0 {
		return f
	}
	bridge := g.Sampled[i].Interface
	for _, l := range c.NS.After.Links {
		if l.Name == bridge && l.Master != 0 {
			bridge = c.linkName(l.Master)
		}
	}
	f.Summary += fmt.Sprintf("; these are frames between ports of the bridge %s, which pass iptables (bridge-nf-call-iptables)", bridge)
	if f.Verdict < Warn {
		return f
	}
	f.Symptom = "virtual machines or containers of one bridge lose each other"
	f.Remedy = &Remedy{Do: "accept what stays on the bridge, or let bridged frames pass without iptables (bridge-nf-call-iptables=0) where no NAT between its hosts needs it", Risk: "its hosts reach each other at every port"}
	if chain, is := nftChain(g); is {
		f.Remedy.Commands = []string{fmt.Sprintf("nft insert rule %s iifname %q oifname %q accept", chain, bridge, bridge)}
	} else if program, rest, legacy := strings.Cut(ruleChain(g), "tables "); legacy {
		table, name, _ := strings.Cut(rest, " ")
		f.Remedy.Commands = []string{fmt.Sprintf("%stables-legacy -t %s -I %s -i %s -o %s -j ACCEPT", program, table, name, bridge, bridge)}
	}
	return f
}

func ruleChain(g trace.DropGroup) string {
	if len(g.Rules) != 1 {
		return ""
	}
	return g.Rules[0].Chain
}

// nftChain is the chain of nftables that holds the rule of a group, as commands name it.
func nftChain(g trace.DropGroup) (string, bool) {
	family, _, _ := strings.Cut(ruleChain(g), " ")
	return ruleChain(g), slices.Contains([]string{"ip", "ip6", "inet"}, family)
}

// bySource reports whether the rule of a group has a source condition: such a rule is intended.
func bySource(g trace.DropGroup) bool {
	return len(g.Rules) == 1 && (strings.Contains(g.Rules[0].Text, "saddr") || strings.Contains(g.Rules[0].Text, "-s ") || strings.Contains(g.Rules[0].Text, "--match-set"))
}

// deadPublished is the target of a port forward to which no connection gets through, and how many
// samples were on their way there.
func (c *Case) deadPublished(g trace.DropGroup) (target netip.AddrPort, n int) {
	dropped := map[netip.AddrPort]int{}
	for _, s := range g.Sampled {
		if s.Tracked == trace.TrackedNew && s.Original.IsValid() && s.Original.Dest != s.Packet.Dest && s.Reply.Source == s.Packet.Dest {
			dropped[s.Packet.Dest]++
		}
	}
	for to, count := range dropped {
		if count > n && !c.reached(to) {
			target, n = to, count
		}
	}
	return target, n
}

// reached reports whether a connection is, or recently was, translated to a backend. Entries of
// ended connections remain for minutes and are no evidence for the present.
func (c *Case) reached(backend netip.AddrPort) bool {
	if c.NS.Table == nil { // not known, but for an empty one
		return c.NS.TableSkipped || c.NS.TableErr != nil
	}
	return c.NS.Entries.Reached[backend] || len(c.NS.Entries.Reached) == observe.MostReached
}

// dataOfFTP finds a dropped data connection of FTP: new, between the ends of a control connection.
func (c *Case) dataOfFTP(g trace.DropGroup) (pair observe.Pair, seen bool) {
	for _, s := range g.Sampled {
		if s.Packet.Protocol != flow.TCP || s.Tracked == trace.TrackedConfirmed {
			continue
		}
		from, to := s.Packet.Source.Addr(), s.Packet.Dest.Addr()
		for _, p := range c.NS.Entries.FTP {
			if from == p.Client && to == p.Server || from == p.Server && to == p.Client {
				return p, true
			}
		}
	}
	return pair, false
}

// helpFTP is the rule that assigns the helper of FTP.
const helpFTP = `nft 'add table inet ftp; add ct helper inet ftp ftp { type "ftp" protocol tcp; }; ` +
	`add chain inet ftp pre { type filter hook prerouting priority filter; }; add rule inet ftp pre tcp dport 21 ct helper set "ftp"'`

// unhelpedFTP judges control connections of FTP that no helper watches, so that nothing expects
// their data connections.
func (c *Case) unhelpedFTP() Finding {
	first := c.NS.Entries.FTP[0]
	f := found(Info, "FTP control connections pass, for example %s to %s, and no helper is assigned: their data connections are new ones to the rules", first.Client, first.Server)
	for _, cause := range []trace.Cause{trace.CauseNftRule, trace.CauseLegacyRule, trace.CauseHookRule} {
		g, there := c.drops(cause)
		if !there {
			continue
		}
		if pair, seen := c.dataOfFTP(g); seen {
			f = found(Warn, "a firewall rule drops the data connections of FTP between %s and %s: no helper is assigned, which would announce them%s", pair.Client, pair.Server, ruleText(g)).losing(g.PerSecond)
			f.Symptom = "FTP logs in, and listings and transfers hang"
			f.Remedy = &Remedy{Do: "assign the helper to port 21, and accept related connections (ct state related)", Commands: []string{helpFTP}, Cost: "an entry of 448 bytes for each control connection",
				Risk: "clients open ports in the firewall by what they write into such a connection"}
			return c.withDrops(f, cause)
		}
	}
	return f.with("control connections without a helper", fmt.Sprint(len(c.NS.Entries.FTP)), fromDump)
}

// closedService finds a port of this host without a listener that receives a large share of the
// traffic. Scans spread over many ports.
func (c *Case) closedService() Finding {
	for _, cause := range []trace.Cause{trace.CauseClosedPort, trace.CauseClosedTCP} {
		g, _ := c.drops(cause)
		g = c.wanted(g)
		if len(g.Sampled) < 3 || c.unwanted(g) < Warn || c.shareOf(g.Packets) < closedShare {
			continue
		}
		to := g.Sampled[0].Packet
		// Segments without a connection are ST08's, entries older than a port forward ST12's.
		if slices.ContainsFunc(g.Sampled, func(s *trace.DropSample) bool {
			return s.Packet.Dest != to.Dest || to.Protocol == flow.TCP && s.Tracked == trace.TrackedNone
		}) || c.NS.Rules != nil && slices.ContainsFunc(c.NS.Rules.Forwarded, func(r firewall.PortRange) bool { return r.Low <= to.Dest.Port() && to.Dest.Port() <= r.High }) {
			continue
		}
		f := found(Warn, "nothing listens on %s %s, to which %.0f packets/s go", to.Protocol, to.Dest, g.PerSecond).losing(g.PerSecond)
		if !c.serves(g.Sampled[0]) {
			f.Verdict = Info
		}
		if to.Dest != g.Sampled[0].Original.Dest && g.Sampled[0].Original.IsValid() {
			f.Summary += fmt.Sprintf(", by a rule that redirects %s", g.Sampled[0].Original.Dest)
		}
		if c.listens(to.Protocol, to.Dest.Port()) {
			f.Summary = strings.Replace(f.Summary, "nothing listens", "no program accepts", 1) + "; one has the port open for another address alone, such as 127.0.0.1"
			f.Remedy = &Remedy{Do: fmt.Sprintf("let the program listen on %s or on all addresses; a rule that redirects leads to the address of the interface of arrival", to.Dest.Addr()),
				Commands: []string{fmt.Sprintf("ss -lnp '( sport = :%d )'", to.Dest.Port())}, Risk: "whoever reaches the address reaches the program"}
			f.Symptom = "a service of this host cannot be reached"
			return c.withDrops(f, cause)
		}
		f.Symptom = "a service of this host cannot be reached, or a port forward to it is missing"
		f.Remedy = &Remedy{Do: "start the service, or correct who sends there", Commands: []string{fmt.Sprintf("ss -lnp '( sport = :%d )'", to.Dest.Port())}, Cost: "none: it only looks"}
		return c.withDrops(f, cause)
	}
	return Finding{}
}

// serves reports whether this host should serve the port of a packet: a program has it open, a rule accepts or redirects
// it, or it is that of DNS, for which hosts of the inside ask.
func (c *Case) serves(s *trace.DropSample) bool {
	to := s.Packet.Dest
	return c.listens(s.Packet.Protocol, to.Port()) || s.Original.IsValid() && s.Original.Dest != to || to.Port() == 53 && s.Packet.Source.Addr().IsPrivate() ||
		c.NS.Rules != nil && slices.ContainsFunc(c.NS.Rules.Opened, func(r firewall.PortRange) bool { return r.Low <= to.Port() && to.Port() <= r.High })
}

// closedShare is the share of the received packets from which on packets to one closed port are
// no scan.
const closedShare = askedDropsShare

// unknownDropsShare is the share of the received packets from which on drops without a reason
// are no accident.
const unknownDropsShare = 0.05

// shareOf is a part of the packets that the namespace received.
func (c *Case) shareOf(n uint64) float64 {
	return float64(n) / float64(max(c.delta("Ip.InReceives")+c.delta("Ip6InReceives"), n, 1))
}

// checkOtherDrops looks at the causes that no other check covers. Most are configured on purpose.
func checkOtherDrops(_ context.Context, c *Case) Finding {
	if c.NS.DropsErr != nil {
		return unknown("%v", c.NS.DropsErr)
	}
	worst := ok("nothing was dropped for another reason")
	for _, cause := range []trace.Cause{trace.CauseTC, trace.CauseXDP, trace.CauseXDPAborted, trace.CauseIPsec, trace.CauseHeader, trace.CauseOther} {
		g, seen := c.drops(cause)
		g = c.wanted(g)
		if !seen || c.unwanted(g) < Warn || g.PerSecond <= worst.LostPerSecond {
			continue
		}
		what := g.Cause.Title
		if cause.ID == trace.CauseOther.ID {
			if len(g.Places) == 0 {
				continue
			}
			// The kernel gives no reason for drops by a socket's filter or at the end of a driver's queue. They count
			// from a share of the traffic on.
			if g.Places[0].Reason == "NOT_SPECIFIED" && c.shareOf(g.Packets) < unknownDropsShare {
				continue
			}
			what = "dropped for a reason that no check knows"
			if at := g.Places[0].Interface; at != "" {
				what += " on " + at
			}
		}
		worst = c.withDrops(found(Warn, "%s: %.0f packets/s are lost%s", what, g.PerSecond, c.towards(cause)).losing(g.PerSecond), cause)
		if g.Cause.Remedy != "" {
			worst.Remedy = &Remedy{Do: g.Cause.Remedy, Risk: "who made the filter or policy may have meant it"}
			if cause.ID == trace.CauseIPsec.ID {
				worst.Remedy.Commands = []string{"ip xfrm policy"}
			}
		}
	}
	if f := c.closedService(); f.LostPerSecond > worst.LostPerSecond {
		return f
	}
	return worst
}
