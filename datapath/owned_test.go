// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// TestOwnedAddresses: a listening address is owned, with the most informative answer, unless it is in a network of
// the host.
func TestOwnedAddresses(t *testing.T) {
	at := func(a, iface string) config.Listen {
		return config.Listen{Address: netip.MustParseAddr(a), Interface: iface}
	}
	c := &config.Config{
		Services: []config.Service{
			{Name: "silent", Listen: []config.Listen{at("192.0.2.1", ""), at("192.0.2.2", "wan0")}, WhenDown: config.WhenDownDrop},
			{Name: "loud", Listen: []config.Listen{at("192.0.2.1", "")}, WhenDown: config.WhenDownReject},
			{Name: "near", Listen: []config.Listen{at("10.0.2.9", "")}},
			{Name: "elsewhere", Listen: []config.Listen{at("192.0.2.2", "wan1"), at("192.0.2.4", "")}},
		},
		NAT: []config.NATRule{{Name: "published", Type: config.NATPortForward, In: "wan0", Listen: &config.Listen{Address: netip.MustParseAddr("2001:db8::3")}}},
	}
	s := &Snapshot{Config: c, NAT: []*config.NATRule{&c.NAT[0]}}
	for i := range c.Services[:3] {
		s.Services = append(s.Services, Service{Service: &c.Services[i]})
	}
	got := OwnedAddresses(s, netip.MustParsePrefix("10.0.2.0/24").Contains)
	want := []Owned{
		{Address: netip.MustParseAddr("192.0.2.1"), Answer: config.WhenDownReject},
		{Address: netip.MustParseAddr("192.0.2.2"), Answer: config.WhenDownReset, Bound: true, Shared: true},
		{Address: netip.MustParseAddr("2001:db8::3"), Answer: config.WhenDownReset, Bound: true},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
