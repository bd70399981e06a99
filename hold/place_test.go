// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func want(owner, first, last string) Want {
	return Want{First: netip.MustParseAddr(first), Last: netip.MustParseAddr(last), Owner: owner}
}

func one(owner, a string) Want { return want(owner, a, a) }

func left(w Want, why string) Want { w.Leave = why; return w }

// TestPlace places addresses on a gateway with two networks and a port without a carrier.
func TestPlace(t *testing.T) {
	p := netip.MustParsePrefix
	v := view{
		networks: []network{{p("198.51.100.0/24"), 2, "wan0", true}, {p("2001:db8:100::/64"), 2, "wan0", true},
			{p("10.0.2.0/24"), 3, "lan0", true}, {p("10.0.0.0/8"), 4, "big0", true}, {p("10.9.0.0/31"), 5, "pair0", true}, {p("10.7.0.0/24"), 6, "dark0", false}},
		own:   map[netip.Addr]string{netip.MustParseAddr("198.51.100.1"): "wan0", netip.MustParseAddr("203.0.113.7"): "lo"},
		local: []netip.Prefix{p("198.51.100.128/28")},
		was: map[netip.Addr]string{netip.MustParseAddr("198.51.100.9"): "wan0", netip.MustParseAddr("192.0.2.9"): "wan0",
			netip.MustParseAddr("10.0.2.77"): "lan0", netip.MustParseAddr("198.51.100.1"): "wan0"},
	}
	for _, c := range []struct {
		name  string
		wants []Want
		want  string
	}{
		{"in a network", []Want{one("a", "198.51.100.20")}, "198.51.100.20 a probing wan0"},
		{"IPv6", []Want{one("a", "2001:db8:100::20")}, "2001:db8:100::20 a probing wan0"},
		{"the smaller network", []Want{one("a", "10.0.2.9")}, "10.0.2.9 a probing lan0"},
		{"the larger network", []Want{one("a", "10.0.3.9")}, "10.0.3.9 a probing big0"},
		{"outside", []Want{one("a", "192.0.2.1")}, "192.0.2.1 a routed"},
		{"the host's", []Want{one("a", "198.51.100.1")}, "198.51.100.1 a own wan0"},
		{"the host's outside the networks", []Want{one("a", "203.0.113.7")}, "203.0.113.7 a own lo"},
		{"a local route", []Want{one("a", "198.51.100.130")}, "198.51.100.130 a own: by a local route"},
		{"several owners", []Want{one("a", "198.51.100.20"), one("b", "198.51.100.20"), one("a", "198.51.100.20")}, "198.51.100.20 a,b probing wan0"},
		{"a pool in a row", []Want{want("a", "198.51.100.20", "198.51.100.23")}, "198.51.100.20-198.51.100.23 a probing wan0"},
		{"a pool around the host's own", []Want{want("a", "198.51.100.0", "198.51.100.2")},
			"198.51.100.0 a absent wan0: the first and the last address of 198.51.100.0/24 are no host's; 198.51.100.1 a own wan0; 198.51.100.2 a probing wan0"},
		{"the broadcast address", []Want{one("a", "198.51.100.255")}, "198.51.100.255 a absent wan0: the first and the last address of 198.51.100.0/24 are no host's"},
		{"both of two (RFC 3021)", []Want{want("a", "10.9.0.0", "10.9.0.1")}, "10.9.0.0-10.9.0.1 a probing pair0"},
		{"the routers' anycast address", []Want{one("a", "2001:db8:100::")}, "2001:db8:100:: a absent wan0: the first and the last address of 2001:db8:100::/64 are no host's"},
		{"a large pool outside", []Want{want("a", "100.64.0.0", "100.127.255.255")}, "100.64.0.0-100.127.255.255 a routed"},
		{"a prefix outside", []Want{want("a", "2001:db8:7::", "2001:db8:7:0:ffff:ffff:ffff:ffff")}, "2001:db8:7::-2001:db8:7:0:ffff:ffff:ffff:ffff a routed"},
		{"no carrier", []Want{one("a", "10.7.0.9")}, "10.7.0.9 a absent dark0: the interface has no carrier"},
		{"left to others", []Want{left(one("a", "198.51.100.20"), "off")}, "198.51.100.20 a absent wan0: off"},
		{"left by one owner", []Want{one("a", "198.51.100.20"), left(one("b", "198.51.100.20"), "off")}, "198.51.100.20 a,b absent wan0: off"},
		{"no addresses", []Want{{Owner: "a"}, one("a", "fe80::1"), one("a", "0.0.0.0"), one("a", "127.0.0.1")}, ""},
		{"an address taken away", []Want{one("a", "198.51.100.9"), {netip.MustParseAddr("10.0.2.77"), netip.MustParseAddr("10.0.2.77"), "b", "", true}},
			"10.0.2.77 b lost lan0: it was the host's own, and Sluice does not take it over: write listen: {interface: lan0} to follow the interface's address, or give the host this one again; " +
				"198.51.100.9 a lost wan0: it was the host's own, and Sluice does not take it over: give it to the host again, or write another"},
		{"an address that VRRP has moved", []Want{left(one("a", "198.51.100.9"), "off")}, "198.51.100.9 a absent wan0: off"},
		{"taken away with its network", []Want{one("a", "192.0.2.9")}, "192.0.2.9 a lost wan0: it was the host's own, and Sluice does not take it over: give it to the host again, or write another"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := describe(decideWants(c.wants, v)); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
	list := decideWants([]Want{want("a", "10.0.64.1", "10.0.79.255"), want("b", "2001:db8:100::", "2001:db8:100:0:ffff:ffff:ffff:ffff")}, v)
	if len(list) != 2 || list[0].State != Absent || list[1].State != Absent || !strings.Contains(list[0].Why, "local route") {
		t.Errorf("more than can be held: %+v", list)
	}
	list = decideWants([]Want{want("a", "10.0.64.1", "10.0.67.255"), want("b", "10.0.68.0", "10.0.68.9")}, v)
	if n := CountByState(statuses(list)); n["probing"] != MaxHeld || n["absent"] != 1023+10-MaxHeld {
		t.Errorf("two pools around the limit: %v", n)
	}
}

func describe(list []addressDecision) string {
	var out []string
	for _, s := range statuses(list) {
		text := fmt.Sprintf("%s %s %s", s.Range(), strings.Join(s.Owners, ","), s.State)
		if s.Interface != "" {
			text += " " + s.Interface
		}
		if s.Why != "" {
			text += ": " + s.Why
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}
