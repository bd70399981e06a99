// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"io/fs"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
)

// tableCases are the cases of checks on the size of the connection table.
var tableCases = []checkCase{
	{"CT01", "80 % full", count(210000), Warn},
	{"CT01", "95 % full of what the kernel gives up", count(250000), Warn},
	{"CT01", "95 % full and the table unreadable", all(count(250000), func(s *observe.Sample) { s.Namespaces[0].Table, s.Namespaces[0].TableErr = nil, errors.New("no") }), Critical},
	{"CT02", "unreadable", func(s *observe.Sample) { s.Namespaces[0].TableErr = errors.New("no") }, Unknown},
	{"CT02", "all held", func(s *observe.Sample) { s.Namespaces[0].After.Limits.Max = 105 }, Critical},
	{"CT03", "full in a minute, seen for seconds", counts(190000, 200000, 3*time.Second), Info},
	{"CT03", "full in a minute, seen for a minute", counts(0, 150000, time.Minute), Critical},
	{"CT03", "full in a minute, all but full", counts(240000, 241000, 3*time.Second), Critical},
	{"CT03", "full in a minute, seen for a minute by a session", all(counts(200000, 200000, 3*time.Second), func(s *observe.Sample) {
		s.Namespaces[0].Growth, s.Namespaces[0].GrowthOver = 1000, time.Minute
	}), Critical},
	{"CT03", "a tooth of the saw in a session", all(counts(190000, 200000, 3*time.Second), func(s *observe.Sample) {
		s.Namespaces[0].Growth, s.Namespaces[0].GrowthOver = -5, time.Minute
	}), OK},
	{"CT03", "a burst in an empty table", counts(0, 10000, 3*time.Second), OK},
	{"CT04", "this namespace, lately", func(s *observe.Sample) {
		s.After.Log = observe.ParseLog([]string{"4,1,1000000,-;nf_conntrack: nf_conntrack: table full in netns 4711, dropping packet"}, time.Minute)
	}, Critical},
	{"CT04", "this namespace, long ago", func(s *observe.Sample) {
		s.After.Log = observe.ParseLog([]string{"4,1,1000000,-;nf_conntrack: nf_conntrack: table full in netns 4711, dropping packet"}, 3*time.Hour)
	}, Warn},
	{"CT04", "another namespace", func(s *observe.Sample) {
		s.After.Log = observe.ParseLog([]string{"4,1,1000000,-;nf_conntrack: nf_conntrack: table full in netns 12, dropping packet"}, time.Minute)
	}, OK},
	{"CT04", "log forbidden", func(s *observe.Sample) { s.After.LogErr = fs.ErrPermission }, Unknown},
	{"CT05", "one drop", set("conntrack.drop", 1), Warn},
	{"CT05", "many drops", set("conntrack.drop", 100), Critical},
	{"CT05", "drops for want of ports", all(set("conntrack.drop", 100), set("conntrack.insert_failed", 100)), OK},
	{"CT05", "a full table beside chains too long", all(set("conntrack.drop", 100), set("conntrack.insert_failed", 100), set("conntrack.chain_too_long", 100)), Critical},
	{"CT05", "counters unreadable", func(s *observe.Sample) { s.Namespaces[0].After.ConntrackErr = fs.ErrPermission }, Unknown},
	{"CT06", "early drop", set("conntrack.early_drop", 3), Warn},
	{"CT07", "ratio 6", func(s *observe.Sample) { s.Namespaces[0].After.Limits.Buckets = 262144 / 6 }, Warn},
	{"CT07", "ratio 16 and long chains", func(s *observe.Sample) {
		s.Namespaces[0].After.Limits.Buckets, s.Namespaces[0].After.Limits.Count = 16384, 200000
	}, Critical},
	{"CT08", "a quarter of the memory", func(s *observe.Sample) { s.Namespaces[0].After.Limits.Max = 6000000 }, Critical},
	{"CT09", "chain too long", set("conntrack.chain_too_long", 1), Critical},
	{"CT11", "resolved clash", set("conntrack.insert_failed", 1), Info},
	{"CT11", "failed in a race", all(set("conntrack.insert_failed", 30), set("conntrack.drop", 30)), Info},
	{"CT11", "failed", all(usedPorts(99), set("conntrack.insert_failed", 30), set("conntrack.drop", 30)), Critical},
	{"CT10", "many come and go", all(set("conntrack.search_restart", 300), func(s *observe.Sample) { s.Namespaces[0].NewPerSecond = 1000 }), Info},
	{"CT10", "one in a thousand", all(set("conntrack.search_restart", 3), func(s *observe.Sample) { s.Namespaces[0].NewPerSecond = 1000 }), OK},
	{"CT11", "one failed", all(usedPorts(99), set("conntrack.insert_failed", 1), set("conntrack.drop", 1)), Warn},
	{"CT08", "a tenth of the memory", func(s *observe.Sample) { s.Namespaces[0].After.Limits.Max = 3000000 }, Warn},
	{"CT08", "unreadable", func(s *observe.Sample) { s.After.Memory = nil }, Unknown},
	{"CT07", "no buckets", func(s *observe.Sample) { s.Namespaces[0].After.Limits.Buckets = 0 }, Unknown},
	{"CT01", "95 % full of what stays", all(count(250000), fills(250000, conntrack.TCPEstablished)), Critical},
	{"CT02", "80 % held", func(s *observe.Sample) { s.Namespaces[0].After.Limits.Max = 125 }, Warn},
	{"CT03", "full in ten minutes", counts(194000, 200000, time.Minute), Warn},
	{"CT13", "some expectations", func(s *observe.Sample) { s.Namespaces[0].After.Expectations = 850 }, Warn},
	{"CT12", "merged", set("conntrack.clash_resolve", 1), Info},
	{"CT13", "many expectations", func(s *observe.Sample) { s.Namespaces[0].After.Expectations = 1000 }, Critical},
	{"CT14", "entries elsewhere", func(*observe.Sample) {}, Info},
	{"CT14", "a router that nobody looks at", router(true, 0), Warn},
	{"CT14", "a router that is looked at in its namespace", router(true, 4711), Info},
	{"CT14", "a router, and nothing looks at the host", router(false, 0), Info},
	{"CT14", "containers that translate their own queries", all(router(true, 0), func(s *observe.Sample) { delete(s.Namespaces[0].Delta, "Ip.ForwDatagrams") }), Info},
	{"CT14", "a namespace without NAT", all(router(true, 0), func(s *observe.Sample) { s.Namespaces[0].Rules.SourceNAT = 0 }), Info},
	{"CT15", "kernel default, enough", func(s *observe.Sample) { s.Namespaces[0].After.Limits.Max = 65536 }, Info},
	{"CT15", "kernel default, in use", func(s *observe.Sample) {
		s.Namespaces[0].After.Limits.Max, s.Namespaces[0].After.Limits.Count = 65536, 20000
	}, Warn},
	{"CT15", "no gateway", all(func(s *observe.Sample) { s.Namespaces[0].After.Limits.Max = 65536 }, rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 })), OK},
}

// entryCases are the cases of checks on the entries of the connection table.
var entryCases = []checkCase{
	{"ST01", "TIME_WAIT in a full table", all(count(200000), func(s *observe.Sample) { fill(s.Namespaces[0].Table, 900, conntrack.TCPTimeWait) }), Warn},
	{"ST01", "TIME_WAIT in an empty table", func(s *observe.Sample) { fill(s.Namespaces[0].Table, 900, conntrack.TCPTimeWait) }, OK},
	{"ST05", "five days", all(count(200000), sysctl("net.netfilter.nf_conntrack_tcp_timeout_established", "432000")), Warn},
	{"ST05", "below RFC 5382", sysctl("net.netfilter.nf_conntrack_tcp_timeout_established", "600"), Info},
	{"ST02", "a third unanswered", all(count(20000), unanswered(1500, 2500)), Warn},
	{"ST02", "most unanswered", all(count(20000), unanswered(3000, 1000)), Critical},
	{"ST02", "a small table", unanswered(90, 10), OK},
	{"ST03", "a source with 15 %", oneSource(15), Warn},
	{"ST03", "a source with 30 %", oneSource(30), Critical},
	{"ST04", "one destination", fillOne(12000), Info},
	{"ST06", "Linux's default", sysctl("net.netfilter.nf_conntrack_udp_timeout", "30"), Info},
	{"ST06", "SIP forgotten early", all(sysctl("net.netfilter.nf_conntrack_udp_timeout_stream", "60"),
		entries(5, func(_ int, e *conntrack.Entry) { e.Protocol, e.Original.DestPort = 17, 5060 })), Warn},
	{"ST07", "Kubernetes", rules(func(r *firewall.Ruleset) { r.KubeServices = 10 }), Info},
	{"ST07", "half-closed connections", fills(200, conntrack.TCPCloseWait), Warn},
	{"ST08", "one in two hundred invalid", all(set("conntrack.invalid", 50), set("Ip.InReceives", 10000)), Warn},
	{"ST08", "one in fifty invalid", all(set("conntrack.invalid", 200), set("Ip.InReceives", 10000)), Critical},
	{"ST08", "a few stragglers", all(set("conntrack.invalid", 5), set("Ip.InReceives", 100)), OK},
	{"ST09", "asymmetric", oneWay(200), Warn},
	{"ST09", "asymmetric and liberal", all(oneWay(200), sysctl("net.netfilter.nf_conntrack_tcp_be_liberal", "1")), OK},
	{"ST09", "offloaded", rules(func(r *firewall.Ruleset) { r.Offload = true }), Warn},
	{"ST09", "strict and loose", rules(func(r *firewall.Ruleset) {
		r.Chains = append(r.Chains, firewall.Chain{Hook: "forward", PolicyDrop: true})
	}), Info},
	{"ST10", "a dead backend", func(s *observe.Sample) {
		s.Namespaces[0].After.Failed = []netip.Addr{netip.MustParseAddr("10.9.0.2")}
		translated(6)(s)
	}, Warn},
	{"ST10", "another neighbour is dead", func(s *observe.Sample) {
		s.Namespaces[0].After.Failed = []netip.Addr{netip.MustParseAddr("10.9.0.3")}
		fill(s.Namespaces[0].Table, 1, conntrack.TCPEstablished)
	}, OK},
	{"ST10", "UDP to a target without a rule", all(targets("10.9.0.9"), translated(17)), Warn},
	{"ST10", "TCP to a target without a rule", all(targets("10.9.0.9"), translated(6)), Info},
	{"ST10", "UDP to a target with a rule", all(targets("10.9.0.2"), translated(17)), OK},
	{"ST10", "UDP and rules that could not all be read", all(targets("10.9.0.9"), func(s *observe.Sample) { s.Namespaces[0].RulesErr = errors.New("no iptables-legacy-save") }, translated(17)), OK},
	{"ST10", "a ping whose identifier SNAT changed", all(targets("10.9.0.9"), entries(1, func(_ int, e *conntrack.Entry) {
		e.Protocol, e.Reply.SourcePort, e.Reply.DestPort = flow.ICMP, 7, 7
	})), OK},
	{"ST10", "UDP where the targets are not all known", all(targets("10.9.0.9"), rules(func(r *firewall.Ruleset) { r.Targets.Unclear = 1 }), translated(17)), OK},
	{"ST11", "asymmetric", oneWay(200), Warn},
	{"ST11", "asymmetric, on a router that asks for no state", all(oneWay(200), rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 })), Info},
	{"ST05", "idle connections that are forgotten", all(sysctl("net.netfilter.nf_conntrack_tcp_timeout_established", "300"), set("conntrack.invalid", 200), set("Ip.InReceives", 10000)), Critical},
	{"ST08", "idle connections that are forgotten", all(sysctl("net.netfilter.nf_conntrack_tcp_timeout_established", "300"), set("conntrack.invalid", 200), set("Ip.InReceives", 10000)), Info},
	{"ST08", "asymmetric routes, on a router that asks for no state", all(half(40), set("conntrack.invalid", 200), set("Ip.InReceives", 10000), rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 })), Info},
	{"ST08", "asymmetric routes", all(half(40), set("conntrack.invalid", 200), set("Ip.InReceives", 10000)), Critical},
	{"ST08", "one segment that the gateway resets", all(set("conntrack.invalid", 1), cutOff), Warn},
	{"ST08", "wrong checksums", all(set("conntrack.invalid", 200), set("Ip.InReceives", 10000), set("Udp.InCsumErrors", 200)), Info},
	{"ST12", "a source that this host has no more", old(func(e *observe.Entries) {
		e.OldSources = map[netip.Addr]*observe.Odd{netip.MustParseAddr("203.0.113.1"): {Entries: 1, First: conntrack.Entry{Protocol: flow.UDP}}}
	}), Warn},
	{"ST12", "a source that a rule names", all(usedPorts(1), old(func(e *observe.Entries) {
		e.OldSources = map[netip.Addr]*observe.Odd{netip.MustParseAddr("203.0.113.1"): {Entries: 1, First: conntrack.Entry{Protocol: flow.UDP}}}
	})), OK},
	{"ST12", "TCP from an old source", old(func(e *observe.Entries) {
		e.OldSources = map[netip.Addr]*observe.Odd{netip.MustParseAddr("203.0.113.1"): {Entries: 1, First: conntrack.Entry{Protocol: flow.TCP}}}
	}), Info},
	{"ST12", "to the host, where a port forward is", all(rules(func(r *firewall.Ruleset) { r.Forwarded = []firewall.PortRange{{Low: 1194, High: 1194}} }), toHost(1194)), Warn},
	{"ST12", "to the host, where no port forward is", toHost(1194), OK},
	{"ST12", "to a service of the host", all(rules(func(r *firewall.Ruleset) { r.Forwarded = []firewall.PortRange{{Low: 1194, High: 1194}} }), listens(17, 1194), toHost(1194)), OK},
	{"ST12", "a phone without NAT on no router", all(sysctl("net.ipv4.ip_forward", "0"), sysctl("net.ipv6.conf.all.forwarding", "0"), old(func(e *observe.Entries) { e.Leaks = leaks(1, true) })), OK},
	{"ST12", "a phone without NAT on a router", all(sysctl("net.ipv4.ip_forward", "1"), old(func(e *observe.Entries) { e.Leaks = leaks(1, true) })), Warn},
	{"ST12", "no rule for the uplink", all(sysctl("net.ipv4.ip_forward", "1"), old(func(e *observe.Entries) { e.Leaks = leaks(9, false) })), Critical},
	{"ST12", "no rule at all, to a private network", all(sysctl("net.ipv4.ip_forward", "1"), rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 }), old(func(e *observe.Entries) { e.Leaks = leaks(9, false) })), OK},
	{"ST12", "no rule any more", all(sysctl("net.ipv4.ip_forward", "1"), rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 }), old(func(e *observe.Entries) {
		e.Leaks = leaks(9, false)
		e.Leaks[0].Before = true
	})), Critical},
}
