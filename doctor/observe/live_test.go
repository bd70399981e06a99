// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestUplinks wants default routes of IPv4 alone to be counted: rp_filter looks at no other.
func TestUplinks(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Topology{Name: "uplinks", Nodes: []lab.NodeSpec{{Name: "host"}}})
	host := l.Node("host")
	for _, step := range []struct {
		commands string
		want     int
	}{
		{`ip link add up0 type veth peer name up1
			ip addr add 192.0.2.1/24 dev up0
			ip addr add 198.51.100.1/24 dev up1
			ip addr add 2001:db8:1::1/64 dev up0 nodad
			ip addr add 2001:db8:2::1/64 dev up1 nodad
			ip link set up0 up
			ip link set up1 up
			ip route add default via 192.0.2.2
			ip -6 route add default nexthop via 2001:db8:1::2 dev up0 nexthop via 2001:db8:2::2 dev up1`, 1},
		{"ip route add default via 198.51.100.2 metric 5", 2},
	} {
		for line := range strings.Lines(step.commands) {
			words := strings.Fields(line)
			if out, err := host.Command(t.Context(), words[0], words[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", line, err, out)
			}
		}
		if err := host.Do(func() error {
			links, err := readLinks()
			r := NamespaceReading{Links: links}
			if r.readRoutes(); r.Uplinks != step.want {
				t.Errorf("%d uplinks, want %d", r.Uplinks, step.want)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRoutesAndAddresses reads gateways, routes for a part of a link's network, and whether links are connected.
func TestRoutesAndAddresses(t *testing.T) {
	labtest.Require(t, labtest.Root)
	host := labtest.New(t, lab.Topology{Name: "routes", Nodes: []lab.NodeSpec{{Name: "host"}}}).Node("host")
	for _, line := range []string{
		"ip link add lan0 type veth peer name far0", "ip link add tun0 type veth peer name far1", "ip addr add 10.0.0.1/24 dev lan0", "ip -6 addr add 2001:db8::1/64 dev lan0",
		"ip link set lan0 up", "ip link set tun0 up", "ip link set far1 up", "ip route add 10.0.0.200/32 dev tun0", "ip route add 192.0.2.0/24 dev tun0",
		"ip route add default via 10.0.0.9 dev lan0", "ip route add blackhole 198.18.0.0/15", "ip rule add from 10.0.0.0/24 iif lan0 unreachable priority 77", "ip route add 198.51.100.0/24 via 10.0.0.9 dev lan0",
	} {
		words := strings.Fields(line)
		if out, err := host.Command(t.Context(), words[0], words[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	if err := host.Do(func() error {
		links, err := readLinks()
		r := NamespaceReading{Links: links, Sysctl: map[string]string{}}
		r.readRoutes()
		gateways := []Gateway{{Address: netip.MustParseAddr("10.0.0.9"), Interface: "lan0", Route: netip.MustParsePrefix("0.0.0.0/0")}}
		if !slices.Equal(r.Routing.Gateways, gateways) {
			t.Errorf("gateways %v, want %v", r.Routing.Gateways, gateways)
		}
		detached := []Detached{{Prefix: netip.MustParsePrefix("10.0.0.200/32"), By: "tun0", Within: "lan0", Network: netip.MustParsePrefix("10.0.0.0/24")}}
		if !slices.Equal(r.Routing.Detached, detached) {
			t.Errorf("detached %v, want %v", r.Routing.Detached, detached)
		}
		refusals := []Refusal{{Kind: "unreachable", Source: netip.MustParsePrefix("10.0.0.0/24"), In: "lan0", Rule: true, Priority: 77}, {Kind: "blackhole", Destination: netip.MustParsePrefix("198.18.0.0/15"), Table: 254}}
		if got := append(ruleRefusals(), r.Routing.Refusals...); !slices.Equal(got, refusals) {
			t.Errorf("refusals %v, want %v", got, refusals)
		}
		for _, l := range links {
			if l.Carrier != (l.Name == "tun0" || l.Name == "far1" || l.Name == "lo" && l.Up) {
				t.Errorf("%s: carrier %v", l.Name, l.Carrier)
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// TestLossySockets reads the counters of drops of single sockets.
func TestLossySockets(t *testing.T) {
	const head = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n"
	line := func(drops string) fstest.MapFS {
		return fstest.MapFS{"proc/thread-self/net/udp": {Data: []byte(head + " 100: 00000000:076C 00000000:0000 07 00000000:00034000 00:00000000 00000000     0        0 4711 2 0000000000000000 " + drops + "\n")}}
	}
	n := Namespace{}
	for drops, r := range map[string]*NamespaceReading{"80": &n.Before, "83": &n.After} {
		r.Sockstat = map[string]uint64{"UDP.inuse": 1}
		r.ReadSockets(line(drops))
	}
	got := n.lossySockets()[4711]
	if want := (LossySocket{Protocol: flow.UDP, Local: netip.MustParseAddrPort("0.0.0.0:1900"), Drops: 3, Waiting: 0x34000}); got == nil || *got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
