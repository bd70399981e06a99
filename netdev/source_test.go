// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestNamedSource has default routes by an interface without IPv4 addresses: only a route that names its source counts,
// and of two the one with the lower metric.
func TestNamedSource(t *testing.T) {
	labtest.Require(t, labtest.Root)
	gw := labtest.New(t, lab.Topology{Name: "source", Nodes: []lab.NodeSpec{{Name: "gateway"}}}).Node("gateway")
	do(t, gw, func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}
		lo, err := netlink.LinkByName("lo")
		if err := errors.Join(err, netlink.LinkAdd(veth), netlink.LinkSetUp(veth)); err != nil {
			return err
		}
		b, err := netlink.LinkByName("b")
		if err := errors.Join(err, netlink.LinkSetUp(b), netlink.LinkSetUp(lo)); err != nil {
			return err
		}
		own := func() netip.Addr { return NamedSource(veth.Index, false, netlink.RouteListFiltered) }
		_, all, _ := net.ParseCIDR("0.0.0.0/0")
		via := &netlink.Via{AddrFamily: netlink.FAMILY_V6, Addr: net.ParseIP("fe80::1")}
		add := func(metric int, source string) {
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: veth.Index, Dst: all, Via: via, Src: net.ParseIP(source), Priority: metric, Flags: int(netlink.FLAG_ONLINK)}); err != nil {
				t.Errorf("route with the source %q: %v", source, err)
			}
		}
		for _, a := range []string{"203.0.113.1/32", "203.0.113.2/32"} {
			address, _ := netlink.ParseAddr(a)
			if err := netlink.AddrAdd(lo, address); err != nil {
				return err
			}
		}
		add(10, "")
		if a := own(); a.IsValid() {
			t.Errorf("a route without src names %v", a)
		}
		add(30, "203.0.113.1")
		add(20, "203.0.113.2")
		if a := own(); a != netip.MustParseAddr("203.0.113.2") {
			t.Errorf("the source is %v", a)
		}
		if a := NamedSource(veth.Index, true, netlink.RouteListFiltered); a.IsValid() {
			t.Errorf("the source of IPv6 is %v", a)
		}
		return nil
	})
}
