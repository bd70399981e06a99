// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/capacity"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/severity"
	"github.com/sluice-lb/sluice/trace"
)

// raiseTable is the remedy for a table that is too small.
var raiseTable = Remedy{
	Do:       "raise the limit, in the host's own namespace; sluice tune does it and can take it back",
	Commands: []string{"sysctl -w net.netfilter.nf_conntrack_buckets=LARGER net.netfilter.nf_conntrack_max=LARGER"},
	Cost:     "384 bytes of kernel memory an entry with NAT, 8 bytes a bucket",
	Risk:     "the limit rules all namespaces of the host; buckets are rehashed once under all locks",
}

// tableChecks examine the size of the connection table and refused connections.
func tableChecks() []Check {
	return []Check{
		{ID: "CT01", Name: "conntrack-fill", About: "entries against nf_conntrack_max, in every namespace", Weight: 50, Run: checkFill,
			Symptom: "none yet; at 100 % new connections fail while old ones go on", Remedy: raiseTable},
		{ID: "CT02", Name: "conntrack-effective-fill", About: "entries that the kernel does not evict", Weight: 49, Run: checkEffectiveFill,
			Symptom: "none yet; these entries stay until they time out", Remedy: raiseTable},
		{ID: "CT03", Name: "conntrack-time-to-full", About: "growth of the table over the window", Weight: 48, Run: checkTimeToFull,
			Symptom: "none yet", Remedy: raiseTable},
		{ID: "CT04", Name: "conntrack-kernel-log", About: "messages that the table was full", Weight: 40, Run: checkTableLog,
			Symptom: "new connections failed at that time", Remedy: raiseTable},
		{ID: "CT05", Name: "conntrack-drop", About: "packets that connection tracking refused", Weight: 100, Run: checkConntrackDrop,
			Symptom: "new connections hang and are repeated after 1, 3 and 7 seconds; old ones go on", Remedy: raiseTable},
		{ID: "CT06", Name: "conntrack-early-drop", About: "entries evicted early to make room for new ones", Weight: 45, Run: checkEarlyDrop,
			Symptom: "slow handshakes die, answers to UDP become invalid", Remedy: raiseTable},
		{ID: "CT07", Name: "conntrack-buckets", About: "nf_conntrack_max against hash buckets", Host: true, Weight: 15, Run: checkBuckets,
			Symptom: "every packet searches longer chains: CPU time in __nf_conntrack_find_get",
			Remedy: Remedy{Do: "raise the number of hash buckets, in the host's own namespace", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_buckets=BUCKETS"},
				Cost: "8 bytes a bucket", Risk: "rehashing takes all locks once"}},
		{ID: "CT08", Name: "conntrack-memory", About: "memory of a full table against RAM", Host: true, Weight: 12, Run: checkTableMemory,
			Symptom: "under a flood the host runs out of memory instead of refusing connections",
			Remedy: Remedy{Do: "lower the limit to what takes a tenth of RAM, in the host's own namespace, or limit connections of each source (nft ct count)",
				Commands: []string{"sysctl -w net.netfilter.nf_conntrack_max=SMALLER"}, Risk: "fewer connections"}},
		{ID: "CT09", Name: "conntrack-chain-too-long", About: "connections refused because a hash chain was full", Weight: 90, Run: checkChainTooLong,
			Symptom: "random new connections are lost although the table is not full",
			Remedy:  Remedy{Do: "raise the number of hash buckets, in the host's own namespace; if there are as many, suspect a collision attack", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_buckets=BUCKETS"}, Cost: "8 bytes a bucket"}},
		{ID: "CT10", Name: "conntrack-search-restart", About: "table lookups that had to start again", Weight: 5, Run: checkSearchRestart,
			Symptom: "CPU time; harmless alone"},
		{ID: "CT11", Name: "conntrack-insert-failed", About: "connections refused because their tuple was in the table already", Weight: 60, Run: checkInsertFailed,
			Symptom: "DNS answers after 5 s, connects after 1 or 3 s", Remedy: Remedy{Do: "where PT01 names no lack of ports: options single-request-reopen in resolv.conf, a DNS cache on each node, or notrack for DNS; else see PT01 to PT04",
				Cost: "a cache takes a process and memory", Risk: "notrack takes NAT and ct state from that traffic"}},
		{ID: "CT12", Name: "conntrack-clash-resolved", About: "two first packets of one UDP connection, merged by the kernel", Weight: 4, Run: checkClash},
		{ID: "CT13", Name: "conntrack-expectations", About: "expectations of helpers against their limit", Weight: 44, Run: checkExpectations,
			Symptom: "FTP or SIP data connections fail while the connection table has room",
			Remedy:  Remedy{Do: "raise the limit, in the host's own namespace, or remove the helper", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_expect_max=LIMIT"}, Cost: "some 200 bytes each"}},
		{ID: "CT14", Name: "conntrack-other-namespaces", About: "entries that the host's own counters do not show", Host: true, Weight: 3, Run: checkBlindSpot,
			Symptom: "the host's graphs show no drops while a router in a namespace refuses connections",
			Remedy: Remedy{Do: "run EXPORTER in NAMESPACE, too, or export what this prints, which reads all of them", Commands: []string{"sluice top --once --json"},
				Cost: "a process for each namespace"}},
		{ID: "CT15", Name: "conntrack-max-for-role", About: "nf_conntrack_max of a NAT gateway", Weight: 20, Run: checkMaxForRole,
			Symptom: "none until the table is full", Remedy: raiseTable},
	}
}

func (c *Case) fillText() string {
	l := c.NS.After.Limits
	return fmt.Sprintf("%d of %d entries", l.Count, l.Max)
}

func checkFill(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	v := severity.TableFill.Level(c.fill())
	// A table full of entries that the kernel gives up by itself is no outage.
	if v == Critical && c.NS.Table != nil && c.effectiveFill() <= severity.TableFill.Warn {
		v = Warn
	}
	f := found(v, "the connection table is %s full (%s)", percent(c.fill()), c.fillText())
	return f.with("nf_conntrack_count / nf_conntrack_max", c.fillText(), fromSysctl)
}

// effectiveFill counts only assured entries that are not closing: the kernel
// evicts the others (early_drop, and gc above 95 %).
func (c *Case) effectiveFill() float64 {
	return float64(c.NS.Table.Total.Held()) / float64(max(c.NS.After.Limits.Max, 1))
}

func checkEffectiveFill(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	held := c.NS.Table.Total.Held()
	v := severity.TableFill.Level(c.effectiveFill())
	return found(v, "%s of the limit are entries that the kernel does not evict", percent(c.effectiveFill())).
		with("assured and not closing", fmt.Sprint(held), c.dumped())
}

func checkTimeToFull(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	b, a := c.NS.Before, c.NS.After
	over := a.At.Sub(b.At)
	growth := (float64(a.Limits.Count) - float64(b.Limits.Count)) / max(over.Seconds(), 0.001)
	if c.NS.GrowthOver >= conntrack.GrowthWindow {
		growth, over = c.NS.Growth, c.NS.GrowthOver
	}
	if growth <= 0 {
		return ok("the table does not grow")
	}
	left := time.Duration(float64(a.Limits.Max-min(a.Limits.Count, a.Limits.Max)) / growth * float64(time.Second))
	f := ok("full in %s at the present growth of %.0f entries/s", left.Round(time.Second), growth)
	f.Verdict = severity.TimeToFull(left, c.fill(), over >= conntrack.GrowthWindow)
	return f.with("growth", fmt.Sprintf("%.0f entries/s over %s", growth, over.Round(time.Second)), fromSysctl)
}

func checkTableLog(_ context.Context, c *Case) Finding {
	if c.After.LogErr != nil {
		return unknown("kernel log: %v", c.After.LogErr)
	}
	lines, last := 0, time.Duration(0)
	created, _ := c.NS.Created() // the number may have been another namespace's before
	for _, l := range c.After.Log {
		if l.At.Before(created) || !observe.TableFull.MatchString(l.Text) || l.Netns != c.NS.Inode && !(l.Netns == 0 && c.NS.IsHost) {
			continue
		}
		if lines++; lines == 1 || l.Age < last {
			last = l.Age
		}
	}
	if lines == 0 {
		return ok("no message in the kernel log")
	}
	v := Warn
	if last < time.Hour {
		v = Critical
	}
	return found(v, "the kernel log says \"table full\", last %s", ago(last)).
		with("messages", fmt.Sprintf("%d lines; the kernel limits their rate, so they count nothing", lines), fromKmsg)
}

func checkConntrackDrop(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	drop, failed := c.delta("conntrack.drop"), c.delta("conntrack.insert_failed")
	full := c.refused().Full
	if drop == 0 {
		return ok("connection tracking refused nothing")
	}
	if full == 0 {
		return ok("the refused packets are not for want of entries; see PT01").with("Δdrop", c.inWindow(drop), fromCtnetlink)
	}
	f := found(severity.Refused.Level(c.perSecond(full)), "the connection table is full: %d new connections were refused in %.1f s (%s)", full, c.Window.Seconds(), c.fillText()).
		with("Δdrop", c.inWindow(drop), fromCtnetlink).with("Δinsert_failed", c.inWindow(failed), fromCtnetlink).losing(c.perSecond(full))
	return c.withDrops(f, trace.CauseTableFull)
}

func checkEarlyDrop(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	n := c.delta("conntrack.early_drop")
	if n == 0 {
		return ok("no entry was evicted early")
	}
	return found(Warn, "%d entries without an answer were removed to make room", n).
		with("Δearly_drop", c.inWindow(n), fromCtnetlink)
}

// hostLimits returns the sizes of the table that all namespaces share, with the entries of all
// namespaces.
func (c *Case) hostLimits() (l conntrack.Limits) {
	for _, n := range c.Sample.Namespaces {
		own := n.After.Limits
		l.Max, l.Buckets, l.Count = max(l.Max, own.Max), max(l.Buckets, own.Buckets), l.Count+own.Count
	}
	return l
}

// tableSizes are the sizes of the table that remedies name: LARGER, twice the limit but as
// large as a gateway's at least, and BUCKETS, as many as nf_conntrack_max. Neither takes
// more than a sixteenth of RAM where that is known.
func (c *Case) tableSizes() []string {
	l := c.hostLimits()
	larger, buckets := max(2*int(l.Max), c.roleMax()), int(l.Max)
	if ram := int(c.After.Memory["MemTotal"]); ram > 0 {
		larger = max(min(larger, ram/16/(384+8)), int(l.Max))
		buckets = max(min(buckets, ram/16/8), int(l.Buckets))
	}
	return []string{"LARGER", fmt.Sprint(larger), "BUCKETS", fmt.Sprint(buckets)}
}

// roleMax is kube-proxy's default of nf_conntrack_max: max(131072, 32768 × cores).
func (c *Case) roleMax() int { return max(131072, 32768*len(c.After.CPUs)) }

func checkBuckets(_ context.Context, c *Case) Finding {
	l := c.hostLimits()
	switch {
	case l.Max == 0:
		return ok("connection tracking is not loaded")
	case l.Buckets == 0:
		return unknown("the kernel does not tell the number of buckets")
	}
	ratio := float64(l.Max) / float64(l.Buckets)
	v := grade(ratio, 4, 8)
	if v == Critical && l.MeanChain() <= 8 {
		v = Warn // bad when full, but it is not
	}
	return found(v, "%.1f entries a bucket when full; mean chain now %.1f", ratio, l.MeanChain()).
		with("nf_conntrack_max / nf_conntrack_buckets", fmt.Sprintf("%d / %d", l.Max, l.Buckets), fromSysctl)
}

func checkTableMemory(_ context.Context, c *Case) Finding {
	l := c.hostLimits()
	if l.Max == 0 {
		return ok("connection tracking is not loaded")
	}
	ram := c.After.Memory["MemTotal"]
	if ram == 0 {
		return unknown("size of memory: /proc/meminfo is not readable")
	}
	bytes := uint64(l.Max)*384 + uint64(l.Buckets)*8
	share := float64(bytes) / float64(ram)
	smaller := (ram/10 - min(ram/10, uint64(l.Buckets)*8)) / 384
	return found(grade(share, 0.10, 0.25), "a full table takes %d MiB, %s of RAM", bytes>>20, percent(share)).filling("SMALLER", fmt.Sprint(smaller)).
		with("384 B × nf_conntrack_max + 8 B × buckets", fmt.Sprintf("%d MiB", bytes>>20), fromSysctl).
		with("entries now", fmt.Sprintf("%d objects of %d B on the host", c.After.Slab.Active, c.After.Slab.ObjectBytes), "/proc/slabinfo")
}

func checkChainTooLong(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	n := c.delta("conntrack.chain_too_long")
	if n == 0 {
		return ok("no hash chain is too long")
	}
	f := found(Critical, "%d new connections were refused because their hash chain was too long", n).
		with("Δchaintoolong", c.inWindow(n), fromCtnetlink).losing(c.perSecond(n))
	return c.withDrops(f, trace.CauseLongChain)
}

func checkSearchRestart(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	n := c.delta("conntrack.search_restart")
	connections := c.NS.NewPerSecond
	if c.NS.NewErr != nil {
		connections = 100_000 // unknown: the rate of a busy gateway
	}
	if c.perSecond(n) > 1 && c.perSecond(n) > 0.01*connections {
		return found(Info, "%.0f lookups a second had to start again: many connections come and go", c.perSecond(n)).
			with("Δsearch_restart", c.inWindow(n), fromCtnetlink)
	}
	return ok("%.0f restarted lookups a second", c.perSecond(n))
}

func checkInsertFailed(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	n, drop := c.delta("conntrack.insert_failed"), c.delta("conntrack.drop")
	if n == 0 {
		return ok("every new connection found its place")
	}
	if drop == 0 {
		return found(Info, "%d clashes of equal UDP connections, all resolved", n).with("Δinsert_failed", c.inWindow(n), fromCtnetlink)
	}
	if c.refused().Race > 0 { // PT01 reports them
		return found(Info, "%d new connections were refused because their tuple was taken", n).
			with("Δinsert_failed", c.inWindow(n), fromCtnetlink).with("Δdrop", c.inWindow(drop), fromCtnetlink)
	}
	return found(severity.Refused.Level(c.perSecond(n)), "%d new connections were refused because their tuple was taken", n).
		with("Δinsert_failed", c.inWindow(n), fromCtnetlink).with("Δdrop", c.inWindow(drop), fromCtnetlink)
}

func checkClash(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	n := c.delta("conntrack.clash_resolve")
	if n == 0 {
		return ok("no clashes")
	}
	return found(Info, "%d times two packets of one UDP connection came at once (DNS A and AAAA); the kernel merged them", n).
		with("Δclash_resolve", c.inWindow(n), fromCtnetlink)
}

func checkExpectations(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	limit, there := c.sysctl("net.netfilter.nf_conntrack_expect_max")
	for _, l := range c.After.Log {
		if l.Age < time.Hour && c.NS.IsHost &&
			strings.Contains(l.Text, "expectation table full") {
			return found(Warn, "the kernel log says that the expectation table was full %s", ago(l.Age)).with("message", l.Text, fromKmsg).
				filling("LIMIT", fmt.Sprint(2*limit))
		}
	}
	n := c.NS.After.Expectations
	if !there || n < 0 {
		return ok("no helper is in use")
	}
	return found(grade(float64(n)/float64(max(limit, 1)), 0.75, 0.95), "%d of %d expectations", n, limit).filling("LIMIT", fmt.Sprint(2*limit)).
		with("nf_conntrack_expect / nf_conntrack_expect_max", fmt.Sprintf("%d / %d", n, limit), fromProc)
}

func checkBlindSpot(_ context.Context, c *Case) Finding {
	inside, outside, spaces := uint32(0), uint32(0), 0
	unseen := []string{} // routers that no exporter looks at
	for _, n := range c.Sample.Namespaces {
		if n.IsHost {
			inside += n.After.Limits.Count
			continue
		}
		if n.After.Limits.Count > 0 {
			outside += n.After.Limits.Count
			spaces++
		}
		if (&Case{Sample: c.Sample, NS: n}).routes() && !slices.ContainsFunc(c.After.Monitors, func(m observe.Monitor) bool { return m.Netns == n.Inode }) {
			unseen = append(unseen, n.Name)
		}
	}
	if outside == 0 {
		return ok("no entries outside the host's own namespace")
	}
	f := found(Info, "%d entries are in %s; conntrack -S and node_exporter on the host show only the %d of its own",
		outside, plural(spaces, "other namespace"), inside)
	if i := slices.IndexFunc(c.After.Monitors, func(m observe.Monitor) bool { return m.Host }); i >= 0 && len(unseen) > 0 {
		f = found(Warn, "%s on the host exports nothing of %s, which %s: %s", c.After.Monitors[i].Name, plural(len(unseen), "namespace"),
			map[bool]string{true: "translates and forwards", false: "translate and forward"}[len(unseen) == 1], strings.Join(unseen[:min(len(unseen), 4)], ", ")).
			with("exporters", exporterText(c.After.Monitors), fromProc).filling("NAMESPACE", unseen[0], "EXPORTER", c.After.Monitors[i].Name)
	}
	return f.with("entries", fmt.Sprintf("%d host, %d others", inside, outside), fromSysctl)
}

// routes reports whether the namespace translates and has forwarded packets in the window.
// Containers have entries and NAT rules for their own queries, and lose no packets of others.
func (c *Case) routes() bool {
	return c.NS.After.Limits.Count > 0 && c.NS.Rules.NAT() && c.delta("Ip.ForwDatagrams")+c.delta("Ip6OutForwDatagrams") > 0
}

func exporterText(list []observe.Monitor) string {
	var words []string
	for _, m := range list {
		where := fmt.Sprintf("namespace %d", m.Netns)
		if m.Host {
			where = "the host"
		}
		words = append(words, m.Name+" in "+where)
	}
	return strings.Join(words, ", ")
}

func checkMaxForRole(_ context.Context, c *Case) Finding {
	if f, there := c.tracking(); !there {
		return f
	}
	if !c.NS.Rules.NAT() || !c.forwards() {
		return ok("not a NAT gateway")
	}
	want := c.roleMax()
	limit := int(c.NS.After.Limits.Max)
	if limit >= want {
		return ok("nf_conntrack_max is %d", limit)
	}
	// The kernel's default on a small machine is no fault while it is enough.
	v := Info
	if c.fill() > 0.25 {
		v = Warn
	}
	f := found(v, "nf_conntrack_max is %d; a gateway with %s should have %d", limit, plural(len(c.After.CPUs), "core"), want)
	f = f.with("nf_conntrack_max", fmt.Sprint(limit), fromSysctl)
	if ram := c.After.Memory["MemAvailable"]; ram > 0 && uint64(want)*384 > ram/4 {
		f.Verdict = Info // no room for it
	}
	return f.with("memory when full", fmt.Sprintf("%d MiB", (uint64(want)*capacity.EntryBytes(capacity.Extensions{NAT: true}))>>20), "computed")
}
