// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
)

// checkOldEntries looks for connections that are older than the rules. The first packet of an entry
// decides its addresses, and the entry remains while packets arrive.
func checkOldEntries(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	if c.NS.RulesErr != nil || c.NS.Rules == nil {
		return unknown("firewall rules: %v", c.NS.RulesErr)
	}
	worst := ok("no entry is older than the rules for its addresses")
	for _, f := range []Finding{c.oldSource(), c.undirected(), c.leaks()} {
		if f.Verdict > worst.Verdict {
			worst = f
		}
	}
	return worst
}

// oldSource finds entries with a source that was translated to an address that this host no longer
// has.
func (c *Case) oldSource() Finding {
	pools := c.NS.Rules.Pools
	for _, address := range slices.SortedFunc(maps.Keys(c.NS.Entries.OldSources), compareAddresses) {
		odd := c.NS.Entries.OldSources[address]
		if _, named := pools.ByAddress[address]; named || pools.Unclear > 0 {
			continue
		}
		v := Warn
		if odd.First.Protocol == flow.TCP { // ends by itself
			v = Info
		}
		f := found(v, "%s %s the source %s, an address that this host does not have and no rule names (any more): no answer comes back",
			plural(int(odd.Entries), "connection"), hasHave(odd.Entries), address).
			with("for example", entryText(&odd.First), c.dumped())
		f.Remedy = c.deleteEntries("--nat-src " + address.String())
		return f
	}
	return Finding{}
}

// undirected finds entries to the host itself that a present port forward would send elsewhere:
// packets arrive at a port without a listener.
func (c *Case) undirected() Finding {
	for port, odd := range c.NS.Entries.ToHost {
		if !slices.ContainsFunc(c.NS.Rules.Forwarded, func(r firewall.PortRange) bool { return r.Low <= port.Port && port.Port <= r.High }) ||
			slices.ContainsFunc(c.NS.After.Listeners, func(l observe.Listener) bool { return l.Protocol == port.Protocol && l.Port == port.Port }) {
			continue
		}
		f := found(Warn, "%s to port %d %s not translated, although a port forward matches it: older than the rule, and kept as long as packets come",
			plural(int(odd.Entries), "connection"), port.Port, map[bool]string{true: "is", false: "are"}[odd.Entries == 1]).
			with("for example", entryText(&odd.First), c.dumped())
		f.Remedy = c.deleteEntries(fmt.Sprintf("--proto %s --dst %s --port %d --state UNREPLIED", port.Protocol, odd.First.Original.Dest.Netip(), port.Port))
		return f
	}
	return Finding{}
}

// leaks finds entries from private to public addresses that leave as they are.
func (c *Case) leaks() Finding {
	if !c.forwards() || len(c.NS.Entries.Leaks) == 0 {
		return Finding{}
	}
	l, rules := c.NS.Entries.Leaks[0], c.NS.Rules
	if c.onLink(l.Out, l.First.Original.Source.Netip()) {
		return Finding{} // back into its own network: a route is wrong, no rule
	}
	e := &l.First
	is4 := e.Original.Source.Is4()
	four, six := rules.Forwards.IPv4+rules.Forwards.Either > 0, rules.Forwards.IPv6+rules.Forwards.Either > 0
	translating := rules.SourceNAT > 0 && (is4 && four || !is4 && six)
	// Without any rule another router may translate, except behind a link with a public address.
	if !translating && !l.Before && !c.publicLink(l.Out, is4) || l.Entries < fewConnections && !translating {
		return Finding{}
	}
	many := plural(int(l.Entries), "connection")
	f := found(Warn, "%s from private addresses %s untranslated and without an answer: older than the NAT rule, or no rule matches", many,
		map[bool]string{true: "leaves", false: "leave"}[l.Entries == 1])
	filter := fmt.Sprintf("--proto %s --src %s --dst %s --state UNREPLIED", e.Protocol, e.Original.Source.Netip(), e.Original.Dest.Netip())
	f.Remedy = c.deleteEntries(filter)
	if !l.Matched && l.Out != "" {
		if l.Entries >= fewConnections {
			f.Verdict = Critical
		}
		f.Summary = fmt.Sprintf("%s from %s %s by %s untranslated and without an answer: no rule translates sources there%s", many, l.Network,
			map[bool]string{true: "leaves", false: "leave"}[l.Entries == 1], l.Out, c.otherOutputs(l.Out))
		f.Remedy = c.masquerade(l)
		f = f.losing(c.perSecond(uint64(l.Entries)))
	}
	return f.with("for example", entryText(e), c.dumped()).
		concerning(Concerns{Interfaces: []string{l.Out}, Sources: []netip.Prefix{l.Network}})
}

// fewConnections is below how many connections without an answer nothing is concluded from them.
const fewConnections = 3

// onLink reports whether an address is in the network of a link.
func (c *Case) onLink(name string, a netip.Addr) bool {
	return slices.ContainsFunc(c.NS.After.Links, func(l observe.Link) bool {
		return l.Name == name && slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool { return p.Contains(a) })
	})
}

// publicLink reports whether the host has a public address on a link.
func (c *Case) publicLink(name string, is4 bool) bool {
	for _, l := range c.NS.After.Links {
		if l.Name == name {
			return slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool {
				return p.Addr().Is4() == is4 && p.Addr().IsGlobalUnicast() && !p.Addr().IsPrivate()
			})
		}
	}
	return false
}

// otherOutputs names the interfaces that the rules ask for instead.
func (c *Case) otherOutputs(out string) string {
	var names []string
	for _, r := range c.NS.Rules.Sources {
		for _, name := range r.Out {
			if name != out && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	switch {
	case len(c.NS.Rules.Sources) == 0:
		return " (any more): the ruleset has none"
	case len(names) > 0:
		return ", the rules name " + strings.Join(names[:min(len(names), 4)], ", ")
	}
	return ""
}

// masquerade is the rule that is missing, in the chain of the others where there is one.
func (c *Case) masquerade(l observe.Leak) *Remedy {
	m := &Remedy{Do: "translate what leaves by " + l.Out + "; a service such as Docker or a VPN whose rules were flushed makes them anew when it restarts", Risk: "the hosts behind can reach all that the uplink reaches"}
	family := nftFamily(l.Network.Addr())
	from := l.Network
	if network, there := c.networkOf(l.First.Original.Source.Netip()); there {
		from = network
	}
	rule := fmt.Sprintf("%s saddr %s oifname %q masquerade", family, from, l.Out)
	for _, r := range c.NS.Rules.Sources {
		of, _, _ := strings.Cut(r.Chain, " ")
		program := map[string]string{"ip": "iptables", "ip6": "ip6tables"}[family]
		switch {
		case r.Legacy && of == program:
			m.Commands = []string{fmt.Sprintf("%s-legacy -t nat -A POSTROUTING -s %s -o %s -j MASQUERADE", program, from, l.Out)}
		case r.Compat && of == family:
			m.Commands = []string{fmt.Sprintf("%s-nft -t nat -A POSTROUTING -s %s -o %s -j MASQUERADE", program, from, l.Out)}
		case !r.Legacy && (of == family || of == "inet"):
			m.Commands = []string{fmt.Sprintf("nft 'add rule %s %s'", r.Chain, rule)}
		}
	}
	if len(m.Commands) == 0 {
		m.Commands = []string{fmt.Sprintf("nft 'add table %s sources; add chain %s sources post { type nat hook postrouting priority srcnat; }; add rule %s sources post %s'", family, family, family, rule)}
	}
	m.Commands = append(m.Commands, c.deleteEntries(fmt.Sprintf("--src %s --state UNREPLIED", from)).Commands...)
	return m
}

func (c *Case) deleteEntries(filter string) *Remedy {
	return &Remedy{Do: "remove the entries: the next packet makes new ones", Commands: []string{fmt.Sprintf("sluice conns delete --netns %s %s --yes", c.NS.Name, filter)},
		Risk: "the connections begin anew"}
}

// entryText words an entry's two directions.
func entryText(e *conntrack.Entry) string {
	end := func(a conntrack.Addr, port uint16) string {
		return conntrack.Service{Addr: a, Port: port, Protocol: e.Protocol}.String()
	}
	return fmt.Sprintf("%s to %s, answers %s to %s", end(e.Original.Source, e.Original.SourcePort), end(e.Original.Dest, e.Original.DestPort),
		end(e.Reply.Source, e.Reply.SourcePort), end(e.Reply.Dest, e.Reply.DestPort))
}

func hasHave(n uint32) string {
	if n == 1 {
		return "has"
	}
	return "have"
}

func compareAddresses[A interface{ String() string }](a, b A) int {
	return cmp.Compare(a.String(), b.String())
}
