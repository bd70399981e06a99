// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"os"
	"strings"
)

// change is a random change of the gateway's environment, and what ends it. SLUICE_ORACLE_CHANGES lists the kinds to
// choose from, separated by commas.
func (g *generator) change() (steps, undo []string) {
	kinds := []string{"setting", "setting", "route", "route", "route", "neighbour", "neighbour", "host", "address", "link", "rule", "rule"}
	if only := os.Getenv("SLUICE_ORACLE_CHANGES"); only != "" {
		kinds = strings.Split(only, ",")
	}
	kind := pick(g, kinds)
	of, ok := map[string]func() ([]string, []string){"setting": g.setting, "route": g.route, "neighbour": g.neighbour, "host": g.host,
		"address": g.address, "link": g.link, "rule": g.rule}[kind]
	if !ok {
		panic("SLUICE_ORACLE_CHANGES: no kind " + kind)
	}
	return of()
}

func (g *generator) setting() (steps, undo []string) {
	link := pick(g, linkNames) + "0"
	all := func(name string, values ...string) (steps, undo []string) {
		key := "net." + name
		was := "0"
		if strings.HasSuffix(name, "forwarding") {
			was = "1"
		}
		return []string{"sysctl " + key + "=" + pick(g, values)}, []string{"sysctl " + key + "=" + was}
	}
	conf4, conf6 := "ipv4.conf."+pick(g, []string{link, link, "all"})+".", "ipv6.conf."+link+"."
	return pick(g, []func() ([]string, []string){
		func() ([]string, []string) { return all(conf4+"rp_filter", "1", "2") },
		func() ([]string, []string) { return all("ipv4.conf."+link+".forwarding", "0") },
		func() ([]string, []string) { return all(conf6+"forwarding", "0") },
		func() ([]string, []string) { return all(conf4+"arp_ignore", "1", "2") },
		func() ([]string, []string) { return all(conf4+"arp_filter", "1") },
		func() ([]string, []string) { return all(conf4+"arp_announce", "1", "2") },
		func() ([]string, []string) { return all(conf4+"accept_local", "1") },
		func() ([]string, []string) { return all(conf4+"proxy_arp", "1") },
		func() ([]string, []string) { return all(conf4+"accept_source_route", "1") },
		func() ([]string, []string) { return all(conf4+"route_localnet", "1") },
		func() ([]string, []string) { return all(conf4+"bc_forwarding", "1") },
		func() ([]string, []string) { return all("ipv4.ip_forward_use_pmtu", "1") },
		func() ([]string, []string) { return all("ipv4.icmp_errors_use_inbound_ifaddr", "1") },
		func() ([]string, []string) { return all("ipv4.fib_multipath_hash_policy", "1", "2") },
		func() ([]string, []string) { return all("ipv4.icmp_echo_ignore_all", "1") },
		func() ([]string, []string) { return all("ipv6.fib_multipath_hash_policy", "1") },
	})()
}

// Where routes lead: prefixes that conversations go to.
var (
	routed4 = []string{"198.51.100.0/24", "198.51.100.7/32", "198.18.0.0/15", "10.0.2.3/32", "10.0.3.2/32", "10.0.20.0/24", "10.0.2.2/32", "0.0.0.0/1"}
	routed6 = []string{"2001:db8:9::/64", "2001:db8:9::7/128", "fd00:2::2/128", "fd00:3::2/128", "fd00:20::/64"}
)

func (g *generator) route() (steps, undo []string) {
	family, to := "", pick(g, routed4)
	ways := []string{"via 203.0.113.3", "via 203.0.113.3 dev wan0 onlink", "via 10.0.3.8", "via 10.0.2.8", "via 203.0.113.99", "via inet6 fe80::2 dev wan0", "dev wan0", "via 203.0.113.2"}
	sources := []string{"203.0.113.1", "10.0.2.1"}
	multi := []string{"nexthop via 203.0.113.3 dev wan0 nexthop via 203.0.113.2 dev wan0", "nexthop via 10.0.3.8 dev dmz0 nexthop via 203.0.113.3 dev wan0"}
	if g.IntN(3) == 0 {
		family, to = "-6 ", pick(g, routed6)
		ways = []string{"via 2001:db8:1::3", "via fe80::3 dev wan0", "via fd00:3::8", "via fd00:2::8", "via 2001:db8:1::99", "dev wan0"}
		sources = []string{"2001:db8:1::1", "fd00:2::1"}
		multi = []string{"nexthop via 2001:db8:1::3 dev wan0 nexthop via 2001:db8:1::2 dev wan0", "nexthop via fd00:3::8 dev dmz0 nexthop via 2001:db8:1::3 dev wan0"}
	}
	undo = []string{"ip " + family + "route del " + to}
	if way := map[string]string{"10.0.20.0/24": "via 10.0.2.8", "fd00:20::/64": "via fd00:2::8"}[to]; way != "" { // that the topology has
		undo = []string{"ip " + family + "route replace " + to + " " + way}
	}
	add := func(way string) []string {
		return []string{"ip " + family + "route replace " + to + " " + way}
	}
	switch g.IntN(13) {
	case 12:
		if family == "" { // IPv6 routes have no type of service
			to += " tos " + pick(g, ruleClass)
			undo = []string{"ip route del " + to}
		}
	case 0:
		kind := pick(g, []string{"blackhole", "prohibit", "unreachable", "throw"})
		return []string{"ip " + family + "route replace " + kind + " " + to}, undo
	case 1:
		return add(pick(g, multi)), undo
	case 2:
		id := 100 + g.next
		g.next++
		way := pick(g, []string{"via 203.0.113.3 dev wan0", "via 10.0.3.8 dev dmz0", "blackhole"})
		if family != "" {
			way = pick(g, []string{"via 2001:db8:1::3 dev wan0", "blackhole"})
		}
		return []string{fmt.Sprintf("ip %snexthop replace id %d %s", family, id, way), fmt.Sprintf("ip %sroute replace %s nhid %d", family, to, id)},
			append(undo, fmt.Sprintf("ip nexthop del id %d", id))
	case 3:
		return add(pick(g, ways) + " src " + pick(g, sources)), undo
	case 4, 5, 6:
		return add(pick(g, ways) + fmt.Sprintf(" mtu %s%d", g.maybe(3, "lock "), pick(g, []int{1280, 1400, 1380, 1000, 1500}))), undo
	}
	return add(pick(g, ways)), undo
}

// Selectors of rules of "ip rule", by the field that they select.
var (
	ruleFrom4 = []string{"10.0.2.3", "10.0.2.0/24", "10.0.3.0/25", "198.51.100.8", "198.51.100.0/24", "192.0.2.0/24", "203.0.113.1", "203.0.113.0/24", "10.0.20.0/24"}
	ruleTo4   = []string{"198.51.100.8", "198.51.100.0/24", "10.0.2.2", "10.0.2.0/24", "10.0.3.3", "203.0.113.1", "192.0.2.10", "203.0.113.203"}
	ruleFrom6 = []string{"fd00:2::3", "fd00:2::/64", "fd00:3::/64", "2001:db8:9::8", "2001:db8:9::/64", "2001:db8:a::/64", "2001:db8:1::1", "fd00:20::/64"}
	ruleTo6   = []string{"2001:db8:9::8", "2001:db8:9::/64", "fd00:2::2", "fd00:2::/64", "fd00:3::/64", "2001:db8:1::1", "2001:db8:a::10"}
	ruleClass = []string{"0x10", "0x04", "0x18", "0x08"}
	rulePorts = []string{"53", "80", "8080", "5353", "8000-9000", "20000-29999", "30000-30400"}
)

// selector returns the selectors of a rule.
func (g *generator) selector(v6 bool) string {
	from, to, icmp := ruleFrom4, ruleTo4, "icmp"
	if v6 {
		from, to, icmp = ruleFrom6, ruleTo6, "ipv6-icmp"
	}
	s := g.maybe(6, "not ")
	for s == "" || s == "not " || g.IntN(4) == 0 {
		s += pick(g, []func() string{
			func() string { return "from " + pick(g, from) },
			func() string { return "to " + pick(g, to) },
			func() string { return "iif " + pick(g, linkNames) + "0" },
			func() string { return "tos " + pick(g, ruleClass) },
			func() string {
				return "ipproto " + pick(g, []string{"udp", "tcp"}) + pick(g, []string{"", " sport " + pick(g, rulePorts), " dport " + pick(g, rulePorts)})
			},
			func() string { return pick(g, []string{"sport ", "dport "}) + pick(g, rulePorts) },
			func() string { return "ipproto " + icmp },
			func() string { return "iif lo" },
		})() + " "
	}
	return s
}

// rule adds a rule of "ip rule", and the routes of its table.
func (g *generator) rule() (steps, undo []string) {
	v6 := g.IntN(3) == 0
	family, to := "", routed4
	ways := []string{"via 203.0.113.3", "via 203.0.113.2", "via 10.0.3.8", "via 10.0.2.8", "dev wan0"}
	if v6 {
		family, to = "-6 ", routed6
		ways = []string{"via 2001:db8:1::3", "via 2001:db8:1::2", "via fd00:3::8", "via fd00:2::8", "dev wan0"}
	}
	g.next++
	table := 200 + g.IntN(5)
	priority := (1+g.IntN(300))*100 + g.next%100 // no two rules in force have the same
	action := fmt.Sprintf("lookup %d", table)
	undo = []string{fmt.Sprintf("ip %srule del priority %d", family, priority)}
	switch g.IntN(8) {
	case 0:
		action = pick(g, []string{"blackhole", "unreachable", "prohibit"})
	case 1:
		action = fmt.Sprintf("goto %d", pick(g, []int{priority + 1 + g.IntN(32700-priority), 32766, 32767}))
	case 2:
		action = "lookup main suppress_prefixlength " + pick(g, []string{"0", "24", "64"})
	default:
		destinations := []string{"default"}
		if g.IntN(3) == 0 {
			destinations = append(destinations[:g.IntN(2)], pick(g, to))
		}
		for _, to := range destinations {
			route := to + " " + pick(g, ways)
			if g.IntN(5) == 0 {
				route = pick(g, []string{"blackhole ", "prohibit ", "unreachable ", "throw "}) + to
			}
			steps = append(steps, fmt.Sprintf("ip %sroute replace %s table %d", family, route, table))
		}
		undo = append(undo, fmt.Sprintf("ip %sroute flush table %d", family, table))
		action += g.maybe(6, " suppress_prefixlength 0")
	}
	return append(steps, fmt.Sprintf("ip %srule add %spriority %d %s", family, g.selector(v6), priority, action)), undo
}

// Addresses of neighbours, by link.
var neighbours = map[string][]string{
	"wan": {"203.0.113.2", "203.0.113.3", "203.0.113.9", "2001:db8:1::2", "2001:db8:1::3", "2001:db8:1::9"},
	"lan": {"10.0.2.2", "10.0.2.3", "10.0.2.4", "10.0.2.8", "fd00:2::2", "fd00:2::3", "fd00:2::8"},
	"dmz": {"10.0.3.2", "10.0.3.3", "10.0.3.8", "fd00:3::2", "fd00:3::8"},
}

func (g *generator) neighbour() (steps, undo []string) {
	link := pick(g, linkNames)
	a := pick(g, neighbours[link])
	mac := fmt.Sprintf("02:00:00:00:%02x:%02x", linkNumber[link], 2+g.IntN(18))
	restore := fmt.Sprintf("ip neigh del %s dev %s0", a, link)
	switch g.IntN(8) {
	case 0:
		return []string{restore}, nil
	case 1:
		return []string{fmt.Sprintf("ip neigh replace %s dev %s0 nud failed", a, link)}, nil
	case 2:
		return []string{fmt.Sprintf("ip neigh replace %s lladdr %s dev %s0 nud stale", a, mac, link)}, []string{restore}
	case 3:
		return []string{fmt.Sprintf("ip neigh add proxy %s dev %s0", pick(g, []string{"10.0.2.77", "203.0.113.201", "fd00:2::77"}), link)}, nil
	case 4:
		return []string{"ip neigh flush dev " + link + "0"}, nil
	}
	return []string{fmt.Sprintf("ip neigh replace %s lladdr %s dev %s0 nud %s", a, mac, link, pick(g, []string{"permanent", "reachable", "noarp"}))}, []string{restore}
}

// host changes one at the far end of a link.
func (g *generator) host() (steps, undo []string) {
	link := pick(g, linkNames)
	a := pick(g, neighbours[link])
	forget := fmt.Sprintf("ip neigh del %s dev %s0", a, link)
	if g.IntN(2) == 0 {
		return []string{"far silent " + link + " " + a, forget}, []string{"far answers " + link + " " + a, forget}
	}
	return []string{fmt.Sprintf("far moves %s %s 02:00:00:00:%02x:%02x", link, a, linkNumber[link], 0x40+g.IntN(8)), forget}, nil
}

func (g *generator) address() (steps, undo []string) {
	a := pick(g, []string{"203.0.113.50/24 dev wan0", "203.0.113.51/32 dev wan0", "169.254.3.1/16 dev lan0", "10.0.2.200/24 dev lan0", "192.0.2.200/32 dev lo",
		"10.9.9.1 peer 10.9.9.2/32 dev dmz0", "2001:db8:1::50/64 dev wan0 nodad", "fd00:2::200/128 dev lan0 nodad", "2001:db8:1::51/64 dev wan0 nodad preferred_lft 0", "192.0.2.10/32 dev lo"})
	plain, _, _ := strings.Cut(a, " nodad")
	return []string{"ip addr add " + a}, []string{"ip addr del " + plain}
}

func (g *generator) link() (steps, undo []string) {
	link := pick(g, linkNames)
	if g.IntN(4) > 0 {
		return []string{fmt.Sprintf("ip link set %s0 mtu %d", link, pick(g, []int{1280, 1400, 1492}))}, []string{fmt.Sprintf("ip link set %s0 mtu 1500", link)}
	}
	name := fmt.Sprintf("mv%d", g.IntN(3))
	return []string{fmt.Sprintf("ip link add %s link %s0 address 02:00:00:00:%02x:f%d type macvlan mode bridge", name, link, linkNumber[link], g.IntN(3)),
			"sysctl net.ipv4.neigh." + name + ".proxy_delay=0", "sysctl net.ipv6.neigh." + name + ".proxy_delay=0", "ip link set " + name + " up"},
		[]string{"ip link del " + name}
}
