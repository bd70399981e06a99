// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
)

// checkOldEntries looks for connections that are older than the rules: what an entry says of
// addresses was decided by its first packet, and stays as long as packets come.
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

// oldSource finds entries whose source was translated to an address that this host has no more.
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

// undirected finds entries to the host itself that a port forward of today would send elsewhere:
// packets come to a port where nothing listens.
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

// leaks finds entries from private to public addresses that leave as they are, on a host whose
// rules translate sources.
func (c *Case) leaks() Finding {
	odd, rules := c.NS.Entries.Leaks, c.NS.Rules
	if odd.Entries == 0 || rules.SourceNAT == 0 || !c.forwards() {
		return Finding{}
	}
	four := rules.Forwards.IPv4+rules.Forwards.Either > 0
	six := rules.Forwards.IPv6+rules.Forwards.Either > 0
	if is4 := odd.First.Original.Source.Is4(); is4 && !four || !is4 && !six {
		return Finding{}
	}
	f := found(Warn, "%s from private addresses %s untranslated and without an answer: older than the NAT rule, or no rule matches", plural(int(odd.Entries), "connection"),
		map[bool]string{true: "leaves", false: "leave"}[odd.Entries == 1]).
		with("for example", entryText(&odd.First), c.dumped())
	e := &odd.First
	f.Remedy = c.deleteEntries(fmt.Sprintf("--proto %s --src %s --dst %s --state UNREPLIED", e.Protocol, e.Original.Source.Netip(), e.Original.Dest.Netip()))
	return f
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
