// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestPolledTellsAtOnce: the next call reports a change, once, and nothing else.
func TestPolledTellsAtOnce(t *testing.T) {
	labtest.Require(t, labtest.Root)
	gw := labtest.New(t, lab.Topology{Name: "polled", Nodes: []lab.NodeSpec{{Name: "gateway"}}}).Node("gateway")
	do(t, gw, func() error {
		p, err := OpenPolled()
		if err != nil {
			return err
		}
		defer p.Close()
		if p.Changed() {
			t.Error("a change is told before there was one")
		}
		_, dst, _ := net.ParseCIDR("203.0.113.0/24")
		_, six, _ := net.ParseCIDR("2001:db8:9::/48")
		_, own, _ := net.ParseCIDR("198.51.100.0/24")
		var link netlink.Link = &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "d0"}, PeerName: "d1"}
		address := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP("198.51.100.1"), Mask: own.Mask}}
		route, route6 := &netlink.Route{Dst: dst}, &netlink.Route{Dst: six}
		rule := netlink.NewRule()
		rule.Table, rule.Priority, rule.Family = 77, 77, netlink.FAMILY_V4
		for _, c := range []struct {
			what string
			do   func() error
		}{
			{"a link that comes", func() (err error) {
				if err = netlink.LinkAdd(link); err == nil {
					link, err = netlink.LinkByName("d0")
				}
				route.LinkIndex, route6.LinkIndex = link.Attrs().Index, link.Attrs().Index
				return err
			}},
			{"a MAC", func() error { return netlink.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 0, 9}) }},
			{"a link that goes up", func() error { return netlink.LinkSetUp(link) }},
			{"an address", func() error { return netlink.AddrAdd(link, address) }},
			{"a route", func() error { return netlink.RouteAdd(route) }},
			{"an IPv6 route", func() error { return netlink.RouteAdd(route6) }},
			{"a rule", func() error { return netlink.RuleAdd(rule) }},
			{"an IPsec policy", func() error {
				return netlink.XfrmPolicyAdd(&netlink.XfrmPolicy{Src: own, Dst: dst, Dir: netlink.XFRM_DIR_OUT})
			}},
			{"IPsec policies that go", netlink.XfrmPolicyFlush},
			{"a route that goes", func() error { return netlink.RouteDel(route) }},
			{"a link that goes", func() error { return netlink.LinkDel(link) }},
		} {
			for p.Changed() { // what the kernel does on its own after the change before, as duplicate address detection
			}
			if err := c.do(); err != nil {
				t.Fatalf("%s: %v", c.what, err)
			}
			if !p.Changed() {
				t.Errorf("%s is not told", c.what)
			}
		}
		return nil
	})
}

// TestPolledWithoutRoom: more changes than the socket holds are a change.
func TestPolledWithoutRoom(t *testing.T) {
	labtest.Require(t, labtest.Root)
	gw := labtest.New(t, lab.Topology{Name: "polled", Nodes: []lab.NodeSpec{{Name: "gateway"}}}).Node("gateway")
	do(t, gw, func() error {
		p, err := OpenPolled()
		if err != nil {
			return err
		}
		defer p.Close()
		if err := unix.SetsockoptInt(p.sockets[0], unix.SOL_SOCKET, unix.SO_RCVBUF, 1); err != nil { // the least that there is
			return err
		}
		link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "d0"}, PeerName: "d1"}
		for range 20 {
			if err := netlink.LinkAdd(link); err != nil {
				return err
			}
			if err := netlink.LinkDel(link); err != nil {
				return err
			}
		}
		if !p.Changed() {
			t.Error("no change is told")
		}
		return nil
	})
}
