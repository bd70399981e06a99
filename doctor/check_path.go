// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/trace"
)

// pathChecks look at the paths that answers take, and at packets that are damaged or truncated on the path.
func pathChecks() []Check {
	return []Check{
		{ID: "FW14", Name: "fragments", About: "packets whose fragments could not be put together", Weight: 90, Run: checkFragments,
			Symptom: "large UDP answers (DNS, NFS, VPN) are lost, small ones arrive",
			Remedy:  Remedy{Do: "give fragments more memory, or send packets that fit the path", Cost: "memory while fragments wait", Risk: "a flood of fragments may fill it"}},
		{ID: "FW15", Name: "checksums", About: "packets whose checksum is wrong", Weight: 93, Run: checkChecksums,
			Symptom: "everything through a tunnel or from one host is lost, although it arrives",
			Remedy: Remedy{Do: "at the sender, have the checksum written by software: turn transmit checksum offload off on its interface (ethtool -K DEV tx-checksum-ip-generic off); if it comes from many, look for a device that rewrites packets",
				Cost: "CPU time of the sender", Risk: "none: only who writes the checksum changes"}},
		{ID: "FW16", Name: "hairpin", About: "port forwards to servers in the client's own network", Weight: 72, Run: checkHairpin,
			Symptom: "a port forward works from outside, and from the inside network it does not",
			Remedy:  Remedy{Do: "masquerade what is sent back into the network that it came from", Risk: "the server sees the router's address instead of the client's"}},
		{ID: "FW17", Name: "reply-uplink", About: "answers that leave by another uplink than their connection came by", Weight: 73, Run: checkReplyUplink,
			Symptom: "a service works by the address of one uplink, and by the other one's connections never open",
			Remedy:  Remedy{Do: "route answers by the uplink of their connection: a mark for each uplink, kept in the connection, and a routing table for each mark", Risk: "other rules that set marks may be in the way: test from outside"}},
		{ID: "FW18", Name: "unanswered-address", About: "addresses of NAT rules in networks of this host for which nobody answers ARP or neighbour discovery", Weight: 74, Run: checkSilent,
			Symptom: "a virtual address is dead, or what is translated to an address of a pool gets no answer; everything else works",
			Remedy: Remedy{Do: "have this host answer for it: add it to the interface; in Sluice's own configuration it is held without that", Commands: []string{"ip addr add ADDRESS dev IFACE"},
				Risk: "another host that is to take the address over (VRRP) would find it in use: then let that program hold it"}},
	}
}

// checkSilent looks at addresses of NAT rules that this host does not have, so that it answers no ARP
// or neighbour discovery for them. Packets to such an address, or answers to it, show that they reach
// this host in another way, for example by a route on a router.
func checkSilent(_ context.Context, c *Case) Finding {
	if c.NS.Rules == nil || c.NS.RulesErr != nil {
		return unknown("firewall rules: %v", c.NS.RulesErr)
	}
	worst := ok("somebody answers for each address of a NAT rule")
	for _, s := range c.NS.Silent {
		if c.owns(s.Address) {
			continue
		}
		unanswered := uint32(0)
		if c.NS.Table != nil {
			from := c.NS.Table.From(s.Address)
			if from.Entries > from.Unassured || c.NS.Table.Toward(s.Address) > 0 {
				continue
			}
			unanswered = from.Unassured
		}
		v := Warn
		if unanswered >= manyUnanswered {
			v = Critical
		}
		if v <= worst.Verdict {
			continue
		}
		worst = found(v, "%s, which a NAT rule names, is an address of the network on %s, and nobody answers for it there, this host included: packets to it get lost before they come here", s.Address, s.Interface).
			with("unanswered connections with this source", fmt.Sprint(unanswered), c.dumped()).
			filling("ADDRESS", netip.PrefixFrom(s.Address, s.Address.BitLen()).String(), "IFACE", s.Interface)
	}
	return worst
}

// manyUnanswered is from how many connections on it is no accident that none got an answer.
const manyUnanswered = 5

// owns reports whether an address is on one of the namespace's interfaces.
func (c *Case) owns(a netip.Addr) bool {
	return slices.ContainsFunc(c.NS.After.Links, func(l observe.Link) bool {
		return slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool { return p.Addr() == a })
	})
}

func checkFragments(_ context.Context, c *Case) Finding {
	fails := c.delta("Ip.ReasmFails") + c.delta("Ip6ReasmFails")
	g, _ := c.drops(trace.CauseFragment)
	requests := c.delta("Ip.ReasmReqds") + c.delta("Ip6ReasmReqds")
	n := max(fails, g.Packets)
	if n == 0 {
		return ok("every fragmented packet was put together")
	}
	f := found(Info, "%s could not be put together from fragments", plural(int(n), "packet")).
		with("ΔReasmFails", c.inWindow(fails), fromSNMP).with("ΔReasmReqds (fragments)", c.inWindow(requests), fromSNMP)
	if n >= 5 && 100*n > requests {
		f.Verdict = max(Warn, grade(float64(n)/float64(max(requests, 1)), 0.01, 0.20))
		f = f.losing(c.perSecond(n))
	}
	for _, family := range []struct{ setting, memory string }{{"net.ipv4.ipfrag_high_thresh", "FRAG.memory"}, {"net.ipv6.ip6frag_high_thresh", "FRAG6.memory"}} {
		limit, there := c.sysctl(family.setting)
		used := c.NS.After.Sockstat[family.memory]
		if !there || family.memory == "FRAG6.memory" && c.delta("Ip6ReasmFails") == 0 || family.memory == "FRAG.memory" && fails > 0 && c.delta("Ip.ReasmFails") == 0 {
			continue
		}
		f = f.with("memory for fragments, "+family.setting, fmt.Sprintf("%d of %d bytes", used, limit), fromProc)
		if f.Remedy == nil {
			f.Remedy = &Remedy{Do: "give fragments more memory, or send packets that fit the path", Cost: "memory while fragments wait", Risk: "a flood of fragments may fill it"}
		}
		f.Remedy.Commands = append(f.Remedy.Commands, fmt.Sprintf("sysctl -w %s=%d", family.setting, max(4*limit, 4<<20)))
		if 4*used > 3*uint64(limit) || limit < 1<<20 {
			f.Summary += fmt.Sprintf("; the memory for fragments is full or small (%s %d)", family.setting, limit)
		}
	}
	return c.withDrops(f, trace.CauseFragment)
}

// wrongChecksums counts packets with a wrong checksum.
func (c *Case) wrongChecksums() uint64 {
	n := c.delta("Udp.InCsumErrors") + c.delta("Udp6InCsumErrors") + c.delta("Tcp.InCsumErrors") + c.delta("Icmp.InCsumErrors") + c.delta("Icmp6InCsumErrors")
	g, _ := c.drops(trace.CauseChecksum)
	return max(n, g.Packets)
}

func checkChecksums(_ context.Context, c *Case) Finding {
	n := c.wrongChecksums()
	if n == 0 {
		return ok("no wrong checksum")
	}
	f := found(Info, "%s had a wrong checksum%s: checksum offload (ethtool) that the sender's card does not do, or a device that rewrites packets", plural(int(n), "packet"), c.fromWhere(trace.CauseChecksum)).
		with("ΔInCsumErrors", c.inWindow(n), fromSNMP)
	if share := c.shareOf(n); n >= 10 && share > 0.01 {
		f.Verdict = max(Warn, grade(share, 0.01, 0.20))
		f = f.losing(c.perSecond(n))
	}
	return c.withDrops(f, trace.CauseChecksum)
}

func checkHairpin(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	odd := c.NS.Entries.Hairpin
	if odd.Entries == 0 {
		return ok("no port forward leads back into the network of its client without an answer")
	}
	server, client := odd.First.Reply.Source.Netip(), odd.First.Original.Source.Netip()
	f := found(Info, "a port forward leads back into the network of its client (hairpin), and the source is not masqueraded: %s to the same interface got no answer here, because the server answers the client directly",
		plural(int(odd.Entries), "connection")).with("for example", entryText(&odd.First), c.dumped())
	// A server that is off has no answers on either side.
	if odd.Entries >= 3 && !slices.Contains(c.NS.After.Failed, server) {
		f.Verdict = Warn
	}
	if network, there := c.networkOf(client); there && client.Is4() {
		f.Remedy = &Remedy{Do: "masquerade what is sent back into the network that it came from", Risk: "the server sees the router's address instead of the client's",
			Commands: []string{fmt.Sprintf("nft 'add table ip hairpin; add chain ip hairpin post { type nat hook postrouting priority srcnat - 1; }; add rule ip hairpin post ip saddr %s ip daddr %s ct status dnat masquerade'", network, server)}}
	}
	return f
}

// networkOf is the network of a link that holds an address.
func (c *Case) networkOf(a netip.Addr) (netip.Prefix, bool) {
	for _, l := range c.NS.After.Links {
		for _, p := range l.Addresses {
			if p.Contains(a) && !l.Loopback {
				return p.Masked(), true
			}
		}
	}
	return netip.Prefix{}, false
}

// linkOf is the interface that has an address.
func (c *Case) linkOf(a netip.Addr) string {
	for _, l := range c.NS.After.Links {
		for _, p := range l.Addresses {
			if p.Addr() == a && !l.Loopback {
				return l.Name
			}
		}
	}
	return ""
}

func checkReplyUplink(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	for _, own := range slices.SortedFunc(maps.Keys(c.NS.Entries.Handshakes), compareAddresses) {
		h := c.NS.Entries.Handshakes[own]
		if h.Out == "" || h.Stuck.Entries <= h.Others {
			continue
		}
		in, client := c.linkOf(own), h.Stuck.First.Original.Source.Netip()
		out := h.Out
		if in == "" || in == out {
			continue
		}
		f := found(Warn, "answers to connections that come in by %s leave by %s: %d handshakes with %s were answered and never finished", in, out, h.Stuck.Entries, own).
			with("for example", entryText(&h.Stuck.First), c.dumped()).
			with("route to "+client.String(), out, fromLinks).with("rules that choose a route by mark", fmt.Sprint(c.NS.After.Routing.Marked), fromLinks)
		f.Remedy = replyRoute(in, h.Gateway, client)
		return f
	}
	return ok("no uplink on which handshakes are answered and never finished")
}

// replyTable and replyMark are of the routing table that the remedy makes.
const (
	replyTable = 5157
	replyMark  = 0x5157
)

// replyRoute marks connections of an uplink and routes their answers back by it.
func replyRoute(in string, gateway, client netip.Addr) *Remedy {
	m := &Remedy{Do: fmt.Sprintf("route answers by the uplink of their connection: mark what comes in by %s, and give the mark a table with a default route by it", in),
		Risk: "other rules that set marks may be in the way: test from outside"}
	if !gateway.IsValid() || !client.Is4() {
		return m
	}
	m.Commands = []string{
		fmt.Sprintf("ip route add default via %s dev %s table %d", gateway, in, replyTable),
		fmt.Sprintf("ip rule add fwmark %#x table %d", replyMark, replyTable),
		fmt.Sprintf("nft 'add table ip replies; add chain ip replies pre { type filter hook prerouting priority mangle; }; add chain ip replies out { type route hook output priority mangle; }; "+
			"add rule ip replies pre iifname \"%s\" ct state new ct mark set %#x; add rule ip replies pre iifname != \"%s\" ct mark %#x meta mark set ct mark; add rule ip replies out ct mark %#x meta mark set ct mark'",
			in, replyMark, in, replyMark, replyMark),
	}
	return m
}
