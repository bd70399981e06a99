// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// hashedNames is a service that selects the server by the flow's addresses and ports. %s: scheduler.
const hashedNames = `
services:
  - name: names
    listen: [{address: 192.0.2.10, ports: [53]}]
    protocol: udp
    mode: dnat
    scheduler: %s
    backends:
      - {name: a, address: 10.0.2.2}
      - {name: b, address: 10.0.2.3, weight: 2}
      - {name: c, address: 10.0.2.4}
      - {name: last, address: 10.0.2.9, priority: 2}
      - {name: drained, address: 10.0.2.8, drain: true}
`

// TestGatewaysAgree sends the same requests, by source address and port, through one gateway and then through
// the other. After a failover, and on any datapath, a flow reaches the same server.
func TestGatewaysAgree(t *testing.T) {
	labtest.Require(t, labtest.Root)
	for _, c := range []struct{ first, second, scheduler string }{
		{"nftables", "nftables", "maglev"}, {"nftables", "ebpf", "maglev"}, {"ebpf", "ebpf", "maglev"},
		{"nftables", "ebpf", "source-hash"}, {"nftables", "ebpf", "symmetric-hash"},
	} {
		t.Run(c.first+" and "+c.second+", "+c.scheduler, func(t *testing.T) {
			l := labtest.New(t, lab.TwoGateways())
			serveDatagrams(t, l, "s1 a 10.0.2.2:53", "s2 b 10.0.2.3:53", "s3 c 10.0.2.4:53")
			names := fmt.Sprintf(hashedNames, c.scheduler)
			start(t, l.Node("gw1"), "datapath: "+c.first+names)
			start(t, l.Node("gw2"), "datapath: "+c.second+names)
			first := askMany(t, l)
			for _, n := range []string{"client", "s1", "s2", "s3"} {
				via := "10.0.2.12"
				if n == "client" {
					via = "10.0.1.12"
				}
				setDefault(t, l.Node(n), via)
			}
			second := askMany(t, l)
			moved := 0
			for source, server := range first {
				if second[source] != server {
					moved++
				}
			}
			if moved > 0 {
				t.Errorf("%d of %d flows have another server at the second gateway", moved, len(first))
			}
		})
	}
}

// askMany sends requests from many addresses and ports, and returns the servers.
func askMany(t *testing.T, l *lab.Lab) map[netip.AddrPort]string {
	t.Helper()
	servers := make(map[netip.AddrPort]string)
	count := make(map[string]int)
	target := netip.MustParseAddrPort("192.0.2.10:53")
	for i := range 400 {
		source := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 64, byte(i), 1}), uint16(10000+7*i))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		a, err := host.AskDatagram(ctx, l.Node("client"), source, target)
		cancel()
		if err != nil {
			t.Fatalf("%s to %s: %v", source, target, err)
		}
		servers[source] = a.Name
		count[a.Name]++
	}
	if count["a"] < 50 || count["b"] < 120 || count["c"] < 50 {
		t.Errorf("spread %v of 400, want about 100, 200, 100", count)
	}
	return servers
}

func setDefault(t *testing.T, n *lab.Node, via string) {
	t.Helper()
	h, err := n.Handle()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	all := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if err := h.RouteReplace(&netlink.Route{Dst: all, Gw: net.ParseIP(via)}); err != nil {
		t.Fatalf("%s: default route via %s: %v", n.Name(), via, err)
	}
}
