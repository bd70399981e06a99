// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestBlame expects the rule that matches the packet, by its counter or its conditions.
func TestBlame(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, lab.Topology{Name: "blame", Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	cmd := l.Node("gateway").Command(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(`table inet filter {
		chain forward {
			type filter hook forward priority filter; policy drop;
			ct state established,related accept
			ct state invalid drop
			ip saddr 192.0.2.66 counter packets 7 bytes 420 drop
			tcp dport { 25, 465 } drop
			iifname "wan0" udp dport 53 jump dns
		}
		chain dns { ip daddr 198.51.100.0/24 reject; }
		chain input { type filter hook input priority filter; drop; }
	}
	`)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	packet := func(p flow.Protocol, from, to string) []*DropSample {
		s := &DropSample{DropCount: DropCount{Hook: HookForward, Tracked: TrackedNew}, Interface: "wan0",
			Packet: flow.Tuple{Protocol: p, Source: netip.MustParseAddrPort(from), Dest: netip.MustParseAddrPort(to)}}
		s.Data = make([]byte, 40)
		s.Data[0], s.Data[9] = 0x45, byte(p)
		copy(s.Data[12:], s.Packet.Source.Addr().AsSlice())
		copy(s.Data[16:], s.Packet.Dest.Addr().AsSlice())
		s.Data[20], s.Data[21] = byte(s.Packet.Source.Port()>>8), byte(s.Packet.Source.Port())
		s.Data[22], s.Data[23] = byte(s.Packet.Dest.Port()>>8), byte(s.Packet.Dest.Port())
		return []*DropSample{s}
	}
	none := packet(flow.TCP, "192.0.2.2:1024", "203.0.113.9:99")
	none[0].Tracked = TrackedNone
	for _, c := range []struct {
		name    string
		moved   bool // the counter has changed since the first listing
		listed  bool
		samples []*DropSample
		want    []string
	}{
		{"ports in a set", false, true, packet(flow.TCP, "192.0.2.2:1024", "198.51.100.9:465"), []string{"tcp dport { 25, 465 } drop"}},
		{"in a chain jumped to", false, true, packet(flow.UDP, "192.0.2.2:1024", "198.51.100.9:53"), []string{"ip daddr 198.51.100.0/24 reject with icmp port-unreachable"}},
		{"only the policy fits", false, true, packet(flow.UDP, "192.0.2.2:1024", "203.0.113.9:99"), []string{"policy drop"}},
		{"no connection", false, true, none, []string{"ct state invalid drop"}},
		{"a counter that moved", true, true, packet(flow.UDP, "192.0.2.66:1024", "203.0.113.9:99"), []string{"ip saddr 192.0.2.66 drop"}},
		{"not listed before", false, false, packet(flow.UDP, "192.0.2.66:1024", "203.0.113.9:99"), []string{"ip saddr 192.0.2.66 drop"}},
		{"not listed before, of another", false, false, packet(flow.UDP, "192.0.2.67:1024", "203.0.113.9:99"), []string{"policy drop"}},
	} {
		err := l.Node("gateway").Do(func() error {
			rules, err := firewall.DropRules(t.Context())
			if err != nil {
				return err
			}
			var before []firewall.Rule
			if c.listed {
				before = firewall.Counters(rules)
			}
			for i := range before {
				if c.moved {
					before[i].Packets = 0
				}
			}
			found := suspectRules(before, rules, map[Hook]bool{HookForward: true}, c.samples)
			if err := firewall.Describe(t.Context(), found); err != nil {
				return err
			}
			var got []string
			for _, r := range found {
				got = append(got, r.Text)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%s: %q, want %q", c.name, got, c.want)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
