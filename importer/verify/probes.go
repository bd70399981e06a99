// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/importer/draft"
	"github.com/sluice-lb/sluice/model"
)

// ruleValues has the values in a rule that probes use.
type ruleValues struct {
	interfaces []string
	sources    []netip.Prefix
	dests      []netip.Prefix
	targets    []netip.Addr
	protocol   flow.Protocol
	ports      []uint16
}

var (
	prefixPattern = `((?:\d{1,3}\.){3}\d{1,3}(?:/\d+)?|[0-9a-fA-F]*:[0-9a-fA-F:.]*(?:/\d+)?)`
	sourceWord    = regexp.MustCompile(`(?:-s|--src-range|saddr)\s+(?:!=\s+)?(?:\{ )?` + prefixPattern)
	destWord      = regexp.MustCompile(`(?:-d|--dst-range|daddr)\s+(?:!=\s+)?(?:\{ )?` + prefixPattern)
	targetWord    = regexp.MustCompile(`(?:--to-destination|--to-source|--to|dnat to|snat to)\s+\[?` + prefixPattern)
	inWord        = regexp.MustCompile(`(?:-i|iifname|iif)\s+(?:!=\s+)?"?([\w.@+*-]+)`)
	outWord       = regexp.MustCompile(`(?:-o|oifname|oif)\s+(?:!=\s+)?"?([\w.@+*-]+)`)
	portWord      = regexp.MustCompile(`(?:--dports?|--destination-ports?|dport)\s+(?:!=\s+)?(?:\{ )?([\d:, -]+)`)
	toPortWord    = regexp.MustCompile(`(?:--to-ports|\d:|\]:)\s*(\d{1,5})`)
	protocolWord  = regexp.MustCompile(`(?:-p|l4proto|^|\s)\s*(tcp|udp|icmpv6|icmp|ipv6-icmp)\b`)
)

func prefixOf(s string) (netip.Prefix, bool) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Masked(), true
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, a.BitLen()), true
}

func mentionsOf(text string) (m ruleValues) {
	prefixes := func(word *regexp.Regexp) (list []netip.Prefix) {
		for _, s := range word.FindAllStringSubmatch(text, -1) {
			if p, ok := prefixOf(s[1]); ok {
				list = append(list, p)
			}
		}
		return list
	}
	m.sources, m.dests = prefixes(sourceWord), prefixes(destWord)
	for _, p := range prefixes(targetWord) {
		m.targets = append(m.targets, p.Addr())
	}
	for _, s := range inWord.FindAllStringSubmatch(text, -1) {
		m.interfaces = append(m.interfaces, s[1])
	}
	port := func(s string) {
		if n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 16); err == nil && n > 0 {
			m.ports = append(m.ports, uint16(n))
		}
	}
	for _, s := range portWord.FindAllStringSubmatch(text, -1) {
		for _, part := range strings.FieldsFunc(s[1], func(r rune) bool { return strings.ContainsRune(":, -", r) }) {
			port(part)
		}
	}
	for _, s := range toPortWord.FindAllStringSubmatch(text, -1) {
		port(s[1])
	}
	switch s := protocolWord.FindStringSubmatch(text); {
	case s == nil:
	case s[1] == "tcp":
		m.protocol = flow.TCP
	case s[1] == "udp":
		m.protocol = flow.UDP
	default:
		m.protocol = flow.ICMP
	}
	return m
}

// Probes returns probes for the rules of an import. Each has the values of one rule, some replaced
// by values of other rules or of the host.
func Probes(h model.Host, r *draft.Result, n int, random *rand.Rand) (list []Probe) {
	var rules []ruleValues
	all := ruleValues{}
	for _, l := range r.Lines {
		m := mentionsOf(l.Text)
		if len(m.interfaces)+len(m.sources)+len(m.dests)+len(m.targets)+len(m.ports) == 0 && !strings.Contains(l.Text, " -j ") {
			continue
		}
		rules = append(rules, m)
		all.sources, all.dests = append(all.sources, m.sources...), append(all.dests, m.dests...)
		all.targets, all.ports = append(all.targets, m.targets...), append(all.ports, m.ports...)
	}
	if len(rules) == 0 {
		rules = []ruleValues{{}}
	}
	g := &probeGenerator{h: h, all: all, Rand: random}
	for tries := 0; len(list) < n && tries < 20*n; tries++ {
		if p, ok := g.probe(rules[random.IntN(len(rules))]); ok {
			list = append(list, p)
		}
	}
	return list
}

type probeGenerator struct {
	h   model.Host
	all ruleValues
	*rand.Rand
}

func choose[T any](g *probeGenerator, list []T) (x T, ok bool) {
	if len(list) == 0 {
		return x, false
	}
	return list[g.IntN(len(list))], true
}

// sample returns an address of a prefix, preferably of one of the host's neighbours.
func (g *probeGenerator) sample(p netip.Prefix) netip.Addr {
	if p.IsSingleIP() {
		return p.Addr()
	}
	var known []netip.Addr
	for _, n := range g.h.Neighbours {
		if p.Contains(n.Address) {
			known = append(known, n.Address)
		}
	}
	if a, ok := choose(g, known); ok {
		return a
	}
	a := p.Addr()
	for range 1 + g.IntN(30) {
		a = a.Next()
	}
	if !p.Contains(a) {
		return p.Addr()
	}
	return a
}

// anyAddress returns an address of the host, of its neighbours, of the rules, or of the outside.
func (g *probeGenerator) anyAddress(six bool) netip.Addr {
	var list []netip.Addr
	for _, i := range g.h.Interfaces {
		for _, p := range i.Addresses {
			list = append(list, p.Addr())
		}
	}
	for _, n := range g.h.Neighbours {
		list = append(list, n.Address)
	}
	for _, p := range slices.Concat(g.all.sources, g.all.dests) {
		list = append(list, g.sample(p))
	}
	list = append(list, g.all.targets...)
	outside := []string{"192.0.2.9", "192.0.2.140", "203.0.113.200"}
	if six {
		outside = []string{"2001:db8:9::9"}
	}
	for _, s := range outside {
		list = append(list, netip.MustParseAddr(s))
	}
	list = slices.DeleteFunc(list, func(a netip.Addr) bool { return a.Is6() != six || a.IsMulticast() || a.IsUnspecified() })
	a, _ := choose(g, list)
	return a
}

// probe returns one probe. ok is false if no host with the address can send to the interface.
func (g *probeGenerator) probe(m ruleValues) (p Probe, ok bool) {
	six := false
	for _, x := range slices.Concat(m.sources, m.dests) {
		six = six || x.Addr().Is6()
	}
	for _, x := range m.targets {
		six = six || x.Is6()
	}
	other := func() bool { return g.IntN(5) == 0 }
	if x, found := choose(g, m.dests); found && !other() {
		p.Dst = g.sample(x)
	} else if x, found := choose(g, m.targets); found && g.IntN(4) == 0 {
		p.Dst = x
	} else {
		p.Dst = g.anyAddress(six)
	}
	if x, found := choose(g, m.sources); found && !other() {
		p.Src = g.sample(x)
	} else {
		p.Src = g.anyAddress(six)
	}
	p.Protocol = m.protocol
	if p.Protocol == flow.Any || other() {
		p.Protocol = []flow.Protocol{flow.TCP, flow.TCP, flow.UDP, flow.ICMP}[g.IntN(4)]
	}
	if six && p.Protocol == flow.ICMP {
		p.Protocol = flow.ICMPv6
	}
	if x, found := choose(g, m.ports); found && !other() {
		p.DstPort = x
	} else if x, found := choose(g, g.all.ports); found && g.IntN(3) > 0 {
		p.DstPort = x + uint16(g.IntN(2))
	} else {
		p.DstPort = []uint16{80, 443, 22, 53, 9999}[g.IntN(5)]
	}
	if p.DstPort == 0 || p.Dst.Is6() != p.Src.Is6() || p.Dst == p.Src || !p.Dst.IsValid() {
		return p, false
	}
	own := slices.ContainsFunc(g.h.Interfaces, func(i model.Interface) bool {
		return slices.ContainsFunc(i.Addresses, func(x netip.Prefix) bool { return x.Addr() == p.Src })
	})
	if own {
		if g.IntN(2) == 0 || p.Protocol != flow.TCP && p.Protocol != flow.UDP {
			return p, false
		}
		p.Src = netip.Addr{} // chosen by the kernel
		return p, true
	}
	return p, g.setArrival(&p)
}

// setArrival sets the interface by which packets of the source arrive: the route to the source uses it.
func (g *probeGenerator) setArrival(p *Probe) bool {
	hop, via, best := "", p.Src, -1
	for _, i := range g.h.Interfaces {
		for _, x := range i.Addresses {
			if x.Contains(p.Src) && x.Bits() > best {
				hop, best = i.Name, x.Bits()
			}
		}
	}
	for _, r := range g.h.Routes {
		if r.To.Contains(p.Src) && r.To.Bits() > best {
			hop, via, best = r.Interface, r.Via, r.To.Bits()
		}
	}
	i, found := g.h.Interface(hop)
	if !found {
		return false
	}
	for _, n := range g.h.Neighbours {
		if n.Interface == hop && n.Address == via {
			p.In, p.FromMAC, p.ToMAC = hop, n.MAC, i.MAC
			return true
		}
	}
	return false
}
