// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/model"
)

// embedIPv4 returns IPv4 addresses in an RFC 6052 prefix.
func embedIPv4(prefix string, addresses ...netip.Addr) []netip.Addr {
	var out []netip.Addr
	for _, a := range addresses {
		out = append(out, model.Embed(netip.MustParsePrefix(prefix), a))
	}
	return out
}

// natScenarios returns scenarios with several NAT rules of the same type.
func natScenarios() []Scenario {
	clients4 := Addresses("203.0.113.%d", 1, 40)
	inside4, inside6 := Addresses("10.0.2.%d", 2, 9), Addresses("fd00:2::%x", 2, 9)
	deep6 := Addresses("fd00:a:1:1::%x", 1, 9)
	far4, far6 := Addresses("198.18.0.%d", 1, 5), Addresses("2001:db8:9::%x", 1, 5)
	all := []Protocol{TCP, UDP, Ping, TCP, UDP, Other}
	through64 := slices.Concat(embedIPv4("3fff:32::/32", far4...), embedIPv4("2001:db8:4000::/40", far4...), embedIPv4("2001:db8:6448::/48", far4...),
		embedIPv4("2001:db8:6456:100::/56", far4...), embedIPv4("2001:db8:6464:1::/64", far4...), embedIPv4("64:ff9b::/96", far4...), far6)
	return []Scenario{
		{Name: "translators", YAML: translators, Opens: []Opening{{"lan0", slices.Concat(inside6, deep6), through64, []uint16{53, 80}, all},
			{"lan0", inside4, far4, []uint16{53, 80}, all},
			{"wan0", far4, Addresses("203.0.113.%d", 201, 206), []uint16{53, 80, 1024}, all}}},
		{Name: "explicit", YAML: explicit, Opens: []Opening{
			{"lan0", slices.Concat(inside6, deep6), slices.Concat(Addresses("fd00:a:4::%x", 1, 5), embedIPv4("2001:db8:6464:1::/64", far4...),
				embedIPv4("2001:db8:6464:1::/64", Addresses("203.0.113.%d", 16, 35)...), embedIPv4("2001:db8:4000::/40", far4...), far6), []uint16{53, 80}, all},
			{"wan0", far4, Addresses("203.0.113.%d", 14, 60), []uint16{53, 80}, all},
			{"wan0", singleAddress("198.51.100.2"), Addresses("203.0.113.%d", 14, 60), []uint16{53, 80}, all},
			{"wan0", append(Addresses("2001:db8:5::%x", 1, 5), embedIPv4("2001:db8:4000::/40", far4...)...), inside6, []uint16{53}, all}}},
		{Name: "customer", YAML: customer, HostLines: customerHost, Opens: []Opening{
			{"lan0", slices.Concat(inside4, Addresses("10.1.9.%d", 2, 4)), slices.Concat(far4, singleAddress("10.0.2.1"), singleAddress("10.1.9.9"), singleAddress("198.51.100.1"), Addresses("203.0.113.%d", 64, 76)), []uint16{53, 80}, all},
			{"wan0", embedIPv4("64:ff9b::/96", far4...), Addresses("2001:db8:c:464::%x", 0, 9), []uint16{53, 80}, all},
			{"wan0", append(far4, inside4[0]), slices.Concat(Addresses("203.0.113.%d", 64, 76), Addresses("203.0.113.%d", 128, 140), singleAddress("198.51.100.1"), far4), []uint16{53, 80}, all},
			{"lan0", slices.Concat(Addresses("fd00:a:9:0:%x00::", 0, 40), Addresses("fd00:b:%x::", 0, 40), inside6), slices.Concat(embedIPv4("2001:db8:6464:1::/64", far4...),
				embedIPv4("2001:db8:6464:1::/64", Addresses("203.0.113.%d", 64, 70)...), embedIPv4("2001:db8:4000::/40", far4...)), []uint16{53, 80}, all},
			{"lan0", embedIPv4("2001:db8:6448::/48", Addresses("203.0.113.%d", 220, 229)...), embedIPv4("2001:db8:6448::/48", far4...), []uint16{53, 80}, all},
			{"lan0", Addresses("2001:db8:c:464::%x", 1, 4), embedIPv4("64:ff9b::/96", far4...), []uint16{53}, all}}},
		{Name: "small-link", YAML: smallLink, HostLines: []string{"mtu wan0 1000", "route ::/0 via fd00:2::9 dev lan0"}, Opens: []Opening{
			{"lan0", inside6, embedIPv4("64:ff9b::/96", append(far4, netip.MustParseAddr("203.0.113.18"))...), []uint16{53, 80}, all},
			{"lan0", deep6, embedIPv4("2001:db8:4000::/40", far4...), []uint16{53, 80}, all},
			{"wan0", far4, Addresses("203.0.113.%d", 16, 25), []uint16{53, 80}, all}}},
		{Name: "unnumbered", YAML: smallLink, HostLines: []string{"unnumbered wan0"}, Opens: []Opening{
			{"lan0", inside6, embedIPv4("64:ff9b::/96", far4...), []uint16{53, 80}, all},
			{"wan0", far4, Addresses("203.0.113.%d", 16, 25), []uint16{53, 80}, all}}},
		{Name: "precedence", YAML: precedence, Opens: []Opening{
			{"lan0", slices.Concat(inside4, Addresses("10.1.9.%d", 2, 9)), slices.Concat(far4, Addresses("198.51.100.%d", 130, 144), Addresses("198.18.7.%d", 1, 3)), []uint16{53, 80}, all},
			{"wan0", clients4, slices.Concat(Addresses("198.51.100.%d", 130, 144), Addresses("203.0.113.%d", 201, 203)), []uint16{53, 80, 9}, all},
			{"lan0", slices.Concat(inside6, deep6, Addresses("fd00:a:56:1ff::%x", 1, 5), Addresses("fd00:a:60:f::%x:1", 1, 5), Addresses("fd00:a:64:1::%x", 1, 5)),
				slices.Concat(far6, Addresses("2001:db8:9:1::%x", 1, 3), Addresses("2001:db8:56:2ff:1::%x", 1, 3)), []uint16{53, 80}, all},
			{"wan0", far6, slices.Concat(Addresses("2001:db8:56:2ff:1::%x", 1, 5), Addresses("2001:db8:60:1f:1::%x", 1, 5), Addresses("2001:db8:64:2::%x", 1, 5),
				Addresses("2001:db8:72::%x", 1, 9)), []uint16{53, 80}, all}}},
		{Name: "borders", YAML: borders, Opens: []Opening{
			{"lan0", slices.Concat(inside4, Addresses("10.1.9.%d", 2, 9)), slices.Concat(far4, singleAddress("198.51.100.1"), singleAddress("203.0.113.203"), singleAddress("203.0.113.204"), singleAddress("10.0.2.1")), []uint16{53, 80, 8003}, all},
			{"lan0", slices.Concat(inside6, deep6), slices.Concat(far6, singleAddress("2001:db8:ff::1"), singleAddress("2001:db8:ab::3")), []uint16{53, 80, 8003}, all},
			{"wan0", clients4, slices.Concat(singleAddress("198.51.100.1"), Addresses("203.0.113.%d", 201, 204)), []uint16{22, 80, 53, 8003}, all},
			{"wan0", far6, slices.Concat(singleAddress("2001:db8:ff::1"), Addresses("2001:db8:ab::%x", 1, 3)), []uint16{22, 80, 8003}, all}}},
	}
}

// Several nat64 rules, each with another prefix length and other limits. The last one shares its
// addresses with snat and a port-forward rule.
const translators = `
lowest-ipv6-mtu: 1280
nat:
  - {name: p32, type: nat64, prefix: "3fff:32::/32", source: ["fd00:2::/126"], out: wan0, pool: [203.0.113.201], filtering: address-dependent}
  - {name: p40, type: nat64, prefix: "2001:db8:4000::/40", source: ["fd00:2::/64"], pool: [203.0.113.202], ports: 2000-2999, port-block: 20, ports-per-client: 40, unreachable: prohibited}
  - {name: p48, type: nat64, prefix: "2001:db8:6448::/48", in: lan0, pool: [203.0.113.203], connections-per-client: 8, except: [198.18.0.1/32]}
  - {name: p56, type: nat64, prefix: "2001:db8:6456:100::/56", source: ["fd00:2::/64"], pool: [203.0.113.204], ports: 512-4000, mapping: address-and-port-dependent, filtering: address-and-port-dependent, mss-clamp: true}
  - {name: p64, type: nat64, prefix: "2001:db8:6464:1::/64", source: ["fd00:2::/122"], pool: [203.0.113.206], ports: 4000-4999, port-block: 10, deterministic: true}
  - {name: p96, type: nat64, prefix: "64:ff9b::/96", pool: [203.0.113.205], filtering: address-and-port-dependent, hairpin: off, mss-clamp: true, except: ["64:ff9b::c612:2/128"]}
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201, 203.0.113.205]}
  - {name: http, type: port-forward, listen: {address: 203.0.113.205, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
`

// siit rules with mappings only, with nested mappings, and with a prefix only.
const explicit = `
lowest-ipv6-mtu: 1280
nat:
  - {name: pairs, type: siit, in: lan0, eam: [{ipv4: 203.0.113.32/28, ipv6: "fd00:a:1:1::/124"}, {ipv4: 203.0.113.48/32, ipv6: "fd00:a:1:1::3/128"},
     {ipv4: 198.18.0.0/29, ipv6: "fd00:a:4::/125"}, {ipv4: 203.0.113.34/31, ipv6: "fd00:a:1:2::/127"}]}
  - {name: both, type: siit, prefix: "2001:db8:6464:1::/64", except: [198.18.0.4/32], mss-clamp: true, eam: [{ipv4: 203.0.113.16/28, ipv6: "fd00:2::/124"},
     {ipv4: 203.0.113.17/32, ipv6: "fd00:2::3/128"}, {ipv4: 203.0.113.20/30, ipv6: "fd00:2::8/126"}]}
  - {name: bare, type: siit, prefix: "2001:db8:4000::/40"}
`

// A customer's router with mappings of other suffixes, a prefix only and nat64. The host has routes
// into all these prefixes, and the gateway has addresses inside.
const customer = `
nat:
  - {name: clat, type: siit, prefix: "64:ff9b::/96", in: lan0, out: wan0, pool: [192.0.2.8/30], traffic-class: 0, udp-zero-checksum: drop, except: [198.18.0.4/32],
     eam: [{ipv4: 10.0.2.0/24, ipv6: "2001:db8:c:464::/120"}]}
  - {name: wide, type: siit, prefix: "2001:db8:6464:1::/64", in: wan0, traffic-class: 184, eam: [{ipv4: 203.0.113.64/26, ipv6: "fd00:a:9::/64"},
     {ipv4: 203.0.113.128/26, ipv6: "fd00:b::/40"}]}
  - {name: outward, type: siit, prefix: "2001:db8:6448::/48", out: wan0, pool: [192.0.2.1]}
  - {name: plat, type: nat64, prefix: "2001:db8:4000::/40", source: ["fd00:2::/64"], pool: [203.0.113.201], out: wan0}
`

var customerHost = []string{"address wan0 203.0.113.66/32", "address lan0 fd00:a:9:0:1c00::1/128", "route 203.0.113.70/31 via 10.0.2.9 dev lan0",
	"route 64:ff9b::198.18.0.2/128 via 2001:db8:ff::2 dev wan0", "route 2001:db8:4000::/40 via fd00:2::9 dev lan0",
	"route 2001:db8:40c6:1200:3::/80 via fd00:2::9 dev lan0", "route 198.18.0.5/32 via 10.0.2.9 dev lan0", "route fd00:b::/32 via fd00:2::9 dev lan0",
	"route 2001:db8:6448::/48 via fd00:2::9 dev lan0", "route 2001:db8:c:464::8/128 via fd00:2::9 dev lan0"}

// siit and nat64 on hosts with an unusual outside link.
const smallLink = `
nat:
  - {name: bih, type: siit, prefix: "64:ff9b::/96", eam: [{ipv4: 203.0.113.16/28, ipv6: "fd00:2::/124"}]}
  - {name: v6only, type: nat64, prefix: "2001:db8:4000::/40", source: ["fd00:a:1:1::/64"], pool: [203.0.113.201]}
`

// Stateless rules together with stateful rules for the same hosts, in both orders.
const precedence = `
nat:
  - {name: dmz, type: static, external: 198.51.100.128/28, internal: 10.1.9.0/28, in: wan0, except: [198.18.7.0/24], mss-clamp: true}
  - {name: single, type: static, external: 198.51.100.144/32, internal: 10.0.2.3/32, hairpin: off}
  - {name: half, type: static, external: "2001:db8:72::8/125", internal: "fd00:2::8/125", in: wan0, out: lan0}
  - {name: n56, type: npt66, external: "2001:db8:56:200::/56", internal: "fd00:a:56:100::/56", except: ["2001:db8:9:1::/64"], mss-clamp: true}
  - {name: n60, type: npt66, external: "2001:db8:60:10::/60", internal: "fd00:a:60::/60", in: wan0, out: lan0}
  - {name: n64, type: npt66, external: "2001:db8:64:2::/64", internal: "fd00:a:64:1::/64"}
  - {name: office, type: snat, source: [10.0.2.0/24, 10.1.0.0/16], except: [198.18.7.1/32], to: [203.0.113.201]}
  - {name: office6, type: snat, source: ["fd00::/16"], out: wan0, to: ["2001:db8:ab::1"], mss-clamp: true}
  - {name: http, type: port-forward, listen: {address: 198.51.100.131, ports: [80]}, protocol: tcp, to: {address: 10.0.2.4, port: 8080}}
  - {name: dns, type: port-forward, listen: {address: 203.0.113.202}, protocol: udp, to: {address: 10.0.2.3}}
`

// Addresses of the gateway itself, port sets, and port-forward rules of both families.
const borders = `
nat:
  - {name: range, type: port-forward, listen: {address: 203.0.113.203, ports: [8000-8009, 80]}, protocol: tcp, to: {address: 10.0.2.2}, mss-clamp: true}
  - {name: quiet, type: port-forward, listen: {address: 203.0.113.204, ports: [80, 53]}, protocol: udp, to: {address: 10.0.2.3, port: 8080}, in: wan0, hairpin: off}
  - {name: own, type: port-forward, listen: {address: 198.51.100.1, ports: [80]}, protocol: tcp, to: {address: 10.0.2.4, port: 8080}}
  - {name: web6, type: port-forward, listen: {address: "2001:db8:ab::3", ports: [8000-8009]}, protocol: tcp, to: {address: "fd00:2::2"}}
  - {name: dns6, type: port-forward, listen: {address: "2001:db8:ab::3", ports: [53, 80]}, protocol: udp, to: {address: "fd00:2::3", port: 5353}}
  - {name: low, type: snat, source: [10.0.2.0/30], in: lan0, to: [203.0.113.201], ports: 100-1500, filtering: address-and-port-dependent, new-connections-per-client: 5/minute}
  - {name: blocks, type: snat, source: [10.0.2.4/31], out: wan0, to: [203.0.113.202, 203.0.113.203], ports: 2000-2039, port-block: 10, deterministic: true, unreachable: prohibited}
  - {name: few, type: snat, source: [10.0.2.6/31], to: [203.0.113.205], ports: 3000-3030, ports-per-client: 20, unreachable: prohibited, except: [198.18.0.3/32]}
  - {name: random, type: snat, source: [10.0.2.8/31], out: wan0, to: [203.0.113.204], fully-random: true, mss-clamp: true}
  - {name: rest, type: masquerade, out: wan0, filtering: address-dependent, mss-clamp: true}
`
