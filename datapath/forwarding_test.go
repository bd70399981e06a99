// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// TestForwards: a snapshot needs forwarding of the families of its listeners and sources; nat64
// needs both, and an empty one none.
func TestForwards(t *testing.T) {
	masquerade := func(source string) *config.NATRule {
		return &config.NATRule{Type: config.NATMasquerade, Source: []netip.Prefix{netip.MustParsePrefix(source)}}
	}
	service := func(listen config.Listen, backend string) Service {
		return Service{Service: &config.Service{Listen: []config.Listen{listen}, Backends: []config.Backend{{Address: netip.MustParseAddr(backend)}}}}
	}
	for _, c := range []struct {
		name   string
		s      Snapshot
		v4, v6 bool
	}{
		{"nothing", Snapshot{}, false, false},
		{"masquerade IPv4", Snapshot{NAT: []*config.NATRule{masquerade("10.0.2.0/24")}}, true, false},
		{"masquerade IPv6", Snapshot{NAT: []*config.NATRule{masquerade("2001:db8::/64")}}, false, true},
		{"nat64", Snapshot{NAT: []*config.NATRule{{Type: config.NATNAT64}}}, true, true},
		{"listener IPv6, backend IPv4", Snapshot{Services: []Service{service(config.Listen{Address: netip.MustParseAddr("2001:db8::1")}, "10.0.2.2")}}, false, true},
		{"listener on an interface", Snapshot{Services: []Service{service(config.Listen{Interface: "wan0"}, "10.0.2.2")}}, true, false},
	} {
		if v4, v6 := c.s.Forwards(); v4 != c.v4 || v6 != c.v6 {
			t.Errorf("%s: IPv4 %t, IPv6 %t; want %t, %t", c.name, v4, v6, c.v4, c.v6)
		}
	}
}
