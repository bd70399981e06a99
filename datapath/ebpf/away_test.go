// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/packet"
)

// TestBackendsFollowWhileALinkIsAway removes parts of the network that the configuration in force needs.
// Backends that fail afterwards must still be removed from service.
func TestBackendsFollowWhileALinkIsAway(t *testing.T) {
	const yaml = `
services:
  - {name: web, protocol: tcp, mode: fullnat, listen: [{address: 192.0.2.10, ports: [80]}], backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]}
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0}
`
	link := func(name string, f func(netlink.Link) error) error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return f(l)
	}
	for name, goes := range map[string]func() error{
		"wan0 loses its addresses": func() error {
			return link("wan0", func(l netlink.Link) error {
				list, err := netlink.AddrList(l, netlink.FAMILY_ALL)
				for i := range list {
					err = errors.Join(err, netlink.AddrDel(l, &list[i]))
				}
				return err
			})
		},
		"wan0 is gone":  func() error { return link("wan0", netlink.LinkDel) },
		"both are gone": func() error { return errors.Join(link("wan0", netlink.LinkDel), link("lan0", netlink.LinkDel)) },
	} {
		t.Run(name, func(t *testing.T) {
			s := changing(t, yaml)
			if err := s.inside(goes); err != nil {
				t.Fatal(err)
			}
			for range 2 { // again, because the second time the host of the last apply is a remembered one
				down := *s.snapshot
				down.Services = slices.Clone(down.Services)
				down.Services[0].State = []datapath.State{datapath.Down, datapath.Up}
				s.snapshot = &down
				if err := s.inside(s.apply); err != nil {
					t.Fatal(err)
				}
			}
			if !slices.ContainsFunc(s.d.Warnings(), func(w string) bool { return strings.Contains(w, "nat office") || strings.Contains(w, "service web") }) {
				t.Errorf("the warnings %q do not tell what is away", s.d.Warnings())
			}
			other := *s.snapshot.Config
			again := *s.snapshot
			again.Config = &other
			err := s.inside(func() error { _, err := s.d.Apply(context.Background(), &again); return err })
			if err != nil { // a rule without its interface waits
				t.Errorf("a new configuration: %v", err)
			}
		})
	}
}

// TestBackendsWaitForARoute: a fullnat backend without a route does not affect other backends and services. A
// warning names it, and it gets connections once a route exists.
func TestBackendsWaitForARoute(t *testing.T) {
	s := changing(t, "services: [{name: dns, protocol: udp, mode: dnat, listen: [{address: 192.0.2.12, ports: [53]}], backends: [{name: a, address: 10.0.2.2}]}]")
	if err := s.ip("route add unreachable 10.77.0.0/24"); err != nil {
		t.Fatal(err)
	}
	s.mustChange(`
services:
  - {name: web, protocol: udp, mode: fullnat, listen: [{address: 192.0.2.10, ports: [53]}], backends: [{name: a, address: 10.77.0.2}, {name: b, address: 10.0.2.3}]}
  - {name: far, protocol: udp, mode: fullnat, listen: [{address: 192.0.2.11, ports: [53]}], backends: [{name: c, address: 10.77.0.2}]}
`)
	to := func(vip string, port int) string {
		out := send(t, s, "wan0", fmt.Sprintf("ip4(src=198.51.100.2,dst=%s)/udp(sport=%d,dport=53)", vip, port))
		for _, b := range []string{"10.0.2.3", "10.77.0.2"} {
			if len(out.Out) == 1 && strings.Contains(fmt.Sprint(packet.Parse(out.Out[0].Frame)), "dst="+b) {
				return b
			}
		}
		return string(out.Reason)
	}
	warned := func() (n int) {
		for _, w := range s.d.Warnings() {
			if strings.Contains(w, "no route to 10.77.0.2") && strings.Contains(w, "no new connections") {
				n++
			}
		}
		return n
	}
	for port := range 4 {
		if got := to("192.0.2.10", 4000+port); got != "10.0.2.3" {
			t.Errorf("the service that has another backend: %s", got)
		}
	}
	if got := to("192.0.2.11", 4000); got != "no-backend" || warned() != 2 {
		t.Errorf("the service that has no other: %s; warnings %q", got, s.d.Warnings())
	}
	if err := errors.Join(s.ip("route replace 10.77.0.0/24 via 10.0.2.3"), s.inside(s.apply)); err != nil {
		t.Fatal(err)
	}
	if got := to("192.0.2.11", 5000); got != "10.77.0.2" || warned() != 0 {
		t.Errorf("with a route: %s; warnings %q", got, s.d.Warnings())
	}
}

// TestRulesWaitForInterfaces: a configuration may name an interface that does not exist yet (PPP, a VLAN, a
// container's). A warning reports it, and the rule takes effect when the interface appears.
func TestRulesWaitForInterfaces(t *testing.T) {
	const yaml = `
services:
  - {name: web, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.10, ports: [80], interface: later0}], backends: [{name: a, address: 10.0.2.2}]}
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24], out: later0}
  - {name: lab, type: snat, source: [10.0.3.0/24], in: later1, to: [203.0.113.1]}
  - {name: garage, type: static, in: later2, internal: 10.9.0.0/24, external: 203.0.113.0/24}
  - {name: yard, type: static, out: later2, internal: 10.8.0.0/24, external: 198.51.100.0/24}
firewall:
  rules: [{name: shut, action: drop, in: later3}]
`
	s := changingAt(t, "tc", yaml) // every link accepts frames from TC
	warned := func(about string) bool {
		return slices.ContainsFunc(s.d.Warnings(), func(w string) bool { return strings.Contains(w, about) })
	}
	for _, name := range []string{"later0", "later1", "later2", "later3"} {
		if !warned("there is no interface " + name) {
			t.Errorf("the warnings %q do not tell of %s", s.d.Warnings(), name)
		}
	}
	asked := "ip4(src=10.0.2.2,dst=198.18.0.2)/udp(sport=4000,dport=53)"
	if out := send(t, s, "lan0", asked); out.Action != model.Pass || out.Reason != "not-ours" {
		t.Errorf("without the interface: %v %v", out.Action, out.Reason)
	}
	if out := send(t, s, "lan0", "ip4(src=10.8.0.2,dst=10.0.2.1)/udp(sport=4000,dport=53)"); out.Action != model.Pass || out.Reason != "not-ours" {
		t.Errorf("to the gateway itself, which leaves by no interface: %v %v", out.Action, out.Reason)
	}
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "later0"}, PeerName: "peer0"}
	err := s.inside(func() error {
		err := errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link))
		_, to, _ := net.ParseCIDR("198.18.0.0/24")
		mac := net.HardwareAddr{2, 0, 0, 0, 9, 9}
		return errors.Join(err, netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: to, Scope: netlink.SCOPE_LINK}),
			netlink.NeighAdd(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.IP{198, 18, 0, 2}, HardwareAddr: mac}))
	})
	if err := errors.Join(err, s.inside(s.apply)); err != nil {
		t.Fatal(err)
	}
	if !warned("nat office: interface later0 has no address") || warned("no interface later0") {
		t.Errorf("without an address the warnings are %q", s.d.Warnings())
	}
	if out := send(t, s, "lan0", asked); out.Action != model.Drop || out.Reason != "no-address" {
		t.Errorf("without an address: %v %v", out.Action, out.Reason)
	}
	err = s.inside(func() error {
		return netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IP{198, 18, 0, 1}, Mask: net.CIDRMask(24, 32)}})
	})
	if err := errors.Join(err, s.inside(s.apply)); err != nil {
		t.Fatal(err)
	}
	if warned("later0") || !warned("later1") {
		t.Errorf("with an address the warnings are %q", s.d.Warnings())
	}
	s.from("198.18.0.1", "10.0.2.2", "198.18.0.2", 4001, "a flow by the interface that came")
}

// TestRenamedInterfaceIsNotAway: after a rename, the old name of an interface does not count as missing.
func TestRenamedInterfaceIsNotAway(t *testing.T) {
	lan, wan := netdev.Interface{Index: 2, Name: "lan0"}, netdev.Interface{Index: 3, Name: "wan0"}
	for _, c := range []struct {
		now  []netdev.Interface
		want string
	}{
		{[]netdev.Interface{lan}, "lan0 wan0"},
		{[]netdev.Interface{lan, {Index: 3, Name: "wan9"}}, "lan0 wan9"},
		{[]netdev.Interface{lan, {Index: 4, Name: "wan0"}}, "lan0 wan0"},
		{[]netdev.Interface{{Index: 2, Name: "wan0"}, {Index: 3, Name: "lan0"}}, "wan0 lan0"},
	} {
		empty := func(list []netdev.Interface) *compile.Host {
			return &compile.Host{Interfaces: list, Addresses: map[int][]netip.Addr{}, Details: map[int][]compile.HostAddress{}, Global: map[int][2]netip.Addr{}}
		}
		var got []string
		for _, i := range empty(c.now).With(empty([]netdev.Interface{lan, wan})).Interfaces {
			got = append(got, i.Name)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("lan0 and wan0 became %v: there are %v, want %s", c.now, got, c.want)
		}
	}
}
