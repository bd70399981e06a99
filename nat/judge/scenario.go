// SPDX-License-Identifier: Apache-2.0

// Package judge sends random structured packet sequences through a datapath and
// holds every outcome against the reference model: sessions with handshakes, data,
// FIN, RST and retransmissions, pings, ICMP errors about all of these, fragments,
// hairpins, time that passes, and hostile packets. The packets are built, not
// mutated noise: each is one that a host, a router or an attacker could send about
// what the datapath has just done.
//
// A disagreement is shrunk to the fewest events that still show it and printed as
// a packet case that can be saved to testdata/packets.
package judge

import (
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/nat"
	"github.com/sluice-lb/sluice/packet/golden"
)

// Scenario is a configuration with what talks through it.
type Scenario struct {
	Name string
	YAML string
	// Opens lists who opens conversations: packets from Sources arrive at Interface
	// for Dests.
	Opens []Opening
}

// Opening is one kind of conversation.
type Opening struct {
	Interface string
	Sources   []netip.Addr
	Dests     []netip.Addr
	Ports     []uint16 // of the destination
	Protocols []Kind
}

// Kind of a conversation.
type Kind uint8

// Kinds.
const (
	TCP Kind = iota
	UDP
	Ping
	Other // a protocol without ports
)

// Config decodes the scenario's configuration.
func (s Scenario) Config() (*config.Config, error) {
	return config.Decode("scenario "+s.Name, []byte(s.YAML))
}

// Host is the host that every scenario runs on.
func (Scenario) Host() nat.Host { return golden.StandardHost() }

func addresses(format string, first, last int) []netip.Addr {
	var out []netip.Addr
	for i := first; i <= last; i++ {
		out = append(out, netip.MustParseAddr(fmt.Sprintf(format, i)))
	}
	return out
}

func one(a string) []netip.Addr { return []netip.Addr{netip.MustParseAddr(a)} }

// Scenarios are the standard ones: every mode and every kind of rule.
func Scenarios() []Scenario {
	clients4, clients6 := addresses("203.0.113.%d", 1, 40), addresses("2001:db8:5::%x", 1, 40)
	inside4, inside6 := addresses("10.0.2.%d", 2, 9), addresses("fd00:2::%x", 2, 9)
	far4, far6 := addresses("198.18.0.%d", 1, 5), addresses("2001:db8:9::%x", 1, 5)
	nowhere := append(one("64:ff9b::127.0.0.1"), one("64:ff9b::224.0.0.1")...)
	all := []Kind{TCP, UDP, Ping, TCP, UDP}
	return []Scenario{
		{"dnat-hash", dnatHash, []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53, 8001, 8002, 9}, []Kind{TCP, UDP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53, 9}, []Kind{TCP, UDP}}}},
		{"dnat-sequence", dnatSequence, []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53, 9}, []Kind{TCP, UDP, Ping}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53}, []Kind{TCP, UDP}}}},
		{"least", least, []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53, 9}, []Kind{UDP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53}, []Kind{UDP}}}},
		{"fullnat", fullnat, []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53}, []Kind{TCP, UDP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53}, []Kind{TCP, UDP}}}},
		{"cookies", cookies, []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 81}, []Kind{TCP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 81}, []Kind{TCP}}}},
		{"bypass", bypass, []Opening{
			{"wan0", clients4, append(append(one("192.0.2.30"), one("192.0.2.40")...), one("192.0.2.50")...), []uint16{80, 514}, []Kind{TCP, UDP}},
			{"wan0", clients6, one("2001:db8::40"), []uint16{80}, []Kind{TCP, UDP}}}},
		{"turn", turn, []Opening{
			{"wan0", clients4, append(append(one("192.0.2.10"), one("192.0.2.40")...), one("192.0.2.50")...), []uint16{80, 53}, []Kind{TCP, UDP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53}, []Kind{TCP, UDP}}}},
		{"quotas", quotas, []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, append(far6, addresses("64:ff9b::c612:%x", 1, 5)...), []uint16{53, 80}, all}}},
		{"client-address", clientAddress, []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 81}, []Kind{TCP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 81}, []Kind{TCP}}}},
		{"snat", fmt.Sprintf(snat, "endpoint-independent"), []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{"snat-address", fmt.Sprintf(snat, "address-dependent"), []Opening{{"lan0", inside4, far4, []uint16{53, 80}, all},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{"remote-endpoint", remoteEndpoint, []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{"forward", forward, []Opening{{"wan0", clients4, one("203.0.113.201"), []uint16{80, 53, 9}, []Kind{TCP, UDP}},
			{"lan0", inside4, append(far4, netip.MustParseAddr("203.0.113.201")), []uint16{53, 80}, []Kind{TCP, UDP}}}},
		{"everyone", everyone, []Opening{{"wan0", clients4, one("203.0.113.201"), []uint16{80, 9}, []Kind{TCP, UDP}},
			{"lan0", inside4, append(far4, netip.MustParseAddr("203.0.113.201")), []uint16{53, 80}, all}}},
		{"prefixes", prefixes, []Opening{{"lan0", addresses("10.1.9.%d", 130, 140), far4, []uint16{53}, append(all, Other)},
			{"wan0", clients4, addresses("198.51.100.%d", 130, 140), []uint16{53}, append(all, Other)},
			{"lan0", addresses("fd00:a:1:1::%x", 1, 9), far6, []uint16{53}, all},
			{"wan0", far6, addresses("2001:db8:1:d550::%x", 1, 9), []uint16{53}, all},
			{"lan0", addresses("fd00:a:77::%x", 1, 9), far6, []uint16{53}, append(all, Other)},
			{"wan0", far6, addresses("2001:db8:77::%x", 1, 9), []uint16{53}, append(all, Other)}}},
		{"nat64", nat64, []Opening{{"lan0", inside6, append(addresses("64:ff9b::c612:%x", 1, 5), nowhere...), []uint16{53, 80}, all}}},
		{"siit", siit, []Opening{{"lan0", inside6, append(addresses("64:ff9b::c612:%x", 1, 5), nowhere...), []uint16{53, 80}, all},
			{"wan0", far4, addresses("203.0.113.%d", 16, 23), []uint16{53, 80}, all}}},
	}
}

const dnatHash = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}, {name: c, address: 10.0.2.4, port: 8080, weight: 2}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: source-hash,
     backends: [{name: a, address: 10.0.2.5}, {name: b, address: 10.0.2.6}]}
  - {name: range, listen: [{address: 192.0.2.10, ports: [8000-8009]}], protocol: tcp, mode: dnat, scheduler: symmetric-hash,
     backends: [{name: a, address: 10.0.2.7}, {name: b, address: 10.0.2.8}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::4", port: 5353}, {name: b, address: "fd00:2::5", port: 5353}]}
`

const dnatSequence = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: wrr,
     backends: [{name: a, address: 10.0.2.2, weight: 3}, {name: b, address: 10.0.2.3}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: random, limits: {strict-tcp: true},
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: "fd00:2::2"}]}
`

// UDP alone: when a closed connection stops counting is the programs' affair.
const least = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: udp, mode: dnat, scheduler: lc,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}, {name: c, address: 10.0.2.4, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: fullnat, scheduler: wlc, source-pool: [10.0.2.102],
     backends: [{name: a, address: 10.0.2.2, weight: 3}, {name: b, address: 10.0.2.3, max-connections: 40}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: udp, mode: fullnat, scheduler: lc, source-pool: [10.0.2.101],
     backends: [{name: a, address: 10.0.2.5, port: 8080}, {name: b, address: 10.0.2.6, port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: dnat, scheduler: wlc,
     backends: [{name: a, address: "fd00:2::2", weight: 2}, {name: b, address: "fd00:2::3"}, {name: c, address: "fd00:2::4", priority: 2}]}
`

const fullnat = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat,
     scheduler: maglev, source-pool: [10.0.2.100-10.0.2.101, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}, {address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat,
     scheduler: rr, source-pool: [10.0.2.102, "fd00:2::102"],
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: "fd00:2::3", port: 5353}]}
`

const cookies = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, syn-cookies: true,
     scheduler: maglev, source-pool: [10.0.2.100-10.0.2.101, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: hash, listen: [{address: 192.0.2.10, ports: [81]}], protocol: tcp, mode: dnat, scheduler: maglev, syn-cookies: true, limits: {strict-tcp: true},
     backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: 10.0.2.5, port: 8080}]}
  - {name: turn, listen: [{address: "2001:db8::10", ports: [81]}], protocol: tcp, mode: dnat, scheduler: rr, syn-cookies: true,
     backends: [{name: a, address: "fd00:2::4", port: 8080}, {name: b, address: "fd00:2::5", port: 8080}]}
tables: {flows: 4096, flows6: 4096, half-open: 600}
`

const bypass = `
services:
  - {name: video, listen: [{address: 192.0.2.30, ports: [80]}], protocol: tcp, mode: dsr, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: tube, listen: [{address: 192.0.2.40, ports: [80]}], protocol: udp, mode: tunnel, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: "fd00:2::3"}]}
  - {name: tube6, listen: [{address: "2001:db8::40", ports: [80]}], protocol: tcp, mode: tunnel, scheduler: source-hash, tunnel: {type: gue},
     backends: [{name: a, address: "fd00:2::2"}, {name: b, address: "fd00:2::3"}]}
  - {name: syslog, listen: [{address: 192.0.2.50, ports: [514]}], protocol: udp, mode: stateless,
     backends: [{name: a, address: 10.0.2.4, port: 5514}, {name: b, address: 10.0.2.5, port: 5514}]}
`

const quotas = `
nat:
  - {name: office, type: snat, source: [10.0.2.0/29], out: wan0, to: [203.0.113.201, 203.0.113.202], connections-per-client: 8}
  - {name: blocks, type: snat, source: [10.0.2.8/29], out: wan0, to: [203.0.113.203], ports: 2000-2999, port-block: 20}
  - {name: office6, type: snat, source: ["fd00:2::/64"], out: wan0, to: ["2001:db8:ab::1"], ports: 2000-2999, port-block: 20, deterministic: true, mss-clamp: true}
`

const turn = `
services:
  - {name: kept, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, persistence: {key: [source-address], timeout: 10m},
     sessions: [{client: 203.0.113.7, backend: b}],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: rr, persistence: {key: [source-address], timeout: 10m},
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: 10.0.2.5}]}
  - {name: direct, listen: [{address: 192.0.2.40, ports: [80]}], protocol: tcp, mode: dsr, scheduler: rr,
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: 10.0.2.7}]}
  - {name: tunnel, listen: [{address: 192.0.2.50, ports: [80]}], protocol: tcp, mode: tunnel, scheduler: wrr,
     backends: [{name: a, address: 10.0.2.8}, {name: b, address: 10.0.2.9}]}
  - {name: kept6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: random, persistence: {key: [source-address], timeout: 10m},
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
`

const clientAddress = `
services:
  - {name: proxy, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, client-address: proxy-v2,
     scheduler: maglev, source-pool: [10.0.2.100-10.0.2.101, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: toa, listen: [{address: 192.0.2.10, ports: [81]}, {address: "2001:db8::10", ports: [81]}], protocol: tcp, mode: fullnat, client-address: toa,
     mss-clamp: true, scheduler: maglev, source-pool: [10.0.2.102, "fd00:2::102"],
     backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: "fd00:2::5", port: 8080}]}
`

const snat = `
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201, 203.0.113.202], filtering: %[1]s}
  - {name: office6, type: snat, source: ["fd00:2::/64"], out: wan0, to: ["2001:db8:ab::1"], filtering: %[1]s}
`

const remoteEndpoint = `
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201], mapping: address-and-port-dependent,
     filtering: address-and-port-dependent}
  - {name: office6, type: snat, source: ["fd00:2::/64"], out: wan0, to: ["2001:db8:ab::1"], mapping: address-and-port-dependent,
     filtering: address-and-port-dependent}
`

const forward = `
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201]}
  - {name: http, type: port-forward, listen: {address: 203.0.113.201, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
  - {name: dns, type: port-forward, listen: {address: 203.0.113.201, ports: [53]}, protocol: udp, to: {address: 10.0.2.3}}
`

const everyone = `
nat:
  - {name: quiet, type: snat, source: [10.0.2.2/31], to: [203.0.113.202], hairpin: off}
  - {name: wan, type: snat, in: wan0, out: wan0, to: [203.0.113.203]}
  - {name: all, type: snat, out: wan0, to: [203.0.113.201]}
  - {name: http, type: port-forward, listen: {address: 203.0.113.201, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
`

const prefixes = `
nat:
  - {name: dmz, type: static, external: 198.51.100.128/25, internal: 10.1.9.128/25}
  - {name: dmz6, type: static, external: "2001:db8:77::/64", internal: "fd00:a:77::/64"}
  - {name: renumber, type: npt66, external: "2001:db8:1::/48", internal: "fd00:a:1::/48"}
`

const nat64 = `
nat:
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.201, 203.0.113.202]}
`

const siit = `
nat:
  - {name: bih, type: siit, prefix: "64:ff9b::/96", eam: [{ipv4: 203.0.113.16/28, ipv6: "fd00:2::/124"}]}
`
