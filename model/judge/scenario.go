// SPDX-License-Identifier: Apache-2.0

// Package judge sends random structured packet sequences through a datapath and compares each
// outcome with the reference model. The sequences contain sessions with handshakes, data, FIN, RST
// and retransmissions, pings, ICMP errors, fragments, hairpins, time steps and hostile packets. The
// generator builds each packet as a reaction to the datapath's previous output. A host, a router or
// an attacker could send it.
//
// The judge reads free choices from the frames that the datapath sends (follow.go). The model
// accepts a legal choice.
//
// The judge shrinks a disagreement to the fewest events and prints it as a packet case for
// testdata/packets.
package judge

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/model/golden"
)

// Scenario is a configuration with its traffic.
type Scenario struct {
	Name string
	YAML string
	// Opens lists the kinds of conversations: packets from Sources arrive at Interface for Dests.
	Opens []Opening
	// Changing lists backends as SERVICE/BACKEND with a variable state.
	Changing    []string
	MapRequests []MapRequests
	// HostLines change the standard host, as the section "host" of a packet case does.
	HostLines []string
}

// Opening is one kind of conversation.
type Opening struct {
	Interface string
	Sources   []netip.Addr
	Dests     []netip.Addr
	Ports     []uint16 // destination ports
	Protocols []Protocol
}

// Protocol is the protocol of a conversation.
type Protocol uint8

// Protocols.
const (
	TCP Protocol = iota
	UDP
	Ping
	Other // protocols without ports
	SCTP
)

// Config decodes the scenario's configuration.
func (s Scenario) Config() (*config.Config, error) {
	return config.Decode("scenario "+s.Name, []byte(s.YAML))
}

// Host returns the host of the scenario.
func (s Scenario) Host() model.Host {
	h, err := golden.HostWith(s.HostLines...)
	if err != nil {
		panic("scenario " + s.Name + ": " + err.Error())
	}
	return h
}

// hostOf returns the host of a run, without some neighbours. The kernel resolves these neighbours.
func (s Scenario) hostOf(seed uint64) (h model.Host, unknown []string) {
	h = s.Host()
	r := rand.New(rand.NewPCG(seed, 3))
	h.Neighbours = slices.DeleteFunc(h.Neighbours, func(n model.Neighbour) bool {
		odds := 8
		if n.Interface == "wan0" { // affects all packets to the outside
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

// Addresses returns the addresses with the numbers from first to last in a format.
func Addresses(format string, first, last int) []netip.Addr {
	var out []netip.Addr
	for i := first; i <= last; i++ {
		out = append(out, netip.MustParseAddr(fmt.Sprintf(format, i)))
	}
	return out
}

func singleAddress(a string) []netip.Addr { return []netip.Addr{netip.MustParseAddr(a)} }

// Scenarios returns the standard scenarios: every mode and every kind of rule.
func Scenarios() []Scenario {
	clients4, clients6 := Addresses("203.0.113.%d", 1, 40), Addresses("2001:db8:5::%x", 1, 40)
	inside4, inside6 := Addresses("10.0.2.%d", 2, 9), Addresses("fd00:2::%x", 2, 9)
	far4, far6 := append(Addresses("198.18.0.%d", 1, 5), netip.MustParseAddr("169.254.169.254")), Addresses("2001:db8:9::%x", 1, 5)
	unroutable := append(singleAddress("64:ff9b::127.0.0.1"), singleAddress("64:ff9b::224.0.0.1")...)
	all := []Protocol{TCP, UDP, Ping, TCP, UDP}
	sites6 := Addresses("2001:db8:5:%x::1", 1, 20) // 20 clients, each in its own /64
	return append([]Scenario{
		{Name: "dnat-hash", YAML: dnatHash, Opens: []Opening{
			{"wan0", clients4, singleAddress("192.0.2.10"), []uint16{80, 53, 8001, 8002, 9}, []Protocol{TCP, UDP}},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 53, 9}, []Protocol{TCP, UDP}}}},
		{Name: "dnat-sequence", YAML: dnatSequence, Opens: []Opening{
			{"wan0", clients4, singleAddress("192.0.2.10"), []uint16{80, 53, 9}, []Protocol{TCP, UDP, Ping}},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 53}, []Protocol{TCP, UDP}},
			{"wan0", clients4[:2], append(Addresses("10.0.2.%d", 2, 4), netip.MustParseAddr("192.0.2.10")), []uint16{80, 53, 8080}, []Protocol{TCP, UDP}}, // servers, directly and through the service
			{"wan0", clients6[:2], append(Addresses("fd00:2::%d", 2, 4), netip.MustParseAddr("2001:db8::10")), []uint16{80, 53, 8080}, []Protocol{TCP, UDP}}}},
		{Name: "least", YAML: least, Opens: []Opening{
			{"wan0", clients4, singleAddress("192.0.2.10"), []uint16{80, 53, 9}, []Protocol{UDP, TCP}},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 53}, []Protocol{UDP, TCP}}}},
		{Name: "fullnat", YAML: fullnat, Opens: []Opening{
			{"wan0", clients4, singleAddress("192.0.2.10"), []uint16{80, 53}, []Protocol{TCP, UDP}},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 53}, []Protocol{TCP, UDP}}}},
		{Name: "cookies", YAML: cookies, Opens: []Opening{
			{"wan0", clients4, singleAddress("192.0.2.10"), []uint16{80, 81}, []Protocol{TCP}},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 81}, []Protocol{TCP}}}},
		{Name: "bypass", YAML: bypass, Opens: []Opening{
			{"wan0", clients4, append(append(singleAddress("192.0.2.30"), singleAddress("192.0.2.40")...), singleAddress("192.0.2.50")...), []uint16{80, 514}, []Protocol{TCP, UDP}},
			{"wan0", clients6, append(singleAddress("2001:db8::40"), singleAddress("2001:db8::30")...), []uint16{80}, []Protocol{TCP, UDP}},
			{"wan0", clients4, append(Addresses("192.0.2.%d", 60, 63), netip.MustParseAddr("192.0.2.51")), []uint16{80, 8001, 9}, append(all, Other, SCTP)},
			{"wan0", clients6, append(singleAddress("2001:db8::50"), Addresses("2001:db8::%x", 0x60, 0x63)...), []uint16{514, 80, 516}, append(all, Other, SCTP)}}},
		{Name: "turn", YAML: turn, Opens: []Opening{
			{"wan0", clients4, append(append(singleAddress("192.0.2.10"), singleAddress("192.0.2.40")...), singleAddress("192.0.2.50")...), []uint16{80, 53}, []Protocol{TCP, UDP}},
			{"wan0", clients6, append(singleAddress("2001:db8::10"), Addresses("2001:db8::%x", 0x40, 0x42)...), []uint16{80, 53}, []Protocol{TCP, UDP, Ping}}}},
		{Name: "quotas", YAML: quotas, Opens: []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, append(far6, Addresses("64:ff9b::c612:%x", 1, 5)...), []uint16{53, 80}, all}}},
		{Name: "client-address", YAML: clientAddress, Opens: []Opening{
			{"wan0", clients4, singleAddress("192.0.2.10"), []uint16{80, 81}, []Protocol{TCP}},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 81}, []Protocol{TCP}}}},
		{Name: "snat", YAML: fmt.Sprintf(snat, "endpoint-independent"), Opens: []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{Name: "snat-address", YAML: fmt.Sprintf(snat, "address-dependent"), Opens: []Opening{{"lan0", inside4, far4, []uint16{53, 80}, all},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{Name: "remote-endpoint", YAML: remoteEndpoint, Opens: []Opening{{"lan0", inside4, far4, []uint16{53, 80}, append(all, Other)},
			{"lan0", inside6, far6, []uint16{53, 80}, all}}},
		{Name: "forward", YAML: forward, Opens: []Opening{{"wan0", clients4, singleAddress("203.0.113.201"), []uint16{80, 53, 9}, []Protocol{TCP, UDP}},
			{"lan0", inside4, append(far4, netip.MustParseAddr("203.0.113.201")), []uint16{53, 80}, []Protocol{TCP, UDP}}}},
		{Name: "everyone", YAML: everyone, Opens: []Opening{{"wan0", clients4, singleAddress("203.0.113.201"), []uint16{80, 9}, []Protocol{TCP, UDP}},
			{"lan0", inside4, append(far4, netip.MustParseAddr("203.0.113.201")), []uint16{53, 80}, all}}},
		{Name: "prefixes", YAML: prefixes, Opens: []Opening{{"lan0", Addresses("10.1.9.%d", 130, 140), far4, []uint16{53}, append(all, Other)},
			{"wan0", clients4, Addresses("198.51.100.%d", 130, 140), []uint16{53}, append(all, Other)},
			{"lan0", Addresses("fd00:a:1:1::%x", 1, 9), far6, []uint16{53}, all},
			{"wan0", far6, Addresses("2001:db8:1:d550::%x", 1, 9), []uint16{53}, all},
			{"lan0", Addresses("fd00:a:77::%x", 1, 9), far6, []uint16{53}, append(all, Other)},
			{"wan0", far6, Addresses("2001:db8:77::%x", 1, 9), []uint16{53}, append(all, Other)}}},
		{Name: "nat64", YAML: nat64, Opens: []Opening{{"lan0", inside6, append(Addresses("64:ff9b::c612:%x", 1, 5), unroutable...), []uint16{53, 80}, all}}},
		{Name: "siit", YAML: siit, Opens: []Opening{{"lan0", inside6, append(Addresses("64:ff9b::c612:%x", 1, 5), unroutable...), []uint16{53, 80}, all},
			{"wan0", far4, Addresses("203.0.113.%d", 16, 23), []uint16{53, 80}, all}}},
		{Name: "lists", YAML: lists, Opens: []Opening{
			{"wan0", clients4, singleAddress("192.0.2.10"), []uint16{80, 53, 85, 8080}, []Protocol{TCP, UDP, Ping, Other}},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 53, 85}, []Protocol{TCP, UDP, Ping}},
			{"lan0", inside4, far4, []uint16{53, 25}, all}}},
		{Name: "denied", YAML: denied, Opens: []Opening{
			{"wan0", clients4, singleAddress("192.0.2.10"), []uint16{80, 53, 25}, []Protocol{TCP, UDP, Ping, Other}},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 53}, []Protocol{TCP, UDP, Ping, Other}},
			{"lan0", inside4, far4, []uint16{53, 25}, all}}},
		{Name: "limits", YAML: limits, Opens: []Opening{
			{"wan0", clients4, Addresses("192.0.2.%d", 10, 14), []uint16{80, 53}, []Protocol{TCP, UDP}},
			{"wan0", sites6, Addresses("2001:db8::%x", 0x10, 0x14), []uint16{80, 53}, []Protocol{TCP, UDP}}}},
		{Name: "families", YAML: families, Opens: []Opening{
			{"wan0", clients4, Addresses("192.0.2.%d", 10, 11), []uint16{80, 81, 53, 54, 8001, 8002, 9}, []Protocol{TCP, UDP}},
			{"wan0", clients6, Addresses("2001:db8::%x", 0x10, 0x11), []uint16{80, 81, 53, 54, 8001, 8002, 9}, []Protocol{TCP, UDP}}}},
		{Name: "mapped", YAML: mapped, Opens: []Opening{
			{"wan0", far4, Addresses("203.0.113.%d", 201, 203), []uint16{2000, 2001, 2002, 2003, 2004, 2005, 2006, 2007}, []Protocol{TCP, UDP, Ping}},
			{"lan0", inside4, append(far4, Addresses("203.0.113.%d", 201, 203)...), []uint16{53, 2000, 2001, 2002, 2003}, all},
			{"lan0", inside6, append(Addresses("64:ff9b::c612:%x", 1, 5), netip.MustParseAddr("64:ff9b::203.0.113.203")), []uint16{53, 2000, 2001, 2002}, all}},
			MapRequests: []MapRequests{{"office", inside4[:4], Addresses("203.0.113.%d", 201, 202), flow.Ports{First: 2000, Last: 2007}},
				{"v6only", inside6, singleAddress("203.0.113.203"), flow.Ports{First: 2000, Last: 2007}},
				{"strict", inside4[4:], singleAddress("203.0.113.203"), flow.Ports{First: 2000, Last: 2007}}}},
		{Name: "interfaces-differ", YAML: differentInterfaces, Opens: []Opening{
			{"wan0", clients4, append(Addresses("192.0.2.%d", 10, 11), netip.MustParseAddr("203.0.113.203")), []uint16{80, 53, 9}, all},
			{"wan0", clients6, singleAddress("2001:db8::10"), []uint16{80, 81}, []Protocol{TCP}},
			{"lan0", inside4, append(append(far4, Addresses("192.0.2.%d", 10, 11)...), netip.MustParseAddr("203.0.113.203")), []uint16{80, 53, 9}, all},
			{"lan0", inside6, append(far6, netip.MustParseAddr("2001:db8::10")), []uint16{80, 81}, []Protocol{TCP, UDP}}}},
		{Name: "states", YAML: states, Opens: []Opening{
			{"wan0", clients4, Addresses("192.0.2.%d", 10, 14), []uint16{80, 53}, []Protocol{TCP, UDP, Ping}},
			{"wan0", clients6, Addresses("2001:db8::%x", 0x10, 0x14), []uint16{80, 53}, []Protocol{TCP, UDP, Ping}}},
			Changing: []string{"web/a", "web/b", "dns/a", "hash/a", "hash/b", "six/a", "six/b", "mixed/a", "mixed/b", "mixed6/a", "direct/a", "tunnel/a", "tunnel/b", "plain/a", "plain/b", "any/a"}},
		{Name: "overlap", YAML: overlap, Opens: []Opening{
			{"wan0", clients4, append(Addresses("203.0.113.%d", 200, 204), netip.MustParseAddr("192.0.2.10")), []uint16{80, 53, 9}, all},
			{"wan0", clients6, append(singleAddress("2001:db8:77::10"), singleAddress("2001:db8:ab::1")...), []uint16{80, 53, 9}, all},
			{"lan0", inside4, append(Addresses("203.0.113.%d", 200, 204), far4...), []uint16{80, 53, 9}, all},
			{"lan0", inside6, append(singleAddress("2001:db8:77::10"), append(Addresses("64:ff9b::cb00:71%x", 0xc8, 0xcc), far6...)...), []uint16{80, 53, 9}, all}}},
	}, append(natScenarios(), edgeScenarios()...)...)
}
