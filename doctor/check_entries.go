// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/trace"
)

// limitSources is a rule that limits each source to a share of the table. SHARE is replaced by the
// number of entries.
const limitSources = "nft 'add table inet shares; add set inet shares sources { type ipv4_addr; flags dynamic; }; " +
	"add chain inet shares forward { type filter hook forward priority filter; }; " +
	"add rule inet shares forward ct state new add @sources { ip saddr ct count over SHARE } drop'"

// share5 returns a twentieth of the table: half of the limit for a warning.
func (c *Case) share5() string { return fmt.Sprint(max(c.NS.After.Limits.Max/20, 1)) }

// entryChecks look at what fills the connection table.
func entryChecks() []Check {
	return []Check{
		{ID: "ST01", Name: "time-wait-share", About: "closed TCP connections that still hold entries", Weight: 30, Run: checkTimeWait,
			Symptom: "the rate of new connections is limited to nf_conntrack_max / 120 s",
			Remedy: Remedy{Do: "keep connections alive in clients and servers, and raise the limit of the table, in the host's own namespace", Commands: raiseTable.Commands,
				Cost: raiseTable.Cost, Risk: raiseTable.Risk}},
		{ID: "ST02", Name: "half-open-share", About: "entries that never saw an answer", Weight: 31, Run: checkHalfOpen,
			Symptom: "a scan, a SYN flood, or a backend that does not answer",
			Remedy:  Remedy{Do: "repair the backend, use synproxy, or limit each source", Commands: []string{limitSources}, Risk: "limits hit NATed clients together"}},
		{ID: "ST03", Name: "source-skew", About: "the largest share of the table held by one source", Weight: 29, Run: checkSourceSkew,
			Symptom: "one host takes the entries of all the others",
			Remedy:  Remedy{Do: "limit connections by source (RFC 6888 REQ-4)", Commands: []string{limitSources}, Risk: "the source loses connections"}},
		{ID: "ST04", Name: "destination-skew", About: "the largest share of the table held by one service", Weight: 6, Run: checkDestinationSkew},
		{ID: "ST05", Name: "established-timeout", About: "how long idle TCP connections are kept", Weight: 18, Run: checkEstablishedTimeout,
			Symptom: "connections whose ends are gone hold entries for days",
			Remedy: Remedy{Do: "remove idle connections from the table after a day", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=86400"},
				Risk: "connections idle for longer are cut; below 7440 breaks RFC 5382 REQ-5"}},
		{ID: "ST06", Name: "udp-timeouts", About: "UDP timeouts against RFC 4787", Weight: 2, Run: checkUDPTimeouts,
			Symptom: "calls and tunnels go silent after a pause",
			Remedy:  Remedy{Do: "keep UDP entries for longer", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_udp_timeout=120 net.netfilter.nf_conntrack_udp_timeout_stream=300"}, Cost: "more entries"}},
		{ID: "ST07", Name: "close-wait-timeout", About: "how long half-closed connections are kept", Weight: 2, Run: checkCloseWait,
			Symptom: "a side that sends on after the other one's end is cut off; packets leave with private sources",
			Remedy:  Remedy{Do: "keep half-closed connections for an hour", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_tcp_timeout_close_wait=3600"}, Cost: "more entries"}},
		{ID: "ST08", Name: "invalid-packets", About: "packets that fit no connection", Weight: 35, Run: checkInvalid,
			Symptom: "connections are reset after a pause; packets with private sources leave the NAT",
			Remedy: Remedy{Do: "log them for a moment to find the cause, in a namespace with net.netfilter.nf_log_all_netns=1 of the host",
				Commands: []string{"sysctl -w net.netfilter.nf_conntrack_log_invalid=255"}, Risk: "a message in the kernel's log for each until it is 0 again"}},
		{ID: "ST09", Name: "tcp-window-checks", About: "strictness of TCP tracking", Weight: 2, Run: checkLiberal,
			Symptom: "connections hang or are reset when packets take another way",
			Remedy:  Remedy{Do: "let tracking accept segments outside the window", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1"}, Risk: "less protection against forged packets"}},
		{ID: "ST10", Name: "stale-nat", About: "entries translated to backends that are gone", Weight: 10, Run: checkStaleNAT,
			Symptom: "clients are sent to backends that are gone",
			Remedy:  Remedy{Do: "remove the backend from the rules where it stands there, then its entries", Commands: []string{"conntrack -D --reply-src ADDRESS"}, Cost: "one pass over the table for each delete"}},
		{ID: "ST12", Name: "entries-before-rules", About: "entries that the present rules would translate otherwise", Weight: 71, Run: checkOldEntries,
			Symptom: "a phone, tunnel or game that never falls silent gets no answer after the address or the rules changed, while new ones work",
			Remedy:  Remedy{Do: "remove the entries: the next packet makes new ones", Risk: "the connections begin anew"}},
		{ID: "ST11", Name: "one-way-connections", About: "established connections without a reply", Weight: 28, Run: checkOneWay,
			Symptom: "asymmetric routing: answers take another way, some connections hang",
			Remedy:  Remedy{Do: "route both directions through this host, or notrack the traffic", Risk: "notrack takes NAT and ct state from it"}},
	}
}

// share is a part of the namespace's entries.
func (c *Case) share(n uint32) float64 {
	return float64(n) / float64(max(c.NS.Table.Total.Entries, 1))
}

func checkTimeWait(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	n := c.NS.Table.State(conntrack.TCPTimeWait).Entries
	timeout, _ := c.sysctl("net.netfilter.nf_conntrack_tcp_timeout_time_wait")
	f := found(OK, "%s of the entries are in TIME_WAIT", percent(c.share(n)))
	if c.share(n) > 0.60 && c.fill() > 0.50 {
		f.Verdict = Warn
		if timeout > 0 {
			f.Summary += fmt.Sprintf(": at most %d connections/s", int(c.NS.After.Limits.Max)/timeout)
		}
	}
	return f.with("TIME_WAIT", fmt.Sprint(n), c.dumped())
}

func checkHalfOpen(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	t := c.NS.Table
	n := max(t.Unreplied, t.State(conntrack.TCPSynSent).Entries)
	f := found(OK, "%s of the entries saw no answer", percent(c.share(n))).with("UNREPLIED", fmt.Sprint(n), c.dumped())
	// In a small table a few lookups without an answer say nothing.
	if n > 1000 && c.fill() > 0.05 {
		f.Verdict = grade(c.share(n), 0.20, 0.50)
	}
	return f.filling("SHARE", c.share5())
}

func checkSourceSkew(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	top := c.NS.Table.Sources(1)
	if len(top) == 0 {
		return ok("no sources")
	}
	share := float64(top[0].Entries) / float64(max(c.NS.After.Limits.Max, 1))
	sources, _, _, _ := c.NS.Table.Distinct()
	v := grade(share, 0.10, 0.25)
	if sources == 1 && v > Info {
		v = Info // a single client takes no entries from others
	}
	return found(v, "the largest source holds %s of the limit: %s", percent(share), top[0].Key).
		with(top[0].Key, fmt.Sprintf("%d entries of %s", top[0].Entries, plural(sources, "source")), c.dumped()).filling("SHARE", c.share5())
}

func checkDestinationSkew(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	top := c.NS.Table.Services(1)
	if len(top) == 0 {
		return ok("no destinations")
	}
	v := OK
	if c.share(top[0].Entries) > 0.5 && top[0].Entries > 10000 {
		v = Info
	}
	return found(v, "the largest destination holds %s of the entries: %s", percent(c.share(top[0].Entries)), top[0].Key).
		with(top[0].Key, fmt.Sprintf("%d entries", top[0].Entries), c.dumped())
}

func checkEstablishedTimeout(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	seconds, there := c.sysctl("net.netfilter.nf_conntrack_tcp_timeout_established")
	if !there {
		return unknown("nf_conntrack_tcp_timeout_established is not readable")
	}
	f := found(OK, "idle TCP connections are kept %d s", seconds).with("nf_conntrack_tcp_timeout_established", fmt.Sprint(seconds), fromSysctl)
	switch {
	case seconds >= 432000 && c.fill() > 0.50 && c.NS.Rules.NAT():
		f.Verdict = Warn
	case seconds < minEstablished && c.NS.Rules.NAT():
		f.Verdict = Info
		f.Summary += ", less than the 2 h 4 min of RFC 5382 REQ-5"
		if n := c.delta("conntrack.invalid"); n >= invalidStragglers && !c.asymmetric() {
			f.Verdict = grade(c.shareOf(n), 0.001, 0.01)
			f.Summary = fmt.Sprintf("idle TCP connections are forgotten after %d s, and %d packets came of connections that are not known (any more)", seconds, n)
			f = f.with("Δinvalid", c.inWindow(n), fromCtnetlink)
			f.Symptom = "a database or SSH session that was silent for a while hangs, or is reset"
			f.Remedy = &Remedy{Do: "keep idle connections for as long as RFC 5382 wants", Commands: []string{fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=%d", minEstablished)},
				Cost: "more entries"}
		}
	}
	return f
}

// minEstablished is the least that RFC 5382 REQ-5 allows, in seconds.
const minEstablished = 7440

// silentUDP are ports of protocols with long and often silent connections: SIP, IKE, IPsec NAT-T,
// OpenVPN, WireGuard.
var silentUDP = map[uint16]string{5060: "SIP", 500: "IKE", 4500: "IPsec", 1194: "OpenVPN", 51820: "WireGuard"}

// silentInUse finds one of these ports among the largest services of the table.
func (c *Case) silentInUse() string {
	if c.NS.Table == nil {
		return ""
	}
	for _, row := range c.NS.Table.Services(50) {
		service, found := strings.CutPrefix(row.Key, "udp ")
		endpoint, err := netip.ParseAddrPort(service)
		if name := silentUDP[endpoint.Port()]; found && err == nil && name != "" {
			return name
		}
	}
	return ""
}

func checkUDPTimeouts(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	single, there := c.sysctl("net.netfilter.nf_conntrack_udp_timeout")
	stream, there2 := c.sysctl("net.netfilter.nf_conntrack_udp_timeout_stream")
	if !there || !there2 {
		return unknown("nf_conntrack_udp_timeout is not readable")
	}
	f := found(OK, "UDP is kept %d s, streams %d s", single, stream).
		with("nf_conntrack_udp_timeout, _stream", fmt.Sprintf("%d, %d", single, stream), fromSysctl)
	if min(single, stream) >= 120 || !c.NS.Rules.NAT() {
		return f
	}
	f.Verdict = Info
	f.Summary += "; RFC 4787 REQ-5 wants 120 s at least"
	if name := c.silentInUse(); name != "" && stream < 120 {
		f.Verdict = Warn
		f.Summary += ", and " + name + " is in use"
	}
	return f
}

func checkCloseWait(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	seconds, there := c.sysctl("net.netfilter.nf_conntrack_tcp_timeout_close_wait")
	if !there {
		return unknown("nf_conntrack_tcp_timeout_close_wait is not readable")
	}
	f := ok("half-closed connections are kept %d s", seconds)
	switch {
	case seconds >= 3600:
	case c.NS.Table != nil && c.NS.Table.State(conntrack.TCPCloseWait).Entries > 100 && c.share(c.NS.Table.State(conntrack.TCPCloseWait).Entries) > 0.01:
		f.Verdict = Warn
		f.Summary = fmt.Sprintf("%d connections are half-closed, and forgotten after %d s", c.NS.Table.State(conntrack.TCPCloseWait).Entries, seconds)
		f = f.with("CLOSE_WAIT", fmt.Sprint(c.NS.Table.State(conntrack.TCPCloseWait).Entries), c.dumped())
	case c.NS.Rules != nil && c.NS.Rules.KubeServices > 0:
		f.Verdict = Info
		f.Summary += "; Kubernetes wants 3600"
	}
	return f.with("nf_conntrack_tcp_timeout_close_wait", fmt.Sprint(seconds), fromSysctl)
}

// invalidStragglers are invalid packets that belong to closed connections, as on every gateway.
const invalidStragglers = 20

func checkInvalid(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	n := c.delta("conntrack.invalid")
	packets := max(c.delta("Ip.InReceives")+c.delta("Ip6InReceives"), 1)
	share := float64(n) / float64(packets)
	f := found(OK, "%d invalid packets, %.2f %% of those received", n, 100*share).with("Δinvalid", c.inWindow(n), fromCtnetlink)
	if n >= invalidStragglers {
		f.Verdict = grade(share, 0.001, 0.01)
	}
	cut := c.cutOff()
	if n > 0 && len(cut) > 0 && c.NS.Rules.NAT() {
		f.Verdict = max(f.Verdict, Warn)
	}
	if f.Verdict < Warn {
		return f
	}
	timeout, known := c.sysctl("net.netfilter.nf_conntrack_tcp_timeout_established")
	switch {
	case c.asymmetric() && c.harmless():
		f.Verdict = Info
		f.Summary += "; routes are asymmetric, and nothing here translates or drops what is forwarded"
	case c.asymmetric():
		f.Summary = fmt.Sprintf("routes are asymmetric: of %d of %d TCP connections packets of one direction only come by, and %s fit none", c.NS.Entries.Unanswered, c.NS.Entries.TCP, plural(int(n), "packet"))
		f.Symptom = "connections never open, or hang after the handshake: answers take another way past this host"
		f.Remedy = &Remedy{Do: "route both directions through this host; else let it pass that traffic without looking at its state (notrack)", Risk: "notrack takes NAT and ct state from it"}
	case c.harmless():
		f.Verdict = Info
		f.Summary += "; nothing here translates or drops what is forwarded, so that they harm nobody"
	case c.wrongChecksums() > n/2:
		f.Verdict = Info
		f.Summary += "; their checksums are wrong, see FW15"
	case known && timeout < minEstablished && c.NS.Rules.NAT():
		f.Verdict = Info
		f.Summary += "; idle connections are forgotten soon, see ST05"
	case len(cut) > 0:
		f.Summary = fmt.Sprintf("%s fit no connection and reached this host instead of its client, for example %s: each is answered by a reset, which ends the connection", plural(int(n), "packet"), cut[0].Text())
		f.Symptom = "long downloads and uploads through the NAT end with \"connection reset\""
		f.Remedy = &Remedy{Do: "let tracking accept segments outside the window, or drop invalid packets in input, where they arrive untranslated",
			Commands: []string{"sysctl -w net.netfilter.nf_conntrack_tcp_be_liberal=1"}, Risk: "less protection against forged packets"}
	}
	return f
}

// cutOff are samples of TCP segments without a connection that this host answers by a reset: no
// SYN, which a scan sends, and no reset.
func (c *Case) cutOff() (samples []*trace.DropSample) {
	g, _ := c.drops(trace.CauseClosedTCP)
	for _, s := range g.Sampled {
		if flags, there := s.TCPFlags(); there && s.Tracked == trace.TrackedNone && flags&(tcpSYN|tcpRST) == 0 && flags&tcpACK != 0 && c.NS.Table != nil {
			samples = append(samples, s)
		}
	}
	return samples
}

// Bits of the TCP header.
const (
	tcpSYN = 1 << 1
	tcpRST = 1 << 2
	tcpACK = 1 << 4
)

// asymmetric reports whether most TCP connections show packets of one direction only, which
// acknowledge packets that did not pass this host.
func (c *Case) asymmetric() bool {
	return c.NS.Entries.Unanswered >= 10 && 2*c.NS.Entries.Unanswered > c.NS.Entries.TCP && c.delta("conntrack.invalid") >= invalidStragglers
}

// harmless reports whether nothing depends on the state of forwarded connections: none is
// translated, and no rule drops forwarded packets.
func (c *Case) harmless() bool {
	r := c.NS.Rules
	if r == nil || c.NS.RulesErr != nil || r.NAT() {
		return false
	}
	for _, cause := range []trace.Cause{trace.CauseNftRule, trace.CauseLegacyRule, trace.CauseHookRule} {
		if g, seen := c.drops(cause); seen && g.PerSecond > 1 {
			return false
		}
	}
	return !slices.ContainsFunc(r.Chains, func(chain firewall.Chain) bool {
		return (chain.Hook == "forward" || chain.Hook == "prerouting") && (chain.Drops > 0 || chain.PolicyDrop)
	})
}

func checkLiberal(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	liberal, _ := c.sysctl("net.netfilter.nf_conntrack_tcp_be_liberal")
	loose, _ := c.sysctl("net.netfilter.nf_conntrack_tcp_loose")
	f := ok("be_liberal %d, loose %d", liberal, loose)
	switch {
	case liberal == 1:
	case c.NS.Table != nil && c.NS.Table.OneWay > 100 && c.share(c.NS.Table.OneWay) > 0.01:
		f.Verdict = Warn
		if c.harmless() {
			f.Verdict = Info
		}
		f.Summary += ": routes are asymmetric, and packets outside the window that tracking saw become invalid"
	case c.NS.Rules != nil && c.NS.Rules.Offload:
		f.Verdict = Warn
		f.Summary += ": hardware forwards packets that tracking does not see, and those after them become invalid"
	case loose == 1 && c.NS.Rules != nil && c.NS.Rules.Strict():
		f.Verdict = Info
		f.Summary += ": the firewall drops what it does not know, but takes connections up in the middle"
	}
	return f.with("nf_conntrack_tcp_be_liberal, _loose", fmt.Sprintf("%d, %d", liberal, loose), fromSysctl)
}

func checkStaleNAT(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	if c.NS.Table.Translated[2]+c.NS.Table.Translated[3] == 0 {
		return ok("no destination is translated")
	}
	dead := map[netip.Addr]bool{}
	for _, addr := range c.NS.After.Failed {
		dead[addr] = true
	}
	var silent, stuck, ending stale
	for _, row := range c.NS.Table.Backends(0) {
		protocol, endpoint, _ := strings.Cut(row.Key, " ")
		switch addr := addrOf(endpoint); {
		case dead[addr]:
			silent.add(addr, row.Entries)
		case !c.targetGone(addr):
		case protocol == "tcp":
			ending.add(addr, row.Entries)
		default:
			stuck.add(addr, row.Entries)
		}
	}
	switch {
	case silent.entries > 0:
		return found(Warn, "%d entries are translated to backends that do not answer, for example %s", silent.entries, silent.first).
			with("entries to neighbours in state FAILED", fmt.Sprint(silent.entries), c.dumped()).filling("ADDRESS", silent.first.String())
	case stuck.entries > 0:
		return found(Warn, "%d entries other than TCP are translated to backends that no rule names, for example %s: each lasts as long as its client sends",
			stuck.entries, stuck.first).with("entries to addresses in no rule", fmt.Sprint(stuck.entries), c.dumped()).filling("ADDRESS", stuck.first.String()).
			concerning(Concerns{Destinations: hosts(stuck.first), Stages: []outcome.Stage{outcome.NeverLeft, outcome.NoAnswer, outcome.Refused}})
	case ending.entries > 0:
		return found(Info, "%d connections go to backends that no rule names any more, for example %s", ending.entries, ending.first).
			with("entries to addresses in no rule", fmt.Sprint(ending.entries), c.dumped())
	}
	return ok("no connection is translated to a backend that does not answer ARP or that no rule names")
}

// stale are entries translated to places that they should not.
type stale struct {
	entries uint32
	first   netip.Addr
}

func (s *stale) add(to netip.Addr, entries uint32) {
	if s.entries += entries; !s.first.IsValid() {
		s.first = to
	}
}

// targetGone reports whether no rule is known to translate to an address.
func (c *Case) targetGone(addr netip.Addr) bool {
	r := c.NS.Rules
	return r != nil && c.NS.RulesErr == nil && r.DestNAT > 0 && r.Targets.Unclear == 0 && !r.Targets.Addresses[addr]
}

// addrOf reads the address of an endpoint or of an address alone.
func addrOf(endpoint string) netip.Addr {
	if a, err := netip.ParseAddrPort(endpoint); err == nil {
		return a.Addr()
	}
	a, _ := netip.ParseAddr(endpoint)
	return a
}

func checkOneWay(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	n := c.NS.Table.OneWay
	f := ok("%s of the entries are established without a reply", percent(c.share(n))).with("ESTABLISHED without SEEN_REPLY", fmt.Sprint(n), c.dumped())
	if c.share(n) > 0.01 && n > 20 {
		f.Verdict = Warn
		if c.harmless() {
			f.Verdict = Info
			f.Summary += "; nothing here translates or drops what is forwarded"
		}
	}
	return f
}
