// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/trace"
)

// lost counts dropped packets to one next hop.
type lost struct {
	gateway  *observe.Gateway
	packets  int
	dests    map[netip.Addr]bool
	original *trace.DropSample
}

// lostTo groups packets that were dropped before they left by the gateway that they had.
func (c *Case) lostTo(groups ...trace.DropGroup) (most lost, total int) {
	byGateway := map[netip.Addr]*lost{}
	for _, g := range groups {
		for _, s := range g.Sampled {
			total++
			gw := c.gatewayOf(s)
			if gw == nil {
				continue
			}
			l := byGateway[gw.Address]
			if l == nil {
				l = &lost{gateway: gw, dests: map[netip.Addr]bool{}, original: s}
				byGateway[gw.Address] = l
			}
			l.packets++
			l.dests[s.Packet.Dest.Addr()] = true
		}
	}
	for _, l := range byGateway {
		if l.packets > most.packets {
			most = *l
		}
	}
	return most, total
}

// gatewayOf is the router that a dropped packet was sent to; nil: none, or not known.
func (c *Case) gatewayOf(s *trace.DropSample) *observe.Gateway {
	find := func(match func(g *observe.Gateway) bool) *observe.Gateway {
		for i := range c.NS.After.Routing.Gateways {
			if g := &c.NS.After.Routing.Gateways[i]; match(g) {
				return g
			}
		}
		return nil
	}
	to := s.Packet.Dest.Addr()
	if w, known := c.NS.Ways[s]; known && w.Err == nil && (s.Interface == "" || w.Interface == s.Interface) {
		return find(func(g *observe.Gateway) bool {
			return g.Address == w.NextHop && w.NextHop != to && g.Interface == w.Interface
		})
	}
	return find(func(g *observe.Gateway) bool { // a multipath route chose another hop for the lookup
		return g.Interface == s.Interface && g.Dead() && g.Route.Contains(to)
	})
}

func checkDeadNextHop(_ context.Context, c *Case) Finding {
	failed, _ := c.drops(trace.CauseNeighbour)
	full, _ := c.drops(trace.CauseNeighbourQueue)
	seen := failed.Packets + full.Packets
	failed, full = c.wanted(failed), c.wanted(full)
	n := failed.Packets + full.Packets
	switch {
	case n > 0:
	case seen > 0:
		return found(Info, "%d packets of a scan were dropped because nobody has their addresses", seen)
	case c.NS.DropsErr != nil && len(c.NS.After.Failed) == 0:
		return unknown("%v; no neighbour is in state FAILED", c.NS.DropsErr)
	default:
		return ok("%s failed", plural(len(c.NS.After.Failed), "neighbour"))
	}
	// Somebody always asks for a host that is switched off.
	v := max(Info, grade(c.perSecond(n), 1, 100))
	if most, total := c.lostTo(failed, full); most.gateway != nil && 2*most.packets >= total {
		return c.withDrops(c.deadGateway(most, n, max(v, grade(c.perSecond(n), 0.5, 5))), trace.CauseNeighbour)
	}
	f := found(v, "%d packets were dropped because their next hop did not answer%s", n, c.towards(trace.CauseNeighbour)).losing(c.perSecond(n))
	var dests []netip.Addr
	for _, s := range append(slices.Clone(failed.Sampled), full.Sampled...) {
		if !slices.Contains(dests, s.Packet.Dest.Addr()) {
			dests = append(dests, s.Packet.Dest.Addr())
		}
	}
	if bridge := c.waitingFor(dests); bridge != "" {
		f.Verdict = Info
		f.Summary += fmt.Sprintf("; a port of the bridge %s does not forward yet, see RX11", bridge)
		return c.withDrops(f, trace.CauseNeighbour)
	}
	if len(dests) > 0 {
		f = c.covered(f, dests[0]).concerning(Concerns{Sources: hosts(dests...), Destinations: hosts(dests...), Stages: []outcome.Stage{outcome.NeverLeft, outcome.AnswerLost}})
	}
	return c.withDrops(f, trace.CauseNeighbour)
}

// waitingFor is the bridge towards one of the addresses, if spanning tree holds back one of its ports.
func (c *Case) waitingFor(dests []netip.Addr) string {
	for _, l := range c.NS.After.Links {
		if c.waiting(l.Index) && slices.ContainsFunc(l.Addresses, func(p netip.Prefix) bool { return slices.ContainsFunc(dests, p.Contains) }) {
			return l.Name
		}
	}
	return ""
}

// covered says why packets to an address look for it on a link: the network of the link contains it. A second network, or
// a route that is less specific, may be the right one.
func (c *Case) covered(f Finding, a netip.Addr) Finding {
	on, network := "", netip.Prefix{}
	for _, l := range c.NS.After.Links {
		for _, p := range l.Addresses {
			switch {
			case a.IsLinkLocalUnicast() || !p.Contains(a) || p.IsSingleIP():
			case on == "":
				on, network = l.Name, p.Masked()
			case on != l.Name:
				f.Summary += fmt.Sprintf("; %s and %s both have the network %s, and a host is looked for on one of them alone", on, l.Name, p.Masked())
				f.Remedy = &Remedy{Do: fmt.Sprintf("give %s or %s another network, or take its address away", on, l.Name), Commands: []string{fmt.Sprintf("ip route show table all match %s", a)}, Risk: "its connections end"}
				return f
			}
		}
	}
	for _, g := range c.NS.After.Routing.Gateways {
		if g.Route.Bits() > 0 && g.Route.Bits() < network.Bits() && g.Route.Contains(a) {
			f.Summary += fmt.Sprintf("; the network %s of %s hides the route %s via %s (%s)", network, on, g.Route, g.Address, g.Interface)
			f.Remedy = &Remedy{Do: fmt.Sprintf("give %s another network (Docker: default-address-pools); until then, route the address by itself", on),
				Commands: []string{fmt.Sprintf("ip %sroute add %s via %s dev %s", ipFlag(a), a, g.Address, g.Interface)}, Risk: "an address of that network on " + on + " is no longer reached"}
			return f
		}
	}
	if network.IsValid() {
		f.Summary += fmt.Sprintf("; by the network %s of %s it is on that link", network, on)
		f.Remedy = &Remedy{Do: "check that the host is up and on this link; if it is behind a router, the network of " + on + " is too wide", Risk: "none: it only looks"}
	}
	return f
}

// asks is the protocol that finds hardware addresses.
func asks(a netip.Addr) string {
	if a.Is4() {
		return "ARP"
	}
	return "neighbour discovery"
}

// deadGateway words a router that does not answer.
func (c *Case) deadGateway(l lost, n uint64, v Verdict) Finding {
	g := l.gateway
	f := found(v, "the next hop %s on %s does not answer %s: %d packets to %s were dropped", g.Address, g.Interface, asks(g.Address), n, plural(len(l.dests), "destination")).
		losing(c.perSecond(n)).with("route", fmt.Sprintf("%s via %s dev %s", routeName(g.Route), g.Address, g.Interface), fromLinks).
		concerning(Concerns{Interfaces: []string{g.Interface}, NextHops: []netip.Addr{g.Address}})
	f.Symptom = "everything that takes the route is lost"
	f.Remedy = &Remedy{Do: fmt.Sprintf("look at the router %s: it is off, on another link, or has another address", g.Address), Risk: "none: it only looks"}
	alive := slices.ContainsFunc(c.NS.After.Routing.Gateways, func(o observe.Gateway) bool { return o.Multipath && o.Address != g.Address && !o.Dead() })
	if g.Multipath && alive {
		f.Summary += "; the route has further next hops"
		f.Remedy.Risk = "less bandwidth until the router is back"
		if g.Address.Is4() {
			f.Remedy.Do, f.Remedy.Commands = "let multipath routes leave out next hops that do not answer", []string{"sysctl -w net.ipv4.fib_multipath_use_neigh=1"}
		} else {
			f.Remedy.Do = "take the next hop out of the route until it answers"
			f.Remedy.Commands = []string{fmt.Sprintf("ip -6 route del %s via %s dev %s", routeName(g.Route), g.Address, g.Interface)}
		}
	}
	return f
}

// routeName is a destination as the ip program names it.
func routeName(p netip.Prefix) string {
	if p.Bits() == 0 {
		return "default"
	}
	return p.String()
}
