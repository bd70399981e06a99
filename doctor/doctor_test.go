// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/trace"
)

// TestHealthyTree wants nothing above a note, and no check that could not look.
func TestHealthyTree(t *testing.T) {
	r := Judge(context.Background(), examined(t))
	for _, f := range r.Findings {
		if f.Verdict >= Warn || f.Verdict == Unknown {
			t.Errorf("%s %s: %s: %s", f.Check, f.Name, f.Verdict, f.Summary)
		}
	}
	if r.ExitCode() != 0 || !strings.HasPrefix(r.Conclusion[0].Summary, "Nothing is wrong in 1 namespace") {
		t.Errorf("exit code %d, conclusion %v", r.ExitCode(), r.Conclusion)
	}
}

// TestChecks makes one thing wrong at a time.
func TestChecks(t *testing.T) {
	set := func(name string, n uint64) func(*observe.Sample) {
		return func(s *observe.Sample) { s.Namespaces[0].Delta[name] = n }
	}
	sysctl := func(name, value string) func(*observe.Sample) {
		return func(s *observe.Sample) { s.Namespaces[0].After.Sysctl[name] = value; s.After.Sysctl[name] = value }
	}
	rules := func(change func(*firewall.Ruleset)) func(*observe.Sample) {
		return func(s *observe.Sample) { change(s.Namespaces[0].Rules) }
	}
	link := func(change func(*observe.Link)) func(*observe.Sample) {
		return func(s *observe.Sample) { change(&s.Namespaces[0].After.Links[1]) }
	}
	count := func(n uint32) func(*observe.Sample) {
		return func(s *observe.Sample) {
			s.Namespaces[0].After.Limits.Count = n
			s.Namespaces[0].Before.Limits.Count = n
		}
	}
	all := func(changes ...func(*observe.Sample)) func(*observe.Sample) {
		return func(s *observe.Sample) {
			for _, change := range changes {
				change(s)
			}
		}
	}
	tried := map[string]map[Verdict]bool{}
	for _, c := range []struct {
		check string
		name  string
		make  func(*observe.Sample)
		want  Verdict
	}{
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
		{"PT02", "85 of 100 ports", usedPorts(85), Warn},
		{"RL14", "no generation", func(s *observe.Sample) { s.Namespaces[0].After.Generation = 0 }, Unknown},
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
		{"FW18", "a pool that nobody answers for", silent(0, 0), Warn},
		{"FW18", "and what it sends gets no answer", silent(8, 0), Critical},
		{"FW18", "which answers reach all the same", silent(8, 3), OK},
		{"FW18", "which the host has now", all(silent(8, 0), link(func(l *observe.Link) { l.Addresses = []netip.Prefix{netip.MustParsePrefix("198.51.100.50/32")} })), OK},
		{"FW18", "rules unreadable", func(s *observe.Sample) { s.Namespaces[0].Rules = nil }, Unknown},
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
		{"ST12", "a phone without NAT on no router", all(sysctl("net.ipv4.ip_forward", "0"), sysctl("net.ipv6.conf.all.forwarding", "0"), old(func(e *observe.Entries) { e.Leaks = observe.Odd{Entries: 1, First: fourEntry} })), OK},
		{"ST12", "a phone without NAT on a router", all(sysctl("net.ipv4.ip_forward", "1"), old(func(e *observe.Entries) { e.Leaks = observe.Odd{Entries: 1, First: fourEntry} })), Warn},
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
		{"RX11", "a port that listens", link(func(l *observe.Link) { l.STP = observe.STPListening }), Warn},
		{"RX11", "a port that forwards", link(func(l *observe.Link) { l.STP = observe.STPForwarding }), OK},
		{"RX12", "unequal MTUs", link(func(l *observe.Link) { l.PeerMTU = 1400 }), Info},
		{"RX12", "unequal MTUs, and frames that are lost", all(link(func(l *observe.Link) { l.PeerMTU = 1400 }), dropped(trace.CauseFarEnd, 9)), Warn},
		{"RL07", "FTP without a helper", old(func(e *observe.Entries) {
			e.FTP = []observe.Pair{{Client: netip.MustParseAddr("10.0.0.2"), Server: netip.MustParseAddr("203.0.113.2")}}
		}), Info},
		{"RL07", "FTP without a helper, whose data is dropped", all(old(func(e *observe.Entries) {
			e.FTP = []observe.Pair{{Client: netip.MustParseAddr("10.0.0.2"), Server: netip.MustParseAddr("203.0.113.2")}}
		}), sampled("tcp", trace.TrackedNew, nil)), Warn},
		{"RL15", "one ICMP error that says too big", sampled("icmp", trace.TrackedConfirmed, []byte{3, 4}), Warn},
		{"RL15", "one ICMPv6 error that says too big", sampled("icmpv6", trace.TrackedNone, []byte{2, 0}), Warn},
		{"RL15", "one ICMP error about a known connection", sampled("icmp", trace.TrackedConfirmed, []byte{3, 1}), Warn},
		{"RL15", "one ICMP error about none", sampled("icmp", trace.TrackedNone, []byte{3, 1}), Info},
		{"PT01", "ports exhausted", all(usedPorts(99), set("conntrack.insert_failed", 10), set("conntrack.drop", 10), set("conntrack.found", 2480)), Critical},
		{"PT01", "chains too long", all(set("conntrack.insert_failed", 10), set("conntrack.drop", 10), set("conntrack.found", 2480), set("conntrack.chain_too_long", 10)), OK},
		{"PT01", "a race", all(set("conntrack.insert_failed", 10), set("conntrack.drop", 10), set("conntrack.found", 10)), Warn},
		{"PT01", "a race beside connections that collided", all(set("conntrack.insert_failed", 10), set("conntrack.drop", 10), set("conntrack.found", 9000)), Warn},
		{"PT01", "ports exhausted, beside clashes that were resolved", all(usedPorts(99), set("conntrack.insert_failed", 20), set("conntrack.drop", 10), set("conntrack.found", 2480)), Critical},
		{"PT01", "a race, with events", all(set("conntrack.insert_failed", 1), set("conntrack.drop", 1), dropped(trace.CausePortsExhausted, 1)), Info},
		{"PT01", "ports exhausted, with events", all(usedPorts(99), set("conntrack.insert_failed", 1), set("conntrack.drop", 1), set("conntrack.found", 248), dropped(trace.CausePortsExhausted, 1)), Critical},
		{"PT01", "a pool of one port", all(usedPorts(1), pool(1), set("conntrack.insert_failed", 10), set("conntrack.drop", 10)), Critical},
		{"PT01", "a pool of one port, the table unreadable", all(pool(1), unread, set("conntrack.insert_failed", 10), set("conntrack.drop", 10)), Critical},
		{"PT01", "a pool of 20 ports", all(usedPorts(20), pool(20), set("conntrack.insert_failed", 10), set("conntrack.drop", 10)), Critical},
		{"PT01", "a pool of 40 ports, the table unreadable", all(pool(40), unread, set("conntrack.insert_failed", 10), set("conntrack.drop", 10), set("conntrack.found", 80)), Critical},
		{"PT02", "95 of 100 ports", usedPorts(95), Critical},
		{"PT02", "95 ports of masquerade beside another address with few", all(usedPorts(95), rules(func(r *firewall.Ruleset) {
			r.Pools = firewall.Pools{Smallest: 1, ByAddress: map[netip.Addr]uint32{netip.MustParseAddr("203.0.113.5"): 1}, Other: 64512}
		})), OK},
		{"PT02", "95 ports of the same address by several rules", all(usedPorts(95), rules(func(r *firewall.Ruleset) { r.Pools.Other = 64512 })), OK},
		{"PT02", "masquerade to 100 ports", all(usedPorts(95), rules(func(r *firewall.Ruleset) { r.Pools = firewall.Pools{Smallest: 100, Other: 100} })), Critical},
		{"PT02", "a fixed port in use", all(usedPorts(1), rules(func(r *firewall.Ruleset) {
			r.Pools.ByAddress[netip.MustParseAddr("203.0.113.1")] = 1
		})), OK},
		{"PT03", "a search of 10 ports", all(set("conntrack.found", 3000), func(s *observe.Sample) { s.Namespaces[0].NewPerSecond = 100 }), Warn},
		{"PT03", "a search of 100 ports", all(set("conntrack.found", 30000), func(s *observe.Sample) { s.Namespaces[0].NewPerSecond = 100 }), Critical},
		{"PT03", "half a port each", all(set("conntrack.found", 1500), func(s *observe.Sample) { s.Namespaces[0].NewPerSecond = 1000 }), OK},
		{"PT03", "new ones unknown, more tries than entries", all(set("conntrack.found", 6000), uncounted), Critical},
		{"PT03", "new ones and entries unknown", all(set("conntrack.found", 6000), uncounted, func(s *observe.Sample) { s.Namespaces[0].Table = nil }), Unknown},
		{"PT04", "kernel 4.19", all(func(s *observe.Sample) { s.After.Release = "4.19.0" }, rules(func(r *firewall.Ruleset) { r.InOrder = 1 })), Warn},
		{"PT04", "kernel 4.19, fully-random", func(s *observe.Sample) { s.After.Release = "4.19.0" }, OK},
		{"PT04", "no release", func(s *observe.Sample) { s.After.Release = "" }, Unknown},
		{"PT05", "an NFS client", func(s *observe.Sample) { s.Namespaces[0].Entries.Privileged = 400 }, Info},
		{"PT06", "all but all to one", connections(28000), Critical},
		{"PT06", "as many from two addresses", all(connections(20000), connections(20000)), OK},
		{"PT06", "no range", sysctl("net.ipv4.ip_local_port_range", ""), Unknown},
		{"PT06", "all to one", connections(25000), Warn},
		{"PT06", "half of those that are not reserved", all(sysctl("net.ipv4.ip_local_reserved_ports", "8080,30000-59999"), connections(500)), OK},
		{"PT06", "nearly all that are not reserved", all(sysctl("net.ipv4.ip_local_reserved_ports", "8080,30000-59999"), connections(970)), Critical},
		{"PT07", "a service in the range", listens(6, 40000), Warn},
		{"PT07", "a UDP service in the range", listens(17, 51820), Warn},
		{"PT07", "a port that the kernel chose", all(listens(6, 40000), func(s *observe.Sample) { s.Namespaces[0].After.Asked = nil }), OK},
		{"PT07", "a UDP port that the kernel chose", all(listens(17, 40000), func(s *observe.Sample) { s.Namespaces[0].After.Asked = nil }), OK},
		{"PT07", "a socket of a moment", all(listens(17, 40000), func(s *observe.Sample) { s.Namespaces[0].Before.Listeners = nil }), OK},
		{"PT07", "a resolver that chooses at random", all(listens(17, 40000), func(s *observe.Sample) {
			n := s.Namespaces[0]
			other := observe.Listener{LocalPort: trace.LocalPort{Protocol: 17, Port: 41000}, User: 53, Socket: 2}
			n.Before.Listeners, n.Before.Asked = append(n.Before.Listeners, other), map[trace.LocalPort]bool{other.LocalPort: true}
		}), OK},
		{"PT07", "sockets of the kernel's choice come and go beside a service", all(listens(17, 40000), func(s *observe.Sample) {
			n := s.Namespaces[0]
			n.Before.Listeners = append(n.Before.Listeners, observe.Listener{LocalPort: trace.LocalPort{Protocol: 17, Port: 41000}, User: 53, Socket: 2})
		}), Warn},
		{"PT07", "who chose TCP is not known", all(listens(6, 40000), unasked), Warn},
		{"PT07", "who chose UDP is not known", all(listens(17, 40000), unasked), Unknown},
		{"PT07", "reserved", all(listens(6, 40000), listens(17, 40001), sysctl("net.ipv4.ip_local_reserved_ports", "8080,39000-41000")), OK},
		{"PT07", "a port forward in the range", rules(func(r *firewall.Ruleset) { r.Forwarded = []firewall.PortRange{{Low: 40000, High: 40000}} }), Warn},
		{"PT07", "a port forward that begins below the range", rules(func(r *firewall.Ruleset) { r.Forwarded = []firewall.PortRange{{Low: 30000, High: 32768}} }), Warn},
		{"PT07", "a port forward below the range", rules(func(r *firewall.Ruleset) { r.Forwarded = []firewall.PortRange{{Low: 30000, High: 32767}} }), OK},
		{"PT07", "a port forward of all ports", rules(func(r *firewall.Ruleset) { r.Forwarded = []firewall.PortRange{{Low: 1024, High: 65535}} }), OK},
		{"PT07", "a port forward that is reserved", all(rules(func(r *firewall.Ruleset) { r.Forwarded = []firewall.PortRange{{Low: 40000, High: 40010}} }), sysctl("net.ipv4.ip_local_reserved_ports", "40000-40010")), OK},
		{"PT08", "many in TIME_WAIT", func(s *observe.Sample) { s.Namespaces[0].After.Sockstat["TCP.tw"] = 20000 }, Info},
		{"PT09", "TIME_WAIT overflow", set("TcpExt.TCPTimeWaitOverflow", 1), Warn},
		{"RL01", "500 rules", rules(func(r *firewall.Ruleset) { r.Chains[0].Longest = 500 }), Warn},
		{"RL01", "chains of one hook add up", rules(func(r *firewall.Ruleset) {
			for _, name := range []string{"ip filter forward", "inet firewall forward", "iptables filter FORWARD"} {
				r.Chains = append(r.Chains, firewall.Chain{Name: name, Hook: "forward", Longest: 60, Established: -1})
			}
		}), Warn},
		{"RL01", "chains of several hooks and families do not", rules(func(r *firewall.Ruleset) {
			r.Chains = append(r.Chains, firewall.Chain{Name: "ip filter forward", Hook: "forward", Longest: 60, Established: -1},
				firewall.Chain{Name: "ip6 filter forward", Hook: "forward", Longest: 60, Established: -1},
				firewall.Chain{Name: "inet filter output", Hook: "output", Longest: 60, Established: -1})
		}), OK},
		{"RL01", "5000 rules of NAT", rules(func(r *firewall.Ruleset) { r.Chains[0].Longest, r.Chains[0].NAT = 5000, true }), Info},
		{"RL01", "established first", rules(func(r *firewall.Ruleset) { r.Chains[0] = firewall.Chain{Longest: 5000, Established: 0, UpTo: 1} }), Info},
		{"RL01", "established behind 50", rules(func(r *firewall.Ruleset) { r.Chains[0] = firewall.Chain{Longest: 5000, Established: 20, UpTo: 51} }), Info},
		{"RL01", "established behind 500", rules(func(r *firewall.Ruleset) { r.Chains[0] = firewall.Chain{Longest: 5000, Established: 20, UpTo: 501} }), Warn},
		{"RL01", "established behind 2000", rules(func(r *firewall.Ruleset) { r.Chains[0] = firewall.Chain{Longest: 5000, Established: 1999, UpTo: 2000} }), Critical},
		{"RL01", "unreadable", func(s *observe.Sample) { s.Namespaces[0].Rules, s.Namespaces[0].RulesErr = nil, fs.ErrPermission }, Unknown},
		{"RL02", "many services", rules(func(r *firewall.Ruleset) { r.KubeServices = 2000 }), Warn},
		{"RL03", "both iptables", all(rules(func(r *firewall.Ruleset) { r.Compat, r.Legacy = true, 1 }), func(s *observe.Sample) { s.Namespaces[0].After.LegacyTables = []string{"filter"} }), Warn},
		{"RL03", "tables of iptables-legacy that something has looked at", all(rules(func(r *firewall.Ruleset) { r.Compat = true }), func(s *observe.Sample) { s.Namespaces[0].After.LegacyTables = []string{"filter"} }), OK},
		{"RL03", "rules of iptables-legacy that could not be read", all(rules(func(r *firewall.Ruleset) { r.Compat = true }), func(s *observe.Sample) {
			s.Namespaces[0].After.LegacyTables, s.Namespaces[0].RulesErr = []string{"filter"}, errors.New("no iptables-legacy-save")
		}), Unknown},
		{"RL04", "late", rules(func(r *firewall.Ruleset) { r.Chains[0] = firewall.Chain{Hook: "forward", Longest: 50, Established: 20} }), Warn},
		{"RL05", "what NAT never touches", plain(2000), Info},
		{"RL06", "no rule needs it", all(rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 }), func(s *observe.Sample) { s.Namespaces[0].NewPerSecond = 10 }), Warn},
		{"RL06", "no rule needs it, and no event was counted", all(rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 }), uncounted), Warn},
		{"RL06", "entries of rules that are gone", rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 }), Info},
		{"RL06", "an empty nat table of iptables-legacy", all(rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 }), func(s *observe.Sample) { s.Namespaces[0].After.LegacyTables = []string{"nat"} }, uncounted), Warn},
		{"RL06", "rules of iptables-legacy that could not be read", all(rules(func(r *firewall.Ruleset) { r.SourceNAT = 0 }), func(s *observe.Sample) { s.Namespaces[0].RulesErr = errors.New("no iptables-legacy-save") }), Unknown},
		{"RL06", "a rule looks at states", rules(func(r *firewall.Ruleset) { r.SourceNAT, r.Tracking = 0, 1 }), OK},
		{"RL07", "a helper by rule", rules(func(r *firewall.Ruleset) { r.Helpers = 1 }), Info},
		{"RL07", "a helper by a rule for all ports", rules(func(r *firewall.Ruleset) { r.Helpers, r.WideHelpers = 2, 1 }), Warn},
		{"RL07", "automatic helpers", sysctl("net.netfilter.nf_conntrack_helper", "1"), Warn},
		{"RL08", "trace", rules(func(r *firewall.Ruleset) { r.Traces = 1 }), Critical},
		{"RL08", "log", rules(func(r *firewall.Ruleset) { r.Logs = 2 }), Warn},
		{"RL08", "invalid packets logged", sysctl("net.netfilter.nf_conntrack_log_invalid", "6"), Info},
		{"RL08", "all invalid packets logged", sysctl("net.netfilter.nf_conntrack_log_invalid", "255"), Warn},
		{"RL09", "bridge", all(sysctl("net.bridge.bridge-nf-call-iptables", "1"), func(s *observe.Sample) {
			s.Namespaces[0].After.Links = append(s.Namespaces[0].After.Links, observe.Link{Name: "virbr0", Kind: "bridge"})
		}), Warn},
		{"RL09", "a bridge and no rules", all(sysctl("net.bridge.bridge-nf-call-iptables", "1"), rules(func(r *firewall.Ruleset) { *r = firewall.Ruleset{} }), func(s *observe.Sample) {
			s.Namespaces[0].After.Links = append(s.Namespaces[0].After.Links, observe.Link{Name: "br0", Kind: "bridge"})
		}), OK},
		{"RL09", "docker", all(sysctl("net.bridge.bridge-nf-call-iptables", "1"), func(s *observe.Sample) {
			s.Namespaces[0].After.Links = append(s.Namespaces[0].After.Links, observe.Link{Name: "docker0", Kind: "bridge", Addresses: []netip.Prefix{netip.MustParsePrefix("172.17.0.1/16")}})
		}), Info},
		{"RL09", "any bridge that is routed for", all(sysctl("net.bridge.bridge-nf-call-iptables", "1"), func(s *observe.Sample) {
			s.Namespaces[0].After.Links = append(s.Namespaces[0].After.Links, observe.Link{Name: "br0", Kind: "bridge"},
				observe.Link{Name: "virbr0", Kind: "bridge", Addresses: []netip.Prefix{netip.MustParsePrefix("192.168.122.1/24")}})
		}), Info},
		{"RL09", "a node of Kubernetes", all(sysctl("net.bridge.bridge-nf-call-iptables", "1"), func(s *observe.Sample) {
			s.Namespaces[0].After.Links = append(s.Namespaces[0].After.Links, observe.Link{Name: "kube-bridge", Kind: "bridge"})
			s.Namespaces[0].Rules.KubeServices = 10
		}), Info},
		{"RL10", "listener", listeners(1, 0), Info},
		{"RL10", "listener on a busy gateway", listeners(1, 6000), Warn},
		{"RL10", "a sample of new connections, by top", func(s *observe.Sample) {
			s.Namespaces[0].After.EventListeners, s.Namespaces[0].NewPerSecond = 1, 6000
		}, OK},
		{"RL11", "no accounting", sysctl("net.netfilter.nf_conntrack_acct", "0"), Info},
		{"RL12", "flowtables unused", all(func(s *observe.Sample) { s.After.Flowtables = true }, fills(2000, conntrack.TCPEstablished)), Info},
		{"RL12", "flowtables unused, few connections", func(s *observe.Sample) { s.After.Flowtables = true }, OK},
		{"RL12", "flowtables used", all(func(s *observe.Sample) { s.After.Flowtables = true }, fills(2000, conntrack.TCPEstablished), rules(func(r *firewall.Ruleset) { r.Flowtables = 1 })), OK},
		{"RL12", "symbols hidden", func(s *observe.Sample) { s.After.FlowtablesErr = fs.ErrPermission }, Unknown},
		{"RL13", "checksums on the CPU", all(sysctl("net.netfilter.nf_conntrack_checksum", "1"), link(func(l *observe.Link) { l.RxChecksum = 0 })), Info},
		{"RL14", "two changes in half a second", func(s *observe.Sample) { s.Window = time.Second / 2; s.Namespaces[0].After.Generation += 2 }, OK},
		{"RL14", "churn", func(s *observe.Sample) { s.Namespaces[0].After.Generation += 30 }, Warn},
		{"RL15", "a rule drops", func(s *observe.Sample) {
			s.Namespaces[0].Drops = []trace.DropGroup{{Cause: trace.CauseNftRule, Packets: 300, PerSecond: 100, Rules: []firewall.Rule{{Chain: "inet filter forward", Text: "drop"}}}}
		}, Warn},
		{"RL15", "scans at the door", func(s *observe.Sample) {
			s.Namespaces[0].Drops = []trace.DropGroup{{Cause: trace.CauseNftRule, Packets: 3, PerSecond: 1}}
		}, Info},
		{"RL15", "no events", func(s *observe.Sample) { s.Namespaces[0].DropsErr = errors.New("no events") }, Unknown},
		{"RL16", "notrack, and other traffic is translated", all(untracked(1, 0, 0), set("Ip.ForwDatagrams", 3000)), Info},
		{"RL16", "notrack, and nothing is forwarded", all(untracked(1, 0, 0), noEntries), Info},
		{"RL16", "notrack, and nothing is translated", all(untracked(0, 0, 1), noEntries, set("Ip.ForwDatagrams", 3000)), Warn},
		{"RL16", "notrack of IPv6, NAT of IPv4", all(untracked(0, 1, 0), noEntries, set("Ip6OutForwDatagrams", 3000)), OK},
		{"RL16", "rules unreadable", func(s *observe.Sample) { s.Namespaces[0].Rules = nil }, Unknown},
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
		{"FW13", "a scan", closed("203.0.113.1:53", "203.0.113.1:54"), OK},
		{"FW13", "no reason, one in a hundred", all(set("Ip.InReceives", 30000), other("NOT_SPECIFIED")), OK},
		{"FW13", "no reason, most of them", other("NOT_SPECIFIED"), Warn},
		{"FW13", "no events", func(s *observe.Sample) { s.Namespaces[0].DropsErr = errors.New("no events") }, Unknown},
		{"FW08", "a lost packet", set("IpExt.InNoRoutes", 1), Info},
		{"FW08", "no route", set("IpExt.InNoRoutes", 100), Warn},
		{"FW10", "LRO", link(func(l *observe.Link) { l.LRO = 1 }), Critical},
		{"FW10", "no GRO", link(func(l *observe.Link) { l.GRO = 0 }), Warn},
		{"FW10", "UDP not merged", link(func(l *observe.Link) { l.UDPForwarding = 0 }), Info},
		{"RX01", "one packet on an idle host", func(s *observe.Sample) { s.After.Softnet[1].Dropped = 1 }, Warn},
		{"RX01", "backlog", func(s *observe.Sample) { s.After.Softnet[1].Dropped = 100 }, Critical},
		{"RX02", "squeezed", func(s *observe.Sample) { s.After.Softnet[1].Squeezed = 100 }, Warn},
		{"RX03", "one queue and a full CPU", all(busy, link(func(l *observe.Link) { l.Queues = 1 }), cores(4)), Warn},
		{"RX03", "one queue, steered", all(busy, link(func(l *observe.Link) { l.Queues = 1 }), cores(4), func(s *observe.Sample) { s.After.Softnet[0].RPS = 1000 }), OK},
		{"RX04", "all on one CPU", all(busy, cores(4), func(s *observe.Sample) {
			s.Before.Interrupts = map[string][]uint64{"wan0 30:": {0, 0, 0, 0}}
			s.After.Interrupts = map[string][]uint64{"wan0 30:": {9900, 100, 0, 0}}
		}), Warn},
		{"RX05", "by the driver's counters", link(func(l *observe.Link) { l.RingLost = 1000 }), Critical},
		{"RX05", "ring", link(func(l *observe.Link) { l.RxMissed = 10 }), Warn},
		{"RX06", "errors", link(func(l *observe.Link) { l.RxErrors, l.RxPackets = 100, 2000 }), Warn},
		{"RX07", "qdisc", link(func(l *observe.Link) { l.QdiscDrops, l.QdiscPackets = 100, 1000 }), Warn},
		{"RX05", "counters that began anew", before(observe.Link{RxMissed: 50, RxFifo: 50}), OK},
		{"RX06", "counters that began anew", before(observe.Link{RxErrors: 50, TxErrors: 50, RxDropped: 50, RxPackets: 5000, TxPackets: 5000}), OK},
		{"RX06", "an interface made anew", all(before(observe.Link{Index: 7}), link(func(l *observe.Link) { l.Index, l.RxErrors, l.RxPackets = 8, 100, 2000 })), OK},
		{"RX07", "counters that began anew", all(before(observe.Link{QdiscPackets: 5000}), link(func(l *observe.Link) { l.QdiscDrops, l.QdiscPackets = 100, 1000 })), Warn},
		{"RX01", "a counter that wrapped", func(s *observe.Sample) { s.Before.Softnet[1].Dropped, s.After.Softnet[1].Dropped = 0xffffffff, 0 }, Warn},
		{"RX01", "a CPU that went away", func(s *observe.Sample) {
			s.Before.Softnet[0].Dropped, s.After.Softnet = 0, []trace.SoftnetCPU{{Dropped: 100}}
		}, OK},
		{"RX02", "a CPU that went away", func(s *observe.Sample) { s.After.Softnet = []trace.SoftnetCPU{{Squeezed: 100}} }, OK},
		{"RX08", "no xdp", func(*observe.Sample) {}, OK},
		{"RX08", "xdp", link(func(l *observe.Link) { l.XDP = true }), Info},
		{"RX08", "xdp, and all can send", all(xdp(3), link(func(l *observe.Link) { l.XDPFeatures = 7 })), Info},
		{"RX08", "xdp, and one cannot send, to which nothing may be redirected", xdp(3), Info},
		{"RX08", "xdp, and one cannot send what is redirected", all(xdp(3), dropped(trace.CauseXDPRedirect, 300)), Warn},
		{"RX08", "xdp, and one frame was lost", all(xdp(3), dropped(trace.CauseXDPRedirect, 1)), Info},
		{"RX09", "slow calls and a full CPU", all(busy, func(s *observe.Sample) {
			s.After.Mitigations = map[string]string{"spectre_v2": "Mitigation: Retpolines"}
		}), Info},
		{"RX09", "unreadable", func(s *observe.Sample) { s.After.Mitigations = nil }, Unknown},
		{"RX10", "full CPU", busy, Critical},
		{"RX10", "a moment of a full CPU", all(busy, func(s *observe.Sample) { s.Window = 100 * time.Millisecond }), Warn},
		{"RX10", "busy CPU", func(s *observe.Sample) { s.After.CPUs[0].Total += 300; s.After.CPUs[0].Softirq += 200 }, Warn},
		{"LS01", "overflow", set("TcpExt.ListenOverflows", 60), Critical},
		{"LS01", "a few", set("TcpExt.ListenOverflows", 6), Warn},
		{"LS01", "one", set("TcpExt.ListenOverflows", 1), OK},
		{"LS02", "cookies", set("TcpExt.TCPReqQFullDoCookies", 60), Warn},
		{"LS03", "files", func(s *observe.Sample) { s.After.Sysctl["fs.file-nr"] = "95000 0 100000" }, Critical},
		{"LS03", "some files", func(s *observe.Sample) { s.After.Sysctl["fs.file-nr"] = "75000 0 100000" }, Warn},
		{"LS03", "a process at its limit", func(s *observe.Sample) {
			s.After.Files = observe.ProcessFiles{Name: "nginx", PID: 7, Open: 1000, Limit: 1024, Hard: 4096}
		}, Warn},
		{"LS03", "unreadable", func(s *observe.Sample) { delete(s.After.Sysctl, "fs.file-nr") }, Unknown},
		{"LS04", "near the end", func(s *observe.Sample) { s.Namespaces[0].After.Sockstat["TCP.mem"] = 1 << 40 }, Critical},
		{"LS04", "orphans", func(s *observe.Sample) { s.Namespaces[0].After.Sockstat["TCP.orphan"] = 1 << 30 }, Critical},
		{"LS04", "unreadable", func(s *observe.Sample) { delete(s.After.Sysctl, "net.ipv4.tcp_mem") }, Unknown},
		{"LS04", "pressure", func(s *observe.Sample) { s.Namespaces[0].After.Sockstat["TCP.mem"] = 140000 }, Warn},
		{"LS05", "buffer", set("Udp.RcvbufErrors", 100), Warn},
		{"KV01", "kernel 6.1", func(s *observe.Sample) { s.After.Release = "6.1.0-28-amd64" }, Info},
		{"KV01", "no BTF", func(s *observe.Sample) { s.After.BTF = false }, Info},
	} {
		if tried[c.check] == nil {
			tried[c.check] = map[Verdict]bool{OK: true} // TestHealthyTree
		}
		tried[c.check][c.want] = true
		t.Run(c.check+" "+c.name, func(t *testing.T) {
			s := examined(t)
			c.make(s)
			for _, f := range Judge(context.Background(), s).Findings {
				if f.Check == c.check && f.Verdict != c.want {
					t.Errorf("%s: %s, want %s", f.Summary, f.Verdict, c.want)
				}
				if f.Remedy != nil {
					for _, command := range append(f.Remedy.Commands, f.Remedy.Do) {
						if strings.HasSuffix(command, ".") || unfilled.MatchString(command) {
							t.Errorf("%s: %q is not complete, or ends with a full stop", f.Check, command)
						}
					}
				}
				if f.Check == c.check && f.Verdict >= Warn && (f.Symptom == "" || f.Remedy == nil || f.Remedy.Do == "" || f.Remedy.Cost+f.Remedy.Risk == "") {
					t.Errorf("%s has no symptom, remedy, or cost and risk of it: %+v", f.Check, f.Remedy)
				}
				if f.Verdict >= Warn && len(f.Remedy.Commands) == 0 && f.Remedy.Risk == "" {
					t.Errorf("%s: the remedy has neither commands nor a risk: %s", f.Check, f.Remedy.Do)
				}
			}
		})
	}
	for _, c := range Checks() {
		if len(tried[c.ID]) < 2 {
			t.Errorf("%s %s: no case in which it finds something", c.ID, c.Name)
		}
	}
}

// TestBlind wants no check to pass for good what it could not read.
func TestBlind(t *testing.T) {
	s := examined(t)
	n := s.Namespaces[0]
	no := errors.New("not permitted")
	n.After.ConntrackErr, n.TableErr, n.RulesErr, n.DropsErr, n.NewErr, s.After.LogErr = no, no, no, no, no, no
	n.Rules, n.Table = &firewall.Ruleset{}, nil
	blind := map[string]bool{}
	for _, f := range Judge(context.Background(), s).Findings {
		blind[f.Check] = f.Verdict == Unknown
	}
	for _, id := range strings.Fields("CT02 CT04 CT05 CT06 CT09 CT10 CT11 CT12 ST01 ST02 ST03 ST04 ST08 ST10 ST11 " +
		"PT01 PT02 PT03 PT05 PT07 RL01 RL02 RL03 RL04 RL05 RL06 RL07 RL08 RL12 RL15 RL16 FW07 FW12 FW13") {
		if !blind[id] {
			t.Errorf("%s says that all is well with what it could not read", id)
		}
	}
}

// TestOpenFilesRemedy: it raises limits, and lowers none; above fs.nr_open there are none.
func TestOpenFilesRemedy(t *testing.T) {
	for _, tc := range []struct {
		hard uint64
		most string
		want string
	}{{1024, "1048576", "prlimit --pid 7 --nofile=4096"}, {4095, "4096", "prlimit --pid 7 --nofile=4096"}, {4096, "1048576", "prlimit --pid 7 --nofile=4096:"},
		{math.MaxUint64, "", "prlimit --pid 7 --nofile=4096:"}, {1024, "4095", "sysctl -w fs.nr_open=4096; prlimit --pid 7 --nofile=4096"}} {
		s := examined(t)
		s.After.Sysctl["fs.nr_open"] = tc.most
		s.After.Files = observe.ProcessFiles{Name: "nginx", PID: 7, Open: 1000, Limit: 1024, Hard: tc.hard}
		for _, f := range Judge(context.Background(), s).Findings {
			if f.Check == "LS03" && strings.Join(f.Remedy.Commands, "; ") != tc.want {
				t.Errorf("hard limit %d, at most %s: %s, want %s", tc.hard, tc.most, f.Remedy.Commands, tc.want)
			}
		}
	}
}

// TestConclusionOrder wants causes before consequences and losses before risks.
func TestConclusionOrder(t *testing.T) {
	s := examined(t)
	n := s.Namespaces[0]
	n.After.Limits.Count, n.After.Limits.Max = 1000, 1000
	fill(n.Table, 900, conntrack.TCPTimeWait)
	n.Delta["conntrack.drop"], n.Delta["conntrack.early_drop"] = 500, 20
	n.After.Links[1].MTU = 1400
	n.Delta["IpExt.InNoRoutes"] = 30
	r := Judge(context.Background(), s)
	var got []string
	for _, c := range r.Conclusion {
		got = append(got, c.Check)
	}
	if want := []string{"CT05", "FW08", "FW05"}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v:\n%v", got, want, r.Conclusion)
	}
	if r.ExitCode() != 2 {
		t.Errorf("exit code %d", r.ExitCode())
	}
	if !strings.Contains(r.Conclusion[0].Summary, "90 % of the entries are tcp TIME_WAIT") {
		t.Errorf("the conclusion does not say what fills the table: %s", r.Conclusion[0])
	}
}
