// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/trace"
)

// ruleChecks look at the firewall and at features of connection tracking.
func ruleChecks() []Check {
	return []Check{
		{ID: "RL01", Name: "linear-rules", About: "rules that a packet walks through one by one", Weight: 55, Run: checkLinearRules,
			Symptom: "fewer packets a second; the CPU is in nft_do_chain or ipt_do_table",
			Remedy:  Remedy{Do: "put addresses and ports into a set or verdict map, accept established connections first", Cost: "rewriting the rules", Risk: "test the new order"}},
		{ID: "RL02", Name: "kube-service-chains", About: "length of KUBE-SERVICES", Weight: 27, Run: checkKubeChains,
			Symptom: "the first packet of a connection is slow, rule updates take seconds",
			Remedy:  Remedy{Do: "kube-proxy in nftables mode, or a replacement with maps", Risk: "a restart of kube-proxy"}},
		{ID: "RL03", Name: "mixed-iptables", About: "iptables-legacy and iptables-nft at once", Weight: 25, Run: checkMixed,
			Symptom: "a rule is there but does nothing; both sets run and cost",
			Remedy: Remedy{Do: "let all programs use one of them (update-alternatives --config iptables), and move the rules, those of ip6tables likewise",
				Commands: []string{"iptables-legacy-save | iptables-nft-restore --noflush && iptables-legacy-save | grep -v ^-A | sed 's/ DROP / ACCEPT /' | iptables-legacy-restore"}, Risk: "save both rule sets first"}},
		{ID: "RL04", Name: "late-established-accept", About: "where established connections are accepted", Weight: 24, Run: checkLateAccept,
			Symptom: "every packet walks the list, not only the first of a connection",
			Remedy:  Remedy{Do: "accept established connections first", Commands: []string{"RULE"}, Risk: "rules above it no longer see packets of known connections: counters, marks, bans"}},
		{ID: "RL05", Name: "notrack-candidates", About: "entries of traffic that NAT never touches", Weight: 9, Run: checkNotrack},
		{ID: "RL06", Name: "tracking-without-need", About: "connection tracking without NAT or ct rules", Weight: 11, Run: checkNeedless,
			Symptom: "a plain router drops new connections when the table is full",
			Remedy:  Remedy{Do: "delete what switches tracking on: rules of iptables with -j CT, IPVS, Open vSwitch; before kernel 4.10 iptables -t nat -L alone does: modprobe -r iptable_nat nf_nat nf_conntrack", Risk: "rules that use it then fail to load"}},
		{ID: "RL07", Name: "automatic-helpers", About: "helpers assigned without a rule, or by rules without a port", Weight: 10, Run: checkHelpers,
			Symptom: "clients open holes in the firewall by what they write into connections of any kind; entries are larger",
			Remedy:  Remedy{Do: "assign helpers by rules, and none by itself", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_helper=0"}, Risk: "FTP and SIP need such rules"}},
		{ID: "RL08", Name: "tracing-left-on", About: "trace and log rules", Weight: 32, Run: checkTracing,
			Symptom: "a storm of kernel messages, CPU time",
			Remedy:  Remedy{Do: "delete the trace rule, put a limit before log; this shows the numbers of rules", Commands: []string{"nft -a list chain CHAIN"}, Risk: "what is not logged cannot be looked up"}},
		{ID: "RL09", Name: "bridge-netfilter", About: "bridged frames sent through iptables", Weight: 22, Run: checkBridge,
			Symptom: "br_nf_pre_routing in profiles; frames between virtual machines meet the host's forward rules",
			Remedy:  Remedy{Do: "let bridged frames pass without iptables", Commands: []string{"sysctl -w net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0"}, Risk: "Docker and Kubernetes need it for services between containers of one bridge"}},
		{ID: "RL10", Name: "event-listeners", About: "programs that receive every conntrack event", Weight: 13, Run: checkListeners,
			Symptom: "fewer new connections a second; the program misses events",
			Remedy: Remedy{Do: "let the program listen for DESTROY only, with a filter on its socket and a buffer of 8 MiB",
				Cost: "8 MiB of memory", Risk: "the program no longer sees connections begin"}},
		{ID: "RL11", Name: "accounting", About: "byte counters and time stamps of connections", Weight: 1, Run: checkAccounting},
		{ID: "RL12", Name: "flowtable", About: "the kernel's fast path for forwarded connections", Weight: 1, Run: checkFlowtable},
		{ID: "RL13", Name: "checksum-check", About: "checksums verified by connection tracking", Weight: 1, Run: checkChecksum},
		{ID: "RL14", Name: "ruleset-churn", About: "how often the rules are replaced", Weight: 14, Run: checkChurn,
			Symptom: "rule updates take long, programs wait for the xtables lock",
			Remedy:  Remedy{Do: "collect changes and apply them together; change set elements instead of rules", Risk: "changes take effect later"}},
		{ID: "RL15", Name: "rule-drops", About: "packets that firewall rules drop", Weight: 70, Run: checkRuleDrops,
			Symptom: "connections to some destinations hang; with reject they fail at once",
			Remedy:  Remedy{Do: "if the packets are wanted, change or delete the rule named above", Risk: "the rule may be there for a reason"}},
		{ID: "RL16", Name: "notrack-before-nat", About: "packets that rules keep from NAT by notrack", Weight: 80, Run: checkNotrackNAT,
			Symptom: "packets leave with the addresses of the inside, and nothing comes back; the NAT rules' counters stand still",
			Remedy: Remedy{Do: "let the notrack rule ask for the ports or destinations that need no NAT, or delete it", Cost: "an entry for each connection",
				Risk: "traffic that was meant not to be tracked is"}},
	}
}

func checkLinearRules(_ context.Context, c *Case) Finding {
	if f, there := c.rules(); !there {
		return f
	}
	longest, name := longestWay(c.NS.Rules.Chains)
	first, firstName := 0, "" // of chains that only the first packet of a connection traverses
	for _, chain := range c.NS.Rules.Chains {
		if (chain.NAT || chain.Walked() < chain.Longest) && chain.Longest > first {
			first, firstName = chain.Longest, chain.Name
		}
	}
	// 3.0 ns a rule and packet in nftables, 2.3 ns in iptables-legacy; 1,000 cost
	// a quarter of the requests a second.
	v := grade(float64(longest), 100, 1000)
	f := found(v, "at most %s one after the other (%s)", plural(longest, "rule"), name)
	switch {
	case v == OK && first > 100:
		return found(Info, "the first packet of a connection walks through %d rules one by one in %s", first, firstName).
			with("longest way of first packets", fmt.Sprintf("%d rules, %s", first, firstName), fromRules)
	case longest+first == 0:
		return ok("no long chains of rules")
	case v > OK:
		f.Summary = fmt.Sprintf("a packet walks through %d rules one by one in %s, about %.1f µs", longest, name, float64(longest)*0.003)
	}
	if n := c.NS.Rules.Unread; n > 0 {
		f.Summary += fmt.Sprintf("; where %s to is not known", pluralVerb(n, "verdict map leads", "verdict maps lead"))
	}
	return f.with("most rules on one path", fmt.Sprintf("%d rules, %s", longest, name), fromRules)
}

// longestWay returns the number of rules that a packet of a known connection traverses at a hook,
// in all chains except NAT chains.
func longestWay(chains []firewall.Chain) (longest int, name string) {
	type way struct {
		rules, most, chains int
		name                string
	}
	ways := map[string]*way{}
	var order []string
	for _, chain := range chains {
		for _, family := range families(chain) {
			key := family + " " + chain.Hook
			if ways[key] == nil {
				ways[key] = &way{}
				order = append(order, key)
			}
			n, w := chain.Walked(), ways[key]
			if chain.NAT || n == 0 {
				continue
			}
			if w.chains++; n > w.most {
				w.most, w.name = n, chain.Name
			}
			w.rules += n
		}
	}
	for _, key := range order {
		if w := ways[key]; w.rules > longest {
			longest, name = w.rules, w.name
			if w.chains > 1 {
				name += fmt.Sprintf(" and %s at its hook", plural(w.chains-1, "chain"))
			}
		}
	}
	return longest, name
}

// families returns the address families whose packets traverse a chain.
func families(chain firewall.Chain) []string {
	switch family, _, _ := strings.Cut(chain.Name, " "); family {
	case "inet":
		return []string{"ip", "ip6"}
	case "iptables":
		return []string{"ip"}
	case "ip6tables":
		return []string{"ip6"}
	default:
		return []string{family}
	}
}

func checkKubeChains(_ context.Context, c *Case) Finding {
	if f, there := c.rules(); !there {
		return f
	}
	n := c.NS.Rules.KubeServices
	if n == 0 {
		return ok("no kube-proxy chains")
	}
	return found(grade(float64(n), 1000, 1e9), "KUBE-SERVICES has %s", plural(n, "rule")).with("rules", fmt.Sprint(n), fromRules)
}

func checkMixed(_ context.Context, c *Case) Finding {
	if f, there := c.rules(); !there {
		return f
	}
	legacy := c.NS.After.LegacyTables
	switch r := c.NS.Rules; {
	case len(legacy) == 0 || !r.Compat:
		return ok("one kind of iptables at most")
	case r.Legacy == 0 && c.NS.RulesErr != nil:
		return unknown("%v", c.NS.RulesErr)
	case r.Legacy == 0: // programs that look which kind is in use load its tables
		return ok("the tables of iptables-legacy are loaded and empty")
	}
	return found(Warn, "rules of iptables-legacy and of iptables-nft are both loaded").
		with("legacy tables", strings.Join(legacy, " "), "/proc/net/ip_tables_names")
}

func checkLateAccept(_ context.Context, c *Case) Finding {
	if f, there := c.rules(); !there {
		return f
	}
	for _, chain := range c.NS.Rules.Chains {
		if (chain.Hook == "forward" || chain.Hook == "input") && chain.Established >= 3 && chain.Longest > 10 {
			return found(Warn, "%s accepts established connections only at rule %d", chain.Name, chain.Established+1).
				with("rule", fmt.Sprint(chain.Established+1), fromRules).filling("RULE", acceptFirst(chain.Name))
		}
	}
	return ok("no chain accepts established connections late")
}

// acceptFirst is the command that puts the rule for established connections at the top of
// a chain.
func acceptFirst(chain string) string {
	if program, legacy, found := strings.Cut(chain, "tables "); found {
		table, name, _ := strings.Cut(legacy, " ")
		return fmt.Sprintf("%stables-legacy -t %s -I %s -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT", program, table, name)
	}
	return "nft insert rule " + chain + " ct state established,related accept"
}

func checkNotrack(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	plain := c.NS.Table.Translated[0]
	if c.share(plain) > 0.2 && plain > 1000 {
		if c.ownTraffic() {
			return ok("%s of the entries are not translated, most of this host's own connections", percent(c.share(plain)))
		}
		f := found(Info, "%s of the entries are not translated; notrack in raw prerouting would free them", percent(c.share(plain))).
			with("not translated", fmt.Sprint(plain), c.dumped())
		for _, service := range c.NS.Table.Services(1) {
			f = f.with("largest destination", fmt.Sprintf("%s, %d entries", service.Key, service.Entries), c.dumped())
		}
		return f
	}
	return ok("%s of the entries are not translated", percent(c.share(plain)))
}

// ownTraffic reports whether this host itself is the largest source or destination, as a DNS
// forwarder is. Rules that accept established connections need its connections tracked.
func (c *Case) ownTraffic() bool {
	var largest []string
	for _, row := range c.NS.Table.Sources(1) {
		largest = append(largest, row.Key)
	}
	for _, row := range c.NS.Table.Services(1) { // "udp 192.0.2.1:53"
		_, end, _ := strings.Cut(row.Key, " ")
		if a, err := netip.ParseAddrPort(end); err == nil {
			largest = append(largest, a.Addr().String())
		}
	}
	for _, l := range c.NS.After.Links {
		for _, a := range l.Addresses {
			if slices.Contains(largest, a.Addr().String()) {
				return true
			}
		}
	}
	return false
}

// strayPackets are forwarded packets of a moment that say nothing of where all the others go.
const strayPackets = 50

// checkNotrackNAT: NAT rules see the first packet of a connection, and of untracked ones none.
func checkNotrackNAT(_ context.Context, c *Case) Finding {
	if f, there := c.rules(); !there {
		return f
	}
	nat, no := c.NS.Rules.Forwards, c.NS.Rules.Untracked
	four := no.IPv4+no.Either > 0 && nat.IPv4+nat.Either > 0
	six := no.IPv6+no.Either > 0 && nat.IPv6+nat.Either > 0
	if !four && !six {
		return ok("no rule keeps packets from NAT by where they come from")
	}
	forwarded := uint64(0)
	if four {
		forwarded += c.delta("Ip.ForwDatagrams")
	}
	if six {
		forwarded += c.delta("Ip6OutForwDatagrams")
	}
	n := no.IPv4 + no.IPv6 + no.Either
	f := found(Info, "%s packets from NAT by where they come from", pluralVerb(n, "notrack rule keeps", "notrack rules keep"))
	t := c.NS.Table
	translated := c.NS.After.Limits.Count > 0 && (t == nil || t.Translated[1]+t.Translated[2]+t.Translated[3] > 0)
	if forwarded >= strayPackets && !translated {
		f = found(Warn, "%d packets were forwarded and none was translated: %s them from NAT", forwarded, pluralVerb(n, "notrack rule keeps", "notrack rules keep")).
			losing(c.perSecond(forwarded))
	}
	return f.with("rules with notrack, without ports and destinations", fmt.Sprint(n), fromRules).
		with("Δforwarded", c.inWindow(forwarded), fromSNMP)
}

func checkNeedless(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	if f, there := c.rules(); !there {
		return f
	}
	r := c.NS.Rules
	switch {
	case r.NAT() || r.Tracking > 0:
		return ok("rules use connection tracking")
	case c.NS.RulesErr != nil:
		return unknown("%v", c.NS.RulesErr)
	}
	n := c.NS.Table.Total.Entries
	if c.NS.NewErr == nil && c.NS.NewPerSecond == 0 && c.NS.After.Limits.Count <= c.NS.Before.Limits.Count {
		return found(Info, "%d entries are left of connections that no rule tracks, or no rule needs to", n)
	}
	return found(Warn, "%d connections are tracked although no rule needs it", n).with("rules with nat or ct", "0", fromRules)
}

func checkHelpers(_ context.Context, c *Case) Finding {
	if v, there := c.sysctl("net.netfilter.nf_conntrack_helper"); there && v == 1 {
		return found(Warn, "helpers are assigned automatically").with("nf_conntrack_helper", "1", fromSysctl)
	}
	if f, there := c.rules(); !there {
		return f
	}
	r := c.NS.Rules
	switch {
	case r.Helpers == 0 && len(c.NS.Entries.FTP) > 0:
		return c.unhelpedFTP()
	case r.WideHelpers > 0:
		f := found(Warn, "%s a helper to connections of any port, as the old automatic assignment did", pluralVerb(r.WideHelpers, "rule assigns", "rules assign")).
			with("rules with ct helper and without a port", fmt.Sprint(r.WideHelpers), fromRules)
		f.Remedy = &Remedy{Do: "let the rule ask for the helper's port, and for the interface or the addresses of those who need it: iifname lan tcp dport 21 ct helper set ftp",
			Risk: "servers at other ports lose their data connections"}
		return f
	case r.Helpers > 0:
		// That is what the remedy asks for: a router that serves FTP has to have it.
		return found(Info, "%s a helper, each for a port: larger entries, and ports opened for what its clients announce", pluralVerb(r.Helpers, "rule assigns", "rules assign")).
			with("rules with ct helper", fmt.Sprint(r.Helpers), fromRules)
	}
	return ok("no helpers")
}

func checkTracing(_ context.Context, c *Case) Finding {
	if f, there := c.rules(); !there {
		return f
	}
	invalid, _ := c.sysctl("net.netfilter.nf_conntrack_log_invalid")
	switch r := c.NS.Rules; {
	case r.Traces > 0:
		return found(Critical, "%s tracing on", pluralVerb(r.Traces, "rule switches", "rules switch")).
			with("trace rules", fmt.Sprintf("%d, the first in %s", r.Traces, r.TraceIn), fromRules).filling("CHAIN", r.TraceIn)
	case r.Logs > 0:
		return found(Warn, "%s without a limit", pluralVerb(r.Logs, "rule logs", "rules log")).
			with("log rules", fmt.Sprintf("%d, the first in %s", r.Logs, r.LogIn), fromRules).filling("CHAIN", r.LogIn)
	case invalid == 255:
		f := found(Warn, "every invalid packet is logged").with("nf_conntrack_log_invalid", "255", fromSysctl)
		f.Remedy = &Remedy{Do: "log no invalid packets", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_log_invalid=0"}, Risk: "what is not logged cannot be looked up"}
		return f
	case invalid > 0:
		return found(Info, "invalid packets are logged (protocol %d)", invalid).with("nf_conntrack_log_invalid", fmt.Sprint(invalid), fromSysctl)
	}
	return ok("no tracing, no unlimited log")
}

func pluralVerb(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func checkBridge(_ context.Context, c *Case) Finding {
	four, there := c.sysctl("net.bridge.bridge-nf-call-iptables")
	six, _ := c.sysctl("net.bridge.bridge-nf-call-ip6tables")
	value := fmt.Sprintf("%d, %d", four, six)
	// A bridge on which this host has an address is one that it routes for: containers, virtual
	// machines, a local network. NAT between two of its ports, as of a port forward that its own
	// hosts use, needs the frames to pass.
	bridges, routed := 0, c.NS.Rules != nil && c.NS.Rules.KubeServices > 0
	for _, l := range c.NS.After.Links {
		if l.Kind == "bridge" {
			bridges++
			routed = routed || slices.ContainsFunc(l.Addresses, func(a netip.Prefix) bool { return !a.Addr().IsLinkLocalUnicast() })
		}
	}
	switch {
	case !there || four+six == 0:
		return ok("bridged frames do not pass iptables")
	case bridges == 0:
		return ok("no bridge")
	case c.NS.Rules != nil && c.NS.RulesErr == nil && len(c.NS.Rules.Chains) == 0:
		return ok("bridged frames pass iptables, where no rule is")
	case routed:
		return found(Info, "bridged frames pass iptables; NAT between hosts of one bridge, containers among them, needs it").with("bridge-nf-call-iptables, -ip6tables", value, fromSysctl)
	}
	return found(Warn, "frames on %s, none of which this host routes for, pass iptables and connection tracking", plural(bridges, "bridge")).with("bridge-nf-call-iptables, -ip6tables", value, fromSysctl)
}

func checkListeners(_ context.Context, c *Case) Finding {
	// Those that listen for a moment, as top does for its samples, are seen at one end only.
	n := min(c.NS.Before.EventListeners, c.NS.After.EventListeners)
	if n == 0 {
		return ok("no program receives all conntrack events")
	}
	// An all-events listener cost 31 % of the connections a second at 15,000/s.
	v := Info
	if c.NS.NewErr == nil && c.NS.NewPerSecond > 5000 {
		v = Warn
	}
	return found(v, "%s every conntrack event: up to a third of the connections a second when busy", pluralVerb(n, "program receives", "programs receive")).
		with("netfilter netlink groups", fmt.Sprint(n), "/proc/net/netlink")
}

func checkAccounting(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	if v, there := c.sysctl("net.netfilter.nf_conntrack_acct"); there && v == 0 {
		f := found(Info, "no byte counters of connections: sysctl -w net.netfilter.nf_conntrack_acct=1 costs nothing measurable")
		f.Remedy = &Remedy{Do: "count the bytes of connections", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_acct=1"}, Risk: "none: connections that are there already stay without"}
		return f
	}
	return ok("connections count bytes")
}

func checkFlowtable(_ context.Context, c *Case) Finding {
	if f, there := c.rules(); !there {
		return f
	}
	switch {
	case c.NS.Rules.Flowtables > 0:
		return ok("%s", plural(c.NS.Rules.Flowtables, "flowtable"))
	case c.After.FlowtablesErr != nil:
		return unknown("whether this kernel has flowtables: %v", c.After.FlowtablesErr)
	case !c.After.Flowtables:
		return ok("this kernel is built without flowtables")
	case !c.forwards():
		return ok("not a router")
	}
	if c.NS.Table == nil || c.NS.Table.State(conntrack.TCPEstablished).Entries < longFlows {
		return ok("few established connections to carry past the rules")
	}
	return found(Info, "%d connections are established, and no rule hands them to a flowtable, which would carry them past the rules", c.NS.Table.State(conntrack.TCPEstablished).Entries).
		with("ESTABLISHED", fmt.Sprint(c.NS.Table.State(conntrack.TCPEstablished).Entries), c.dumped())
}

// longFlows is from how many established connections on a flowtable is worth a word.
const longFlows = 1000

func checkChecksum(_ context.Context, c *Case) Finding {
	v, there := c.sysctl("net.netfilter.nf_conntrack_checksum")
	if !there || v == 0 {
		return ok("connection tracking does not verify checksums")
	}
	for _, l := range c.NS.After.Links {
		if l.Kind == "device" && l.Up && !l.Loopback && l.RxChecksum == 0 {
			return found(Info, "%s does not verify checksums in hardware, so connection tracking does it on the CPU", l.Name).
				with("nf_conntrack_checksum", "1", fromSysctl)
		}
	}
	return ok("the interfaces verify checksums")
}

func checkChurn(_ context.Context, c *Case) Finding {
	if c.NS.Before.Generation == 0 || c.NS.After.Generation == 0 {
		return unknown("the generation of the nftables ruleset is not readable")
	}
	n := c.NS.After.Generation - c.NS.Before.Generation
	// A change costs CPU time and loses no packet. Each start of a container makes several.
	f := ok("%s of the nftables rules in %.1f s", plural(int(n), "change"), c.Window.Seconds())
	if float64(n) >= max(c.Window, observe.DefaultWindow).Seconds() {
		f.Verdict = Info
	}
	return f.with("Δgeneration", c.inWindow(uint64(n)), fromRules)
}

// Drops that somebody has asked for are everyday scans below these rates.
const (
	askedDropsPerSecond = 5
	askedDropsShare     = 0.01
)

// unwanted judges drops by a rule or route, which may be there for a reason.
func (c *Case) unwanted(g trace.DropGroup) Verdict {
	received := float64(max(c.delta("Ip.InReceives")+c.delta("Ip6InReceives"), 1))
	rate := float64(g.Packets) / max(c.Window, observe.DefaultWindow).Seconds() // a short window is no evidence of a rate
	if rate > askedDropsPerSecond && float64(g.Packets)/received > askedDropsShare {
		return Warn
	}
	return Info
}

func checkRuleDrops(_ context.Context, c *Case) Finding {
	if c.NS.DropsErr != nil {
		return unknown("%v", c.NS.DropsErr)
	}
	for _, cause := range []trace.Cause{trace.CauseNftRule, trace.CauseLegacyRule, trace.CauseHookRule} {
		g, seen := c.drops(cause)
		if !seen {
			continue
		}
		f, is := c.unheard(g)
		if !is {
			f = c.ruleDrops(g)
		}
		for _, r := range g.Rules[:min(len(g.Rules), 3)] {
			f = f.with("rule", r.String(), fromRules)
		}
		return c.withDrops(f, cause)
	}
	return ok("no rule dropped anything")
}

func ruleText(g trace.DropGroup) string {
	if len(g.Rules) == 0 || len(g.Rules) > 3 {
		return ""
	}
	var texts []string
	for _, r := range g.Rules {
		texts = append(texts, r.String())
	}
	return ": " + strings.Join(texts, ", or ")
}
