// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

const oneToOne = `
nat:
  - {name: bih, type: siit, prefix: "64:ff9b::/96", eam: [{ipv4: 203.0.113.16/28, ipv6: "fd00:2::/124"}, {ipv4: 203.0.113.7, ipv6: "fd00:2::7"}]}
`

// A new route or address inside a mapping takes effect when the network changes, and so does its removal (RFC
// 7915 §4.6).
func TestRoutesIntoMappings(t *testing.T) {
	s := changing(t, oneToOne)
	meets := func(want string) {
		t.Helper()
		out := send(t, s, "wan0", "ip4(src=198.18.0.1,dst=203.0.113.18)/udp(sport=53,dport=4000)/data(9)")
		if got := string(out.Action) + " " + string(out.Reason); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	meets("forward static")
	link, route := &net.IPNet{IP: net.IP{203, 0, 113, 18}, Mask: net.CIDRMask(32, 32)}, &netlink.Route{}
	again := func(f func() error) {
		t.Helper()
		if err := s.inside(f); err != nil {
			t.Fatal(err)
		}
		if err := s.inside(s.apply); err != nil {
			t.Fatal(err)
		}
	}
	again(func() error {
		lan, err := netlink.LinkByName("lan0")
		if err != nil {
			return err
		}
		route = &netlink.Route{LinkIndex: lan.Attrs().Index, Dst: link, Gw: net.IP{10, 0, 2, 9}}
		return netlink.RouteAdd(route)
	})
	meets("pass not-ours")
	again(func() error { return netlink.RouteDel(route) })
	meets("forward static")
	again(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: link})
	})
	meets("pass not-routed")
}

// Warnings name the traffic that a siit rule seems to include but does not translate.
func TestCrossingWarnings(t *testing.T) {
	s := changing(t, oneToOne)
	if w := strings.Join(s.d.Warnings(), "\n"); strings.Contains(w, "nat bih") {
		t.Errorf("warned of a rule that is as it should be: %s", w)
	}
	if err := s.readdress("wan0", "198.51.100.1/24", "203.0.113.7/24"); err != nil {
		t.Fatal(err)
	}
	s.mustChange(oneToOne)
	if w := strings.Join(s.d.Warnings(), "\n"); !strings.Contains(w, "nat bih: 203.0.113.7 is an address of this host") {
		t.Errorf("an own address with a mapping: %q", w)
	}
	for yaml, told := range map[string]bool{`{name: bare, type: siit, prefix: "64:ff9b::/96"}`: true,
		`{name: bare, type: siit, prefix: "64:ff9b::/96", out: wan0}`: false} {
		s.mustChange("nat: [" + yaml + "]")
		if w := strings.Join(s.d.Warnings(), "\n"); strings.Contains(w, "nat bare: only IPv6 packets are translated") != told {
			t.Errorf("%s: %q", yaml, w)
		}
	}
}

// The routing table is read with its own addresses, without unreachable routes.
func TestDestinations(t *testing.T) {
	s := changing(t, oneToOne)
	err := s.inside(func() error {
		for _, text := range []string{"198.18.6.0/24", "2001:db8:66::/48"} {
			_, unreachable, err := net.ParseCIDR(text)
			if err != nil {
				return err
			}
			if err := netlink.RouteAdd(&netlink.Route{Dst: unreachable, Type: unix.RTN_UNREACHABLE}); err != nil {
				return err
			}
		}
		found := map[netdev.Destination]bool{}
		for _, v6 := range []bool{false, true} {
			list, err := netdev.Destinations(v6)
			if err != nil {
				return err
			}
			for _, d := range list {
				found[d] = true
			}
		}
		for text, here := range map[string]bool{"0.0.0.0/0": false, "::/0": false, "10.1.0.0/16": false, "10.0.2.0/24": false, "10.0.2.1/32": true,
			"fd00:2::1/128": true, "fd00:2::/128": true, "fd00:2::/64": false} {
			if !found[netdev.Destination{Prefix: netip.MustParsePrefix(text), Here: here}] {
				t.Errorf("%s is missing, of %v", text, found)
			}
		}
		for d := range found {
			if d.Prefix.String() == "198.18.6.0/24" || d.Prefix.String() == "2001:db8:66::/48" {
				t.Errorf("%v is not reachable", d)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
