// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model/golden"
)

// twoUplinks is a datapath on a gateway with two interfaces of two networks each. A masquerade rule has an entry
// for each network.
func twoUplinks(t *testing.T) *Datapath {
	t.Helper()
	l := labtest.New(t, lab.Topology{Name: "uplinks", Nodes: []lab.NodeSpec{{Name: "gateway"}, {Name: "outside"}}, Links: []lab.LinkSpec{
		{A: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"198.51.100.1/24", "192.168.100.2/24"}}, B: lab.End{Node: "outside", Iface: "eth0"}},
		{A: lab.End{Node: "gateway", Iface: "wan1", Addresses: []string{"203.0.113.1/24", "192.168.101.2/24"}}, B: lab.End{Node: "outside", Iface: "eth1"}},
	}})
	return mappingGateway(t, l, "tables: {flows: 4096, flows6: 4096}\n")
}

// TestChangeTellsARuleOnce plans a masquerade rule with several entries in the table. The change names the rule
// once.
func TestChangeTellsARuleOnce(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	d := twoUplinks(t)
	const tables = "tables: {flows: 4096, flows6: 4096}\n"
	for _, c := range []struct {
		yaml, line string
		count      datapath.Count
	}{
		{"nat:\n  - {name: office, type: masquerade, source: [10.0.0.0/24], out: [wan0, wan1]}\n", "add nat office", datapath.Count{Added: 1}},
		{"nat:\n  - {name: office, type: masquerade, source: [10.0.0.0/24], out: [wan0, wan1], ports-per-client: 99}\n", "change nat office", datapath.Count{Changed: 1}},
		{"nat:\n  - {name: office, type: masquerade, source: [10.0.0.0/24], out: wan0}\n", "change nat office", datapath.Count{Changed: 1}},
		{"", "remove nat office", datapath.Count{Removed: 1}},
	} {
		parsed, err := config.Decode("test.yaml", []byte(c.yaml+tables))
		if err != nil {
			t.Fatal(err)
		}
		change, err := d.Plan(context.Background(), golden.Snapshot(parsed))
		if err != nil {
			t.Fatal(err)
		}
		lines := slices.DeleteFunc(slices.Clone(change.Lines), func(s string) bool { return !strings.Contains(s, " nat ") })
		if !slices.Equal(lines, []string{c.line}) || change.Rules != c.count {
			t.Errorf("%s: %q, %+v; want %q, %+v", c.yaml, lines, change.Rules, c.line, c.count)
		}
		putConfig(t, d, c.yaml+tables)
	}
}

// TestMappingsOfTwoNetworks requests a mapping on an outside interface with addresses of two networks. The
// request finds the rule, and the mapped address is the source for most destinations.
func TestMappingsOfTwoNetworks(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	d := twoUplinks(t)
	putConfig(t, d, "nat:\n  - {name: office, type: masquerade, source: [10.0.0.0/24], out: wan0, pcp: true}\ntables: {flows: 4096, flows6: 4096}\n")
	want := netip.MustParseAddr("198.51.100.1")
	if rules := d.MappingRules(); len(rules) != 1 || rules[0].Name != "office" || !slices.Equal(rules[0].Outside, []netip.Addr{want}) {
		t.Fatalf("rules %v, want office at %s", rules, want)
	}
	m, err := d.Map(datapath.Mapping{Rule: "office", Protocol: flow.TCP, Inside: netip.MustParseAddrPort("10.0.0.2:3000"),
		Outside: netip.MustParseAddrPort("0.0.0.0:0"), Expires: kernel.SinceBoot() + time.Hour}, false)
	if err != nil || m.Outside != netip.AddrPortFrom(want, 3000) {
		t.Errorf("%v, %v; want %s:3000", m, err, want)
	}
}
