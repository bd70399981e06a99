// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/trace"
)

// wayChecks look at where packets leave the host: the interface, its addresses, and the next hop.
func wayChecks() []Check {
	return []Check{
		{ID: "FW07", Name: "next-hop-dead", About: "next hops that do not answer ARP or neighbour discovery", Weight: 80, Run: checkDeadNextHop,
			Symptom: "one backend or host cannot be reached",
			Remedy:  Remedy{Do: "check that the host is up, on this link, and that its address is right", Risk: "none: it only looks"}},
		{ID: "FW09", Name: "ttl", About: "packets whose TTL expired", Weight: 79, Run: checkTTL,
			Symptom: "a destination cannot be reached, traceroute goes in circles",
			Remedy:  Remedy{Do: "trace the route to the destination; correct the routers that point at each other", Risk: "a route that is wrong takes other traffic along"}},
		{ID: "FW19", Name: "ipsec-bypassed", About: "connections that NAT takes out of an IPsec policy", Weight: 86, Run: checkBypassed,
			Symptom: "the tunnel is up, and the other site cannot be reached",
			Remedy:  Remedy{Do: "do not translate what the policy selects", Risk: "none: the policy encrypts it"}},
		{ID: "FW20", Name: "proxy-arp", About: "addresses of a link's network that are routed by another interface", Weight: 84, Run: checkProxyARP,
			Symptom: "VPN clients reach the Internet, and no host of the LAN",
			Remedy:  Remedy{Do: "answer for the address on the link (proxy ARP), or give the clients addresses of a network of their own", Risk: "hosts of the link reach the clients without a route"}},
		{ID: "RX13", Name: "tun-queue", About: "packets that find the queue of a tun interface full", Weight: 83, Run: checkTun,
			Symptom: "bursts through the tunnel are lost, the CPU is idle",
			Remedy:  Remedy{Do: "lengthen the queue, and make the program behind the interface faster", Risk: "a longer queue adds latency"}},
		{ID: "RX14", Name: "carrier", About: "links without carrier that routes use", Weight: 97, Run: checkCarrier,
			Symptom: "everything that takes the route is lost",
			Remedy:  Remedy{Do: "connect the link, or remove its routes", Risk: "none: the link carries nothing"}},
	}
}

func checkTTL(_ context.Context, c *Case) Finding {
	g, seen := c.drops(trace.CauseTTL)
	n := c.delta("Ip.InHdrErrors") + c.delta("Ip6InHdrErrors")
	if !seen && (n == 0 || c.NS.DropsErr == nil) {
		return ok("no TTL expired")
	}
	n = max(g.Packets, n)
	if c.NS.Traffic != nil && slices.ContainsFunc(c.NS.Traffic.Classes, func(class outcome.Class) bool { return class.Reason.HopLimit }) {
		return found(Info, "%d packets arrive with a hop limit of 1 and are no loop, see OC01", n)
	}
	f := found(Info, "the TTL of %d packets expired%s", n, c.towards(trace.CauseTTL)).with("ΔInHdrErrors", c.inWindow(n), fromSNMP)
	if c.perSecond(n) > 10 { // a traceroute makes some
		f.Verdict = Warn
		f = f.losing(c.perSecond(n))
	}
	return c.withDrops(c.looped(f, g), trace.CauseTTL)
}

// looped adds the destination of packets with an expired TTL: a way back to the link of their
// arrival is a loop.
func (c *Case) looped(f Finding, g trace.DropGroup) Finding {
	var back []netip.Addr
	link, hop := "", netip.Addr{}
	for _, s := range g.Sampled {
		w, known := c.NS.Ways[s]
		if known && w.Err == nil && w.Interface == c.linkNameOf(s.InIfIndex) && w.Interface != "" {
			back, link, hop = append(back, s.Packet.Dest.Addr()), w.Interface, w.NextHop
		}
	}
	if f.Verdict < Warn || len(back) == 0 {
		return f
	}
	covers := c.delegated(back)
	f.Summary = fmt.Sprintf("%s: a routing loop, they go back to %s on %s, from where they came", f.Summary, hop, link)
	f = f.concerning(Concerns{Interfaces: []string{link}, Destinations: []netip.Prefix{covers}, Stages: []outcome.Stage{outcome.WrongWay, outcome.NeverLeft}})
	f.Remedy = &Remedy{Do: fmt.Sprintf("correct the route here, or the one of %s that leads here: for %s, of which no part but the connected networks is in use here, an unreachable route", hop, covers),
		Risk: "addresses of the prefix that are routed later need a route of their own"}
	if covers.Bits() > 8 && covers.Bits() < covers.Addr().BitLen() {
		f.Remedy.Commands = []string{fmt.Sprintf("ip %sroute add unreachable %s", ipFlag(covers.Addr()), covers)}
	}
	return f
}

// ipFlag is the option of the ip program for a family.
func ipFlag(a netip.Addr) string {
	if a.Is4() {
		return ""
	}
	return "-6 "
}

func (c *Case) linkNameOf(index uint32) string {
	for _, l := range c.NS.After.Links {
		if uint32(l.Index) == index {
			return l.Name
		}
	}
	return ""
}

// delegated is the prefix that the addresses of a loop share, with the network of this host that is nearest to them:
// what another router sends here. IPv6 prefixes are delegated in steps of 4 bits.
func (c *Case) delegated(addresses []netip.Addr) netip.Prefix {
	bits := addresses[0].BitLen()
	for _, a := range addresses[1:] {
		bits = min(bits, common(addresses[0], a))
	}
	nearest := 0
	for _, l := range c.NS.After.Links {
		for _, own := range l.Addresses {
			if own.Addr().Is4() == addresses[0].Is4() && !own.Addr().IsLinkLocalUnicast() {
				nearest = max(nearest, common(own.Addr(), addresses[0]))
			}
		}
	}
	if least := addresses[0].BitLen() / 4; nearest > least { // an own network near by was delegated together with them
		bits = min(bits, nearest)
	}
	if addresses[0].Is6() {
		bits -= bits % 4
	}
	p, _ := addresses[0].Prefix(bits)
	return p
}

// common is the length of the prefix that two addresses share.
func common(a, b netip.Addr) (bits int) {
	x, y := a.AsSlice(), b.AsSlice()
	for i := range min(len(x), len(y)) * 8 {
		if (x[i/8]^y[i/8])&(0x80>>(i%8)) != 0 {
			return i
		}
	}
	return a.BitLen()
}

func checkBypassed(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	odd := c.NS.Entries.Bypassed
	if odd.Entries == 0 {
		return ok("NAT takes no connection out of an IPsec policy")
	}
	policy, e := c.NS.Entries.BypassedPolicy, &odd.First
	f := found(Critical, "%s that the IPsec policy %s to %s selects %s masqueraded first, so that the policy does not match and %s outside of the tunnel", plural(int(odd.Entries), "connection"),
		policy.Source, policy.Dest, isAre(odd.Entries), map[bool]string{true: "it leaves", false: "they leave"}[odd.Entries == 1]).
		with("for example", entryText(e), c.dumped()).with("policy", policy.String(), "xfrm netlink").
		concerning(Concerns{Sources: []netip.Prefix{policy.Source}, Destinations: []netip.Prefix{policy.Dest}})
	f.Remedy = &Remedy{Do: "do not translate what the policy selects", Risk: "none: the policy encrypts it"}
	if len(c.NS.Rules.Sources) > 0 {
		r := c.NS.Rules.Sources[0]
		family, _, _ := strings.Cut(r.Chain, " ")
		if r.Legacy {
			program, rest, _ := strings.Cut(r.Chain, " ")
			table, name, _ := strings.Cut(rest, " ")
			f.Remedy.Commands = append(f.Remedy.Commands, fmt.Sprintf("%s-legacy -t %s -I %s -s %s -d %s -j ACCEPT", program, table, name, policy.Source, policy.Dest))
		} else if slices.Contains([]string{"inet", nftFamily(policy.Source.Addr())}, family) {
			f.Remedy.Commands = append(f.Remedy.Commands, fmt.Sprintf("nft insert rule %s %s saddr %s %s daddr %s accept", r.Chain, nftFamily(policy.Source.Addr()), policy.Source, nftFamily(policy.Source.Addr()), policy.Dest))
		}
	}
	f.Remedy.Commands = append(f.Remedy.Commands, c.deleteEntries(fmt.Sprintf("--src %s --dst %s", policy.Source, policy.Dest)).Commands...)
	return f
}

// nftFamily is the family of an address as nft names it.
func nftFamily(a netip.Addr) string {
	if a.Is4() {
		return "ip"
	}
	return "ip6"
}

func isAre(n uint32) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

func checkProxyARP(_ context.Context, c *Case) Finding {
	worst := ok("the host answers for each address of a link that it routes elsewhere")
	for _, d := range c.NS.After.Routing.Detached {
		if d.Proxied {
			continue
		}
		verdict, n := Info, uint32(0)
		if x := c.NS.Entries.Detached[d]; x != nil {
			n = x.Unanswered.Entries
			if n > 0 && x.Answered == 0 {
				verdict = Warn
			}
			if n >= manyUnanswered && x.Answered == 0 {
				verdict = Critical
			}
		}
		if verdict <= worst.Verdict {
			continue
		}
		a := d.Prefix.Addr()
		what, many := d.Prefix.String(), d.Prefix.Bits() < a.BitLen()
		if !many {
			what = a.String()
		}
		worst = found(verdict, "%s, routed by %s, lies in the network of %s (%s), and this host does not answer %s for it there", what, d.By, d.Within, d.Network, asks(a)).
			with("route", fmt.Sprintf("%s dev %s", d.Prefix, d.By), fromLinks).
			concerning(Concerns{Sources: []netip.Prefix{d.Prefix}, Destinations: []netip.Prefix{d.Prefix}})
		if n > 0 {
			worst.Summary += fmt.Sprintf(": %s between the two got no answer", plural(int(n), "connection"))
			worst = worst.losing(c.perSecond(uint64(n)))
		}
		worst.Remedy = &Remedy{Do: "answer for the address on the link (proxy ARP), or give the clients addresses of a network of their own", Risk: "hosts of the link reach the clients without a route"}
		switch {
		case a.Is4():
			worst.Remedy.Commands = []string{"sysctl -w net.ipv4.conf." + d.Within + ".proxy_arp=1"}
		case many:
			worst.Remedy.Do = "answer for each address on the link (a proxy entry for each, or a program such as ndppd), have the prefix routed to this host, or give the clients a network of their own"
		default:
			worst.Remedy.Commands = []string{"sysctl -w net.ipv6.conf." + d.Within + ".proxy_ndp=1", fmt.Sprintf("ip -6 neigh add proxy %s dev %s", a, d.Within)}
		}
	}
	return worst
}

func checkTun(_ context.Context, c *Case) Finding {
	f := ok("no queue of a tun interface was full")
	c.eachLink(func(b, a observe.Link) {
		n := added(b.TxDropped, a.TxDropped)
		if a.Kind != "tuntap" || n == 0 || c.perSecond(n) <= f.LostPerSecond {
			return
		}
		program, known := c.NS.Readers[a.Name]
		behind := "the program behind it does not read fast enough"
		if known {
			behind = fmt.Sprintf("%s, which reads it, does not keep up", program)
		}
		sent := added(b.TxPackets, a.TxPackets)
		f = found(max(Info, grade(c.perSecond(n), 1, 100)), "the queue of %s was full and %d of %d packets were dropped: %s (txqueuelen %d)", a.Name, n, n+sent, behind, a.Queue).
			with("Δtx_dropped", c.inWindow(n), fromLinks).losing(c.perSecond(n)).concerning(Concerns{Interfaces: []string{a.Name}})
		f.Remedy = &Remedy{Do: "lengthen the queue for bursts; for a steady rate make the program faster", Risk: "a longer queue adds latency",
			Commands: []string{fmt.Sprintf("ip link set dev %s txqueuelen %d", a.Name, max(4*a.Queue, 2000))}}
	})
	return f
}

func checkCarrier(_ context.Context, c *Case) Finding {
	for _, l := range c.NS.After.Links {
		if l.Loopback || !l.Up || l.Carrier || l.Kind == "dummy" || c.waiting(l.Index) {
			continue
		}
		n, dests := 0, []netip.Addr{}
		for _, cause := range []trace.Cause{trace.CauseNeighbour, trace.CauseNeighbourQueue, trace.CauseQdisc, trace.CauseFarEnd, trace.CauseOther} {
			g, _ := c.drops(cause)
			for _, s := range c.wanted(g).Sampled {
				if w, known := c.NS.Ways[s]; s.Interface == l.Name && s.InIfIndex != uint32(l.Index) || known && w.Err == nil && w.Interface == l.Name {
					n++
					if to := s.Packet.Dest.Addr(); to.IsValid() && !slices.Contains(dests, to) {
						dests = append(dests, to)
					}
				}
			}
		}
		if n < fewLost {
			continue
		}
		f := found(Critical, "the link %s has no carrier (it is down, look at the cable), and routes still lead there: packets to it are dropped", l.Name).
			with("state of "+l.Name, "up, no carrier", fromLinks).with("sampled packets that were dropped on the way there", fmt.Sprint(n), fromEvents).
			losing(c.perSecond(uint64(n))).concerning(Concerns{Destinations: hosts(dests...)}) // packets that wait for the next hop have no interface yet
		for _, g := range c.NS.After.Routing.Gateways {
			if g.Interface == l.Name {
				f = f.with("route", fmt.Sprintf("%s via %s dev %s", routeName(g.Route), g.Address, l.Name), fromLinks)
			}
		}
		f.Remedy = &Remedy{Do: "connect the link", Risk: "none: the link carries nothing"}
		if family, there := c.otherWay(l.Name); there {
			f.Remedy = &Remedy{Do: "connect the link; until then let the kernel use the other route", Commands: []string{"sysctl -w net." + family + ".conf.all.ignore_routes_with_linkdown=1"},
				Risk: "none: the link carries nothing"}
		}
		return f
	}
	return ok("no route in use leads to a link without carrier")
}

// waiting reports whether spanning tree holds back a port of a bridge, which then has no carrier.
func (c *Case) waiting(bridge int) bool {
	return slices.ContainsFunc(c.NS.After.Links, func(l observe.Link) bool {
		return bridge != 0 && l.Master == bridge && (l.STP == observe.STPListening || l.STP == observe.STPLearning)
	})
}

// fewLost is below how many packets nothing is concluded.
const fewLost = 2

// otherWay reports whether a route by another interface covers the destinations of a link, and its
// family.
func (c *Case) otherWay(link string) (family string, there bool) {
	for _, g := range c.NS.After.Routing.Gateways {
		if g.Interface != link {
			continue
		}
		for _, o := range c.NS.After.Routing.Gateways {
			if o.Interface != link && o.Route.Overlaps(g.Route) && o.Route.Bits() <= g.Route.Bits() {
				return map[bool]string{true: "ipv4", false: "ipv6"}[g.Address.Is4()], true
			}
		}
	}
	return "", false
}

// withoutTunnel judges packets that an IPsec policy selects and that the kernel drops as a blackhole route does, while
// it has no security association for them.
func (c *Case) withoutTunnel(g trace.DropGroup) (Finding, bool) {
	for _, s := range g.Sampled {
		for _, p := range c.NS.After.Routing.Policies {
			if p.Blocks || !p.Source.Contains(s.Packet.Source.Addr()) || !p.Dest.Contains(s.Packet.Dest.Addr()) {
				continue
			}
			f := found(Critical, "the IPsec policy %s to %s wants packets encrypted, and no security association exists: %.0f packets/s are dropped%s", p.Source, p.Dest, g.PerSecond, c.towards(trace.CauseBlackhole)).
				losing(g.PerSecond).with("policy", p.String(), "xfrm netlink").concerning(Concerns{Destinations: []netip.Prefix{p.Dest}})
			f.Remedy = &Remedy{Do: "start the program that negotiates the tunnel (IKE), or delete the policy", Commands: []string{"ip xfrm policy", "ip xfrm state"}, Risk: "without the policy the packets leave in clear"}
			return c.withDrops(f, trace.CauseBlackhole), true
		}
	}
	return Finding{}, false
}

// refusing names the route or rule that refuses packets.
func (c *Case) refusing(g trace.DropGroup) (Finding, bool) {
	for _, s := range g.Sampled {
		var best *observe.Refusal
		for i := range c.NS.After.Routing.Refusals {
			r := &c.NS.After.Routing.Refusals[i]
			if r.Matches(s.Packet.Source.Addr(), s.Packet.Dest.Addr(), c.linkNameOf(s.InIfIndex)) && (best == nil || r.Destination.Bits() > best.Destination.Bits()) {
				best = r
			}
		}
		if best == nil {
			continue
		}
		f := found(c.unwanted(g), "%s refuses %.0f packets/s, for example towards %s", best, g.PerSecond, s.Packet.Dest.Addr()).losing(g.PerSecond)
		f.Remedy = &Remedy{Do: "delete it, if the packets are wanted", Risk: "it may be there for a reason"}
		if best.Rule {
			f.Remedy.Commands = []string{fmt.Sprintf("ip %srule del priority %d", ipFlag(s.Packet.Dest.Addr()), best.Priority)}
		} else {
			f.Remedy.Commands = []string{fmt.Sprintf("ip %sroute del %s %s table %d", ipFlag(best.Destination.Addr()), best.Kind, best.Destination, best.Table)}
			f = f.concerning(Concerns{Destinations: []netip.Prefix{best.Destination}, Stages: []outcome.Stage{outcome.NeverLeft, outcome.Refused}})
		}
		return c.withDrops(f, g.Cause), true
	}
	return Finding{}, false
}
