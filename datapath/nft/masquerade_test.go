// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab"
)

// TestMasqueradeRouteSource: masquerade takes the source that the default route names, as the
// host's own programs do. On the interface's own networks it is the address there, and
// without such a name the kernel chooses.
func TestMasqueradeRouteSource(t *testing.T) {
	b := newBench(t, lab.Office())
	b.tcpServers(80, "outside")
	rule := config.NATRule{Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24")}, Out: "wan0"}
	seen := func(to string) netip.Addr {
		t.Helper()
		a, err := b.tcp("pc", "", to+":80")
		if err != nil {
			t.Fatalf("%v\n%s", err, b.ruleset())
		}
		return a.client.Addr()
	}
	b.apply(&config.Config{NAT: []config.NATRule{rule}})
	if a := seen("203.0.113.1"); a != addr("211.155.226.121") {
		t.Errorf("without a name the server saw %s", a)
	}
	defaultRoute := func(src string) {
		t.Helper()
		if err := b.gateway.Do(func() error {
			wan, err := netlink.LinkByName("wan0")
			if err != nil {
				return err
			}
			more, err := netlink.ParseAddr("211.155.226.200/24")
			if err != nil {
				return err
			}
			if err := netlink.AddrReplace(wan, more); err != nil {
				return err
			}
			return netlink.RouteReplace(&netlink.Route{LinkIndex: wan.Attrs().Index, Gw: addr("211.155.226.1").AsSlice(), Src: addr(src).AsSlice()})
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		rule config.NATRule
		src  string
	}{{rule, "211.155.226.200"}, {config.NATRule{Name: "office", Type: config.NATMasquerade, Ports: config.PortSet{{First: 50000, Last: 50010}}}, "211.155.226.200"},
		{rule, "211.155.226.121"}} {
		defaultRoute(c.src)
		b.apply(&config.Config{NAT: []config.NATRule{c.rule}})
		if a := seen("203.0.113.1"); a != addr(c.src) {
			t.Errorf("the route names %s, and the server saw %s\n%s", c.src, a, b.ruleset())
		}
		if a := seen("211.155.226.1"); a != addr("211.155.226.121") {
			t.Errorf("on the network of wan0 the server saw %s, while the route names %s", a, c.src)
		}
	}
}
