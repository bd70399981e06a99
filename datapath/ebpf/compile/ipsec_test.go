// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// TestIPsecPoliciesThatWouldBeBypassed judges the usual policies of a gateway by the usual services and rules.
func TestIPsecPoliciesThatWouldBeBypassed(t *testing.T) {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	public := addr("203.0.113.2")
	policies := map[string]netdev.IPsecPolicy{
		"all traffic of a remote user":   {Source: prefix("0.0.0.0/0"), Dest: prefix("10.99.0.5/32")},
		"a remote user's to the office":  {Source: prefix("10.1.10.0/24"), Dest: prefix("10.99.0.5/32")},
		"between offices":                {Source: prefix("10.1.10.0/24"), Dest: prefix("192.168.7.0/24")},
		"a branch that is behind a rule": {Source: prefix("172.16.0.0/12"), Dest: prefix("10.1.10.0/24")},
		"L2TP":                           {Source: prefix("203.0.113.2/32"), Dest: prefix("198.51.100.9/32"), Protocol: flow.UDP, SourcePort: 1701},
		"the gateway's own GRE":          {Source: prefix("203.0.113.2/32"), Dest: prefix("198.51.100.9/32"), Protocol: 47},
		"backends in another place":      {Source: prefix("0.0.0.0/0"), Dest: prefix("10.2.0.0/24")},
		"IPv6 of remote users":           {Source: prefix("::/0"), Dest: prefix("fd00:99::/64")},
		"everything is forbidden":        {Source: prefix("0.0.0.0/0"), Dest: prefix("0.0.0.0/0"), Blocks: true},
	}
	service := func(mode config.Mode, backend string) *config.Service {
		return &config.Service{Protocol: flow.TCP, Mode: mode, Listen: []config.Listen{{Address: public, Ports: []flow.Ports{{First: 80, Last: 80}}}},
			Backends: []config.Backend{{Address: addr(backend)}}}
	}
	rule := func(n config.NATRule) *config.NATRule { return &n }
	objects := map[string]any{
		"web":                service(config.ModeDNAT, "10.1.10.7"),
		"web there":          service(config.ModeFullNAT, "10.2.0.7"),
		"dsr":                service(config.ModeDSR, "10.1.10.7"),
		"follows":            &config.Service{Protocol: flow.UDP, Mode: config.ModeDNAT, Listen: []config.Listen{{Interface: "wan0"}}},
		"office":             rule(config.NATRule{Type: config.NATMasquerade, Out: "wan0", Source: []netip.Prefix{prefix("10.1.10.0/24")}}),
		"office and users":   rule(config.NATRule{Type: config.NATMasquerade, Out: "wan1", Source: []netip.Prefix{prefix("10.1.10.0/24"), prefix("10.99.0.0/24")}}),
		"all":                rule(config.NATRule{Type: config.NATMasquerade, Out: "wan1"}),
		"pool":               rule(config.NATRule{Type: config.NATSNAT, Source: []netip.Prefix{prefix("10.3.0.0/24")}, To: config.Target{Addresses: []config.AddressRange{{First: public, Last: public}}}}),
		"camera":             rule(config.NATRule{Type: config.NATPortForward, Protocol: flow.TCP, Listen: &config.Listen{Address: public, Ports: []flow.Ports{{First: 81, Last: 81}}}, To: config.Target{Address: addr("10.1.10.9")}}),
		"one to one":         rule(config.NATRule{Type: config.NATStatic, Internal: prefix("10.1.10.8/32"), External: prefix("203.0.113.8/32")}),
		"network prefix":     rule(config.NATRule{Type: config.NATNPT66, Internal: prefix("fd00:99::/64"), External: prefix("2001:db8:9::/64")}),
		"between the family": rule(config.NATRule{Type: config.NATNAT64}),
	}
	want := map[string][]string{
		"all traffic of a remote user":   {"web", "web there", "follows", "office", "office and users", "all", "pool", "camera", "one to one"},
		"a remote user's to the office":  nil,
		"between offices":                nil,
		"a branch that is behind a rule": {"web", "office", "office and users", "camera", "one to one"},
		"L2TP":                           {"follows"}, // it takes all ports
		"the gateway's own GRE":          nil,
		"backends in another place":      {"web", "web there", "follows", "office", "all", "pool", "camera", "one to one"},
		"IPv6 of remote users":           {"network prefix", "all"},
		"everything is forbidden":        {"web", "web there", "follows", "office", "office and users", "all", "pool", "camera", "one to one"},
	}
	h := &Host{Interfaces: []netdev.Interface{{Index: 2, Name: "wan0"}}, Addresses: map[int][]netip.Addr{2: {public}}, Global: map[int][2]netip.Addr{2: {public}}}
	for what, policy := range policies {
		h.Policies = []netdev.IPsecPolicy{policy}
		expected := map[string]bool{}
		for _, name := range want[what] {
			expected[name] = true
		}
		for name, o := range objects {
			var got bool
			switch o := o.(type) {
			case *config.Service:
				_, got = h.BypassedByService(o)
			case *config.NATRule:
				_, got = h.BypassedByNAT(o)
			}
			if got != expected[name] {
				t.Errorf("%s (%s): judged for %s: %v, want %v", what, policy, name, got, expected[name])
			}
		}
	}
}
