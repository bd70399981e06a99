// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// TestFollowedAddressIsNotGiven: an address that a listener follows, as one of a PPP link with a
// network of its own, is the interface's all the same, and masquerade may have it.
func TestFollowedAddressIsNotGiven(t *testing.T) {
	own, fixed := netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("203.0.113.8")
	c := &config.Config{NAT: []config.NATRule{
		{Name: "follows", Type: config.NATPortForward, Listen: &config.Listen{Interface: "ppp0"}, To: config.Target{Address: netip.MustParseAddr("10.0.2.2")}},
		{Name: "named", Type: config.NATPortForward, Listen: &config.Listen{Address: fixed}, To: config.Target{Address: netip.MustParseAddr("10.0.2.3")}},
	}}
	asked := &datapath.Snapshot{Config: c, NAT: []*config.NATRule{&c.NAT[0], &c.NAT[1]}}
	resolved := datapath.Resolve(asked, func(string, bool) (netip.Addr, bool) { return own, true })
	if a := resolved.NAT[0].Listen.Address; a != own {
		t.Fatalf("the rule listens on %s", a)
	}
	k := &compiler{snapshot: resolved, asked: asked}
	if k.given(own) || !k.given(fixed) {
		t.Errorf("given: followed %v, named %v", k.given(own), k.given(fixed))
	}
}
