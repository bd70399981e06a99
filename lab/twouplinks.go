// SPDX-License-Identifier: Apache-2.0

package lab

// TwoUplinks is an office with two providers; it fits the example office-two-uplinks.
//
//	                           /- wan0 -- fiber --\
//	pc, desk -- lan0 gateway --                    -- internet
//	                           \- wan1 -- radio --/
//
// Inside are 10.1.10.20 (pc) and 10.1.10.21 (desk), fd00:10::20 and ::21. The gateway is 198.51.100.2 and
// 2001:db8:a::2 at wan0, 192.0.2.2 and 2001:db8:b::2 at wan1. Its default route is the router of the provider fiber,
// 198.51.100.1. The router of the provider radio is 192.0.2.1. The node internet is every host behind the providers,
// such as 203.0.113.10 and 2001:db8:f::10.
func TwoUplinks() Topology {
	t := Topology{
		Name:  "twouplinks",
		About: "an office with two providers",
		Nodes: []NodeSpec{
			{
				Name: "gateway", Forward: true,
				Routes: []Route{{To: "default", Via: "198.51.100.1"}, {To: "default6", Via: "2001:db8:a::1"}},
			},
			{Name: "lan", Switch: true},
			{
				Name:      "internet",
				Addresses: []string{"203.0.113.10/32", "2001:db8:f::10/128"},
				Owns:      []string{"203.0.113.0/24", "2001:db8:f::/64"},
				Routes: []Route{
					{To: "198.51.100.0/24", Via: "100.64.1.1"}, {To: "2001:db8:a::/64", Via: "2001:db8:1::1"},
					{To: "192.0.2.0/24", Via: "100.64.2.1"}, {To: "2001:db8:b::/64", Via: "2001:db8:2::1"},
				},
				Servers: standardServers(),
			},
		},
		Links: []LinkSpec{{
			A: End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.1.10.1/24", "fd00:10::1/64"}},
			B: End{Node: "lan", Iface: "gateway"},
		}},
	}
	for _, p := range []struct{ name, wan, at, near, near6, far, far6 string }{
		{"fiber", "wan0", "eth0", "198.51.100.", "2001:db8:a::", "100.64.1.", "2001:db8:1::"},
		{"radio", "wan1", "eth1", "192.0.2.", "2001:db8:b::", "100.64.2.", "2001:db8:2::"},
	} {
		t.Nodes = append(t.Nodes, NodeSpec{Name: p.name, Forward: true, Routes: []Route{{To: "default", Via: p.far + "2"}, {To: "default6", Via: p.far6 + "2"}}})
		t.Links = append(t.Links,
			LinkSpec{A: End{Node: "gateway", Iface: p.wan, Addresses: []string{p.near + "2/24", p.near6 + "2/64"}}, B: End{Node: p.name, Iface: "office", Addresses: []string{p.near + "1/24", p.near6 + "1/64"}}},
			LinkSpec{A: End{Node: p.name, Iface: "internet", Addresses: []string{p.far + "1/24", p.far6 + "1/64"}}, B: End{Node: "internet", Iface: p.at, Addresses: []string{p.far + "2/24", p.far6 + "2/64"}}})
	}
	for _, h := range []struct{ name, host string }{{"pc", "20"}, {"desk", "21"}} {
		t.Nodes = append(t.Nodes, NodeSpec{Name: h.name, Routes: []Route{{To: "default", Via: "10.1.10.1"}, {To: "default6", Via: "fd00:10::1"}}})
		t.Links = append(t.Links, LinkSpec{A: End{Node: h.name, Iface: "eth0", Addresses: []string{"10.1.10." + h.host + "/24", "fd00:10::" + h.host + "/64"}}, B: End{Node: "lan", Iface: h.name}})
	}
	return t
}
