// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/severity"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// linkChecks look at interfaces, queues and the CPUs that serve them.
func linkChecks() []Check {
	return []Check{
		{ID: "RX01", Name: "receive-backlog", About: "packets dropped because a CPU's receive backlog was full", Host: true, Weight: 95, Run: checkBacklog,
			Symptom: "loss although CPUs are idle on average",
			Remedy:  Remedy{Do: "lengthen the backlog, in the host's own namespace, or spread packets over CPUs with RPS", Commands: []string{"sysctl -w net.core.netdev_max_backlog=LIMIT"}, Cost: "memory", Risk: "latency while a long queue drains"}},
		{ID: "RX02", Name: "softirq-squeezed", About: "rounds of packet processing that ended before the work was done (time_squeeze)", Host: true, Weight: 17, Run: checkSqueeze,
			Symptom: "latency, and drops in the interface's ring",
			Remedy:  Remedy{Do: "raise the budget, in the host's own namespace", Commands: []string{"sysctl -w net.core.netdev_budget=BUDGET net.core.netdev_budget_usecs=MICROSECONDS"}, Risk: "programs get less CPU time"}},
		{ID: "RX03", Name: "receive-steering", About: "receive queues against CPUs", Weight: 19, Run: checkSteering,
			Symptom: "one CPU is full, the others idle",
			Remedy:  Remedy{Do: "have a receive queue for each CPU, or set rps_cpus to the other CPUs of the node", Commands: []string{"ethtool -L IFACE combined CPUS"}, Risk: "packets of a flow may be reordered once"}},
		{ID: "RX04", Name: "interrupt-affinity", About: "where network interrupts go", Host: true, Weight: 16, Run: checkAffinity,
			Symptom: "one CPU is full, the others idle",
			Remedy:  Remedy{Do: "spread with irqbalance or /proc/irq/N/smp_affinity, and sends with XPS", Risk: "irqbalance undoes what was set by hand"}},
		{ID: "RX05", Name: "ring-drops", About: "packets lost because an interface's receive ring was full", Weight: 85, Run: checkRing,
			Symptom: "bursts are lost before the kernel sees them",
			Remedy:  Remedy{Do: "lengthen the ring to the most that the interface takes (ethtool -G), which this shows", Commands: []string{"ethtool -g IFACE"}, Cost: "memory, cache misses", Risk: "a moment without traffic"}},
		{ID: "RX06", Name: "link-errors", About: "errors and drops of interfaces", Weight: 78, Run: checkLinkErrors,
			Symptom: "retransmissions", Remedy: Remedy{Do: "change cable or transceiver; the driver's counters may tell which", Commands: []string{"ethtool -S IFACE"}, Risk: "the link is down meanwhile"}},
		{ID: "RX07", Name: "queue-drops", About: "packets that queueing disciplines dropped", Weight: 82, Run: checkQdisc,
			Symptom: "loss and jitter on the way out",
			Remedy:  Remedy{Do: "raise the limit or rate of the discipline that this shows, or replace it by fq_codel", Commands: []string{"tc -s qdisc show dev IFACE"}, Risk: "a longer queue adds latency; fq_codel limits no rate"}},
		{ID: "RX08", Name: "xdp", About: "XDP programs, and frames that are lost when they redirect them", Weight: 60, Run: checkXDP,
			Symptom: "connections through an XDP program stall, and no counter says why",
			Remedy:  Remedy{Do: trace.CauseXDPRedirect.Remedy, Risk: "GRO holds packets back for microseconds"}},
		{ID: "RX09", Name: "cpu-mitigations", About: "mitigations that make indirect calls slow", Host: true, Weight: 1, Run: checkMitigations},
		{ID: "RX10", Name: "softirq-load", About: "CPU time in softirq", Host: true, Weight: 42, Run: checkSoftirq,
			Symptom: "latency and loss; ksoftirqd is at the top of the list of programs",
			Remedy:  Remedy{Do: "see where it goes; spread queues over CPUs; use the eBPF datapath", Commands: []string{"sluice profile"}, Cost: "1,000 samples a second of each CPU while it runs", Risk: "packets of connections that change queues are reordered for a moment"}},
	}
}

// added returns the increase of a counter. A counter that began again has a negligible increase.
func added(before, after uint64) uint64 { return after - min(before, after) }

// softnet adds up a counter of all CPUs, which has 32 bits. The file does not number its lines, so
// nothing is known if a CPU was added or removed.
func (c *Case) softnet(of func(trace.SoftnetCPU) uint64) (n uint64) {
	if len(c.Before.Softnet) != len(c.After.Softnet) {
		return 0
	}
	for i, after := range c.After.Softnet {
		n += uint64(uint32(of(after)) - uint32(of(c.Before.Softnet[i])))
	}
	return n
}

func checkBacklog(_ context.Context, c *Case) Finding {
	n := c.softnet(func(cpu trace.SoftnetCPU) uint64 { return cpu.Dropped })
	var sample *Case
	for _, ns := range c.Sample.Namespaces {
		one := &Case{Sample: c.Sample, NS: ns}
		if _, seen := one.drops(trace.CauseBacklog); seen {
			sample = one
		}
	}
	if n == 0 {
		return ok("no backlog was full")
	}
	if c.elsewhere(trace.CauseBacklog) {
		return found(Info, "a CPU's backlog was full, for packets of other namespaces").with("Δdropped", c.inWindow(n), fromSoftnet)
	}
	// netdata warns above 10 a second, averaged over a minute.
	backlog, there := observe.Number(c.After.Sysctl, "net.core.netdev_max_backlog")
	v := grade(c.perSecond(n), 1, 10)
	if _, share := c.busiest(); v == OK && share < 0.10 {
		v = Warn // on an idle host every one is a burst that found no room
	}
	f := found(v, "a CPU's receive backlog was full: %d packets were dropped in %.1f s (netdev_max_backlog %d)", n, c.Window.Seconds(), backlog).
		with("Δdropped", c.inWindow(n), fromSoftnet).losing(c.perSecond(n))
	if there { // a new value could be less than one that cannot be read
		f = f.filling("LIMIT", fmt.Sprint(max(4*backlog, 10000)))
	}
	if sample != nil {
		f = sample.withDrops(f, trace.CauseBacklog)
	}
	return f
}

func checkSqueeze(_ context.Context, c *Case) Finding {
	n := c.softnet(func(cpu trace.SoftnetCPU) uint64 { return cpu.Squeezed })
	budget, there := observe.Number(c.After.Sysctl, "net.core.netdev_budget")
	time, too := observe.Number(c.After.Sysctl, "net.core.netdev_budget_usecs")
	if !there || !too { // in a container: a new value could be smaller than the present one
		return found(grade(c.perSecond(n), 10, 1e9), "%.0f rounds of packet processing a second ended before the work was done (netdev_budget cannot be read here)", c.perSecond(n)).
			with("Δtime_squeeze", c.inWindow(n), fromSoftnet)
	}
	return found(grade(c.perSecond(n), 10, 1e9), "%.0f rounds of packet processing a second ended before the work was done (netdev_budget %d, %d µs)", c.perSecond(n), budget, time).
		with("Δtime_squeeze", c.inWindow(n), fromSoftnet).filling("BUDGET", fmt.Sprint(max(2*budget, 600)), "MICROSECONDS", fmt.Sprint(max(2*time, 4000)))
}

func checkSteering(_ context.Context, c *Case) Finding {
	cpu, share := c.busiest()
	if share < 0.70 {
		return ok("no CPU is full of softirq work")
	}
	steered := c.softnet(func(cpu trace.SoftnetCPU) uint64 { return cpu.RPS })
	if steered > 0 {
		return ok("packets are steered to other CPUs (RPS)").with("Δreceived_rps", c.inWindow(steered), fromSoftnet)
	}
	for _, l := range c.NS.After.Links {
		if l.Kind == "device" && l.Up && !l.Loopback && l.Queues > 0 && l.Queues < (len(c.After.CPUs)+1)/2 {
			return found(Warn, "%s has %s for %d CPUs, and CPU %d is %s in softirq", l.Name, plural(l.Queues, "receive queue"), len(c.After.CPUs), cpu, percent(share)).
				with("queues", fmt.Sprint(l.Queues), fromLinks).filling("IFACE", l.Name, "CPUS", fmt.Sprint(len(c.After.CPUs)))
		}
	}
	return ok("there are receive queues for the CPUs")
}

func checkAffinity(_ context.Context, c *Case) Finding {
	perCPU := make([]uint64, len(c.After.CPUs)) // a column for each that is online
	total := uint64(0)
	for name, after := range c.After.Interrupts {
		before := c.Before.Interrupts[name]
		for cpu := range min(len(after), len(before), len(perCPU)) {
			perCPU[cpu] += added(before[cpu], after[cpu])
			total += added(before[cpu], after[cpu])
		}
	}
	_, busy := c.busiest()
	for cpu, n := range perCPU {
		if len(perCPU) > 2 && total > 1000 && float64(n) > 0.80*float64(total) && busy > 0.60 {
			return found(Warn, "CPU %d takes %s of the network interrupts", c.After.CPUs[cpu].CPU, percent(float64(n)/float64(total))).
				with("interrupts", c.inWindow(n), "/proc/interrupts")
		}
	}
	return ok("network interrupts are spread, or few")
}

// eachLink compares both readings of every interface that is up and was not made anew.
func (c *Case) eachLink(visit func(before, after observe.Link)) {
	for _, a := range c.NS.After.Links {
		if a.Loopback || !a.Up {
			continue
		}
		for _, b := range c.NS.Before.Links {
			if a.Name == b.Name && a.Index == b.Index {
				visit(b, a)
			}
		}
	}
}

func checkRing(_ context.Context, c *Case) Finding {
	f := ok("no ring was full")
	c.eachLink(func(b, a observe.Link) {
		// Drivers count the same packet in several places.
		kernels, own := added(b.RxMissed, a.RxMissed)+added(b.RxFifo, a.RxFifo), added(b.RingLost, a.RingLost)
		n := max(kernels, own)
		if n > 0 {
			f = found(grade(c.perSecond(n), 0, 100), "%s lost %d packets because its receive ring was full", a.Name, n).
				with("Δrx_missed + Δrx_fifo", c.inWindow(kernels), fromLinks).
				with("the driver's own counters", c.inWindow(own), "ethtool -S").losing(c.perSecond(n)).filling("IFACE", a.Name)
		}
	})
	return f
}

func checkLinkErrors(_ context.Context, c *Case) Finding {
	f := ok("no errors to speak of")
	c.eachLink(func(b, a observe.Link) {
		packets := added(b.RxPackets, a.RxPackets) + added(b.TxPackets, a.TxPackets)
		errs := added(b.RxErrors, a.RxErrors) + added(b.TxErrors, a.TxErrors)
		// node_exporter's mixin: more than one percent.
		if errs > 0 && float64(errs) > 0.01*float64(packets) {
			f = found(Warn, "%s: %s of the packets are errors", a.Name, percent(float64(errs)/float64(packets+errs))).
				with("Δerrors", c.inWindow(errs), fromLinks).losing(c.perSecond(errs)).filling("IFACE", a.Name)
			if a.Kind != "device" {
				f.Remedy = &Remedy{Do: "see which errors, and of a tunnel its far end: is there a route to it?", Commands: []string{"ip -s -s -d link show IFACE"}, Cost: "none: it only looks"}
			}
		}
		// Drops of hardware only: virtual links count what their far end refused.
		if n := added(b.RxDropped, a.RxDropped); a.Kind == "device" && packets > 10000 && float64(n) > 0.02*float64(packets) {
			f = found(Warn, "%s dropped %s of the packets", a.Name, percent(float64(n)/float64(packets))).with("Δrx_dropped", c.inWindow(n), fromLinks).filling("IFACE", a.Name)
		}
	})
	return f
}

func checkQdisc(_ context.Context, c *Case) Finding {
	f := ok("no queueing discipline dropped much")
	c.eachLink(func(b, a observe.Link) {
		n, packets := added(b.QdiscDrops, a.QdiscDrops), added(b.QdiscPackets, a.QdiscPackets)
		if n > 10 && float64(n) > 0.001*float64(packets) {
			f = found(Warn, "the queue of %s dropped %d packets, %.1f %%", a.Name, n, 100*float64(n)/float64(packets+n)).
				with("Δdropped", c.inWindow(n), "tc statistics").losing(c.perSecond(n)).filling("IFACE", a.Name)
		}
	})
	if f.Verdict == OK {
		if g, seen := c.drops(trace.CauseQdisc); seen && g.PerSecond > 1 && !c.withoutCarrier(c.arrivedOn(trace.CauseQdisc)) {
			f = found(Warn, "queueing disciplines dropped %d packets", g.Packets).losing(g.PerSecond).filling("IFACE", c.arrivedOn(trace.CauseQdisc))
		}
	}
	return c.withDrops(f, trace.CauseQdisc)
}

// withoutCarrier reports whether a link is up and not connected, so that its queue drops everything.
func (c *Case) withoutCarrier(name string) bool {
	return slices.ContainsFunc(c.NS.After.Links, func(l observe.Link) bool { return l.Name == name && l.Up && !l.Carrier && l.Index != 0 })
}

func checkXDP(_ context.Context, c *Case) Finding {
	var names, cannotTransmit []string
	known := false
	for _, l := range c.NS.After.Links {
		if l.XDP {
			names = append(names, l.Name)
		}
		if known = known || l.XDPKnown; l.XDPKnown && l.Up && !l.Loopback && (l.Kind == "device" || l.Kind == "veth") && l.XDPFeatures&netdev.XDPTransmit == 0 {
			cannotTransmit = append(cannotTransmit, l.Name)
		}
	}
	if g, seen := c.drops(trace.CauseXDPRedirect); seen && c.unwanted(g) >= Warn {
		where := ""
		if len(g.Places) > 0 {
			where = fmt.Sprintf(", %s: %s", g.Places[0].Interface, g.Places[0].Reason)
		}
		return c.withDrops(found(Warn, "%.0f frames/s are redirected by XDP and lost%s", g.PerSecond, where).losing(g.PerSecond), trace.CauseXDPRedirect)
	}
	switch {
	case len(names) == 0:
		return ok("no XDP program")
	case !known:
		return found(Info, "XDP programs on %s; whether the other interfaces take what they redirect is not known before kernel 6.3", strings.Join(names, ", "))
	case len(cannotTransmit) > 0:
		// Nothing says that a program redirects there: most, Sluice's own too, do not.
		return found(Info, "XDP programs on %s; should one redirect frames to %s, they would be lost", strings.Join(names, ", "), strings.Join(cannotTransmit, ", ")).
			with("without NETDEV_XDP_ACT_NDO_XMIT", strings.Join(cannotTransmit, ", "), "generic netlink, family netdev")
	}
	return found(Info, "XDP programs on %s: what they drop or redirect is seen by no rule and, on hardware, by no drop event", strings.Join(names, ", "))
}

func checkMitigations(_ context.Context, c *Case) Finding {
	if len(c.After.Mitigations) == 0 {
		return unknown("/sys/devices/system/cpu/vulnerabilities is not readable")
	}
	_, share := c.busiest()
	state := c.After.Mitigations["spectre_v2"]
	if share > 0.50 && (strings.Contains(state, "Retpoline") || strings.Contains(state, "IBRS") && !strings.Contains(state, "Enhanced")) {
		return found(Info, "indirect calls are slow here (%s) and a CPU is %s in softirq; turning mitigations off is a decision about security", state, percent(share)).
			with("spectre_v2", state, "/sys/devices/system/cpu/vulnerabilities")
	}
	return ok("no costly mitigation, or no load")
}

func checkSoftirq(_ context.Context, c *Case) Finding {
	cpu, share := c.busiest()
	v := severity.Softirq.Level(share)
	if c.Window < time.Second {
		v = min(v, Warn) // any burst fills a moment
	}
	return found(v, "CPU %d spends %s of its time in softirq, the most of all", cpu, percent(share)).
		with("softirq share", percent(share), fromStat)
}
