// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/model"
	"github.com/sluice-lb/sluice/packet"
)

// ip runs commands of ip(8), one a line, in the subject's network.
func (s *subject) ip(commands string) error {
	return s.inside(func() (err error) {
		for line := range strings.Lines(commands) {
			if words := strings.Fields(line); len(words) > 0 {
				if out, failed := exec.Command("ip", words...).CombinedOutput(); failed != nil {
					err = errors.Join(err, fmt.Errorf("ip %s: %w: %s", strings.Join(words, " "), failed, out))
				}
			}
		}
		return err
	})
}

const uplink = `
link add later0 type veth peer name peer0
link set later0 up
link set peer0 up
addr add 192.168.100.2/24 dev later0
addr add 203.0.113.2/24 dev later0
addr add 203.0.113.7/24 dev later0
addr add 203.0.113.199/32 dev later0
-6 addr add 2001:db8:a::2/64 dev later0 nodad preferred_lft 0
-6 addr add 2001:db8:b::2/64 dev later0 nodad
-6 addr add 2001:db8:c::2/64 dev later0 nodad
-6 addr add 2001:db8:c::3/128 dev later0 nodad
-6 addr add fd00:99::2/64 dev later0 nodad
neigh add 192.168.100.1 lladdr 02:00:00:00:09:01 dev later0
neigh add 203.0.113.1 lladdr 02:00:00:00:09:02 dev later0
-6 neigh add fe80::9 lladdr 02:00:00:00:09:03 dev later0
-6 neigh add 2001:db8:c::77 lladdr 02:00:00:00:09:04 dev later0
route add 198.18.0.0/24 via 203.0.113.1
route add 198.19.0.0/24 via 192.168.100.1
-6 route add 2600::/16 via fe80::9 dev later0
-6 route add 2001:db8:b::/40 via fe80::9 dev later0
-6 route add fd12::/16 via fe80::9 dev later0
`

// TestMasqueradeSource has an interface with several networks and prefixes, a deprecated address, and addresses
// that the configuration translates. Inside hosts leave with the address that the kernel itself selects.
func TestMasqueradeSource(t *testing.T) {
	s := changingAt(t, "tc", `
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24, "fd00:2::/64"], out: later0}
  - {name: web, type: port-forward, protocol: tcp, listen: {address: 203.0.113.199, ports: [80]}, to: {address: 10.0.2.2}}
  - {name: web6, type: port-forward, protocol: tcp, listen: {address: "2001:db8:c::3", ports: [80]}, to: {address: "fd00:2::2"}}
`)
	if err := errors.Join(s.ip(uplink), s.inside(s.apply)); err != nil {
		t.Fatal(err)
	}
	port, vip := 4000, netip.MustParseAddr("2001:db8:c::3")
	check := func(to ...string) {
		t.Helper()
		for _, to := range to {
			dst, want := netip.MustParseAddr(to), netip.Addr{}
			if err := s.inside(func() error {
				routes, err := netlink.RouteGet(dst.AsSlice())
				if err == nil {
					want, _ = netip.AddrFromSlice(routes[0].Src)
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			port++
			frame := fmt.Sprintf("ip4(src=10.0.2.2,dst=%s)/udp(sport=%d,dport=53)", to, port)
			if dst.Is6() {
				frame = fmt.Sprintf("ip6(src=fd00:2::2,dst=%s)/udp(sport=%d,dport=53)", to, port)
			}
			got := sourceOf(send(t, s, "lan0", frame))
			if want == vip {
				want = netip.MustParseAddr("2001:db8:c::2") // an address of a pool is no source of the host
			}
			if got != want.Unmap() {
				t.Errorf("towards %s: %s, the kernel takes %s", to, got, want)
			}
		}
	}
	check("198.18.0.2", "198.19.0.2", "192.168.100.1", "203.0.113.1", "2600::1", "2001:db8:b:1::5", "2001:db8:c::77", "fd12::1")
	// An endpoint that sends by both networks has an outside endpoint in each.
	for _, c := range [][2]string{{"198.18.0.3", "203.0.113.2"}, {"198.19.0.3", "192.168.100.2"}, {"198.18.0.4", "203.0.113.2"}} {
		if got := sourceOf(send(t, s, "lan0", fmt.Sprintf("ip4(src=10.0.2.3,dst=%s)/udp(sport=4000,dport=53)", c[0]))); got.String() != c[1] {
			t.Errorf("towards %s: %s, not %s", c[0], got, c[1])
		}
	}
	// The default route names a source, and the first prefix is no longer deprecated.
	if err := errors.Join(s.ip("route replace default via 203.0.113.1 dev later0 src 203.0.113.7\n-6 addr change 2001:db8:a::2/64 dev later0 preferred_lft forever"),
		s.inside(s.apply)); err != nil {
		t.Fatal(err)
	}
	check("9.9.9.9", "198.19.0.9", "2600::9", "2001:db8:b:1::9")
	c, err := s.d.Counters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := slices.DeleteFunc(c.NAT, func(r datapath.RuleCounters) bool { return r.Name != "office" }); len(n) != 1 || n[0].Packets != uint64(port-4000+3) {
		t.Errorf("of %d packets the rule has counted %+v", port-4000+3, n)
	}
}

// TestMasqueradeWithoutAddress: packets are dropped if the interface has no address of their family. A warning
// reports it.
func TestMasqueradeWithoutAddress(t *testing.T) {
	s := changingAt(t, "tc", "nat: [{name: office, type: masquerade, source: [10.0.2.0/24, 'fd00:2::/64'], out: wan0}]")
	if err := errors.Join(s.ip(`
-6 addr flush dev wan0 scope global
-6 route replace default via fe80::9 dev wan0
-6 neigh add fe80::9 lladdr 02:00:00:00:09:03 dev wan0`), s.inside(s.apply)); err != nil {
		t.Fatal(err)
	}
	for _, layers := range []string{"udp(sport=4000,dport=53)", "icmp6(type=echo,id=9)", "tcp(sport=4000,dport=80,flags=S)"} {
		if out := send(t, s, "lan0", "ip6(src=fd00:2::2,dst=2600::1)/"+layers); out.Action != model.Drop || out.Reason != "no-address" {
			t.Errorf("%s: %v %v", layers, out.Action, out.Reason)
		}
	}
	if out := send(t, s, "lan0", "ip4(src=10.0.2.2,dst=198.18.0.1)/udp(sport=4000,dport=53)"); out.Action != model.Forward {
		t.Errorf("IPv4: %v %v", out.Action, out.Reason)
	}
	if !slices.ContainsFunc(s.d.Warnings(), func(w string) bool { return strings.Contains(w, "nat office: interface wan0 has no IPv6 address") }) {
		t.Errorf("the warnings %q do not tell of it", s.d.Warnings())
	}
}

func sourceOf(out model.Outcome) netip.Addr {
	if len(out.Out) != 1 {
		return netip.Addr{}
	}
	p := packet.Parse(out.Out[0].Frame)
	if ip, ok := packet.Find[*packet.IPv4](p); ok {
		return ip.Src
	}
	if ip, ok := packet.Find[*packet.IPv6](p); ok {
		return ip.Src
	}
	return netip.Addr{}
}

// TestListenersFollowTheirAddress replaces and removes the address of an interface. Listeners without a fixed
// address use the current one and leave its other ports to the host.
func TestListenersFollowTheirAddress(t *testing.T) {
	s := changingAt(t, "tc", `
services: [{name: svc, protocol: tcp, mode: dnat, listen: [{interface: wan0, ports: [443]}], backends: [{address: 10.0.2.2}]}]
nat: [{name: web, type: port-forward, protocol: tcp, listen: {interface: wan0, ports: [80]}, to: {address: 10.0.2.2}}]
`)
	port := 4000
	check := func(to string, want model.Action, ports ...int) {
		t.Helper()
		for _, dport := range ports {
			port++
			frame := fmt.Sprintf("ip4(src=198.18.0.1,dst=%s)/tcp(sport=%d,dport=%d,flags=S)", to, port, dport)
			if out := send(t, s, "wan0", frame); out.Action != want {
				t.Errorf("%s port %d: %v %v, not %v", to, dport, out.Action, out.Reason, want)
			}
		}
	}
	check("198.51.100.1", model.Forward, 80, 443)
	if err := errors.Join(s.readdress("wan0", "198.51.100.1/24", "198.51.100.9/24"), s.inside(s.apply)); err != nil {
		t.Fatal(err)
	}
	check("198.51.100.9", model.Forward, 80, 443)
	check("198.51.100.9", model.Pass, 81)
	check("198.51.100.1", model.Pass, 80, 443)
	if err := errors.Join(s.ip("addr flush dev wan0 scope global"), s.inside(s.apply)); err != nil {
		t.Fatal(err)
	}
	check("198.51.100.9", model.Pass, 80, 443)
	if !slices.ContainsFunc(s.d.Warnings(), func(w string) bool { return strings.Contains(w, "service svc: interface wan0 has no IPv4 address") }) {
		t.Errorf("the warnings %q do not tell of it", s.d.Warnings())
	}
}

// TestUnservedByRoute: a packet to an unused port of a virtual address is refused whatever the route, for
// example the blackhole of an announced prefix. An address with a local route belongs to the host. The source of
// the ICMP error is the interface's own address, not a held one.
func TestUnservedByRoute(t *testing.T) {
	for _, hook := range []string{"xdp", "tc"} {
		t.Run(hook, func(t *testing.T) {
			s := changingAt(t, hook, `
services:
  - {name: four, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.10, ports: [80]}], backends: [{address: 10.0.2.2}]}
  - {name: six, protocol: tcp, mode: dnat, listen: [{address: "2001:db8:9::10", ports: [80]}], backends: [{address: "fd00:2::2"}]}
`)
			if err := s.ip("addr add 198.51.100.77/32 dev wan0 scope link"); err != nil {
				t.Fatal(err)
			}
			for _, step := range []struct {
				change string
				want   model.Action
			}{
				{"", model.Drop},
				{"route add blackhole 192.0.2.0/24\nroute add blackhole 2001:db8:9::/48", model.Drop},
				{"route add local 192.0.2.0/25 dev lo\n-6 route add local 2001:db8:9::/64 dev lo", model.Pass},
				{"route del local 192.0.2.0/25 dev lo\n-6 route del local 2001:db8:9::/64 dev lo", model.Drop},
				{"addr add 192.0.2.10/32 dev lo\naddr add 2001:db8:9::10/128 dev lo nodad", model.Pass},
			} {
				if err := errors.Join(s.ip(step.change), s.inside(s.apply)); err != nil {
					t.Fatal(err)
				}
				for frame, from := range map[string]string{
					"ip4(src=198.18.0.1,dst=192.0.2.10)/icmp(type=echo,id=1)":             "198.51.100.1",
					"ip6(src=2001:db8:5::1,dst=2001:db8:9::10)/icmp6(type=echo,id=1)":     "2001:db8:ff::1",
					"ip4(src=198.18.0.1,dst=192.0.2.10)/tcp(sport=99,dport=81,flags=S)":   "192.0.2.10",
					"ip6(src=2001:db8:5::1,dst=2001:db8:9::10)/tcp(dport=81,flags=S)":     "2001:db8:9::10",
					"ip4(src=198.18.0.1,dst=192.0.2.10)/udp(sport=99,dport=81)/data(100)": "198.51.100.1",
				} {
					out := send(t, s, "wan0", frame)
					if out.Action != step.want || out.Action == model.Drop && sourceOf(out) != netip.MustParseAddr(from) {
						t.Errorf("%q: %s: %v %v from %v, not %v from %s", step.change, frame, out.Action, out.Reason, sourceOf(out), step.want, from)
					}
				}
			}
		})
	}
}
