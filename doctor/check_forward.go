// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/trace"
)

// clampMSS is the rule that keeps TCP segments to what the way takes.
const clampMSS = "nft 'add table inet clamp; add chain inet clamp forward { type filter hook forward priority mangle; }; " +
	"add rule inet clamp forward tcp flags syn tcp option maxseg size set rt mtu'"

// forwardChecks look at the way of packets through the host.
func forwardChecks() []Check {
	return []Check{
		{ID: "FW01", Name: "ip-forward", About: "forwarding where packets are translated", Weight: 98, Run: checkForwarding,
			Symptom: "nothing passes the gateway",
			Remedy:  Remedy{Do: "let the interface forward", Commands: []string{"sysctl -w net.ipv4.conf.IFACE.forwarding=1"}, Risk: "resets the per-interface settings to those of a router: set rp_filter again"}},
		{ID: "FW02", Name: "rp-filter", About: "packets refused by reverse path filtering", Weight: 92, Run: checkRPFilter,
			Symptom: "traffic from some networks is lost in one direction",
			Remedy: Remedy{Do: "check loosely where the route back to the source leads over another interface; where there is no route back, add it",
				Commands: []string{"sysctl -w net.ipv4.conf.IFACE.rp_filter=2"}, Risk: "loose mode checks less against spoofing (RFC 3704)"}},
		{ID: "FW03", Name: "mtu", About: "packets too large for the next link", Weight: 91, Run: checkMTU,
			Symptom: "small requests work, large transfers hang",
			Remedy:  Remedy{Do: "let ICMP \"fragmentation needed\" through and align MTUs; for TCP a clamp of the segment size is enough", Commands: []string{clampMSS}, Risk: "none for the clamp"}},
		{ID: "FW04", Name: "icmp-rate-limit", About: "ICMP errors that were not sent", Weight: 38, Run: checkICMPLimit,
			Symptom: "clients of hosts and ports that refuse them wait instead of failing at once; traceroute shows stars",
			Remedy:  Remedy{Do: "let 10 ms pass between errors to one host instead of a second", Commands: []string{"sysctl -w net.ipv4.icmp_ratelimit=10"}, Risk: "more ICMP under attack"}},
		{ID: "FW05", Name: "mss-clamp", About: "links of different MTU without a clamp", Weight: 21, Run: checkMSSClamp,
			Symptom: "large transfers hang where ICMP is filtered",
			Remedy:  Remedy{Do: "clamp the TCP segment size to what the route takes", Commands: []string{clampMSS}, Cost: "a rule for each SYN", Risk: "none for TCP; UDP still needs ICMP"}},
		{ID: "FW06", Name: "neighbour-table", About: "next hops against gc_thresh3", Host: true, Weight: 94, Run: checkNeighbours,
			Symptom: "hosts that were not talked to recently cannot be reached",
			Remedy: Remedy{Do: "raise the thresholds, in the host's own namespace", Commands: []string{"sysctl -w THRESHOLDS"},
				Cost: "some 400 bytes a neighbour"}},
		{ID: "FW08", Name: "no-route", About: "packets without a route", Weight: 81, Run: checkNoRoute,
			Symptom: "some destinations answer \"network unreachable\"",
			Remedy:  Remedy{Do: "add the route, or correct the client's", Risk: "a route that is wrong takes other traffic along"}},
		{ID: "FW10", Name: "offloads", About: "LRO and GRO on a router", Weight: 37, Run: checkOffloads,
			Symptom: "packets too large to forward, or one CPU's worth of work for each packet",
			Remedy:  Remedy{Do: "turn LRO off and GRO on", Commands: []string{"ethtool -K IFACE lro off gro on"}, Risk: "a moment without traffic on some drivers"}},
		{ID: "FW12", Name: "impossible-addresses", About: "packets with an impossible (martian) source or destination", Weight: 36, Run: checkMartians,
			Symptom: "DNAT to 127.0.0.1 does not work",
			Remedy:  Remedy{Do: "let the program listen on another address, or let the interface lead to 127.0.0.0/8", Commands: []string{"sysctl -w net.ipv4.conf.IFACE.route_localnet=1"}, Risk: "local services open to the network"}},
		{ID: "FW13", Name: "other-drops", About: "packets dropped by TC, XDP, IPsec policies, for broken headers, or for a reason that no other check looks at", Weight: 35, Run: checkOtherDrops,
			Symptom: "connections to some destinations hang, and no rule, route or counter of connection tracking says why",
			Remedy:  Remedy{Do: "look at packets, and where in the kernel they end", Commands: []string{"sluice drops --stack"}, Cost: "a few hundred ns of CPU for each drop while it runs"}},
	}
}

// strays are packets for other hosts, a second, that any host may get: broadcasts of
// other networks on its link.
const strays = 5

func checkForwarding(_ context.Context, c *Case) Finding {
	four, there := c.sysctl("net.ipv4.ip_forward")
	if !there {
		return unknown("net.ipv4.ip_forward is not readable")
	}
	six, has6 := c.sysctl("net.ipv6.conf.all.forwarding")
	var rules firewall.Forwards
	if c.NS.Rules != nil {
		rules = c.NS.Rules.Forwards
	}
	refused := c.delta("Ip.InAddrErrors")
	worst := Finding{}
	if four == 0 {
		worst = c.forwardingOff("IPv4", "net.ipv4.ip_forward", rules.IPv4, rules.Either, six != 1, refused)
	}
	if has6 && six == 0 {
		f := c.forwardingOff("IPv6", "net.ipv6.conf.all.forwarding", rules.IPv6, rules.Either, four != 1, c.delta("Ip6InAddrErrors"))
		if f.Verdict > worst.Verdict {
			worst = f
		}
	}
	g, seen := c.drops(trace.CauseForwardOff)
	switch refused6 := c.delta("Ip6InAddrErrors"); {
	case worst.Verdict > OK:
		return c.withDrops(worst, trace.CauseForwardOff)
	case seen && has6 && six == 0 && c.perSecond(refused6) > strays:
		f := found(Warn, "%d IPv6 packets for other hosts arrived; forwarding is off, and no rule needs it", refused6).
			with("net.ipv6.conf.all.forwarding", "0", fromSysctl).with("ΔIp6InAddrErrors", c.inWindow(refused6), fromSNMP)
		f.Remedy = c.switchForwarding("net.ipv6.conf.all.forwarding")
		return c.withDrops(f, trace.CauseForwardOff)
	case four == 1:
		return c.interfacesForward(refused)
	case !seen:
		return ok("no rule needs forwarding, which is off")
	}
	f := found(Info, "%d packets for other hosts arrived; forwarding is off, and no rule needs it", g.Packets).
		with("net.ipv4.ip_forward", "0", fromSysctl).with("ΔInAddrErrors", c.inWindow(refused), fromSNMP)
	if g.PerSecond > strays {
		f.Verdict = Warn
		f.Remedy = c.switchForwarding("net.ipv4.ip_forward")
	}
	return c.withDrops(f, trace.CauseForwardOff)
}

// forwardingOff judges a family that does not forward. Rules of this family need forwarding. Rules
// of both families need it if the other family does not forward either, or if packets show the
// need.
func (c *Case) forwardingOff(family, setting string, own, either int, both bool, refused uint64) Finding {
	n := own
	if both || refused > 0 {
		n += either
	}
	if n == 0 {
		return Finding{}
	}
	f := found(Warn, "%s packets that are to be forwarded, but %s forwarding is off", pluralVerb(n, "rule translates", "rules translate"), family).
		with(setting, "0", fromSysctl)
	f.Remedy = c.switchForwarding(setting)
	if refused == 0 && !both {
		f.Verdict = Info // such as kube-proxy's rules for IPv6 on a node of IPv4
	}
	if refused > 0 {
		f.Verdict = Critical
		f.Summary = fmt.Sprintf("%s forwarding is off: %d packets for other hosts were refused in %.1f s", family, refused, c.Window.Seconds())
		f = f.with("ΔInAddrErrors", c.inWindow(refused), fromSNMP).losing(c.perSecond(refused))
	}
	return f
}

// switchForwarding keeps default routes that router advertisements gave: with accept_ra=1 a
// host that becomes a router forgets them, and takes no more.
func (c *Case) switchForwarding(setting string) *Remedy {
	m := &Remedy{Do: "switch forwarding on, if this host is to be a router", Risk: "resets the per-interface settings to those of a router: set rp_filter again"}
	if strings.HasPrefix(setting, "net.ipv6.") {
		m.Risk = "interfaces that are to learn routes from router advertisements later need accept_ra=2, too"
		for _, name := range c.learners() {
			m.Commands = append(m.Commands, "sysctl -w net.ipv6.conf."+name+".accept_ra=2")
			m.Do = "let the interfaces whose routes come from router advertisements keep them, then switch forwarding on, if this host is to be a router"
		}
	}
	m.Commands = append(m.Commands, "sysctl -w "+setting+"=1")
	return m
}

// learners are interfaces with IPv6 routes from router advertisements. If the host forwards, the
// kernel ignores these advertisements.
func (c *Case) learners() (names []string) {
	r := c.NS.After.Routing
	for _, l := range c.NS.After.Links {
		accept, there := c.sysctl("net.ipv6.conf." + l.Name + ".accept_ra")
		if there && accept == 1 && (r.Advertised[l.Name] > 0 || slices.Contains(r.Learned6, l.Name)) {
			names = append(names, l.Name)
		}
	}
	return names
}

// interfacesForward looks for interfaces on which forwarding alone is off.
func (c *Case) interfacesForward(refused uint64) Finding {
	var off []string
	for _, l := range c.NS.After.Links {
		if v, there := c.sysctl("net.ipv4.conf." + l.Name + ".forwarding"); there && v == 0 && l.Up && !l.Loopback {
			off = append(off, l.Name)
		}
	}
	if r := c.NS.Rules; len(off) == 0 || r == nil || r.Forwards.IPv4+r.Forwards.Either == 0 {
		return ok("the host forwards").with("net.ipv4.ip_forward", "1", fromSysctl)
	}
	if refused == 0 {
		return found(Info, "forwarding is off for what arrives on %s", strings.Join(off, ", ")).
			with("net.ipv4.conf.*.forwarding", "0", fromSysctl)
	}
	return c.withDrops(found(Critical, "forwarding is off on %s: %d packets for other hosts were refused in %.1f s", strings.Join(off, ", "), refused, c.Window.Seconds()).
		filling("IFACE", off[0]).
		with("net.ipv4.conf.*.forwarding", "0", fromSysctl).with("ΔInAddrErrors", c.inWindow(refused), fromSNMP).losing(c.perSecond(refused)), trace.CauseForwardOff)
}

func checkMTU(_ context.Context, c *Case) Finding {
	// ip6_forward counts a packet in both of IPv6's counters.
	n := c.delta("Ip.FragFails") + max(c.delta("Ip6InTooBigErrors"), c.delta("Ip6FragFails"))
	g, seen := c.drops(trace.CauseMTU)
	if n == 0 && !seen {
		return ok("every packet fitted its next link")
	}
	n = max(n, g.Packets)
	f := found(grade(c.perSecond(n), 0, 1), "%d packets were too large for the next link in %.1f s%s", n, c.Window.Seconds(), mtuText(g)).
		with("ΔFragFails", c.inWindow(n), fromSNMP).losing(c.perSecond(n))
	return c.withDrops(f, trace.CauseMTU)
}

func mtuText(g trace.DropGroup) string {
	for _, s := range g.Samples {
		if s.Packet.IsValid() {
			return fmt.Sprintf(" (%d bytes towards %s)", s.Length, s.Packet.Dest.Addr())
		}
	}
	return ""
}

func checkICMPLimit(_ context.Context, c *Case) Finding {
	n := c.delta("Icmp.OutRateLimitHost") + c.delta("Icmp.OutRateLimitGlobal")
	if n == 0 {
		return ok("no ICMP error was held back")
	}
	// One a second for each destination is let through; "fragmentation needed" always is.
	f := found(max(Info, grade(c.perSecond(n), 10, 1e9)), "%d ICMP errors were held back by the rate limit", n).with("ΔOutRateLimit", c.inWindow(n), fromSNMP)
	if all := c.delta("Icmp.OutRateLimitGlobal"); all > n/2 {
		limit, _ := c.sysctl("net.ipv4.icmp_msgs_per_sec")
		f.Remedy = &Remedy{Do: "raise the limit for all destinations together", Commands: []string{fmt.Sprintf("sysctl -w net.ipv4.icmp_msgs_per_sec=%d", 10*max(limit, 1000))}, Risk: "more ICMP under attack"}
	}
	return f
}

func checkMSSClamp(_ context.Context, c *Case) Finding {
	if !c.forwards() {
		return ok("not a router")
	}
	low, high, lowName := 0, 0, ""
	var links []observe.Link
	for _, l := range c.NS.After.Links {
		if l.Loopback || !l.Up || l.RxPackets+l.TxPackets == 0 {
			continue
		}
		links = append(links, l)
		if low == 0 || l.MTU < low {
			low, lowName = l.MTU, l.Name
		}
		high = max(high, l.MTU)
	}
	if low == high || low >= 1500 {
		return ok("links of 1500 bytes or equal MTU")
	}
	if c.NS.Rules != nil && c.NS.Rules.MSSClamp {
		return ok("TCP segment size is clamped")
	}
	if ofContainers(links, low) {
		return found(Info, "containers and their overlay have an MTU of %d, which they announce; other networks that are routed over %s need a clamp of the TCP segment size", low, lowName)
	}
	return found(Warn, "%s takes %d bytes, other links %d, and no rule clamps the TCP segment size", lowName, low, high).
		with("smallest and largest MTU", fmt.Sprintf("%d, %d", low, high), fromLinks)
}

// ofContainers reports whether the smallest MTU belongs to the host's containers and to all their
// links except the uplinks, as on a node of Kubernetes: both ends know the MTU.
func ofContainers(links []observe.Link, low int) bool {
	containers := false
	for _, l := range links {
		switch {
		case l.MTU > low && l.Kind != "device":
			return false
		case l.MTU == low && (l.Kind == "bridge" || l.Kind == "veth"):
			containers = true
		}
	}
	return containers
}

func checkNeighbours(_ context.Context, c *Case) Finding {
	fulls := c.After.Neighbours["neigh.table_fulls"] - min(c.Before.Neighbours["neigh.table_fulls"], c.After.Neighbours["neigh.table_fulls"])
	where, events := "", uint64(0)
	var sample *Case
	for _, n := range c.Sample.Namespaces {
		one := &Case{Sample: c.Sample, NS: n}
		if g, seen := one.drops(trace.CauseNeighbourFull); seen {
			where, events, sample = " in namespace "+n.Name, events+g.Packets, one
		}
	}
	if fulls > 0 && c.elsewhere(trace.CauseNeighbourFull) {
		return found(Info, "the neighbour table is full, for next hops of other namespaces").with("Δtable_fulls", c.inWindow(fulls), "/proc/net/stat/arp_cache")
	}
	var larger []string
	for _, family := range []string{"ipv4", "ipv6"} {
		if limit, there := observe.Number(c.After.Sysctl, "net."+family+".neigh.default.gc_thresh3"); there {
			for i, share := range []int{1, 4, 8} { // the kernel's own proportions
				larger = append(larger, fmt.Sprintf("net.%s.neigh.default.gc_thresh%d=%d", family, i+1, share*limit))
			}
		}
	}
	thresholds := strings.Join(larger, " ")
	if n := max(fulls, events); n > 0 {
		f := found(Critical, "the neighbour table is full: %d next hops could not be entered in %.1f s%s", n, c.Window.Seconds(), where).
			with("Δtable_fulls", c.inWindow(fulls), "/proc/net/stat/arp_cache").losing(c.perSecond(n)).filling("THRESHOLDS", thresholds)
		if sample != nil {
			f = sample.withDrops(f, trace.CauseNeighbourFull)
		}
		return f
	}
	worst := ok("no neighbour table is near its limit")
	for i, family := range []string{"ipv4", "ipv6"} {
		limit, there := observe.Number(c.After.Sysctl, "net."+family+".neigh.default.gc_thresh3")
		if !there {
			return unknown("net.%s.neigh.default.gc_thresh3 is not readable", family)
		}
		share := float64(c.After.Entries[i]) / float64(max(limit, 1))
		if v := grade(share, 0.80, 1); v > worst.Verdict {
			worst = found(v, "%d of %d %s neighbours", c.After.Entries[i], limit, family).
				with("entries / gc_thresh3", fmt.Sprintf("%d / %d", c.After.Entries[i], limit), "/proc/net/stat").filling("THRESHOLDS", thresholds)
		}
	}
	return worst
}

// towards names the destination of a sample.
func (c *Case) towards(cause trace.Cause) string {
	if to := c.sampleDest(cause); to != "DESTINATION" {
		return ", for example towards " + to
	}
	return ""
}

// sampleDest is the destination of a sample, DESTINATION where there is none.
func (c *Case) sampleDest(cause trace.Cause) string {
	if g, seen := c.drops(cause); seen && len(g.Samples) > 0 && g.Samples[0].Packet.IsValid() {
		return g.Samples[0].Packet.Dest.Addr().String()
	}
	return "DESTINATION"
}

func checkNoRoute(_ context.Context, c *Case) Finding {
	n := c.delta("IpExt.InNoRoutes") + c.delta("Ip6InNoRoutes")
	g, black := c.drops(trace.CauseBlackhole)
	switch all := g.Packets; {
	case n == 0 && !black:
		return ok("every packet had a route")
	case black && all > n/2 && c.wanted(g).Packets == 0:
		return c.withDrops(found(Info, "a blackhole, unreachable or prohibit route refused %s of a scan%s", plural(int(all), "packet"), c.towards(trace.CauseBlackhole)), trace.CauseBlackhole)
	case g.Packets > n/2: // IPv6 counts them there, too
		if f, is := c.withoutTunnel(g); is {
			return f
		}
		if f, is := c.refusing(g); is {
			return f
		}
		f := found(c.unwanted(g), "a blackhole, unreachable or prohibit route refuses %.0f packets/s%s", g.PerSecond, c.towards(trace.CauseBlackhole)).losing(g.PerSecond)
		f.Remedy = &Remedy{Do: "if the packets are wanted, delete the route or rule that these show", Commands: []string{"ip route show table all match DESTINATION", "ip rule"}, Risk: "it may be there for a reason"}
		return c.withDrops(f.filling("DESTINATION", c.sampleDest(trace.CauseBlackhole)), trace.CauseBlackhole)
	}
	if lost, _ := c.drops(trace.CauseNoRoute); len(c.NS.After.Routing.Refusals) > 0 {
		if f, is := c.refusing(c.wanted(lost)); is {
			return f
		}
	}
	if ignoring := c.learners(); len(ignoring) > 0 && c.forwards6() && !c.NS.After.Routing.Default6 && c.delta("Ip6InNoRoutes") > 0 {
		return c.adverts(ignoring, n)
	}
	f := found(Info, "%d packets had no route%s", n, c.towards(trace.CauseNoRoute)).with("ΔInNoRoutes", c.inWindow(n), fromSNMP).losing(c.perSecond(n))
	if c.perSecond(n) >= 1 {
		f.Verdict = Warn
	}
	return c.withDrops(f, trace.CauseNoRoute)
}

func (c *Case) forwards6() bool {
	six, _ := c.sysctl("net.ipv6.conf.all.forwarding")
	return six == 1
}

// adverts words a default route of IPv6 that a host lost when it began to forward.
func (c *Case) adverts(ignoring []string, n uint64) Finding {
	f := found(Critical, "router advertisements that arrive on %s are ignored, because forwarding is on and accept_ra is 1, and there is no default route of IPv6: %d packets had no route%s",
		strings.Join(ignoring, ", "), n, c.towards(trace.CauseNoRoute)).
		with("ΔIp6InNoRoutes", c.inWindow(c.delta("Ip6InNoRoutes")), fromSNMP).losing(c.perSecond(n))
	f.Remedy = &Remedy{Do: "let a router learn its routes from advertisements (accept_ra=2); the next one brings the route", Risk: "whoever can send advertisements on that link chooses the route"}
	for _, name := range ignoring {
		f = f.with("net.ipv6.conf."+name+".accept_ra", "1", fromSysctl)
		f.Remedy.Commands = append(f.Remedy.Commands, "sysctl -w net.ipv6.conf."+name+".accept_ra=2")
	}
	return c.withDrops(f, trace.CauseNoRoute)
}

func checkOffloads(_ context.Context, c *Case) Finding {
	if !c.forwards() {
		return ok("not a router")
	}
	for _, l := range c.NS.After.Links {
		if l.Kind != "device" || !l.Up || l.Loopback {
			continue
		}
		if l.LRO == 1 {
			return found(Critical, "%s merges received packets (LRO), which must not be forwarded", l.Name).with("lro", "on", "ethtool").filling("IFACE", l.Name)
		}
		if l.GRO == 0 {
			return found(Warn, "%s has GRO off", l.Name).with("gro", "off", "ethtool").filling("IFACE", l.Name)
		}
	}
	for _, l := range c.NS.After.Links {
		if l.Kind == "device" && l.Up && !l.Loopback && l.UDPForwarding == 0 {
			return found(Info, "%s does not merge UDP packets to be forwarded: ethtool -K %s rx-udp-gro-forwarding on makes QUIC and tunnels cheaper", l.Name, l.Name).
				with("rx-udp-gro-forwarding", "off", "ethtool")
		}
	}
	return ok("LRO is off and GRO is on where it matters")
}
