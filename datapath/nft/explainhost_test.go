// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestExplainHost traces packets through rules of other programs, without a daemon: of
// nftables, iptables-nft and iptables-legacy.
func TestExplainHost(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack, labtest.Tool("nft"), labtest.Tool("iptables-nft"), labtest.Tool("iptables-legacy"))
	const toServer = "tcp 192.0.2.2:4000 -> 198.51.100.2:80"
	for _, c := range []struct{ name, rules, action, after, rule string }{
		{"nftables", `nft 'table ip own { chain pre { type nat hook prerouting priority dstnat; ip daddr 192.0.2.1 tcp dport 8080 dnat to 198.51.100.2:80; }; }'`,
			"forward", toServer, "dnat to 198.51.100.2:80"},
		{"nftables drops", `nft 'table inet own { chain filter { type filter hook forward priority filter; policy drop; }; }; table ip nat { chain pre { type nat hook prerouting priority dstnat; tcp dport 8080 dnat to 198.51.100.2:80; }; }'`,
			"drop", "", "policy drop"},
		{"iptables-nft", `iptables-nft -t nat -A PREROUTING -d 192.0.2.1 -p tcp --dport 8080 -m comment --comment web -j DNAT --to-destination 198.51.100.2:80`,
			"forward", toServer, "8080"},
		{"iptables-legacy", `iptables-legacy -t nat -A PREROUTING -d 192.0.2.1 -p tcp --dport 8080 -j DNAT --to-destination 198.51.100.2:80`,
			"forward", toServer, "-j DNAT --to-destination 198.51.100.2:80"},
		{"iptables-legacy drops", `iptables-legacy -t nat -A PREROUTING -p tcp --dport 8080 -j DNAT --to-destination 198.51.100.2:80; iptables-legacy -P FORWARD DROP`,
			"drop", "", "policy DROP"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := labtest.New(t, lab.Topology{Name: "explain", Nodes: []lab.NodeSpec{{Name: "client"}, {Name: "gateway", Forward: true}, {Name: "server"}},
				Links: []lab.LinkSpec{
					{A: lab.End{Node: "client", Iface: "eth0", Addresses: []string{"192.0.2.2/24"}}, B: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"192.0.2.1/24"}}},
					{A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"198.51.100.1/24"}}, B: lab.End{Node: "server", Iface: "eth0", Addresses: []string{"198.51.100.2/24"}}},
				}})
			if text, err := l.Node("gateway").Command(t.Context(), "sh", "-ec", c.rules).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			var e *datapath.Explanation
			err := l.Node("gateway").Do(func() (err error) {
				e, err = ExplainHost(t.Context(), datapath.Question{Tuple: flow.Tuple{Protocol: flow.TCP,
					Source: netip.MustParseAddrPort("192.0.2.2:4000"), Dest: netip.MustParseAddrPort("192.0.2.1:8080")}})
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			var rules []string
			for _, m := range e.Rules {
				rules = append(rules, m.Chain+": "+m.Rule)
			}
			if e.Action != c.action || c.after != "" && e.After.String() != c.after || !strings.Contains(strings.Join(rules, "\n"), c.rule) {
				t.Errorf("%s (%s), %s, rules %q, steps %q, notes %q; want %s, %s, %q", e.Action, e.Reason, e.After, rules, e.Steps, e.Notes, c.action, c.after, c.rule)
			}
		})
	}
}
