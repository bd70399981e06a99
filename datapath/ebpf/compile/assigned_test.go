// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// TestFollowedAddressIsNotAssigned: a listener can take its address from an interface, for example a PPP link with
// its own network. The interface still uses that address, so masquerade may use it, too.
func TestFollowedAddressIsNotAssigned(t *testing.T) {
	own, fixed := netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("203.0.113.8")
	c := &config.Config{NAT: []config.NATRule{
		{Name: "follows", Type: config.NATPortForward, Listen: &config.Listen{Interface: "ppp0"}, To: config.Target{Address: netip.MustParseAddr("10.0.2.2")}},
		{Name: "named", Type: config.NATPortForward, Listen: &config.Listen{Address: fixed}, To: config.Target{Address: netip.MustParseAddr("10.0.2.3")}},
	}}
	unresolved := &datapath.Snapshot{Config: c, NAT: []*config.NATRule{&c.NAT[0], &c.NAT[1]}}
	resolved := datapath.Resolve(unresolved, func(string, bool) (netip.Addr, bool) { return own, true })
	if a := resolved.NAT[0].Listen.Address; a != own {
		t.Fatalf("the rule listens on %s", a)
	}
	k := &compiler{snapshot: resolved, unresolved: unresolved}
	if k.isAssigned(own) || !k.isAssigned(fixed) {
		t.Errorf("assigned: followed %v, named %v", k.isAssigned(own), k.isAssigned(fixed))
	}
}
