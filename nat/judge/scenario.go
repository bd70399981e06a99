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
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/nat"
	"github.com/sluice-lb/sluice/nat/golden"
)

// Scenario is a configuration with what talks through it.
type Scenario struct {
	Name string
	YAML string
	// Opens lists who opens conversations: packets from Sources arrive at Interface
	// for Dests.
	Opens []Opening
	// Changing lists backends, SERVICE/BACKEND, whose state changes now and then.
	Changing []string
	Wishes   []Wishes
	// HostLines change the standard host, as the section "host" of a packet case does.
	HostLines []string
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
	Other // protocols without ports
	SCTP
)

// Config decodes the scenario's configuration.
func (s Scenario) Config() (*config.Config, error) {
	return config.Decode("scenario "+s.Name, []byte(s.YAML))
}

// Host is the host that the scenario runs on.
func (s Scenario) Host() nat.Host {
	h, err := golden.HostWith(s.HostLines...)
	if err != nil {
		panic("scenario " + s.Name + ": " + err.Error())
	}
	return h
}

// hostOf is the host of a run, which does not know some neighbours: what goes to them is left
// to the kernel.
func (s Scenario) hostOf(seed uint64) (h nat.Host, unknown []string) {
	h = s.Host()
	r := rand.New(rand.NewPCG(seed, 3))
	h.Neighbours = slices.DeleteFunc(h.Neighbours, func(n nat.Neighbour) bool {
		odds := 8
		if n.Interface == "wan0" { // nothing goes out
			odds = 16
		}
		if r.IntN(odds) > 0 {
			return false
		}
		unknown = append(unknown, n.Address.String())
		return true
	})
	return h, unknown
}

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
	sites6 := addresses("2001:db8:5:%x::1", 1, 20) // clients with a /64 each
	return append([]Scenario{
		{Name: "dnat-hash", YAML: dnatHash, Opens: []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53, 8001, 8002, 9}, []Kind{TCP, UDP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53, 9}, []Kind{TCP, UDP}}}},
		{Name: "dnat-sequence", YAML: dnatSequence, Opens: []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53, 9}, []Kind{TCP, UDP, Ping}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53}, []Kind{TCP, UDP}}}},
		{Name: "least", YAML: least, Opens: []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53, 9}, []Kind{UDP, TCP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53}, []Kind{UDP, TCP}}}},
		{Name: "fullnat", YAML: fullnat, Opens: []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53}, []Kind{TCP, UDP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53}, []Kind{TCP, UDP}}}},
		{Name: "cookies", YAML: cookies, Opens: []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 81}, []Kind{TCP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 81}, []Kind{TCP}}}},
		{Name: "bypass", YAML: bypass, Opens: []Opening{
			{"wan0", clients4, append(append(one("192.0.2.30"), one("192.0.2.40")...), one("192.0.2.50")...), []uint16{80, 514}, []Kind{TCP, UDP}},
			{"wan0", clients6, append(one("2001:db8::40"), one("2001:db8::30")...), []uint16{80}, []Kind{TCP, UDP}},
			{"wan0", clients4, append(addresses("192.0.2.%d", 60, 63), netip.MustParseAddr("192.0.2.51")), []uint16{80, 8001, 9}, append(all, Other, SCTP)},
			{"wan0", clients6, append(one("2001:db8::50"), addresses("2001:db8::%x", 0x60, 0x63)...), []uint16{514, 80, 516}, append(all, Other, SCTP)}}},
		{Name: "turn", YAML: turn, Opens: []Opening{
			{"wan0", clients4, append(append(one("192.0.2.10"), one("192.0.2.40")...), one("192.0.2.50")...), []uint16{80, 53}, []Kind{TCP, UDP}},
			{"wan0", clients6, append(one("2001:db8::10"), addresses("2001:db8::%x", 0x40, 0x42)...), []uint16{80, 53}, []Kind{TCP, UDP, Ping}}}},
		{Name: "quotas", YAML: quotas, Opens: []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, append(far6, addresses("64:ff9b::c612:%x", 1, 5)...), []uint16{53, 80}, all}}},
		{Name: "client-address", YAML: clientAddress, Opens: []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 81}, []Kind{TCP}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 81}, []Kind{TCP}}}},
		{Name: "snat", YAML: fmt.Sprintf(snat, "endpoint-independent"), Opens: []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{Name: "snat-address", YAML: fmt.Sprintf(snat, "address-dependent"), Opens: []Opening{{"lan0", inside4, far4, []uint16{53, 80}, all},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{Name: "remote-endpoint", YAML: remoteEndpoint, Opens: []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{Name: "forward", YAML: forward, Opens: []Opening{{"wan0", clients4, one("203.0.113.201"), []uint16{80, 53, 9}, []Kind{TCP, UDP}},
			{"lan0", inside4, append(far4, netip.MustParseAddr("203.0.113.201")), []uint16{53, 80}, []Kind{TCP, UDP}}}},
		{Name: "everyone", YAML: everyone, Opens: []Opening{{"wan0", clients4, one("203.0.113.201"), []uint16{80, 9}, []Kind{TCP, UDP}},
			{"lan0", inside4, append(far4, netip.MustParseAddr("203.0.113.201")), []uint16{53, 80}, all}}},
		{Name: "prefixes", YAML: prefixes, Opens: []Opening{{"lan0", addresses("10.1.9.%d", 130, 140), far4, []uint16{53}, append(all, Other)},
			{"wan0", clients4, addresses("198.51.100.%d", 130, 140), []uint16{53}, append(all, Other)},
			{"lan0", addresses("fd00:a:1:1::%x", 1, 9), far6, []uint16{53}, all},
			{"wan0", far6, addresses("2001:db8:1:d550::%x", 1, 9), []uint16{53}, all},
			{"lan0", addresses("fd00:a:77::%x", 1, 9), far6, []uint16{53}, append(all, Other)},
			{"wan0", far6, addresses("2001:db8:77::%x", 1, 9), []uint16{53}, append(all, Other)}}},
		{Name: "nat64", YAML: nat64, Opens: []Opening{{"lan0", inside6, append(addresses("64:ff9b::c612:%x", 1, 5), nowhere...), []uint16{53, 80}, all}}},
		{Name: "siit", YAML: siit, Opens: []Opening{{"lan0", inside6, append(addresses("64:ff9b::c612:%x", 1, 5), nowhere...), []uint16{53, 80}, all},
			{"wan0", far4, addresses("203.0.113.%d", 16, 23), []uint16{53, 80}, all}}},
		{Name: "lists", YAML: lists, Opens: []Opening{
			{"wan0", clients4, one("192.0.2.10"), []uint16{80, 53, 85, 8080}, []Kind{TCP, UDP, Ping, Other}},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 53, 85}, []Kind{TCP, UDP, Ping}},
			{"lan0", inside4, far4, []uint16{53, 25}, all}}},
		{Name: "limits", YAML: limits, Opens: []Opening{
			{"wan0", clients4, addresses("192.0.2.%d", 10, 14), []uint16{80, 53}, []Kind{TCP, UDP}},
			{"wan0", sites6, addresses("2001:db8::%x", 0x10, 0x14), []uint16{80, 53}, []Kind{TCP, UDP}}}},
		{Name: "families", YAML: families, Opens: []Opening{
			{"wan0", clients4, addresses("192.0.2.%d", 10, 11), []uint16{80, 81, 53, 54, 8001, 8002, 9}, []Kind{TCP, UDP}},
			{"wan0", clients6, addresses("2001:db8::%x", 0x10, 0x11), []uint16{80, 81, 53, 54, 8001, 8002, 9}, []Kind{TCP, UDP}}}},
		{Name: "mapped", YAML: mapped, Opens: []Opening{
			{"wan0", far4, addresses("203.0.113.%d", 201, 203), []uint16{2000, 2001, 2002, 2003, 2004, 2005, 2006, 2007}, []Kind{TCP, UDP, Ping}},
			{"lan0", inside4, append(far4, addresses("203.0.113.%d", 201, 203)...), []uint16{53, 2000, 2001, 2002, 2003}, all},
			{"lan0", inside6, append(addresses("64:ff9b::c612:%x", 1, 5), netip.MustParseAddr("64:ff9b::203.0.113.203")), []uint16{53, 2000, 2001, 2002}, all}},
			Wishes: []Wishes{{"office", inside4[:4], addresses("203.0.113.%d", 201, 202), flow.Ports{First: 2000, Last: 2007}},
				{"v6only", inside6, one("203.0.113.203"), flow.Ports{First: 2000, Last: 2007}},
				{"strict", inside4[4:], one("203.0.113.203"), flow.Ports{First: 2000, Last: 2007}}}},
		{Name: "doors", YAML: doors, Opens: []Opening{
			{"wan0", clients4, append(addresses("192.0.2.%d", 10, 11), netip.MustParseAddr("203.0.113.203")), []uint16{80, 53, 9}, all},
			{"wan0", clients6, one("2001:db8::10"), []uint16{80, 81}, []Kind{TCP}},
			{"lan0", inside4, append(append(far4, addresses("192.0.2.%d", 10, 11)...), netip.MustParseAddr("203.0.113.203")), []uint16{80, 53, 9}, all},
			{"lan0", inside6, append(far6, netip.MustParseAddr("2001:db8::10")), []uint16{80, 81}, []Kind{TCP, UDP}}}},
		{Name: "states", YAML: states, Opens: []Opening{
			{"wan0", clients4, addresses("192.0.2.%d", 10, 14), []uint16{80, 53}, []Kind{TCP, UDP, Ping}},
			{"wan0", clients6, addresses("2001:db8::%x", 0x10, 0x14), []uint16{80, 53}, []Kind{TCP, UDP, Ping}}},
			Changing: []string{"web/a", "web/b", "dns/a", "hash/a", "hash/b", "six/a", "six/b", "mixed/a", "mixed/b", "mixed6/a", "direct/a", "tunnel/a", "tunnel/b", "plain/a", "plain/b", "any/a"}},
		{Name: "overlap", YAML: overlap, Opens: []Opening{
			{"wan0", clients4, append(addresses("203.0.113.%d", 200, 204), netip.MustParseAddr("192.0.2.10")), []uint16{80, 53, 9}, all},
			{"wan0", clients6, append(one("2001:db8:77::10"), one("2001:db8:ab::1")...), []uint16{80, 53, 9}, all},
			{"lan0", inside4, append(addresses("203.0.113.%d", 200, 204), far4...), []uint16{80, 53, 9}, all},
			{"lan0", inside6, append(one("2001:db8:77::10"), append(addresses("64:ff9b::cb00:71%x", 0xc8, 0xcc), far6...)...), []uint16{80, 53, 9}, all}}},
	}, append(natScenarios(), edgeScenarios()...)...)
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

const least = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: lc,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}, {name: c, address: 10.0.2.4, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: fullnat, scheduler: wlc, source-pool: [10.0.2.102],
     backends: [{name: a, address: 10.0.2.2, weight: 3}, {name: b, address: 10.0.2.3, max-connections: 40}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: lc, source-pool: [10.0.2.101],
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
  - {name: video6, listen: [{address: "2001:db8::30", ports: [80]}], protocol: tcp, mode: dsr, scheduler: symmetric-hash, limits: {strict-tcp: true},
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: "fd00:2::5", mac: "02:00:00:00:02:77"}]}
  - {name: gue, listen: [{address: 192.0.2.60, ports: [80, 8000-8009]}], protocol: tcp, mode: tunnel, scheduler: source-hash, tunnel: {type: gue},
     mss-clamp: true, limits: {strict-tcp: true}, backends: [{name: a, address: 10.0.2.8}, {name: b, address: "fd00:2::8"}]}
  - {name: gue64, listen: [{address: "2001:db8::60"}], protocol: udp, mode: tunnel, scheduler: symmetric-hash, tunnel: {type: gue},
     backends: [{name: a, address: 10.0.2.8}, {name: b, address: "fd00:2::8"}]}
  - {name: syslog6, listen: [{address: "2001:db8::50", ports: [514-515]}], protocol: udp, mode: stateless, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::6"}, {name: b, address: "fd00:2::7"}]}
  - {name: mirror, listen: [{address: 192.0.2.51}], protocol: any, mode: stateless, scheduler: symmetric-hash, mss-clamp: true,
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: 10.0.2.7}]}
  - {name: pipe, listen: [{address: 192.0.2.61}, {address: "2001:db8::61"}], protocol: any, mode: tunnel, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::9"}]}
  - {name: all, listen: [{address: 192.0.2.62}], protocol: any, mode: dnat, scheduler: rr, mss-clamp: true,
     backends: [{name: a, address: 10.0.2.9}, {name: b, address: 10.0.2.2}]}
  - {name: all6, listen: [{address: "2001:db8::62"}], protocol: any, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::9"}, {name: b, address: "fd00:2::2"}]}
  - {name: sctp, listen: [{address: 192.0.2.63, ports: [80]}], protocol: sctp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.3, port: 80}, {name: b, address: 10.0.2.4}]}
  - {name: sctp6, listen: [{address: "2001:db8::63", ports: [80]}], protocol: sctp, mode: stateless,
     backends: [{name: a, address: "fd00:2::3", port: 80}, {name: b, address: "fd00:2::4"}]}
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
     sessions: [{client: "2001:db8:5::8/125", backend: b}],
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: mixed6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat, scheduler: wrr,
     persistence: {key: [source-address, destination-port], timeout: 10m}, source-pool: [10.0.2.100, "fd00:2::100"],
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: 10.0.2.4}]}
  - {name: direct6, listen: [{address: "2001:db8::40", ports: [80]}], protocol: tcp, mode: dsr, scheduler: wrr, persistence: {key: [source-mac, source-address], timeout: 10m},
     backends: [{name: a, address: "fd00:2::6", weight: 2}, {name: b, address: "fd00:2::7"}]}
  - {name: tunnel6, listen: [{address: "2001:db8::41", ports: [80]}], protocol: udp, mode: tunnel, scheduler: random, tunnel: {type: gue},
     backends: [{name: a, address: "fd00:2::8"}, {name: b, address: 10.0.2.9}, {name: c, address: 10.0.2.8, drain: true}]}
  - {name: all6, listen: [{address: "2001:db8::42"}], protocol: any, mode: dsr, scheduler: rr, persistence: {key: [source-address, source-port]},
     backends: [{name: a, address: "fd00:2::6"}, {name: b, address: "fd00:2::7"}, {name: c, address: "fd00:2::8", priority: 2}]}
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

const lists = `
firewall:
  sets:
    bad: [203.0.113.8/29, 203.0.113.3, "2001:db8:5::8/125", 10.0.2.8]
    good: [203.0.113.0/27, "2001:db8:5::/124"]
    few: [203.0.113.4, 203.0.113.5, "2001:db8:5::4"]
    served: [192.0.2.10, "2001:db8::/64"]
  rules:
    - {name: friend, action: accept, hook: ingress, source: 203.0.113.9, destination: 192.0.2.10}
    - {name: bad, action: drop, hook: ingress, source: "@bad"}
    - {name: flood, action: drop, hook: ingress, protocol: udp, destination: 192.0.2.10, ports: [53], rate: 1/day, burst: 400}
    - {name: flood6, action: drop, hook: ingress, protocol: tcp, source: "2001:db8:5::/64", in: wan0, rate: 1/day, burst: 400}
    - {name: closed, action: drop, hook: ingress, protocol: tcp, destination: "@served", ports: [22, 81-89]}
    - {name: pings, action: drop, hook: ingress, protocol: icmp, source: 203.0.113.16/28}
    - {name: mail, action: drop, hook: ingress, in: lan0, protocol: tcp, ports: [25]}
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: rr, allow: [good], deny: [few],
     source-pool: [10.0.2.100, "fd00:2::100"],
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev, deny: [few],
     backends: [{name: a, address: 10.0.2.4, port: 5353}, {name: b, address: 10.0.2.5, port: 5353}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: stateless, allow: [good, few],
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: "fd00:2::5"}]}
  - {name: http, listen: [{address: 192.0.2.10, ports: [8080]}], protocol: tcp, mode: dnat, scheduler: maglev, allow: [good],
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: 10.0.2.7}]}
nat:
  - {name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.201]}
`

const limits = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, limits: {connections: 60, connections-per-client: 3, connections-per-backend: 40, new-connections-per-client: 2/minute, reset-rate: 2/minute},
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: rr, limits: {connections: 60, connections-per-client: 3, connections-per-backend: 40},
     backends: [{name: a, address: 10.0.2.4, port: 5353}, {name: b, address: 10.0.2.5, port: 5353}, {name: c, address: 10.0.2.6, max-connections: 5}]}
  - {name: hash, listen: [{address: 192.0.2.11, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, limits: {connections: 40, connections-per-client: 3, new-connections: 6/minute, reset-rate: 2/minute, strict-tcp: true},
     backends: [{name: a, address: 10.0.2.7, port: 8080}, {name: b, address: 10.0.2.8, port: 8080}]}
  - {name: udp, listen: [{address: 192.0.2.11, ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev, limits: {connections-per-client: 3, connections-per-backend: 30, new-connections-per-client: 2/minute},
     backends: [{name: a, address: 10.0.2.7}, {name: b, address: 10.0.2.8}]}
  - {name: plain, listen: [{address: 192.0.2.12}], protocol: any, mode: stateless, limits: {new-connections-per-client: 2/minute, reset-rate: 2/minute},
     backends: [{name: a, address: 10.0.2.9}]}
  - {name: direct, listen: [{address: 192.0.2.13, ports: [53]}], protocol: udp, mode: dsr, scheduler: rr, limits: {connections: 50, connections-per-client: 3},
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: tunnel, listen: [{address: 192.0.2.13, ports: [80]}], protocol: tcp, mode: tunnel, scheduler: maglev, limits: {new-connections: 6/minute, reset-rate: 2/minute},
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
  - {name: web6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: wlc, limits: {connections-per-client: 3, reset-rate: 2/minute},
     source-pool: [10.0.2.100, "fd00:2::100"], backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: "fd00:2::3", port: 8080}]}
  - {name: dns6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat, scheduler: maglev, limits: {connections: 60, connections-per-client: 3, connections-per-backend: 20},
     source-pool: [10.0.2.101, "fd00:2::101"], backends: [{name: a, address: 10.0.2.4}, {name: b, address: "fd00:2::3", max-connections: 30}]}
  - {name: hash6, listen: [{address: "2001:db8::11", ports: [80]}], protocol: tcp, mode: dnat, scheduler: source-hash, limits: {new-connections-per-client: 2/minute},
     backends: [{name: a, address: "fd00:2::4", port: 8080}, {name: b, address: "fd00:2::5", port: 8080}]}
  - {name: deep6, listen: [{address: "2001:db8::14"}], protocol: tcp, mode: dsr, scheduler: maglev, limits: {connections: 40, connections-per-backend: 30},
     backends: [{name: a, address: "fd00:2::8"}, {name: b, address: "fd00:2::9"}]}
  - {name: direct6, listen: [{address: "2001:db8::13"}], protocol: udp, mode: tunnel, scheduler: wrr, limits: {connections-per-client: 3, connections-per-backend: 20},
     backends: [{name: a, address: "fd00:2::6"}, {name: b, address: "fd00:2::7"}]}
`

const families = `
lowest-ipv6-mtu: 1400
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: source-hash, mss-clamp: true,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: "fd00:2::3", port: 8080, weight: 3}]}
  - {name: other, listen: [{address: 192.0.2.10, ports: [81]}, {address: "2001:db8::10", ports: [81]}], protocol: tcp, mode: fullnat, scheduler: wrr, mss-clamp: true,
     source-pool: [10.0.2.100, "fd00:2::100"], limits: {strict-tcp: true}, persistence: {key: [source-address], timeout: 10m},
     backends: [{name: a, address: 10.0.2.2, port: 8081}, {name: b, address: "fd00:2::3", port: 8081, weight: 3}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}, {address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat, scheduler: symmetric-hash,
     source-pool: [10.0.2.101, "fd00:2::101"],
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: "fd00:2::5", port: 5353}]}
  - {name: least, listen: [{address: 192.0.2.10, ports: [54]}, {address: "2001:db8::10", ports: [54]}], protocol: udp, mode: fullnat, scheduler: wlc,
     source-pool: [10.0.2.102, "fd00:2::102"],
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: "fd00:2::5", weight: 2}]}
  - {name: range, listen: [{address: 192.0.2.10, ports: [8000-8009]}, {address: "2001:db8::10", ports: [8000-8009]}], protocol: tcp, mode: fullnat, scheduler: random,
     source-pool: [10.0.2.103, "fd00:2::103"],
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: "fd00:2::7"}]}
  - {name: wide, listen: [{address: 192.0.2.11}, {address: "2001:db8::11"}], protocol: udp, mode: fullnat, scheduler: maglev,
     source-pool: [10.0.2.104, "fd00:2::104"],
     backends: [{name: a, address: 10.0.2.6}, {name: b, address: "fd00:2::7"}]}
`

const states = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr, persistence: {key: [source-address], timeout: 10m},
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, scheduler: wrr, when-down: reject,
     backends: [{name: a, address: 10.0.2.4}]}
  - {name: hash, listen: [{address: 192.0.2.11, ports: [80]}], protocol: tcp, mode: dnat, scheduler: maglev, when-down: reject,
     sessions: [{client: 203.0.113.8/29, backend: b}],
     backends: [{name: a, address: 10.0.2.5, port: 8080}, {name: b, address: 10.0.2.6, port: 8080}]}
  - {name: plain, listen: [{address: 192.0.2.12, ports: [53]}], protocol: udp, mode: stateless, when-down: drop,
     backends: [{name: a, address: 10.0.2.7}, {name: b, address: 10.0.2.8}]}
  - {name: direct, listen: [{address: 192.0.2.13, ports: [80]}], protocol: tcp, mode: dsr, scheduler: rr,
     backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3, priority: 2}]}
  - {name: any, listen: [{address: 192.0.2.14}], protocol: any, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.9}]}
  - {name: six, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: source-hash, when-down: reset,
     backends: [{name: a, address: "fd00:2::2", port: 8080}, {name: b, address: "fd00:2::3", port: 8080, priority: 2}]}
  - {name: mixed, listen: [{address: "2001:db8::11", ports: [80]}], protocol: tcp, mode: fullnat, scheduler: maglev, persistence: {key: [source-address], timeout: 10m},
     source-pool: [10.0.2.100, "fd00:2::100"], backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: "fd00:2::4", port: 8080}]}
  - {name: mixed6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: fullnat, scheduler: rr, when-down: reject,
     source-pool: [10.0.2.101, "fd00:2::101"], backends: [{name: a, address: 10.0.2.4}]}
  - {name: tunnel, listen: [{address: "2001:db8::12"}], protocol: tcp, mode: tunnel, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::5"}, {name: b, address: "fd00:2::6"}]}
`

const overlap = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}, {address: 203.0.113.201, ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: dns, listen: [{address: 203.0.113.201, ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.4}, {name: b, address: 10.0.2.5}]}
  - {name: mapped, listen: [{address: 203.0.113.202, ports: [80]}], protocol: tcp, mode: fullnat, scheduler: maglev,
     source-pool: [10.0.2.100, "fd00:2::100"], backends: [{name: a, address: 10.0.2.6, port: 8080}, {name: b, address: "fd00:2::6", port: 8080}]}
  - {name: six, listen: [{address: "2001:db8:77::10", ports: [80]}], protocol: tcp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: "fd00:2::2", port: 8080}]}
  - {name: six-dns, listen: [{address: "2001:db8:ab::1", ports: [53]}], protocol: udp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::4"}, {name: b, address: "fd00:2::5"}]}
nat:
  - {name: one, type: static, external: 203.0.113.202/32, internal: 10.0.2.6/32}
  - {name: dmz6, type: static, external: "2001:db8:77::/64", internal: "fd00:2::/64", in: wan0}
  - {name: office, type: snat, source: [10.0.2.0/26], to: [203.0.113.201, 203.0.113.203]}
  - {name: office6, type: snat, source: ["fd00:2::8/125"], out: wan0, to: ["2001:db8:ab::1"]}
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], pool: [203.0.113.203]}
  - {name: http, type: port-forward, listen: {address: 203.0.113.203, ports: [80]}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
`

// doors has endpoints that are one service or another by the interface of arrival.
const doors = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80], interface: wan0}], protocol: tcp, mode: dnat, scheduler: rr,
     backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]}
  - {name: inner, listen: [{address: 192.0.2.10, ports: [80], interface: lan0}], protocol: tcp, mode: fullnat, scheduler: maglev,
     source-pool: [10.0.2.100], backends: [{name: a, address: 10.0.2.4, port: 8080}, {name: b, address: 10.0.2.5, port: 8080}]}
  - {name: dns, listen: [{address: 192.0.2.10, ports: [53], interface: wan0}], protocol: udp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.6, port: 5353}]}
  - {name: rest, listen: [{address: 192.0.2.10, interface: lan0}, {address: 192.0.2.11}], protocol: udp, mode: dnat, scheduler: source-hash,
     backends: [{name: a, address: 10.0.2.7}]}
  - {name: direct, listen: [{address: 192.0.2.11, ports: [80], interface: wan0}], protocol: tcp, mode: dsr, scheduler: maglev,
     backends: [{name: a, address: 10.0.2.8}]}
  - {name: six, listen: [{address: "2001:db8::10", ports: [80], interface: wan0}, {address: "2001:db8::10", ports: [81], interface: lan0}], protocol: tcp, mode: dnat, scheduler: maglev,
     backends: [{name: a, address: "fd00:2::2", port: 8080}]}
nat:
  - {name: http, type: port-forward, listen: {address: 203.0.113.203, ports: [80], interface: wan0}, protocol: tcp, to: {address: 10.0.2.2, port: 8080}}
  - {name: http-in, type: port-forward, listen: {address: 203.0.113.203, ports: [80], interface: lan0}, protocol: tcp, to: {address: 10.0.2.9, port: 8081}}
  - {name: office, type: snat, source: [10.0.2.0/24], in: lan0, out: wan0, to: [203.0.113.203, 203.0.113.204]}
  - {name: never, type: snat, source: ["fd00:2::/64"], in: wan0, out: wan0, to: ["2001:db8:ab::1"]}
`

// mapped has rules whose hosts ask for mappings.
const mapped = `
nat:
  - {name: office, type: snat, source: [10.0.2.2/31, 10.0.2.4/31], out: wan0, to: [203.0.113.201, 203.0.113.202], ports: 2000-2063, ports-per-client: 6, filtering: address-dependent, pcp: true}
  - {name: strict, type: snat, source: [10.0.2.6/31, 10.0.2.8/31], in: lan0, to: [203.0.113.203], filtering: address-and-port-dependent, pcp: true}
  - {name: v6only, type: nat64, prefix: "64:ff9b::/96", source: ["fd00:2::/64"], in: lan0, pool: [203.0.113.203], pcp: true}
`
