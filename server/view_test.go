// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// TestInterfacesAreTold: each object lists the interfaces that it is bound to, or none.
func TestInterfacesAreTold(t *testing.T) {
	address, ports := netip.MustParseAddr("2001:db8::1"), []flow.Ports{{First: 80, Last: 80}}
	for want, l := range map[string]config.Listen{
		"2001:db8::1":            {Address: address},
		"2001:db8::1 on wan0":    {Address: address, Interface: "wan0"},
		"[2001:db8::1]:80 on lo": {Address: address, Ports: ports, Interface: "lo"},
	} {
		if got := listenText(l); got != want {
			t.Errorf("want %q, got %q", want, got)
		}
	}
	for want, n := range map[string]config.NATRule{
		"1 explicit mapping":                {EAM: make([]config.EAMEntry, 1)},
		"64:ff9b::/96, 0 explicit mappings": {Prefix: netip.MustParsePrefix("64:ff9b::/96")},
	} {
		n.Type = config.NATSIIT
		if got := summary(&n); got != want {
			t.Errorf("want %q, got %q", want, got)
		}
	}
	inside := []netip.Prefix{netip.MustParsePrefix("10.0.2.0/24")}
	for want, out := range map[string]string{"10.0.2.0/24 out wan0": "wan0", "10.0.2.0/24 out of any interface": ""} {
		if got := summary(&config.NATRule{Type: config.NATMasquerade, Source: inside, Out: config.Interfaces(out)}); got != want {
			t.Errorf("want %q, got %q", want, got)
		}
	}
}
