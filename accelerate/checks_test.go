// SPDX-License-Identifier: Apache-2.0

package accelerate

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/flow"
)

// TestDivide separates rules that exclude some flows from those that may apply to every flow.
func TestDivide(t *testing.T) {
	rule := func(name string, w firewall.Where) firewall.PacketRule {
		return firewall.PacketRule{Rule: name, What: "limit", Where: w}
	}
	text := func(name string) string { return "rule " + name + ": limit depends on single packets" }
	index := func(name string) uint32 { return map[string]uint32{"lan0": 7}[name] }
	tcp, udp := firewall.Where{Protocol: flow.TCP}, firewall.Where{Protocol: flow.UDP}
	ports := firewall.Where{Protocol: flow.UDP, DestPorts: firewall.PortRange{Low: 7, High: 9}, Source: netip.MustParsePrefix("10.0.0.0/8"), In: "lan0", Out: "lan1"}
	for name, c := range map[string]struct {
		ipv4, ipv6      []firewall.PacketRule
		all, six, rules []string
	}{
		"every flow":          {ipv4: []firewall.PacketRule{rule("a", tcp), rule("a", udp)}, all: []string{text("a")}},
		"any protocol":        {ipv4: []firewall.PacketRule{rule("a", firewall.Where{})}, all: []string{text("a")}},
		"one protocol":        {ipv4: []firewall.PacketRule{rule("a", udp)}, rules: []string{text("a")}},
		"two rules":           {ipv4: []firewall.PacketRule{rule("a", udp), rule("b", tcp)}, rules: []string{text("a"), text("b")}},
		"both families":       {ipv4: []firewall.PacketRule{rule("a", tcp), rule("a", udp)}, ipv6: []firewall.PacketRule{rule("a", tcp), rule("a", udp)}, all: []string{text("a")}},
		"IPv6":                {ipv6: []firewall.PacketRule{rule("a", tcp), rule("a", udp)}, six: []string{text("a")}},
		"conditions":          {ipv4: []firewall.PacketRule{rule("a", ports)}, rules: []string{text("a")}},
		"more than the table": {ipv4: slices.Repeat([]firewall.PacketRule{rule("a", ports)}, int(programsLimitEXCLUSIONS)+1), all: []string{text("a")}},
	} {
		j := divide(c.ipv4, c.ipv6, index)
		if !slices.Equal(j.all, c.all) || !slices.Equal(j.ipv6, c.six) || !slices.Equal(j.rules(), c.rules) {
			t.Errorf("%s: %q, %q, %q", name, j.all, j.ipv6, j.rules())
		}
	}
	got := divide([]firewall.PacketRule{rule("a", ports)}, nil, index).some[0].conditions
	address, mask := maskedWords(ports.Source)
	want := programsExclusion{Saddr: address, Smask: mask, Dport: [2]uint16{7, 9}, L4Proto: unix.IPPROTO_UDP, Family: unix.AF_INET, In: 7}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
