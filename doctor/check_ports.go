// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/severity"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/trace"
)

// morePorts is the remedy for a SNAT address without free ports.
var morePorts = Remedy{
	Do:   "give SNAT more addresses, widen the rule's port range, or keep connections alive",
	Cost: "public addresses", Risk: "services that know the old address must learn the new ones",
}

// portChecks look at the ports of SNAT and of local programs.
func portChecks() []Check {
	return []Check{
		{ID: "PT01", Name: "snat-ports-exhausted", About: "connections refused because no source port was free", Weight: 99, Run: checkPortsExhausted,
			Symptom: "one destination fails while others work, and no log says why", Remedy: morePorts},
		{ID: "PT02", Name: "snat-port-occupancy", About: "ports of each SNAT address in use towards one destination", Weight: 47, Run: checkOccupancy,
			Symptom: "none yet; the first connections fail between 90 and 95 %", Remedy: morePorts},
		{ID: "PT03", Name: "snat-port-search", About: "how often NAT tries a port that is taken", Weight: 33, Run: checkPortSearch,
			Symptom: "CPU time in nf_conntrack_tuple_taken, latency of new connections", Remedy: morePorts},
		{ID: "PT04", Name: "snat-port-race", About: "random ports on kernels before 5.0", Weight: 8, Run: checkPortRace,
			Symptom: "parallel connections to one destination take 1 or 3 s",
			Remedy:  Remedy{Do: "let the rules take ports at random: masquerade random,fully-random (iptables --random-fully)", Risk: "source ports are not preserved"}},
		{ID: "PT05", Name: "privileged-source-ports", About: "translated clients with ports below 1024", Weight: 7, Run: checkPrivilegedPorts},
		{ID: "PT06", Name: "local-ports", About: "local connections against ip_local_port_range", Weight: 46, Run: checkLocalPorts,
			Symptom: "a proxy reports EADDRNOTAVAIL",
			Remedy:  Remedy{Do: "widen the range of ports, or use more source addresses", Commands: []string{"sysctl -w net.ipv4.ip_local_port_range=\"1024 65535\""}, Risk: "listeners above 1024 need ip_local_reserved_ports"}},
		{ID: "PT07", Name: "reserved-ports", About: "ports of services and of port forwards inside the range of ephemeral ports", Weight: 2, Run: checkReservedPorts,
			Symptom: "a service cannot bind its port after a restart",
			Remedy:  Remedy{Do: "keep the kernel from giving them to other programs", Commands: []string{"sysctl -w net.ipv4.ip_local_reserved_ports=PORTS"}, Risk: "a write replaces the whole list"}},
		{ID: "PT08", Name: "tcp-tw-reuse", About: "reuse of ports in TIME_WAIT", Weight: 1, Run: checkTWReuse},
		{ID: "PT09", Name: "time-wait-buckets", About: "TIME_WAIT sockets against their limit", Weight: 26, Run: checkTWBuckets,
			Symptom: "TIME_WAIT ends early; old packets may reach new connections",
			Remedy:  Remedy{Do: "raise the limit", Commands: []string{"sysctl -w net.ipv4.tcp_max_tw_buckets=LIMIT"}, Cost: "some 250 bytes a socket"}},
	}
}

func checkPortsExhausted(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	refused, tries := c.refused(), c.delta("conntrack.found")
	failed := refused.Ports + refused.Race
	g, seen := c.drops(trace.CausePortsExhausted)
	switch {
	case failed == 0:
		return ok("every translated connection found a port")
	case refused.Race > 0:
		return c.lostRace(failed, g)
	}
	n := failed
	if seen {
		n = max(n, g.Packets)
	}
	f := found(Critical, "no source port is left for SNAT%s: %d new connections were refused in %.1f s", destinationOf(g), n, c.Window.Seconds()).
		with("Δinsert_failed = Δdrop", c.inWindow(failed), fromCtnetlink).with("Δfound (ports tried)", c.inWindow(tries), fromCtnetlink).losing(c.perSecond(n))
	return c.withDrops(f, trace.CausePortsExhausted)
}

// lostRace words connections that were refused although ports are not short: two packets at
// once had chosen the same one, which masquerading keeps where it is free when it looks.
func (c *Case) lostRace(n uint64, g trace.DropGroup) Finding {
	f := found(Info, "%s lost a race with one of an equal source port that left at once%s; ports are not short", plural(int(n), "new connection"), destinationOf(g)).
		with("Δinsert_failed = Δdrop", c.inWindow(n), fromCtnetlink)
	if use := c.portUse(); use.Pool > 0 {
		f = f.with("ports in use", fmt.Sprintf("%d of %d", use.Used, use.Pool), c.dumped())
	}
	if n >= 5 && c.perSecond(n) > 0.5 {
		f.Verdict = Warn
		f = f.losing(c.perSecond(n))
	}
	f.Symptom = "some connections to a service that many ask take 1 or 3 s, DNS answers 5 s; ports are free"
	f.Remedy = &Remedy{Do: "let the rules take ports at random: masquerade random,fully-random (iptables --random-fully)", Risk: "source ports are not preserved"}
	if c.NS.Rules != nil && c.NS.Rules.SourceNAT > 0 && c.NS.Rules.InOrder == 0 {
		f.Remedy = &Remedy{Do: "for DNS, options single-request-reopen in resolv.conf or a cache on each node: the rules take ports at random already", Cost: "a cache takes a process and memory", Risk: "with single-request-reopen each name takes two sockets"}
	}
	return c.withDrops(f, trace.CausePortsExhausted)
}

// destinationOf words where the samples of a group were going.
func destinationOf(g trace.DropGroup) string {
	for _, s := range g.Samples {
		if s.Reply.IsValid() {
			return fmt.Sprintf(" towards %s %s", s.Reply.Protocol, s.Reply.Source)
		}
	}
	return ""
}

func checkOccupancy(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	pools := firewall.Pools{}
	if c.NS.Rules != nil {
		pools = c.NS.Rules.Pools
	}
	o, there := c.NS.Table.Fullest(func(public netip.Addr) uint32 {
		n := pools.Of(public)
		if n == 1 {
			return 0 // a fixed port is in use or not; PT01 reports a conflict
		}
		return n
	})
	if !there {
		return ok("no source is translated to more than one port")
	}
	return found(severity.Ports.Level(o.Share()), "%s uses %s of its ports towards %s %s", o.Public, percent(o.Share()), o.Protocol, o.Remote).
		with("ports in use", fmt.Sprintf("%d of %d", o.Used, o.Pool), c.dumped())
}

func checkPortSearch(_ context.Context, c *Case) Finding {
	if f, there := c.conntrackCounters(); !there {
		return f
	}
	tries := c.delta("conntrack.found")
	f := ok("%.0f taken ports tried a second", c.perSecond(tries)).with("Δfound", c.inWindow(tries), fromCtnetlink)
	if tries < 1000 || c.NS.Rules == nil || c.NS.Rules.SourceNAT == 0 {
		return f
	}
	// Up to half of a pool each connection costs half a try, at 90 % 50, when it
	// is full 248.
	if c.NS.NewErr == nil && c.NS.NewPerSecond > 0 {
		perFlow := c.perSecond(tries) / c.NS.NewPerSecond
		f.Verdict = grade(perFlow, 5, 50)
		f.Summary = fmt.Sprintf("NAT tried %.0f taken ports for each new connection", perFlow)
		return f.with("new connections", fmt.Sprintf("%.0f/s", c.NS.NewPerSecond), fromNew)
	}
	if c.NS.Table == nil {
		return unknown("%.0f taken ports tried a second, but new connections could not be counted: %v", c.perSecond(tries), c.NS.NewErr)
	}
	// No more connections can be new than there are entries.
	perFlow := float64(tries) / float64(max(c.NS.Table.Total.Entries, 1))
	f.Verdict = grade(perFlow, 5, 50)
	f.Summary = fmt.Sprintf("NAT tried at least %.0f taken ports for each new connection", perFlow)
	return f
}

func checkPortRace(_ context.Context, c *Case) Finding {
	major, _ := release(c.After.Release)
	if major == 0 {
		return unknown("kernel release %q", c.After.Release)
	}
	if major >= 5 {
		return ok("kernel %s searches ports at random", c.After.Release)
	}
	if f, there := c.rules(); !there {
		return f
	}
	if c.NS.Rules.InOrder == 0 {
		return ok("no source is translated without fully-random")
	}
	return found(Warn, "kernel %s searches ports in order: parallel connections collide", c.After.Release).with("release", c.After.Release, fromProc)
}

// release splits "6.1.0-28-amd64".
func release(s string) (major, minor int) {
	parts := strings.FieldsFunc(s, func(r rune) bool { return r < '0' || r > '9' })
	if len(parts) < 2 {
		return 0, 0
	}
	major, _ = strconv.Atoi(parts[0])
	minor, _ = strconv.Atoi(parts[1])
	return major, minor
}

func checkPrivilegedPorts(_ context.Context, c *Case) Finding {
	if f, there := c.table(); !there {
		return f
	}
	n := c.NS.Entries.Privileged
	if n < 300 {
		return ok("%d translated connections from ports below 1024", n)
	}
	return found(Info, "%d translated connections come from ports below 1024; the kernel maps those to 424 ports only (NFS, rsh)", n).
		with("connections", fmt.Sprint(n), c.dumped())
}

func checkLocalPorts(_ context.Context, c *Case) Finding {
	if _, _, there := c.NS.After.LocalRange(); !there {
		return unknown("net.ipv4.ip_local_port_range is not readable")
	}
	most, to := 0, observe.Remote{}
	for remote, n := range c.NS.After.Remotes {
		if n > most || n == most && remote.To.Compare(to.To) < 0 {
			most, to = n, remote
		}
	}
	if most == 0 {
		return ok("no local connections")
	}
	size := max(c.NS.After.LocalPorts(), 1)
	share := float64(most) / float64(size)
	return found(grade(share, 0.80, 0.95), "local programs use at most %s of their ports towards one destination", percent(share)).
		with(fmt.Sprintf("from %s to %s", to.From, to.To), fmt.Sprintf("%d connections of %d ports", most, size), "/proc/net/tcp")
}

func checkReservedPorts(_ context.Context, c *Case) Finding {
	low, high, there := c.NS.After.LocalRange()
	if !there {
		return unknown("net.ipv4.ip_local_port_range is not readable")
	}
	listeners, unjudged := c.exposedListeners()
	forwarded := c.ephemeralForwards(low, high)
	var f Finding
	switch {
	case len(listeners) > 0:
		f = found(Warn, "ports %s listen inside the ephemeral range: a client may take them while the service restarts", shorten(listeners))
		if len(forwarded) > 0 {
			f.Summary += "; rules forward " + shorten(forwarded) + " there"
		}
	case len(forwarded) > 0:
		f = found(Warn, "rules forward ports %s of the ephemeral range: a local program that gets one receives nothing from outside", shorten(forwarded))
		f.Symptom = "now and then a local program that listens on a port of the kernel's choice (FTP data, RPC) cannot be reached"
	case unjudged > 0:
		return unknown("whether programs asked for %s of the ephemeral range, or the kernel chose them: %v", plural(unjudged, "UDP port"), c.NS.After.AskedErr)
	default:
		if f, there := c.rules(); !there {
			return f
		}
		return ok("no service and no port forward inside the ephemeral range %d-%d", low, high)
	}
	// A write replaces the whole list, so it includes the old one.
	reserved := c.NS.After.Sysctl["net.ipv4.ip_local_reserved_ports"]
	var list []string
	for _, port := range append(append(strings.FieldsFunc(reserved, func(r rune) bool { return r == ',' }), listeners...), forwarded...) {
		if port, _, _ = strings.Cut(port, "/"); !slices.Contains(list, port) {
			list = append(list, port)
		}
	}
	return f.with("ip_local_port_range", fmt.Sprintf("%d-%d", low, high), fromSysctl).
		with("ip_local_reserved_ports", fmt.Sprintf("%q", reserved), fromSysctl).filling("PORTS", strings.Join(list, ","))
}

func shorten(ports []string) string {
	text := strings.Join(ports[:min(len(ports), 5)], ", ")
	if n := len(ports) - 5; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// exposedListeners returns the ports of services that the kernel may assign to other sockets.
// unjudged counts UDP ports that were left out because it is unknown whether the program chose
// them.
func (c *Case) exposedListeners() (ports []string, unjudged int) {
	exposed := func(r *observe.NamespaceReading) observe.Sockets {
		return observe.Sockets{Listeners: r.ExposedListeners(), Asked: r.Asked, AskedErr: r.AskedErr}
	}
	list, unknown := observe.Lasting(exposed(&c.NS.Before), exposed(&c.NS.After))
	for _, l := range list {
		if name := fmt.Sprintf("%d/%s", l.Port, l.Protocol); !slices.Contains(ports, name) {
			ports = append(ports, name)
		}
	}
	return ports, len(unknown)
}

// ephemeralForwards are ports that rules forward and that the kernel may give to local
// programs. A rule that takes the whole range leaves nothing to reserve.
func (c *Case) ephemeralForwards(low, high int) (ports []string) {
	if c.NS.Rules == nil {
		return nil
	}
	for _, p := range c.NS.Rules.Forwarded {
		if int(p.Low) <= low && int(p.High) >= high {
			continue
		}
		free := false
		for port := max(int(p.Low), low); port <= min(int(p.High), high) && !free; port++ {
			free = c.NS.After.Exposed(uint16(port))
		}
		if free {
			ports = append(ports, p.String())
		}
	}
	return ports
}

func checkTWReuse(_ context.Context, c *Case) Finding {
	v, there := c.sysctl("net.ipv4.tcp_tw_reuse")
	if !there {
		return unknown("net.ipv4.tcp_tw_reuse is not readable")
	}
	if v != 1 && c.NS.After.Sockstat["TCP.tw"] > 10000 {
		f := found(Info, "%d sockets in TIME_WAIT and tcp_tw_reuse is %d: sysctl -w net.ipv4.tcp_tw_reuse=1 lets clients reuse their ports (needs TCP timestamps end to end)",
			c.NS.After.Sockstat["TCP.tw"], v).with("TCP tw", fmt.Sprint(c.NS.After.Sockstat["TCP.tw"]), "/proc/net/sockstat")
		f.Remedy = &Remedy{Do: "let clients reuse their ports", Commands: []string{"sysctl -w net.ipv4.tcp_tw_reuse=1"}, Risk: "without TCP timestamps an old segment may meet the new connection"}
		return f
	}
	return ok("tcp_tw_reuse is %d", v)
}

func checkTWBuckets(_ context.Context, c *Case) Finding {
	n := c.delta("TcpExt.TCPTimeWaitOverflow")
	if n == 0 {
		return ok("no TIME_WAIT socket was dropped")
	}
	limit, _ := c.sysctl("net.ipv4.tcp_max_tw_buckets")
	return found(Warn, "%d sockets could not enter TIME_WAIT (tcp_max_tw_buckets %d)", n, limit).
		with("ΔTCPTimeWaitOverflow", c.inWindow(n), fromSNMP).filling("LIMIT", fmt.Sprint(max(2*limit, 65536)))
}
