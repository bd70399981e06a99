// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// TestReplayCommand traces the packet as it arrived, on its ingress interface if known.
func TestReplayCommand(t *testing.T) {
	tuple := func(p flow.Protocol, from, to string) flow.Tuple {
		return flow.Tuple{Protocol: p, Source: netip.MustParseAddrPort(from), Dest: netip.MustParseAddrPort(to)}
	}
	tcp, before := tuple(flow.TCP, "192.0.2.2:1024", "198.51.100.2:80"), tuple(flow.TCP, "192.0.2.2:1024", "192.0.2.1:8080")
	ping := tuple(flow.ICMP, "192.0.2.2:7", "198.51.100.2:7")
	host := netdev.HostNamespace().Inode
	for _, tc := range []struct {
		netns uint64
		s     DropSample
		want  string
	}{
		{host, DropSample{DropCount: DropCount{Hook: HookForward}, Interface: "wan0", InIfIndex: 2, Packet: tcp}, "sluice explain --host tcp 192.0.2.2:1024 198.51.100.2:80 --in wan0"},
		{host, DropSample{DropCount: DropCount{Hook: HookForward}, Interface: "wan0", InIfIndex: 2, Packet: tcp, Original: before}, "sluice explain --host tcp 192.0.2.2:1024 192.0.2.1:8080 --in wan0"},
		{host, DropSample{DropCount: DropCount{Hook: HookPostrouting}, Interface: "lan0", InIfIndex: 2, Packet: ping}, "sluice explain --host icmp 192.0.2.2 198.51.100.2"},
		{host, DropSample{DropCount: DropCount{Hook: HookOutput}, Interface: "lan0", Packet: ping}, ""}, // of this host
		{4711, DropSample{DropCount: DropCount{Hook: HookForward}, Interface: "wan0", InIfIndex: 2, Packet: tcp}, ""},
	} {
		if got := (&DropGroup{Namespace: "no such namespace", Netns: tc.netns, Samples: []*DropSample{&tc.s}}).ReplayCommand(); got != tc.want {
			t.Errorf("%q, want %q", got, tc.want)
		}
	}
}
