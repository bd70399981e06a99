// SPDX-License-Identifier: Apache-2.0

package lab

import "fmt"

// TopologyByName returns a predefined topology by name, or false.
func TopologyByName(name string) (Topology, bool) {
	for _, t := range All() {
		if t.Name == name {
			return t, true
		}
	}
	return Topology{}, false
}

// All returns every predefined topology.
func All() []Topology {
	return []Topology{Balancer(), Office(), TwoUplinks(), TwoGateways(), IPv6Only()}
}

// Balancer is a load balancer between a client and four servers. It fits the examples lb-dnat, lb-fullnat, lb-dsr and
// stateless.
//
//	client ---- wan0 gateway lan0 ---- lan (switch) ---- s1 s2 s3 s9
//	   |                                   |
//	   +----- out0 bypass lan0 ------------+
//
// The client (10.0.1.2, fd00:1::2) has the gateway (10.0.1.1) as its default route, so every virtual address
// (192.0.2.0/24, 2001:db8::/64) arrives at wan0. It also owns 10.64.0.0/16 and fd00:64::/64, to emulate many clients.
//
// The servers s1, s2, s3 and s9 are 10.0.2.2, .3, .4, .9 and fd00:2::2, ::3, ::4, ::9. Their default route is the
// gateway (10.0.2.1, fd00:2::1). The gateway has the source pool of lb-fullnat (10.0.2.100-103, fd00:2::100) on lan0.
//
// For direct server return the servers have 192.0.2.30 and 2001:db8::30 on lo and do not answer ARP for them. Packets
// from these addresses use the router bypass (10.0.2.254) to the client's second interface ret0. So replies bypass
// the gateway, as the counters of ret0 show.
func Balancer() Topology {
	t := Topology{
		Name:  "balancer",
		About: "a client, a load balancer and four servers; direct server returns take a bypass",
		Nodes: []NodeSpec{
			{
				Name: "client",
				Owns: []string{"10.64.0.0/16", "fd00:64::/64"},
				Routes: []Route{
					{To: "default", Via: "10.0.1.1"},
					{To: "default6", Via: "fd00:1::1"},
				},
			},
			{
				Name: "gateway", Forward: true,
				Routes: []Route{
					{To: "10.64.0.0/16", Via: "10.0.1.2"},
					{To: "fd00:64::/64", Via: "fd00:1::2"},
				},
			},
			{Name: "lan", Switch: true},
			{
				Name: "bypass", Forward: true,
				Routes: []Route{
					{To: "10.0.1.0/24", Via: "10.0.3.2"},
					{To: "10.64.0.0/16", Via: "10.0.3.2"},
					{To: "fd00:1::/64", Via: "fd00:3::2"},
					{To: "fd00:64::/64", Via: "fd00:3::2"},
				},
			},
		},
		Links: []LinkSpec{
			{
				A: End{Node: "client", Iface: "eth0", Addresses: []string{"10.0.1.2/24", "fd00:1::2/64"}},
				B: End{Node: "gateway", Iface: "wan0", Addresses: []string{"10.0.1.1/24", "fd00:1::1/64"}},
			},
			{
				A: End{Node: "gateway", Iface: "lan0", Addresses: []string{
					"10.0.2.1/24", "fd00:2::1/64",
					"10.0.2.100/32", "10.0.2.101/32", "10.0.2.102/32", "10.0.2.103/32", "fd00:2::100/128",
				}},
				B: End{Node: "lan", Iface: "gateway"},
			},
			{
				A: End{Node: "bypass", Iface: "lan0", Addresses: []string{"10.0.2.254/24", "fd00:2::fe/64"}},
				B: End{Node: "lan", Iface: "bypass"},
			},
			{
				A: End{Node: "bypass", Iface: "out0", Addresses: []string{"10.0.3.1/24", "fd00:3::1/64"}},
				B: End{Node: "client", Iface: "ret0", Addresses: []string{"10.0.3.2/24", "fd00:3::2/64"}},
			},
		},
	}
	for _, s := range []struct {
		name string
		host int
	}{{"s1", 2}, {"s2", 3}, {"s3", 4}, {"s9", 9}} {
		t.Nodes = append(t.Nodes, balancerServer(s.name))
		t.Links = append(t.Links, LinkSpec{
			A: End{Node: s.name, Iface: "eth0", Addresses: []string{
				fmt.Sprintf("10.0.2.%d/24", s.host), fmt.Sprintf("fd00:2::%d/64", s.host),
			}},
			B: End{Node: "lan", Iface: s.name},
		})
	}
	return t
}

// standardServers are the servers of the examples.
func standardServers() []ServerSpec {
	return []ServerSpec{{"echo", 7}, {"dns", 53}, {"web", 80}, {"web", 8000}, {"web", 8080}}
}

func balancerServer(name string) NodeSpec {
	return NodeSpec{
		Name:      name,
		Servers:   standardServers(),
		Addresses: []string{"192.0.2.30/32", "2001:db8::30/128"},
		Routes: []Route{
			{To: "default", Via: "10.0.2.1"},
			{To: "default6", Via: "fd00:2::1"},
			{To: "default", Via: "10.0.2.254", From: "192.0.2.30"},
			{To: "default6", Via: "fd00:2::fe", From: "2001:db8::30"},
		},
		// Answer ARP only for addresses of the receiving interface, and use only such addresses in requests.
		Sysctls: map[string]string{
			"net.ipv4.conf.all.arp_ignore":   "1",
			"net.ipv4.conf.all.arp_announce": "2",
		},
	}
}

// Office is an office behind one public address; it fits the examples office and router.
//
//	pc laptop web ftp ---- lan (switch) ---- lan0 gateway wan0 ---- outside
//
// Inside are 10.1.10.20 (pc), 10.1.10.2 (web) and 10.1.10.3 (ftp), and 2001:db8:10::/64 without translation. The
// laptop has no address until a DHCP server gives it one. The servers of the gateway are dnsmasq, OpenVPN and Sluice
// itself. The gateway is 211.155.226.121 at wan0. The node outside is the provider's router (211.155.226.1) and every host behind
// it. 203.0.113.0/24 and 2001:db8:f::/64 are friendly; 198.51.100.0/24 and 2001:db8:bad::/48 are on the example's
// deny list.
func Office() Topology {
	t := Topology{
		Name:  "office",
		About: "an office with published servers, DHCP, DNS and a VPN on its router",
		Nodes: []NodeSpec{
			{
				Name: "gateway", Forward: true,
				Servers: []ServerSpec{{"dnsmasq", 67}, {"openvpn", 1194}, {Kind: "sluice"}},
				Routes: []Route{
					{To: "default", Via: "211.155.226.1"},
					{To: "default6", Via: "2001:db8:e::1"},
				},
			},
			{Name: "lan", Switch: true},
			{
				Name:      "outside",
				Addresses: []string{"203.0.113.10/32", "198.51.100.10/32", "2001:db8:f::10/128", "2001:db8:bad::10/128"},
				Owns:      []string{"203.0.113.0/24", "198.51.100.0/24", "2001:db8:f::/64", "2001:db8:bad::/48"},
				Routes:    []Route{{To: "2001:db8:10::/64", Via: "2001:db8:e::2"}},
				Servers:   append(standardServers(), ServerSpec{Kind: "openvpn-client"}),
			},
		},
		Links: []LinkSpec{
			{
				A: End{Node: "gateway", Iface: "wan0", Addresses: []string{"211.155.226.121/24", "2001:db8:e::2/64"}},
				B: End{Node: "outside", Iface: "eth0", Addresses: []string{"211.155.226.1/24", "2001:db8:e::1/64"}},
			},
			{
				A: End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.1.10.1/24", "2001:db8:10::1/64"}},
				B: End{Node: "lan", Iface: "gateway"},
			},
		},
	}
	for _, h := range []struct {
		name string
		host int
	}{{"web", 2}, {"ftp", 3}, {"pc", 20}} {
		node := NodeSpec{Name: h.name, Routes: []Route{
			{To: "default", Via: "10.1.10.1"},
			{To: "default6", Via: "2001:db8:10::1"},
		}}
		switch h.name {
		case "web":
			node.Servers = standardServers()
		case "ftp":
			node.Servers = []ServerSpec{{"ftp", 21}}
		}
		t.Nodes = append(t.Nodes, node)
		t.Links = append(t.Links, LinkSpec{
			A: End{Node: h.name, Iface: "eth0", Addresses: []string{
				fmt.Sprintf("10.1.10.%d/24", h.host), fmt.Sprintf("2001:db8:10::%d/64", h.host),
			}},
			B: End{Node: "lan", Iface: h.name},
		})
	}
	t.Nodes = append(t.Nodes, NodeSpec{Name: "laptop", Servers: []ServerSpec{{Kind: "dhcp-client"}}})
	t.Links = append(t.Links, LinkSpec{A: End{Node: "laptop", Iface: "eth0"}, B: End{Node: "lan", Iface: "laptop"}})
	return t
}

// TwoGateways is the balancer's network with two load balancers in parallel.
//
//	client ---- wan (switch) ==== wan0 gw1 lan0 ==== lan (switch) ---- s1 s2 s3
//	                         ==== wan0 gw2 lan0 ====
//
// The gateways are 10.0.1.11 and .12, fd00:1::11 and ::12 outside, 10.0.2.11 and .12, fd00:2::11 and ::12 inside. gw1
// also has the addresses that all nodes use as next hop: 10.0.1.1, fd00:1::1, 10.0.2.1 and fd00:2::1. Moving them to
// gw2 is a failover.
func TwoGateways() Topology {
	t := Topology{
		Name:  "twogateways",
		About: "a client, two load balancers side by side and three servers",
		Nodes: []NodeSpec{
			{
				Name: "client",
				Owns: []string{"10.64.0.0/16", "fd00:64::/64"},
				Routes: []Route{
					{To: "default", Via: "10.0.1.1"},
					{To: "default6", Via: "fd00:1::1"},
				},
			},
			{Name: "wan", Switch: true},
			{Name: "lan", Switch: true},
		},
		Links: []LinkSpec{{
			A: End{Node: "client", Iface: "eth0", Addresses: []string{"10.0.1.2/24", "fd00:1::2/64"}},
			B: End{Node: "wan", Iface: "client"},
		}},
	}
	for i, gw := range []string{"gw1", "gw2"} {
		wan := []string{fmt.Sprintf("10.0.1.%d/24", 11+i), fmt.Sprintf("fd00:1::%d/64", 11+i)}
		lan := []string{fmt.Sprintf("10.0.2.%d/24", 11+i), fmt.Sprintf("fd00:2::%d/64", 11+i)}
		if i == 0 {
			wan = append(wan, "10.0.1.1/24", "fd00:1::1/64")
			lan = append(lan, "10.0.2.1/24", "fd00:2::1/64")
		}
		t.Nodes = append(t.Nodes, NodeSpec{Name: gw, Forward: true, Routes: []Route{
			{To: "10.64.0.0/16", Via: "10.0.1.2"},
			{To: "fd00:64::/64", Via: "fd00:1::2"},
		}})
		t.Links = append(t.Links,
			LinkSpec{A: End{Node: gw, Iface: "wan0", Addresses: wan}, B: End{Node: "wan", Iface: gw}},
			LinkSpec{A: End{Node: gw, Iface: "lan0", Addresses: lan}, B: End{Node: "lan", Iface: gw}})
	}
	for i := 1; i <= 3; i++ {
		name := fmt.Sprintf("s%d", i)
		t.Nodes = append(t.Nodes, NodeSpec{Name: name, Servers: standardServers(), Routes: []Route{
			{To: "default", Via: "10.0.2.1"},
			{To: "default6", Via: "fd00:2::1"},
		}})
		t.Links = append(t.Links, LinkSpec{
			A: End{Node: name, Iface: "eth0", Addresses: []string{
				fmt.Sprintf("10.0.2.%d/24", i+1), fmt.Sprintf("fd00:2::%d/64", i+1),
			}},
			B: End{Node: "lan", Iface: name},
		})
	}
	return t
}

// IPv6Only is a network without IPv4 that reaches IPv4 hosts by translation; it fits the example nat64.
//
//	client dmz old ---- lan (switch) ---- lan0 gateway wan0 ---- outside
//
// The client (2001:db8:1::2) has IPv6 only. The node dmz (10.9.0.2) is 198.51.100.2 outside, the node old (fd00:a::2)
// is in 2001:db8:a::/48. The node outside (192.0.2.2 and 2001:db8:f::2) routes the pool 203.0.113.0/28,
// 198.51.100.0/24, 2001:db8:a::/48 and 2001:db8:1::/48 to the gateway (192.0.2.1, 2001:db8:f::1).
func IPv6Only() Topology {
	return Topology{
		Name:  "ipv6only",
		About: "an IPv6-only client, a host behind a 1:1 mapping and one behind a prefix translation",
		Nodes: []NodeSpec{
			{
				Name: "gateway", Forward: true,
				Routes: []Route{
					{To: "default", Via: "192.0.2.2"},
					{To: "default6", Via: "2001:db8:f::2"},
				},
			},
			{Name: "lan", Switch: true},
			{
				Name: "outside", Servers: standardServers(),
				Routes: []Route{
					{To: "203.0.113.0/28", Via: "192.0.2.1"},
					{To: "198.51.100.0/24", Via: "192.0.2.1"},
					{To: "2001:db8:a::/48", Via: "2001:db8:f::1"},
					{To: "2001:db8:1::/48", Via: "2001:db8:f::1"},
				},
			},
			{Name: "client", Routes: []Route{{To: "default6", Via: "2001:db8:1::1"}}},
			{Name: "dmz", Servers: standardServers(), Routes: []Route{{To: "default", Via: "10.9.0.1"}}},
			{Name: "old", Servers: standardServers(), Routes: []Route{{To: "default6", Via: "fd00:a::1"}}},
		},
		Links: []LinkSpec{
			{
				A: End{Node: "gateway", Iface: "wan0", Addresses: []string{"192.0.2.1/24", "2001:db8:f::1/64"}},
				B: End{Node: "outside", Iface: "eth0", Addresses: []string{"192.0.2.2/24", "2001:db8:f::2/64"}},
			},
			{
				A: End{Node: "gateway", Iface: "lan0", Addresses: []string{"2001:db8:1::1/64", "10.9.0.1/24", "fd00:a::1/64"}},
				B: End{Node: "lan", Iface: "gateway"},
			},
			{
				A: End{Node: "client", Iface: "eth0", Addresses: []string{"2001:db8:1::2/64"}},
				B: End{Node: "lan", Iface: "client"},
			},
			{
				A: End{Node: "dmz", Iface: "eth0", Addresses: []string{"10.9.0.2/24"}},
				B: End{Node: "lan", Iface: "dmz"},
			},
			{
				A: End{Node: "old", Iface: "eth0", Addresses: []string{"fd00:a::2/64"}},
				B: End{Node: "lan", Iface: "old"},
			},
		},
	}
}
