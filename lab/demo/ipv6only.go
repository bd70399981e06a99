// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"net/netip"

	"github.com/sluice-lb/sluice/lab/host"
)

// playIPv6Only shows the three translations of nat64.yaml.
func playIPv6Only(ctx context.Context, s *stage) error {
	var all servers
	defer func() { all.stop() }()
	for _, b := range []struct{ node, name, addr string }{
		{"outside", "internet", "192.0.2.2:80"}, {"outside", "internet", "[2001:db8:f::2]:80"}, {"dmz", "dmz", "10.9.0.2:80"}, {"old", "old", "[fd00:a::2]:80"},
	} {
		server, err := host.ServeWeb(s.lab.Node(b.node), b.name, b.addr)
		if err != nil {
			return err
		}
		all = append(all, server)
	}
	gw, err := s.start(ctx, "gateway", "nat64.yaml", nil)
	if err != nil || gw == nil {
		return err
	}
	for _, one := range []struct {
		promise, from, target, seenIn string
	}{
		{"an IPv6-only client reaches IPv4 servers (NAT64)", "client", "[64:ff9b::c000:202]:80", "203.0.113.0/28"},
		{"a host is seen outside as its external address", "dmz", "192.0.2.2:80", "198.51.100.2/32"},
		{"and is reached by it", "outside", "198.51.100.2:80", "192.0.2.2/32"},
		{"a prefix is translated to another (NPTv6)", "old", "[2001:db8:f::2]:80", "2001:db8:a::/48"},
	} {
		seenIn := netip.MustParsePrefix(one.seenIn)
		t := s.run(ctx, host.Load{From: s.lab.Node(one.from), Target: netip.MustParseAddrPort(one.target), Ask: host.AskWeb, Count: 500})
		right, example := 0, ""
		for client, n := range t.Clients() {
			if a, err := netip.ParseAddr(client); err == nil && seenIn.Contains(a) {
				right += n
				example = client
			}
		}
		s.recordPromise(right == t.Sent(), one.promise, "%d of %d requests, seen as %s%s", right, t.Sent(), example, causes(t.Failures))
	}
	return gw.Stop()
}
