// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// TestResolveFollows: listeners without an address get the one that their interface has at the time,
// and none while it has none; what names an address stays as it is.
func TestResolveFollows(t *testing.T) {
	c := &config.Config{
		Services: []config.Service{{Name: "web", Mode: config.ModeDNAT, Listen: []config.Listen{{Interface: "wan0"}, {Address: netip.MustParseAddr("192.0.2.1")}},
			Backends: []config.Backend{{Address: netip.MustParseAddr("10.0.0.2")}}}},
		NAT: []config.NATRule{
			{Name: "http", Type: config.NATPortForward, Listen: &config.Listen{Interface: "wan0"}, To: config.Target{Address: netip.MustParseAddr("fd00::2")}},
			{Name: "home", Type: config.NATMasquerade},
		},
	}
	s := &Snapshot{Config: c, Services: []Service{{Service: &c.Services[0]}}, NAT: []*config.NATRule{&c.NAT[0], &c.NAT[1]}}
	for _, four := range []string{"", "203.0.113.7", "203.0.113.8"} {
		got := Resolve(s, func(iface string, v6 bool) (netip.Addr, bool) {
			if v6 {
				return netip.MustParseAddr("2001:db8::7"), iface == "wan0"
			}
			a, err := netip.ParseAddr(four)
			return a, err == nil && iface == "wan0"
		})
		var listens []string
		for _, l := range got.Services[0].Listen {
			listens = append(listens, l.Address.String())
		}
		if n := len(listens); n == 0 || listens[n-1] != "192.0.2.1" || four != "" && listens[0] != four || four == "" && n != 1 {
			t.Errorf("with %q the service listens on %v", four, listens)
		}
		if a := got.NAT[0].Listen.Address; a.String() != "2001:db8::7" || got.NAT[1] != &c.NAT[1] {
			t.Errorf("the port-forward listens on %s", a)
		}
	}
	if got := Resolve(s, func(string, bool) (netip.Addr, bool) { return netip.Addr{}, false }); len(got.NAT) != 1 {
		t.Errorf("a port-forward without an address is in force: %v", got.NAT)
	}
	c.NAT = append(c.NAT, config.NATRule{Name: "fixed", Type: config.NATPortForward, Listen: &config.Listen{Address: netip.MustParseAddr("2001:db8::7")}})
	if got := Resolve(s, func(string, bool) (netip.Addr, bool) { return netip.MustParseAddr("2001:db8::7"), true }); len(got.NAT) != 1 {
		t.Errorf("what another listener has by its name is taken again: %v", got.NAT)
	}
	owned := OwnedAddresses(s, func(netip.Addr) bool { return false })
	if len(owned) != 1 || owned[0].Address != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("owned addresses %v", owned)
	}
	if c.Services[0].Listen[0].Address.IsValid() || c.NAT[0].Listen.Address.IsValid() {
		t.Error("the configuration was changed")
	}
}

// TestWaitingForAnAddress: what listens on the address of an interface says so while it has none.
func TestWaitingForAnAddress(t *testing.T) {
	n := &config.NATRule{Name: "http", Type: config.NATPortForward, Listen: &config.Listen{Interface: "wan0"}, To: config.Target{Address: netip.MustParseAddr("10.0.0.2")}}
	masks := &config.NATRule{Name: "home", Type: config.NATMasquerade, Out: "wan0"}
	s := &Snapshot{Config: &config.Config{}, NAT: []*config.NATRule{masks, n}}
	for _, c := range []struct{ there, four, six bool }{{false, false, false}, {true, false, true}, {true, true, false}} {
		addressed := func(_ string, v6 bool) bool { return v6 && c.six || !v6 && c.four }
		got := strings.Join(Waiting(s, func(string) bool { return c.there }, addressed, addressed), "\n")
		if told := strings.Contains(got, "nat http: interface wan0 has no IPv4 address"); told != (c.there && !c.four) {
			t.Errorf("%+v: %s", c, got)
		}
	}
}
