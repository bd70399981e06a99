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
	"github.com/sluice-lb/sluice/trace"
)

// portCases are the cases of checks on ports.
var portCases = []checkCase{
	{"PT02", "85 of 100 ports", usedPorts(85), Warn},
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
}

// ruleCases are the cases of checks on firewall rules.
var ruleCases = []checkCase{
	{"RL14", "no generation", func(s *observe.Sample) { s.Namespaces[0].After.Generation = 0 }, Unknown},
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
	{"RL04", "late", rules(func(r *firewall.Ruleset) {
		r.Chains[0] = firewall.Chain{Name: "inet filter forward", Hook: "forward", Longest: 50, Established: 20}
	}), Warn},
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
	{"RL08", "trace", rules(func(r *firewall.Ruleset) { r.Traces, r.TraceIn = 1, "inet filter forward" }), Critical},
	{"RL08", "log", rules(func(r *firewall.Ruleset) { r.Logs, r.LogIn = 2, "inet filter forward" }), Warn},
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
	{"RL14", "churn", func(s *observe.Sample) { s.Namespaces[0].After.Generation += 30 }, Info},
	{"RL15", "a rule drops", func(s *observe.Sample) {
		s.Namespaces[0].Drops = []trace.DropGroup{{Cause: trace.CauseNftRule, Packets: 300, PerSecond: 100, Rules: []firewall.Rule{{Chain: "inet filter forward", Text: "drop"}}}}
	}, Warn},
	{"RL15", "scans at the gate", func(s *observe.Sample) {
		s.Namespaces[0].Drops = []trace.DropGroup{{Cause: trace.CauseNftRule, Packets: 3, PerSecond: 1}}
	}, Info},
	{"RL15", "no events", func(s *observe.Sample) { s.Namespaces[0].DropsErr = errors.New("no events") }, Unknown},
	{"RL16", "notrack, and other traffic is translated", all(untracked(1, 0, 0), set("Ip.ForwDatagrams", 3000)), Info},
	{"RL16", "notrack, and nothing is forwarded", all(untracked(1, 0, 0), noEntries), Info},
	{"RL16", "notrack, and nothing is translated", all(untracked(0, 0, 1), noEntries, set("Ip.ForwDatagrams", 3000)), Warn},
	{"RL16", "notrack of IPv6, NAT of IPv4", all(untracked(0, 1, 0), noEntries, set("Ip6OutForwDatagrams", 3000)), OK},
	{"RL16", "rules unreadable", func(s *observe.Sample) { s.Namespaces[0].Rules = nil }, Unknown},
}
