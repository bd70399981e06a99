// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/packet"
)

// situation is a step after which a world is not as the oracle.
type situation struct {
	run            *run
	line           string
	world          *world
	missing, extra []string // lines of the oracle alone, and of the other world alone
}

// exception is a deliberate difference. docs/reference/limits.md has it with its reason, or it is one of the oracle,
// which nftables.md has.
type exception struct {
	name   string
	covers func(*situation) (missing, extra []string)
}

// exceptions are all that the judge accepts.
var exceptions = []exception{
	{"backends-resolved", backendsResolved},
	{"resolution-kept", resolutionKept},
	{"stale-probed", staleProbed},
	{"errors-over-several-hops", errorsOverHops},
	{"odd-destinations", oddDestinations},
	{"own-redirects", ownRedirects},
	{"ip-options-left", optionsLeft},
	{"source-routes-dropped", sourceRoutes},
	{"own-packets-untranslated", ownUntranslated},
	{"untranslated-not-remembered", notRemembered},
	{"rerouted-flows-end", reroutedEnds},
	{"own-errors-name-the-gateway", ownErrors},
	{"no-errors-to-nowhere", errorsToNowhere},
	{"no-route-errors", noRouteErrors},
	{"broadcast-sources", broadcastSources},
	{"nftables-stateless-errors", statelessErrors},
	{"nftables-stateless-sources", statelessSources},
	{"nftables-npt66-errors", prefixErrors},
	{"nftables-dsr-at-ingress", dsrAtIngress},
}

// pairs returns the lines of both worlds that are equal when they are written as the two functions do; "" is none.
func (s *situation) pairs(ofOracle, ofOther func(parsed) string) (missing, extra []string) {
	taken := map[int]bool{}
	for _, m := range s.missing {
		f, ok := parse(m)
		if !ok {
			continue
		}
		as := ofOracle(f)
		for i, x := range s.extra {
			if g, ok := parse(x); ok && as != "" && !taken[i] && as == ofOther(g) {
				taken[i] = true
				missing, extra = append(missing, m), append(extra, x)
				break
			}
		}
	}
	return missing, extra
}

// has reports whether the configuration in force has a service of a mode, or a NAT rule of a type.
func (s *situation) has(mode config.Mode, kind config.NATType) bool {
	snapshot := s.world.snapshot
	if snapshot == nil {
		return false
	}
	for _, v := range snapshot.Services {
		if v.Mode == mode {
			return true
		}
	}
	return slices.ContainsFunc(snapshot.NAT, func(n *config.NATRule) bool { return n.Type == kind })
}

// backendsResolved: the eBPF datapath keeps the next hops of all backends and of the targets of port-forwards resolved:
// those in the network as it begins at any time, those by a route of a step when the configuration or the network changes.
func backendsResolved(s *situation) (missing, extra []string) {
	recent := s.run.script[max(0, len(s.run.script)-changeSteps):]
	changes := slices.ContainsFunc(recent, func(line string) bool {
		verb, _, _ := strings.Cut(line, " ")
		return slices.Contains([]string{"known", "config", "ip", "far", "sysctl"}, verb)
	})
	of := func(_ string, f parsed) bool {
		a, ok := f.asksFor()
		return ok && slices.Contains(toBackends, a)
	}
	return filter(s.missing, of), filter(s.extra, func(l string, f parsed) bool {
		a, ok := f.asksFor()
		return of(l, f) || ok && changes && (slices.Contains(routers, a) || s.did(func(line string) bool { return names(line, "via", a) }))
	})
}

// changeSteps is how many steps may be made before the daemon has resolved the next hops of changed routes.
const changeSteps = 6

// routers are the next hops of the default routes.
var routers = addrs("203.0.113.2", "2001:db8:1::2")

// did reports whether a condition holds for a step until now.
func (s *situation) did(is func(string) bool) bool { return slices.ContainsFunc(s.run.script, is) }

// names reports whether a step has an address after a word.
func names(line, word string, a netip.Addr) bool {
	f := strings.Fields(line)
	return slices.ContainsFunc(f, func(of string) bool { return of == a.String() }) && slices.Contains(f, word)
}

// toBackends are the next hops of the backends of all scenes.
var toBackends = addrs("10.0.2.2", "10.0.2.3", "10.0.2.4", "10.0.2.8", "10.0.3.3", "fd00:2::2", "fd00:2::3", "fd00:2::4", "fd00:2::8")

// moreAddresses are those that steps may add to the gateway.
var moreAddresses = addrs("203.0.113.50", "203.0.113.51", "169.254.3.1", "10.0.2.200", "192.0.2.200", "10.9.9.1", "2001:db8:1::50", "2001:db8:1::51", "fd00:2::200")

func addrs(texts ...string) (list []netip.Addr) {
	for _, t := range texts {
		list = append(list, netip.MustParseAddr(t))
	}
	return list
}

// resolutionKept: the kernel asks again for a next hop that the eBPF datapath has asked for, when the answer stays out
// and when the entry is removed (NTF_EXT_MANAGED), so that it needs not ask for a packet. The daemon asks a moment
// after the packet.
func resolutionKept(s *situation) (missing, extra []string) {
	kept := func(_ string, f parsed) bool {
		a, ok := f.asksFor()
		return ok && !s.world.asked[f.link+" "+a.String()].IsZero()
	}
	recent := s.run.script[max(0, len(s.run.script)-10):]
	missing, extra = filter(s.missing, kept), filter(s.extra, func(l string, f parsed) bool {
		a, ok := f.asksFor()
		return kept(l, f) || ok && slices.ContainsFunc(recent, func(line string) bool {
			return strings.Contains(line, "dst="+a.String()+",") || strings.Contains(line, "dst="+a.String()+")")
		})
	})
	// The kernel asks from the source of the packet if it is its own.
	asking := func(f parsed) string {
		if a, ok := f.asksFor(); ok {
			return f.link + " " + a.String()
		}
		return ""
	}
	sm, sx := s.pairs(asking, asking)
	missing, extra = append(subtract(missing, sm), sm...), append(subtract(extra, sx), sx...)
	// An entry that was made stale is resolved at once, and has the right hardware address sooner.
	m, x := s.pairs(func(f parsed) string {
		eth, ok := packet.Find[*packet.Ethernet](f.p)
		if !ok || !s.did(func(line string) bool {
			return strings.Contains(line, " nud stale") && strings.Contains(line, " lladdr "+eth.Dst.String()+" ")
		}) {
			return ""
		}
		return f.toAnybody()
	}, func(f parsed) string {
		eth, ok := packet.Find[*packet.Ethernet](f.p)
		if !ok || !s.world.wire.answers(f.link, eth.Dst) {
			return ""
		}
		return f.toAnybody()
	})
	return append(missing, m...), append(extra, x...)
}

// tooBig reports whether a packet is an ICMP error about the size of another one.
func tooBig(p packet.Packet) bool {
	i, ok := packet.Find[*packet.ICMP](p)
	return ok && (i.V6 && i.Type == 2 || !i.V6 && i.Type == 3 && i.Code == 4)
}

// staleProbed: the eBPF datapath has stale entries of the neighbour table probed that it may use soon. A step or an ARP
// request of the host has made the entry.
func staleProbed(s *situation) (missing, extra []string) {
	return nil, filter(s.extra, func(_ string, f parsed) bool {
		eth, ok := packet.Find[*packet.Ethernet](f.p)
		a, asks := f.asksFor()
		return asks && ok && eth.Dst[0]&1 == 0 && s.did(func(line string) bool {
			return names(line, "stale", a) || strings.Contains(line, "spa="+a.String()+",")
		})
	})
}

// errorsOverHops: of several equal next hops, the kernel selects the next hop of an ICMP error by the quoted packet, eBPF
// by the addresses of the error.
func errorsOverHops(s *situation) (missing, extra []string) {
	several := slices.ContainsFunc(s.run.script, func(line string) bool {
		return strings.Contains(line, " nexthop via ")
	})
	if !several || !strings.HasPrefix(s.line, "error ") {
		return nil, nil
	}
	asks := func(_ string, f parsed) bool {
		a, ok := f.asksFor()
		return ok && s.did(func(line string) bool { return names(line, "nexthop", a) })
	}
	if len(s.missing) == 0 {
		return nil, filter(s.extra, asks)
	}
	missing, extra = s.pairs(parsed.anyWay, parsed.anyWay)
	if len(missing) == 0 {
		return nil, nil
	}
	return append(missing, filter(s.missing, asks)...), append(extra, filter(s.extra, asks)...)
}

// ownRedirects: nftables has given a packet that leaves by the link that it arrived on another source, so that the kernel
// sends a redirect (RFC 4861 §8) to a host on another link.
func ownRedirects(s *situation) (missing, extra []string) {
	const redirect = 137
	return filter(s.missing, func(_ string, f parsed) bool {
		i, ok := packet.Find[*packet.ICMP](f.p)
		return ok && i.V6 && i.Type == redirect && f.link != s.world.last[s.talk()].link
	}), nil
}

// oddDestinations: nftables translates packets to link-local IPv6 addresses that leave by the link that they arrived
// on, which eBPF leaves to the kernel.
func oddDestinations(s *situation) (missing, extra []string) {
	odd := func(f parsed) string {
		_, dst := f.ends(0)
		if !dst.Is6() || !dst.IsLinkLocalUnicast() {
			return ""
		}
		return f.without(0, true, false)
	}
	return s.pairs(odd, odd)
}

// optionsLeft: eBPF forwards IPv4 options as they are; the kernel enters its address for record route and timestamp,
// and answers with the options in its errors.
func optionsLeft(s *situation) (missing, extra []string) {
	if s.world.sent == nil {
		return nil, nil
	}
	ip, ok := packet.Find[*packet.IPv4](s.world.sent)
	if !ok || len(ip.Options) == 0 {
		return nil, nil
	}
	const recordRoute, timestamp = 0x07, 0x44
	written := ip.Options[0] == recordRoute || ip.Options[0] == timestamp
	without := func(f parsed) string {
		if f.error == nil && !written {
			return ""
		}
		for _, at := range f.at {
			if ip, ok := f.p[at].(*packet.IPv4); ok {
				ip.Options, ip.Checksum, ip.Length, ip.IHL = nil, packet.Forced{}, packet.Forced{}, packet.Forced{}
				if len(f.at) > 1 {
					ip.TOS = 0
				}
			}
		}
		if f.error != nil {
			f, _ = parse(f.without(1, true, true))
			for _, l := range f.p { // the more options, the less is quoted
				switch l := l.(type) {
				case *packet.Data:
					l.Bytes = nil
				case *packet.UDP:
					l.Length = packet.Forced{}
				}
			}
			return f.anyWay()
		}
		return f.link + " " + f.p.String()
	}
	return s.pairs(without, without)
}

// sourceRoutes: eBPF drops packets with a source route. The kernel forwards them if accept_source_route is set.
func sourceRoutes(s *situation) (missing, extra []string) {
	ip, ok := packet.Find[*packet.IPv4](s.world.sent)
	accepted := false
	for key, value := range s.run.settings {
		accepted = accepted || strings.HasSuffix(key, "accept_source_route") && value == "1"
	}
	if !ok || len(ip.Options) == 0 || ip.Options[0] != 0x83 {
		return nil, nil
	}
	if !accepted {
		return nil, nil
	}
	return filter(s.missing, func(_ string, f parsed) bool {
		_, asks := f.asksFor()
		return asks || passes(s.world.sent, f.p) || f.error != nil && ofSent(s, f)
	}), nil
}

// ownUntranslated: eBPF does not see packets of the gateway's own sockets. nftables translates such packets if their
// source is an inside address.
func ownUntranslated(s *situation) (missing, extra []string) {
	if !strings.HasPrefix(s.line, "emit ") {
		return nil, nil
	}
	without := func(f parsed) string { return f.without(0, true, false) }
	return s.pairs(without, without)
}

// notRemembered: eBPF has no state of a connection that no rule translates. When its route changes to the "out" of a
// rule, its packets are translated, or refused where they cannot open a flow. When the route changes back, that flow ends
// with the next packet.
func notRemembered(s *situation) (missing, extra []string) {
	if verb, _, _ := strings.Cut(s.line, " "); !slices.Contains([]string{"reply", "again", "error"}, verb) || !s.rerouted() {
		return nil, nil
	}
	untranslated := func(f parsed) bool {
		if s.world.sent == nil {
			return false
		}
		sent := parsed{p: s.world.sent, at: []int{1}}
		a, b := sent.ends(0)
		c, d := f.ends(0)
		return f.link == "wan" && a == c && b == d
	}
	missing, extra = s.pairs(func(f parsed) string {
		if !untranslated(f) {
			return ""
		}
		return f.without(0, true, false)
	}, func(f parsed) string {
		if src, _ := f.ends(0); f.link != "wan" || !pooled[src] {
			return ""
		}
		return f.without(0, true, false)
	})
	if len(s.extra) == 0 && s.run.late() {
		missing = filter(s.missing, func(_ string, f parsed) bool { return untranslated(f) || ofSent(s, f) })
	}
	return missing, extra
}

// ofSent reports whether a frame is the packet of the step, untranslated, or an error about it.
func ofSent(s *situation, f parsed) bool {
	if s.world.sent == nil || len(f.at) == 0 {
		return false
	}
	a, b := parsed{p: s.world.sent, at: []int{1}}.ends(0)
	c, d := f.ends(len(f.at) - 1)
	return a == c && b == d
}

// rerouted reports whether routes have changed since the conversation of the step began.
func (s *situation) rerouted() bool {
	script := s.run.script
	at := max(0, slices.IndexFunc(script, func(line string) bool { return strings.HasPrefix(line, "send "+s.talk()+" ") }))
	return slices.ContainsFunc(script[at:], func(line string) bool {
		return strings.HasPrefix(line, "ip ") && (strings.Contains(line, "route ") || strings.Contains(line, "rule ") || strings.Contains(line, "nexthop "))
	})
}

// reroutedEnds: if the route of a masquerade or snat flow changes to an interface outside the rule, eBPF ends the flow
// with the next packet of the inside host. nftables ends only some flows, at the change. The host then gets no reply,
// which it gets on eBPF.
func reroutedEnds(s *situation) (missing, extra []string) {
	if verb, _, _ := strings.Cut(s.line, " "); verb != "reply" && verb != "again" || !s.rerouted() || s.world.sent == nil {
		return nil, nil
	}
	if _, to := (parsed{p: s.world.sent, at: []int{1}}).ends(0); pooled[to] && len(s.missing) == 0 && s.world.last[s.talk()].link == "wan" {
		return nil, filter(s.extra, func(_ string, f parsed) bool {
			_, asks := f.asksFor()
			return f.link != "wan" && (asks || passes(s.world.sent, f.p))
		})
	}
	if !s.run.late() {
		return nil, nil
	}
	return filter(s.missing, func(_ string, f parsed) bool {
		src, _ := f.ends(0)
		return f.error == nil && pooled[src] && f.link != "wan"
	}), nil
}

// broadcastSources: eBPF refuses IPv4 packets from the broadcast address of a network (RFC 1812 §5.3.7). The kernel
// refuses them if rp_filter is set, or after a rule was added by "ip rule". Otherwise it gets the packet untranslated, and
// may report that the next hop does not answer.
func broadcastSources(s *situation) (missing, extra []string) {
	ip, ok := packet.Find[*packet.IPv4](s.world.sent)
	extra = filter(s.extra, func(_ string, f parsed) bool { return f.error != nil && ofSent(s, f) })
	if !ok || !slices.Contains(broadcasts, ip.Src) || len(s.extra) > len(extra) || !s.run.late() {
		return nil, nil
	}
	return s.missing, extra
}

// broadcasts are the broadcast addresses of the networks of the links.
var broadcasts = addrs("203.0.113.255", "10.0.2.255", "10.0.3.255")
