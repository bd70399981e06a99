// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

func TestListeners(t *testing.T) {
	at := func(iface string, ports ...flow.Ports) []config.Listen {
		return []config.Listen{{Address: netip.MustParseAddr("192.0.2.10"), Ports: ports, Interface: iface}}
	}
	port := func(n uint16) flow.Ports { return flow.Ports{First: n, Last: n} }
	s := &Snapshot{Services: []Service{
		{Service: &config.Service{Name: "all", Protocol: flow.Any, Listen: at("")}},
		{Service: &config.Service{Name: "web", Protocol: flow.TCP, Listen: at("", port(80))}},
		{Service: &config.Service{Name: "wan", Protocol: flow.TCP, Listen: at("wan0", port(81))}},
		{Service: &config.Service{Name: "lan", Protocol: flow.TCP, Listen: at("lan0", port(81))}},
	}}
	for _, c := range []struct {
		protocol flow.Protocol
		to       string
		want     []string
	}{
		{flow.TCP, "192.0.2.10:80", []string{"service web"}},
		{flow.UDP, "192.0.2.10:80", []string{"service all"}},
		{flow.TCP, "192.0.2.10:81", []string{"service wan", "service all", "service lan"}},
		{flow.TCP, "192.0.2.11:80", nil},
	} {
		var got []string
		for _, l := range NewListeners(s).Find(c.protocol, netip.MustParseAddrPort(c.to)) {
			got = append(got, l.Name())
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s %s: %v, want %v", c.protocol, c.to, got, c.want)
		}
	}
}

func TestDiffering(t *testing.T) {
	snapshot := func(address string, state State) *Snapshot {
		return &Snapshot{Services: []Service{{Service: &config.Service{Name: "web", Backends: []config.Backend{{Address: netip.MustParseAddr(address)}}}, State: []State{state}}},
			NAT: []*config.NATRule{{Name: "office"}}}
	}
	a := snapshot("10.0.2.2", Up)
	for _, c := range []struct {
		name          string
		before, after *Snapshot
		want          int
	}{
		{"the same", a, a, 0}, {"read again", a, snapshot("10.0.2.2", Up), 0}, {"a state", a, snapshot("10.0.2.2", Drain), 1},
		{"an address", a, snapshot("10.0.2.3", Up), 1}, {"the first", nil, a, 2}, {"gone", a, &Snapshot{}, 2},
	} {
		if got := Differing(c.before, c.after); len(got) != c.want {
			t.Errorf("%s: %v differ, want %d", c.name, got, c.want)
		}
	}
}
