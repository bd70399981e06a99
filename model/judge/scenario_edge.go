// SPDX-License-Identifier: Apache-2.0

package judge

import "slices"

// edgeScenarios returns the scenarios of a customer's router: several interfaces, port sets and
// port-forwards.
func edgeScenarios() []Scenario {
	clients4 := Addresses("203.0.113.%d", 1, 40)
	inside4, inside6 := Addresses("10.0.2.%d", 2, 9), Addresses("fd00:2::%x", 2, 9)
	far4, far6 := Addresses("198.18.0.%d", 1, 5), Addresses("2001:db8:9::%x", 1, 5)
	near4, near6 := Addresses("10.1.0.%d", 1, 5), Addresses("fd00:a:4::%x", 1, 5)
	all := []Protocol{TCP, UDP, Ping, TCP, UDP}
	return []Scenario{
		{Name: "several", YAML: several, Opens: []Opening{
			{"lan0", inside4, slices.Concat(far4, near4, singleAddress("198.51.100.1"), singleAddress("10.0.2.1")), []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, slices.Concat(far6, near6), []uint16{53, 80}, all},
			{"wan0", clients4, slices.Concat(singleAddress("203.0.113.202"), singleAddress("203.0.113.201")), []uint16{80, 53, 9}, all}}},
		{Name: "followed", YAML: followed, Opens: []Opening{
			{"wan0", clients4, singleAddress("198.51.100.1"), []uint16{80, 53, 8443, 9}, all},
			{"wan0", Addresses("2001:db8:5::%x", 1, 40), singleAddress("2001:db8:ff::1"), []uint16{80, 53, 8443, 9}, []Protocol{TCP, UDP}},
			{"lan0", inside4, slices.Concat(far4, singleAddress("198.51.100.1")), []uint16{53, 80, 8443}, all}}},
		{Name: "published", YAML: published, Opens: []Opening{
			{"wan0", clients4, Addresses("203.0.113.%d", 201, 204), []uint16{80, 7000, 7003, 7009, 7010, 8000, 8001, 8999, 9}, all},
			{"wan0", Addresses("2001:db8:5::%x", 1, 40), singleAddress("2001:db8:ab::1"), []uint16{7000, 7001, 7099}, []Protocol{TCP, UDP}},
			{"lan0", inside4, slices.Concat(far4, Addresses("203.0.113.%d", 201, 203)), []uint16{80, 7000, 8001, 53}, all},
			{"lan0", inside6, slices.Concat(Addresses("64:ff9b::c612:%x", 1, 5), Addresses("64:ff9b::cb00:71%x", 0xc9, 0xcc), singleAddress("64:ff9b::198.51.100.1")), []uint16{80, 7000, 7003, 53}, all}}},
		{Name: "neighbours", YAML: neighbours, Opens: []Opening{
			{"wan0", clients4, Addresses("192.0.2.%d", 10, 12), []uint16{80, 53, 81}, all},
			{"lan0", inside4, Addresses("192.0.2.%d", 10, 12), []uint16{80, 53, 81}, all},
			{"lan0", near4, Addresses("192.0.2.%d", 10, 12), []uint16{80, 53, 81}, all},
			{"lan0", inside6, singleAddress("2001:db8::10"), []uint16{80, 81}, []Protocol{TCP, UDP}}}},
		{Name: "one-server", YAML: oneServer, Opens: []Opening{
			{"wan0", clients4, Addresses("192.0.2.%d", 10, 12), []uint16{80, 443, 8003, 53, 853, 7003, 9}, []Protocol{TCP, UDP}},
			{"wan0", Addresses("2001:db8:5::%x", 1, 40), Addresses("2001:db8::%x", 0x10, 0x12), []uint16{80, 443, 9}, []Protocol{TCP, UDP}},
			{"wan0", clients4, singleAddress("203.0.113.201"), []uint16{9000, 9009}, []Protocol{TCP}},
			{"lan0", inside4, far4, []uint16{53, 80}, []Protocol{TCP, UDP}}}},
		{Name: "port-sets", YAML: portSets, Opens: []Opening{
			{"lan0", inside4, slices.Concat(far4, Addresses("203.0.113.%d", 201, 203)), []uint16{53, 80, 9232}, append(all, Other)},
			{"lan0", inside6, slices.Concat(far6, Addresses("64:ff9b::c612:%x", 1, 5)), []uint16{53, 80}, all},
			{"wan0", clients4, Addresses("203.0.113.%d", 201, 203), []uint16{80, 5136, 9232, 13330}, all}}},
	}
}

// followed has listeners on the address of an interface.
const followed = `
services:
  - {name: web, listen: [{interface: wan0, ports: [8443]}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
nat:
  - {name: http, type: port-forward, listen: {interface: wan0, ports: [80]}, protocol: tcp, to: {address: 10.0.2.9, port: 8080}}
  - {name: dns6, type: port-forward, listen: {interface: wan0, ports: [53]}, protocol: udp, to: {address: "fd00:2::8"}}
  - {name: away, type: port-forward, listen: {interface: ppp0, ports: [80]}, protocol: tcp, to: {address: 10.0.2.8}}
  - {name: home, type: masquerade, source: [10.0.2.0/24], out: wan0}
`

// published has port-forward rules: port ranges, IPv6 targets, and one port by interface.
const published = `
nat:
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.202-203.0.113.203], ports: 10000-60000, filtering: address-dependent}
  - {name: web, type: port-forward, listen: {address: 203.0.113.202, ports: [80]}, protocol: tcp, to: {address: "fd00:2::2", port: 8080}}
  - {name: game, type: port-forward, listen: {address: 203.0.113.202, ports: [7000-7009]}, protocol: udp, to: {address: "fd00:2::3", port: 9000}, mss-clamp: true}
  - {name: same, type: port-forward, listen: {address: 203.0.113.203, ports: [7000-7009]}, protocol: udp, to: {address: "fd00:2::4"}, hairpin: off}
  - {name: pings, type: port-forward, listen: {address: 203.0.113.204}, protocol: icmp, to: {address: "fd00:2::2"}}
  - {name: up, type: port-forward, listen: {address: 203.0.113.201, ports: [7000-7009]}, protocol: tcp, to: {address: 10.0.2.2, port: 9000}}
  - {name: down, type: port-forward, listen: {address: 203.0.113.201, ports: [8000-8999]}, protocol: udp, to: {address: 10.0.2.3, port: 1}}
  - {name: six, type: port-forward, listen: {address: "2001:db8:ab::1", ports: [7000-7099]}, protocol: tcp, to: {address: "fd00:2::2", port: 65000}}
  - {name: outer, type: port-forward, in: wan0, listen: {address: 203.0.113.201, ports: [80]}, protocol: tcp, to: {address: 10.0.2.4, port: 8080}}
  - {name: inner, type: port-forward, in: [lan*, ppp0], listen: {address: 203.0.113.201, ports: [80]}, protocol: tcp, to: {address: 10.0.2.5}}
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201], ports: 10000-60000}
`

// neighbours has services with clients in their backends' networks, or on the backends.
const neighbours = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: 10.1.0.2, port: 5353}, {name: c, address: 10.1.0.3}]}
  - {name: cookies, listen: [{address: 192.0.2.11, ports: [80]}], protocol: tcp, mode: dnat, scheduler: source-hash, syn-cookies: true, limits: {connections-per-client: 20},
     backends: [{name: a, address: 10.0.2.5, port: 8080}, {name: b, address: 10.0.2.6, port: 8080}]}
  - {name: off, listen: [{address: 192.0.2.11, ports: [81]}], protocol: tcp, mode: dnat, hairpin: off, backends: [{name: a, address: 10.0.2.7}]}
  - {name: every, listen: [{address: 192.0.2.12}], protocol: any, mode: dnat, scheduler: source-hash, backends: [{name: a, address: 10.0.2.8}, {name: b, address: 10.0.2.9}]}
  - {name: six, listen: [{address: "2001:db8::10", ports: [80, 81]}], protocol: tcp, mode: dnat, scheduler: rr, persistence: {timeout: 5m},
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
`

// oneServer has several services on each server, most without a backend port. Their replies differ in the
// source port, except for shared, every and moved.
const oneServer = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: webs, listen: [{address: 192.0.2.11, ports: [443]}], protocol: tcp, mode: dnat, scheduler: source-hash, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: range, listen: [{address: 192.0.2.10, ports: [8000-8009]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: full, listen: [{address: 192.0.2.12, ports: [80]}], protocol: tcp, mode: fullnat, scheduler: maglev, source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.2}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: stateless, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: dot, listen: [{address: 192.0.2.11, ports: [853]}], protocol: udp, mode: stateless, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: game, listen: [{address: 192.0.2.12, ports: [7000-7009]}], protocol: udp, mode: stateless, backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: "fd00:2::2"}, {name: b, address: "fd00:2::3"}]}
  - {name: webs6, listen: [{address: "2001:db8::10", ports: [443]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: "fd00:2::2"}, {name: b, address: "fd00:2::3", port: 8443}]}
  - {name: shared, listen: [{address: "2001:db8::11", ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: "fd00:2::4"}]}
  - {name: every, listen: [{address: "2001:db8::12"}], protocol: tcp, mode: dnat, scheduler: source-hash, backends: [{name: a, address: "fd00:2::4"}, {name: b, address: "fd00:2::5"}]}
  - {name: moved, listen: [{address: 192.0.2.12, ports: [443]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.4}]}
nat:
  - {name: nine, type: port-forward, listen: {address: 203.0.113.201, ports: [9000-9009]}, protocol: tcp, to: {address: 10.0.2.4, port: 440}}
`

// portSets has rules with outside addresses shared with other gateways.
const portSets = `
nat:
  - {name: set, type: snat, source: [10.0.2.0/30], out: wan0, to: [203.0.113.201], ports: [5136-5151, 9232-9247, 13328-13343], filtering: address-dependent}
  - {name: few, type: snat, source: [10.0.2.4/30], out: wan0, to: [203.0.113.202], ports: [700-703, 9232, 65535], ports-per-client: 4}
  - {name: six, type: snat, source: ["fd00:2::/64"], out: wan0, to: ["2001:db8:ab::1"], ports: [1024-1039, 2048-2063], mapping: address-and-port-dependent}
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.203], ports: [5136-5151, 9232-9247]}
`

// several has rules with more than one interface.
const several = `
nat:
  - {name: home, type: masquerade, source: [10.0.2.0/30], out: [wan*, lan0], filtering: address-dependent}
  - {name: home6, type: masquerade, source: ["fd00:2::/125"], out: [wan0, lan0, ppp*], mss-clamp: true}
  - {name: never, type: masquerade, source: [10.0.2.4/31], out: [ppp*, wan1]}
  - {name: pool, type: snat, source: [10.0.2.0/24], in: [ppp*, lan0], out: [w*, tun0], to: [203.0.113.201]}
  - {name: http, type: port-forward, in: [ppp*, wan*], listen: {address: 203.0.113.202, ports: [80]}, protocol: tcp, to: {address: 10.0.2.9, port: 8080}}
  - {name: dns, type: port-forward, in: lan*, listen: {address: 203.0.113.202, ports: [53]}, protocol: udp, to: {address: 10.0.2.8}}
`
