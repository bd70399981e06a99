// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"strings"
)

// change is a random change of the gateway's environment, and what ends it.
func (g *generator) change() (steps, undo []string) {
	return pick(g, []func() ([]string, []string){g.setting, g.setting, g.route, g.route, g.route, g.neighbour, g.neighbour, g.host, g.address, g.link, g.rule})()
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
	switch g.IntN(12) {
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

func (g *generator) rule() (steps, undo []string) {
	table := 200 + g.IntN(5)
	if g.IntN(3) == 0 {
		from := pick(g, []string{"from fd00:2::3", "to 2001:db8:9::8", "iif lan0"})
		way := pick(g, []string{"default via 2001:db8:1::3", "default via fd00:3::8", "unreachable default"})
		return []string{fmt.Sprintf("ip -6 route replace %s table %d", way, table), fmt.Sprintf("ip -6 rule add %s lookup %d priority %d", from, table, table)},
			[]string{fmt.Sprintf("ip -6 rule del priority %d", table), fmt.Sprintf("ip -6 route flush table %d", table)}
	}
	from := pick(g, []string{"from 10.0.2.3", "to 198.51.100.8", "iif lan0", "iif wan0", "tos 0x10", "ipproto udp dport 53", "from 203.0.113.1"})
	way := pick(g, []string{"default via 203.0.113.3", "default via 10.0.3.8", "blackhole default", "prohibit default"})
	return []string{fmt.Sprintf("ip route replace %s table %d", way, table), fmt.Sprintf("ip rule add %s lookup %d priority %d", from, table, table)},
		[]string{fmt.Sprintf("ip rule del priority %d", table), fmt.Sprintf("ip route flush table %d", table)}
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
