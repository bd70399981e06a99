// SPDX-License-Identifier: Apache-2.0

package oracle

import "net/netip"

// scene is a configuration that both datapaths support, and the conversations through it.
type scene struct {
	yaml     string
	openings []opening
}

// opening describes the first packets of conversations.
type opening struct {
	link      string
	from, to  []string
	ports     []uint16
	protocols []string // "tcp", "udp", "icmp"
}

// sourcePool6 is the IPv6 address of the source pool of the scenes.
var sourcePool6 = netip.MustParseAddr("fd00:2::100")

// pooled are the addresses with ports chosen by a datapath.
var pooled = map[netip.Addr]bool{}

func init() {
	for _, a := range []string{"203.0.113.1", "203.0.113.201", "203.0.113.50", "203.0.113.51", "2001:db8:1::1", "2001:db8:1::50", "2001:db8:1::51", "2001:db8:1::201", "10.0.2.100", "fd00:2::100"} {
		pooled[netip.MustParseAddr(a)] = true
	}
}

// rest is the part of YAML that every configuration has.
const rest = `
icmp-errors-per-second: 1000000
timeouts: {tcp-transitory: 2h, udp: 2h, icmp: 2h}
tables: {flows: 8192, flows6: 8192}
`

var allProtocols = []string{"udp", "udp", "tcp", "tcp", "icmp"}

// The outside hosts: behind the router, behind the other router, on the link.
var outside4, outside6 = []string{"198.51.100.7", "198.51.100.8", "198.18.0.5", "203.0.113.9"}, []string{"2001:db8:9::7", "2001:db8:9::8", "2001:db8:1::9"}

// plain are packets that no rule translates.
var plain = []opening{
	{"lan", []string{"10.0.2.5", "10.0.20.3"}, []string{"10.0.3.2", "10.0.3.4"}, []uint16{53, 80}, allProtocols},
	{"dmz", []string{"10.0.3.5"}, []string{"10.0.2.5", "10.0.20.3"}, []uint16{53, 80}, allProtocols},
	{"lan", []string{"fd00:2::5", "fd00:20::3"}, []string{"fd00:3::2"}, []uint16{53, 80}, allProtocols},
	{"wan", outside4[:2], []string{"203.0.113.1"}, []uint16{9, 53}, allProtocols},
	{"wan", outside6[:2], []string{"2001:db8:1::1"}, []uint16{9, 53}, allProtocols},
}

var scenes = map[string]scene{
	"nat": {rest + `
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24, 10.0.20.0/24, "fd00:2::/64", "fd00:20::/64"], out: wan0, ports: 20000-29999, mapping: address-and-port-dependent, filtering: address-and-port-dependent}
  - {name: dmz, type: snat, source: [10.0.3.0/24], out: wan0, to: [203.0.113.201], ports: 20000-29999, mapping: address-and-port-dependent, filtering: address-and-port-dependent}
  - {name: dmz6, type: snat, source: ["fd00:3::/64"], out: wan0, to: ["2001:db8:1::201"], ports: 20000-29999, mapping: address-and-port-dependent, filtering: address-and-port-dependent}
  - {name: web, type: port-forward, listen: {address: 203.0.113.203, ports: [8080]}, protocol: tcp, to: {address: 10.0.2.2, port: 80}}
  - {name: dns, type: port-forward, listen: {address: 203.0.113.203, ports: [5353]}, protocol: udp, to: {address: 10.0.3.3, port: 53}}
  - {name: one, type: static, external: 203.0.113.204/32, internal: 10.0.2.4/32}
`, append([]opening{
		{"lan", []string{"10.0.2.2", "10.0.2.3", "10.0.2.4", "10.0.20.3"}, outside4, []uint16{53, 80}, allProtocols},
		{"lan", []string{"fd00:2::2", "fd00:2::3", "fd00:20::3"}, outside6, []uint16{53, 80}, allProtocols},
		{"dmz", []string{"10.0.3.2", "10.0.3.3"}, outside4, []uint16{53, 80}, allProtocols},
		{"dmz", []string{"fd00:3::2", "fd00:3::3"}, outside6, []uint16{53, 80}, allProtocols},
		{"wan", outside4, []string{"203.0.113.203"}, []uint16{8080}, []string{"tcp"}},
		{"wan", outside4, []string{"203.0.113.203"}, []uint16{5353}, []string{"udp"}},
		{"wan", outside4, []string{"203.0.113.204"}, []uint16{53, 80}, allProtocols},
	}, plain...)},
	"prefix": {rest + `
nat:
  - {name: six, type: npt66, internal: "fd00:2::/64", external: "2001:db8:77::/64", out: wan0}
  - {name: one, type: static, external: 203.0.113.204/32, internal: 10.0.2.4/32}
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201], ports: 20000-29999, mapping: address-and-port-dependent, filtering: address-and-port-dependent}
`, append([]opening{
		{"lan", []string{"fd00:2::2", "fd00:2::3"}, outside6, []uint16{53, 80}, allProtocols},
		{"lan", []string{"10.0.2.2", "10.0.2.3", "10.0.2.4"}, outside4, []uint16{53, 80}, allProtocols},
		{"wan", outside4, []string{"203.0.113.204"}, []uint16{53, 80}, allProtocols},
	}, plain...)},
	"services": {rest + `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev, backends: [{name: a, address: 10.0.2.3, port: 5353}]}
  - {name: web6, listen: [{address: "2001:db8:a::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, backends: [{name: a, address: "fd00:2::2", port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8:a::10", ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev, backends: [{name: a, address: "fd00:20::3", port: 5353}]}
  - {name: full, listen: [{address: 192.0.2.11, ports: [80]}], protocol: tcp, mode: fullnat, scheduler: maglev, source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.4, port: 8080}]}
  - {name: full6, listen: [{address: "2001:db8:a::11", ports: [53]}], protocol: udp, mode: fullnat, scheduler: maglev, source-pool: ["fd00:2::100"], backends: [{name: a, address: "fd00:2::4", port: 8080}]}
`, append([]opening{
		{"wan", outside4, []string{"192.0.2.10", "192.0.2.11"}, []uint16{80}, []string{"tcp"}},
		{"wan", outside4, []string{"192.0.2.10"}, []uint16{53}, []string{"udp"}},
		{"wan", outside6, []string{"2001:db8:a::10"}, []uint16{80}, []string{"tcp"}},
		{"wan", outside6, []string{"2001:db8:a::10", "2001:db8:a::11"}, []uint16{53}, []string{"udp"}},
		{"dmz", []string{"10.0.3.2"}, []string{"192.0.2.10", "192.0.2.11"}, []uint16{80}, []string{"tcp"}},
	}, plain...)},
	"stateless": {rest + `
services:
  - {name: dns, listen: [{address: 192.0.2.12, ports: [53]}], protocol: udp, mode: stateless, scheduler: maglev, backends: [{name: a, address: 10.0.2.3, port: 5353}]}
  - {name: web, listen: [{address: 192.0.2.12, ports: [80]}], protocol: tcp, mode: stateless, scheduler: maglev, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8:a::12", ports: [53]}], protocol: udp, mode: stateless, scheduler: maglev, backends: [{name: a, address: "fd00:2::3", port: 5353}]}
  - {name: direct, listen: [{address: 192.0.2.13, ports: [53]}], protocol: udp, mode: dsr, scheduler: maglev, backends: [{name: a, address: 10.0.2.4}]}
  - {name: direct6, listen: [{address: "2001:db8:a::13", ports: [53]}], protocol: udp, mode: dsr, scheduler: maglev, backends: [{name: a, address: "fd00:2::4"}]}
`, append([]opening{
		{"wan", outside4, []string{"192.0.2.12", "192.0.2.13"}, []uint16{53}, []string{"udp"}},
		{"wan", outside4, []string{"192.0.2.12"}, []uint16{80}, []string{"tcp"}},
		{"wan", outside6, []string{"2001:db8:a::12", "2001:db8:a::13"}, []uint16{53}, []string{"udp"}},
		{"dmz", []string{"10.0.3.2"}, []string{"192.0.2.12", "192.0.2.13"}, []uint16{53}, []string{"udp"}},
	}, plain...)},
}
