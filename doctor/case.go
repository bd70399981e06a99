// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/severity"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/trace"
)

// Sources of evidence.
const (
	fromCtnetlink = "ctnetlink statistics of all CPUs"
	fromDump      = "dump of the connection table"
	fromNew       = "ctnetlink events of new connections, for a moment"
	fromSysctl    = "/proc/sys"
	fromSNMP      = "/proc/net/snmp and netstat"
	fromSoftnet   = "/proc/net/softnet_stat"
	fromLinks     = "rtnetlink"
	fromRules     = "nf_tables netlink and iptables-legacy-save"
	fromEvents    = "tracepoint skb:kfree_skb"
	fromKmsg      = "/dev/kmsg"
	fromStat      = "/proc/stat"
	fromProc      = "/proc"
)

// Shapes of findings.

func ok(format string, args ...any) Finding {
	return Finding{Verdict: OK, Summary: fmt.Sprintf(format, args...)}
}

func unknown(format string, args ...any) Finding {
	return Finding{Verdict: Unknown, Summary: fmt.Sprintf(format, args...)}
}

func found(v Verdict, format string, args ...any) Finding {
	return Finding{Verdict: v, Summary: fmt.Sprintf(format, args...)}
}

// with returns the finding with one more line of evidence.
func (f Finding) with(what, value, source string) Finding {
	f.Evidence = append(f.Evidence, Evidence{what, value, source})
	return f
}

// filling sets the values of words in the remedy of the check, as pairs of word and value.
func (f Finding) filling(pairs ...string) Finding {
	f.fill = append(f.fill, pairs...)
	return f
}

// losing sets the loss that the cause explains, in packets or connections per second.
func (f Finding) losing(perSecond float64) Finding {
	f.LostPerSecond = perSecond
	return f
}

// grade compares a value with two limits; more is worse.
func grade(value, warn, critical float64) Verdict {
	return severity.Limits{Warn: warn, Critical: critical}.Level(value)
}

// delta returns the increase of a counter of the namespace in the window.
func (c *Case) delta(name string) uint64 { return c.NS.Delta[name] }

// perSecond returns the rate of n events in the window, per second.
func (c *Case) perSecond(n uint64) float64 {
	if c.Window <= 0 {
		return 0
	}
	return float64(n) / c.Window.Seconds()
}

// inWindow describes the increase of a counter in the window.
func (c *Case) inWindow(n uint64) string {
	return fmt.Sprintf("+%d in %.1f s", n, c.Window.Seconds())
}

// sysctl returns a numeric setting, or false if this kernel does not have it.
func (c *Case) sysctl(name string) (int, bool) { return observe.Number(c.NS.After.Sysctl, name) }

// tracking reports whether connection tracking is available. If it is not, the finding has the
// reason.
func (c *Case) tracking() (Finding, bool) {
	if c.NS.After.Limits.Max == 0 {
		return ok("connection tracking is not loaded"), false
	}
	return Finding{}, true
}

// conntrackCounters reports whether connection tracking is available and its counters were read.
func (c *Case) conntrackCounters() (Finding, bool) {
	if f, there := c.tracking(); !there {
		return f, false
	}
	if err := c.NS.After.ConntrackErr; err != nil {
		return unknown("counters of connection tracking: %v", err), false
	}
	return Finding{}, true
}

// refused returns the number of refused connections in the window by reason.
func (c *Case) refused() conntrack.Refused {
	pool := uint32(0)
	if c.NS.Rules != nil {
		pool = c.NS.Rules.Pools.Smallest
	}
	count := func(name string) uint32 { return uint32(c.delta("conntrack." + name)) }
	return conntrack.Counters{Drop: count("drop"), InsertFailed: count("insert_failed"), Found: count("found"), ChainTooLong: count("chain_too_long")}.Refused(pool, c.portUse())
}

// portUse returns the used ports towards the destination of a refused packet. Without such a packet, it returns the
// destination with the largest share of used ports.
func (c *Case) portUse() (use conntrack.Use) {
	if c.NS.Table == nil || c.NS.TableAge > 0 {
		return use
	}
	pools := firewall.Pools{}
	if c.NS.Rules != nil {
		pools = c.NS.Rules.Pools
	}
	if g, seen := c.drops(trace.CausePortsExhausted); seen {
		for _, s := range g.Sampled {
			if public := s.Reply.Dest.Addr(); s.Reply.IsValid() {
				return conntrack.Use{Used: c.NS.Table.PortsInUse(public, s.Reply.Protocol, s.Reply.Source), Pool: pools.Of(public)}
			}
		}
	}
	if o, there := c.NS.Table.Fullest(pools.Of); there {
		use = conntrack.Use{Used: o.Used, Pool: o.Pool}
	}
	return use
}

// table reports whether the connection table was read. If it was not, the finding has the reason.
func (c *Case) table() (Finding, bool) {
	if f, there := c.tracking(); !there {
		return f, false
	}
	if err := c.NS.TableErr; err != nil {
		return unknown("connection table: %v", err), false
	}
	if c.NS.TableSkipped {
		return ok("the connection table is hardly in use"), false
	}
	if c.NS.Table == nil || c.NS.Table.Total.Entries == 0 {
		return ok("the connection table is empty"), false
	}
	return Finding{}, true
}

// dumped describes the source of evidence from the connection table, with its age.
func (c *Case) dumped() string {
	if c.NS.TableAge < time.Second {
		return "dump of the connection table"
	}
	return "dump of the connection table " + ago(c.NS.TableAge)
}

// rules reports whether the ruleset was read. If it was not, the finding has the reason.
func (c *Case) rules() (Finding, bool) {
	if c.NS.Rules == nil || c.NS.RulesErr != nil && c.NS.Rules.Tables == 0 && c.NS.Rules.Legacy == 0 {
		return unknown("firewall rules: %v", c.NS.RulesErr), false
	}
	return Finding{}, true
}

// fill returns the used share of the table's limit, from 0 to 1.
func (c *Case) fill() float64 { return c.NS.After.Limits.Fill() }

// forwards reports whether the namespace is a router.
func (c *Case) forwards() bool {
	four, _ := c.sysctl("net.ipv4.ip_forward")
	six, _ := c.sysctl("net.ipv6.conf.all.forwarding")
	return four == 1 || six == 1
}

// drops returns the drop group of a cause.
func (c *Case) drops(cause trace.Cause) (trace.DropGroup, bool) {
	for _, g := range c.NS.Drops {
		if g.Cause.ID == cause.ID {
			return g, true
		}
	}
	return trace.DropGroup{}, false
}

// elsewhere reports whether a host-wide count is irrelevant to the examined namespaces: drop events
// show no such drop there.
func (c *Case) elsewhere(cause trace.Cause) bool {
	if !c.Partial {
		return false
	}
	for _, n := range c.Sample.Namespaces {
		if _, seen := (&Case{Sample: c.Sample, NS: n}).drops(cause); seen || n.DropsErr != nil {
			return false
		}
	}
	return true
}

// withDrops adds the drop events of a cause to a finding, with a sample packet.
func (c *Case) withDrops(f Finding, cause trace.Cause) Finding {
	g, seen := c.drops(cause)
	if !seen {
		return f
	}
	if len(g.Places) > 0 {
		p := g.Places[0]
		f = f.with("dropped packets", fmt.Sprintf("%d in %.1f s at %s, %s", g.Packets, c.Window.Seconds(), p.Function, p.Reason), fromEvents)
	}
	for _, s := range g.Samples[:min(len(g.Samples), 1)] {
		value := s.Text()
		if s.Original.IsValid() && s.Original != s.Packet {
			value += fmt.Sprintf(" (before NAT %s)", s.Original)
		}
		f = f.with("for example", value, fromEvents)
	}
	return f
}

// busiest returns the CPU with the highest share of its time in softirq.
func (c *Case) busiest() (cpu int, share float64) {
	return trace.BusiestInSoftirq(trace.CPUsBetween(c.Before.CPUs, c.After.CPUs))
}

func percent(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }

func ago(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	}
	return fmt.Sprintf("%d h ago", int(d.Hours()))
}

// counted matches a count of one before a plural noun, such as "1 packets were".
var counted = regexp.MustCompile(`(^|[^\w.,:/+-])1 ((?:new|invalid|dropped|translated|other|ICMP|TCP|UDP|next) )?(packet|connection|entr|rule|datagram|socket|change|clash|handshake|hop|interface|line|message|object|orphan|page|port)(?:ies|es|s)\b( were| are| have| had)?`)

// agree changes plurals after a count of one into singulars: "1 packet was".
func agree(text string) string {
	return counted.ReplaceAllStringFunc(text, func(match string) string {
		m := counted.FindStringSubmatch(match)
		noun := m[3]
		if noun == "entr" {
			noun = "entry"
		}
		verb := map[string]string{" were": " was", " are": " is", " have": " has", " had": " had"}[m[4]]
		return m[1] + "1 " + m[2] + noun + verb
	})
}

// plural returns a count with its noun: "1 packet", "2 packets".
func plural(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	if base, ok := strings.CutSuffix(one, "y"); ok {
		return fmt.Sprintf("%d %sies", n, base)
	}
	return fmt.Sprintf("%d %ss", n, one)
}
