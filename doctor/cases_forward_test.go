// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"net/netip"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// forwardCases are the cases of checks on forwarding and paths.
var forwardCases = []checkCase{
	{outcomesCheck, "silent server", func(s *observe.Sample) { exchanges(s, 12, 6, trace.PacketLoss{}, noAnswer) }, Warn},
	{outcomesCheck, "most of all", func(s *observe.Sample) { exchanges(s, 2, 20, trace.PacketLoss{}, noAnswer) }, Critical},
	{outcomesCheck, "one of many", func(s *observe.Sample) { exchanges(s, 40, 1, trace.PacketLoss{}, noAnswer) }, OK},
	{"FW18", "a pool that nobody answers for", silent(0, 0), Warn},
	{"FW18", "and what it sends gets no answer", silent(8, 0), Critical},
	{"FW18", "which answers reach all the same", silent(8, 3), OK},
	{"FW18", "which the host has now", all(silent(8, 0), link(func(l *observe.Link) { l.Addresses = []netip.Prefix{netip.MustParsePrefix("198.51.100.50/32")} })), OK},
	{"FW18", "rules unreadable", func(s *observe.Sample) { s.Namespaces[0].Rules = nil }, Unknown},
	{"FW14", "fragments", all(set("Ip.ReasmFails", 40), set("Ip.ReasmReqds", 100)), Critical},
	{"FW14", "a few fragments", all(set("Ip.ReasmFails", 5), set("Ip.ReasmReqds", 100)), Warn},
	{"FW14", "one in a thousand", all(set("Ip.ReasmFails", 1), set("Ip.ReasmReqds", 1000)), Info},
	{"FW15", "wrong checksums", all(set("Udp.InCsumErrors", 100), set("Ip.InReceives", 200)), Critical},
	{"FW15", "a few of many", all(set("Udp.InCsumErrors", 2), set("Ip.InReceives", 20000)), Info},
	{"FW16", "hairpin", old(func(e *observe.Entries) { e.Hairpin = observe.Odd{Entries: 5, First: fourEntry} }), Warn},
	{"FW16", "one", old(func(e *observe.Entries) { e.Hairpin = observe.Odd{Entries: 1, First: fourEntry} }), Info},
	{"FW17", "a handshake that is never finished", handshakes(3, 9, "lan0"), OK},
	{"FW17", "answers by another uplink", handshakes(9, 3, "lan0"), Warn},
	{"FW17", "answers by the same uplink, to a flood of SYNs", handshakes(9, 3, "wan0"), OK},
	{"FW01", "off, refusing", all(sysctl("net.ipv4.ip_forward", "0"), set("Ip.InAddrErrors", 30)), Critical},
	{"FW01", "off, and nobody sends", sysctl("net.ipv4.ip_forward", "0"), Warn},
	{"FW01", "off on a host", all(sysctl("net.ipv4.ip_forward", "0"), rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 }), forwards(0, 0, 0)), OK},
	{"FW01", "off on a host that only redirects", all(sysctl("net.ipv4.ip_forward", "0"), rules(func(r *firewall.Ruleset) { r.DestNAT = 1 }), forwards(0, 0, 0)), OK},
	{"FW01", "off on a host that only redirects, with strays", all(sysctl("net.ipv4.ip_forward", "0"), forwards(0, 0, 0), set("Ip.InAddrErrors", 3), dropped(trace.CauseForwardOff, 3)), Info},
	{"FW01", "off on a host without rules, with much traffic", all(sysctl("net.ipv4.ip_forward", "0"), forwards(0, 0, 0), set("Ip.InAddrErrors", 300), dropped(trace.CauseForwardOff, 300)), Warn},
	{"FW01", "IPv6 off on a host without rules, with much traffic", all(sysctl("net.ipv6.conf.all.forwarding", "0"), forwards(0, 0, 0), set("Ip6InAddrErrors", 300), dropped(trace.CauseForwardOff, 300)), Warn},
	{"FW01", "IPv4 off on a router of IPv6", all(sysctl("net.ipv4.ip_forward", "0"), sysctl("net.ipv6.conf.all.forwarding", "1"), forwards(0, 1, 0)), OK},
	{"FW01", "IPv6 off under rules for IPv6 on a router of IPv4", all(sysctl("net.ipv6.conf.all.forwarding", "0"), forwards(1, 1, 0)), Info},
	{"FW01", "IPv6 off under rules for IPv6, refusing", all(sysctl("net.ipv6.conf.all.forwarding", "0"), forwards(1, 1, 0), set("Ip6InAddrErrors", 30)), Critical},
	{"FW01", "IPv6 off under rules for both on a router of IPv4", all(sysctl("net.ipv6.conf.all.forwarding", "0"), forwards(0, 0, 1)), OK},
	{"FW01", "IPv6 off under rules for both, refusing", all(sysctl("net.ipv6.conf.all.forwarding", "0"), forwards(0, 0, 1), set("Ip6InAddrErrors", 30)), Critical},
	{"FW01", "both off under rules for both", all(sysctl("net.ipv4.ip_forward", "0"), sysctl("net.ipv6.conf.all.forwarding", "0"), forwards(0, 0, 1)), Warn},
	{"FW01", "off on one interface, refusing", all(sysctl("net.ipv4.conf.wan0.forwarding", "0"), set("Ip.InAddrErrors", 30)), Critical},
	{"FW01", "off on one interface", sysctl("net.ipv4.conf.wan0.forwarding", "0"), Info},
	{"FW01", "unreadable", sysctl("net.ipv4.ip_forward", ""), Unknown},
	{"FW02", "strict with two uplinks", all(sysctl("net.ipv4.conf.wan0.rp_filter", "1"), func(s *observe.Sample) { s.Namespaces[0].After.Uplinks = 2 }), Warn},
	{"FW02", "one packet", set("TcpExt.IPReversePathFilter", 1), Warn},
	{"FW02", "refused", set("TcpExt.IPReversePathFilter", 100), Critical},
	{"FW03", "too large", set("Ip.FragFails", 100), Critical},
	{"FW03", "one too large", set("Ip.FragFails", 1), Warn},
	{"FW03", "IPv6, which counts twice", all(set("Ip6InTooBigErrors", 3), set("Ip6FragFails", 3)), Warn},
	{"FW04", "an error held back", set("Icmp.OutRateLimitHost", 1), Info},
	{"FW04", "rate limit", set("Icmp.OutRateLimitHost", 100), Warn},
	{"FW05", "tunnel", link(func(l *observe.Link) { l.MTU = 1420 }), Warn},
	{"FW05", "an overlay and its containers", mtus(map[string]int{"device": 1500, "vxlan": 1450, "bridge": 1450, "veth": 1450}), Info},
	{"FW05", "a tunnel beside containers", mtus(map[string]int{"device": 1500, "wireguard": 1420, "bridge": 1450}), Warn},
	{"FW05", "a tunnel, and containers of the uplink's MTU", mtus(map[string]int{"device": 1500, "wireguard": 1420, "veth": 1500}), Warn},
	{"FW05", "a tunnel without containers", mtus(map[string]int{"device": 1500, "gre": 1476}), Warn},
	{"FW05", "tunnel with clamp", all(link(func(l *observe.Link) { l.MTU = 1420 }), rules(func(r *firewall.Ruleset) { r.MSSClamp = true })), OK},
	{"FW06", "full", func(s *observe.Sample) { s.After.Neighbours["neigh.table_fulls"] = 5 }, Critical},
	{"FW06", "near full", func(s *observe.Sample) { s.After.Entries[0] = 900 }, Warn},
	{"FW06", "unreadable", func(s *observe.Sample) { delete(s.After.Sysctl, "net.ipv4.neigh.default.gc_thresh3") }, Unknown},
	{"FW07", "a host that is off", dropped(trace.CauseNeighbour, 1), Info},
	{"FW07", "a backend that is off", dropped(trace.CauseNeighbour, 30), Warn},
	{"FW07", "the next router is off", dropped(trace.CauseNeighbour, 3000), Critical},
	{"FW07", "no events", func(s *observe.Sample) { s.Namespaces[0].DropsErr = errors.New("no events") }, Unknown},
	{"FW09", "a traceroute", dropped(trace.CauseTTL, 9), Info},
	{"FW09", "a loop", dropped(trace.CauseTTL, 900), Warn},
	{"FW12", "one martian", dropped(trace.CauseMartian, 1), Info},
	{"FW12", "martians", dropped(trace.CauseMartian, 100), Warn},
	{"FW12", "no events", func(s *observe.Sample) { s.Namespaces[0].DropsErr = errors.New("no events") }, Unknown},
	{"FW08", "scans of a blackhole route", dropped(trace.CauseBlackhole, 9), Info},
	{"FW08", "a route of IPv6 that refuses, which the kernel counts as no route", all(set("Ip6InNoRoutes", 9), dropped(trace.CauseBlackhole, 9)), Info},
	{"FW08", "a route that refuses much", dropped(trace.CauseBlackhole, 300), Warn},
	{"FW13", "an IPsec policy", dropped(trace.CauseIPsec, 300), Warn},
	{"FW13", "a TC filter", dropped(trace.CauseTC, 300), Warn},
	{"FW13", "few", dropped(trace.CauseTC, 9), OK},
	{"FW13", "few of many", all(set("Ip.InReceives", 100_000), dropped(trace.CauseTC, 300)), OK},
	{"FW13", "another reason", other("IPV6_BAD_EXTHDR"), Warn},
	{"FW13", "a service that is down", closed("203.0.113.1:53", "203.0.113.1:53"), Warn},
	{"FW13", "a service that is down, one packet in a hundred", all(set("Ip.InReceives", 30000), closed("203.0.113.1:53", "203.0.113.1:53")), OK},
	{"FW13", "a port that nobody serves", closed("203.0.113.1:161", "203.0.113.1:161"), Info},
	{"FW13", "a port that a rule opens", all(opened(161), closed("203.0.113.1:161", "203.0.113.1:161")), Warn},
	{"FW13", "a scan", closed("203.0.113.1:53", "203.0.113.1:54"), OK},
	{"FW13", "no reason, one in a hundred", all(set("Ip.InReceives", 30000), other("NOT_SPECIFIED")), OK},
	{"FW13", "no reason, most of them", other("NOT_SPECIFIED"), Warn},
	{"FW13", "no events", func(s *observe.Sample) { s.Namespaces[0].DropsErr = errors.New("no events") }, Unknown},
	{"FW08", "a lost packet", set("IpExt.InNoRoutes", 1), Info},
	{"FW08", "no route", set("IpExt.InNoRoutes", 100), Warn},
	{"FW10", "LRO", link(func(l *observe.Link) { l.LRO = 1 }), Critical},
	{"FW10", "no GRO", link(func(l *observe.Link) { l.GRO = 0 }), Warn},
	{"FW10", "UDP not merged", link(func(l *observe.Link) { l.UDPForwarding = 0 }), Info},
	{"FW07", "the router of a default route", lostBy(trace.CauseNeighbour, "wan0", observe.Gateway{Address: netip.MustParseAddr("203.0.113.2"), Interface: "wan0", Route: netip.MustParsePrefix("0.0.0.0/0"), State: 0x20}), Critical},
	{"FW07", "one of two routers", lostBy(trace.CauseNeighbour, "wan0", observe.Gateway{Address: netip.MustParseAddr("203.0.113.2"), Interface: "wan0", Route: netip.MustParsePrefix("0.0.0.0/0"), Multipath: true, State: 0x20},
		observe.Gateway{Address: netip.MustParseAddr("192.0.2.2"), Interface: "lan0", Route: netip.MustParsePrefix("0.0.0.0/0"), Multipath: true, State: 2}), Critical},
	{"FW09", "a loop through this host", looping, Warn},
	{"FW19", "masqueraded before the policy", old(func(e *observe.Entries) {
		e.Bypassed, e.BypassedPolicy = observe.Odd{Entries: 5, First: fourEntry}, netdev.IPsecPolicy{Source: netip.MustParsePrefix("10.0.0.0/24"), Dest: netip.MustParsePrefix("10.2.0.0/24")}
	}), Critical},
	{"FW20", "an address that nobody talks to", detached(0, 0, false), Info},
	{"FW20", "a VPN client in the LAN's network", detached(9, 0, false), Critical},
	{"FW20", "with proxy ARP", detached(9, 0, true), OK},
	{"FW20", "answered in another way", detached(9, 3, false), Info},
	{"RL15", "broadcasts", ruleDrops(flow.UDP, repeated(6, "10.0.0.2:137", "255.255.255.255:137")...), Info},
	{"RL15", "a scan of ports", ruleDrops(flow.TCP, scan(20)...), Info},
	{"RL15", "a client that repeats itself", ruleDrops(flow.TCP, repeated(20, "10.0.0.2:4000", "203.0.113.1:443")...), Warn},
	{"RL15", "VRRP", ruleDrops(112, repeated(1, "10.0.0.3:0", "224.0.0.18:0")...), Critical},
	{"FW13", "broadcasts that a TC filter drops", func(s *observe.Sample) {
		ruleDrops(flow.UDP, repeated(6, "10.0.0.2:137", "255.255.255.255:137")...)(s)
		s.Namespaces[0].Drops[0].Cause = trace.CauseTC
	}, OK},
}
