// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/trace"
)

func checkRPFilter(_ context.Context, c *Case) Finding {
	n := c.delta("TcpExt.IPReversePathFilter")
	if n > 0 {
		f := found(Critical, "reverse path filtering refused %d packets in %.1f s%s", n, c.Window.Seconds(), c.fromWhere(trace.CauseRPFilter)).
			with("ΔIPReversePathFilter", c.inWindow(n), fromSNMP).losing(c.perSecond(n))
		if c.perSecond(n) < 1 {
			f.Verdict = Warn
		}
		all, _ := c.sysctl("net.ipv4.conf.all.rp_filter")
		arrived := c.arrivedOn(trace.CauseRPFilter)
		if one, _ := c.sysctl("net.ipv4.conf." + arrived + ".rp_filter"); max(all, one) == 2 {
			f.Remedy = &Remedy{Do: "add a route that leads to the source: the filter is loose already and asks for any", Risk: "a route that is wrong takes other traffic along"}
		} else if d, from, there := c.routedElsewhere(arrived); there {
			f.Summary += fmt.Sprintf(": its network is on %s, and the route to %s leads by %s", arrived, d.Prefix, d.By)
			f.Remedy = &Remedy{Do: "delete the route, if the host is on " + arrived + ": a loose filter would let requests in, and answers would still leave by " + d.By,
				Commands: []string{fmt.Sprintf("ip route del %s dev %s", d.Prefix, d.By)}, Risk: from.String() + " is no longer reached by " + d.By}
		} else if w, known := c.wayBack(); known && w.Dead() {
			f.Remedy = &Remedy{Do: fmt.Sprintf("correct the route back: it leads by %s to %s, which does not answer %s, so that a loose filter would not help", w.Interface, w.NextHop, asks(w.NextHop)), Risk: "a route that is wrong takes other traffic along"}
		}
		return c.withDrops(f.filling("IFACE", arrived), trace.CauseRPFilter)
	}
	all, _ := c.sysctl("net.ipv4.conf.all.rp_filter")
	var strict []string
	links := 0
	for _, l := range c.NS.After.Links {
		if l.Loopback || !l.Up {
			continue
		}
		links++
		if one, _ := c.sysctl("net.ipv4.conf." + l.Name + ".rp_filter"); max(all, one) == 1 {
			strict = append(strict, l.Name)
		}
	}
	if n := c.NS.After.Uplinks; n > 1 && len(strict) > 0 {
		return found(Warn, "%s check strictly, and default routes lead over %d interfaces: answers to what came by another one are lost", strings.Join(strict, ", "), n).
			with("interfaces with a default route", fmt.Sprint(n), fromLinks).filling("IFACE", strict[0])
	}
	if links > 2 && len(strict) > 0 {
		return found(Info, "%s check strictly; with routes over more than one of %d interfaces that loses packets", strings.Join(strict, ", "), links)
	}
	return ok("reverse path filtering refused nothing")
}

// routedElsewhere is the route by another interface to the source of a refused packet, whose network is on the interface of
// its arrival.
func (c *Case) routedElsewhere(arrived string) (d observe.Detached, from netip.Addr, there bool) {
	g, _ := c.drops(trace.CauseRPFilter)
	for _, s := range g.Sampled {
		from = s.Packet.Source.Addr()
		i := slices.IndexFunc(c.NS.After.Routing.Detached, func(d observe.Detached) bool { return d.Within == arrived && d.Prefix.Contains(from) })
		if i >= 0 {
			return c.NS.After.Routing.Detached[i], from, true
		}
	}
	return d, from, false
}

// wayBack is the route to the source of a packet that the reverse path filter refused.
func (c *Case) wayBack() (w observe.Way, known bool) {
	g, _ := c.drops(trace.CauseRPFilter)
	for _, s := range g.Sampled {
		if w, known = c.NS.Ways[s]; known && w.Err == nil && w.Interface != "" {
			return w, true
		}
	}
	return w, false
}

// arrivedOn is the interface of a sample, IFACE where there is none.
func (c *Case) arrivedOn(cause trace.Cause) string {
	if g, seen := c.drops(cause); seen && len(g.Samples) > 0 && g.Samples[0].Interface != "" {
		return g.Samples[0].Interface
	}
	return "IFACE"
}

// fromWhere names interface and source of a sample.
func (c *Case) fromWhere(cause trace.Cause) string {
	g, seen := c.drops(cause)
	if !seen || len(g.Samples) == 0 || !g.Samples[0].Packet.IsValid() {
		return ""
	}
	s := g.Samples[0]
	return fmt.Sprintf(", for example from %s on %s", s.Packet.Source.Addr(), s.Interface)
}

func checkMartians(_ context.Context, c *Case) Finding {
	if c.NS.DropsErr != nil {
		return unknown("%v", c.NS.DropsErr)
	}
	g, seen := c.drops(trace.CauseMartian)
	if !seen {
		return ok("no packet with an impossible (martian) address")
	}
	f := found(Info, "%d packets had an impossible (martian) address%s", g.Packets, c.fromWhere(trace.CauseMartian)).filling("IFACE", c.arrivedOn(trace.CauseMartian))
	if to, err := netip.ParseAddr(c.sampleDest(trace.CauseMartian)); err == nil && !to.IsLoopback() {
		f.Symptom = "somebody's packets are not answered"
		f.Remedy = &Remedy{Do: "find who sends them by their hardware addresses", Commands: []string{"sluice drops --seconds 10 --pcap martians.pcap"}, Risk: "they may be forged"}
	}
	var source netip.Addr
	if len(g.Sampled) > 0 {
		source = g.Sampled[0].Packet.Source.Addr()
	}
	switch valid, _ := c.sysctl("net.ipv4.conf.all.src_valid_mark"); {
	case c.linkOf(source) != "":
		f.Summary += ": that is this host's own address, which another host uses, or to which it translates"
		f.Remedy = &Remedy{Do: "find the sender by its hardware address: it has this host's address, or a rule there translates sources to it", Commands: []string{"sluice drops --seconds 10 --pcap martians.pcap"}, Risk: "none: it only looks"}
	case valid == 1 && c.NS.After.Routing.Marked > 0:
		f.Summary += ": src_valid_mark is 1, so that the route back to the source is looked up with the packet's mark, and the table of the mark delivers everything to this host (TPROXY)"
		f.Remedy = &Remedy{Do: "look up the route back without the mark", Commands: []string{"sysctl -w net.ipv4.conf.all.src_valid_mark=0"}, Risk: "a VPN that marks packets (wg-quick, Tailscale) may need rp_filter=2 then"}
	}
	if g.PerSecond > 1 {
		f.Verdict = Warn
		f = f.losing(g.PerSecond)
	}
	return c.withDrops(f, trace.CauseMartian)
}
