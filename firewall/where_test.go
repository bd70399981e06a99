// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// TestWhere reads the conditions of rules that depend on single packets. Only conditions before that part count, and
// none that a packet of the rule may miss.
func TestWhere(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	const begin = "table inet f {\n set ports { type inet_service; elements = { 7, 9 }; }\n set late { type inet_service; flags timeout; }\n" +
		" chain one { limit rate 5/second drop; }\n chain two { limit rate 5/second drop; }\n" +
		"chain c { type filter hook forward priority 0; policy accept;\n"
	for rule, want := range map[string]Where{
		"limit rate 5/second drop":                                                {},
		"limit rate 5/second udp dport 7 drop":                                    {},
		"udp dport 7 limit rate 5/second drop":                                    {DestPorts: PortRange{7, 7}},
		"udp dport != 7 limit rate 5/second drop":                                 {},
		"udp sport 1000-2000 limit rate 5/second":                                 {SourcePorts: PortRange{1000, 2000}},
		"udp dport { 7, 80, 443 } limit rate 5/second":                            {DestPorts: PortRange{7, 443}},
		"udp dport { 7, 80-90 } limit rate 5/second":                              {DestPorts: PortRange{7, 90}},
		"udp dport != { 7, 80 } limit rate 5/second":                              {},
		"udp dport @ports limit rate 5/second":                                    {DestPorts: PortRange{7, 9}},
		"udp dport @late limit rate 5/second":                                     {},
		"udp dport and 0xff00 == 0x100 limit rate 5/second":                       {},
		"ip saddr 10.0.0.0/8 limit rate 5/second":                                 {Source: prefix("10.0.0.0/8")},
		"ip saddr 10.128.0.0/9 udp dport 7 limit rate 5/second":                   {Source: prefix("10.128.0.0/9"), DestPorts: PortRange{7, 7}},
		"ip saddr 10.0.0.1 ip daddr 10.0.0.2 limit rate 5/second":                 {Source: prefix("10.0.0.1/32"), Dest: prefix("10.0.0.2/32")},
		"ip daddr != 10.0.0.2 limit rate 5/second":                                {},
		"ip daddr & 255.0.255.0 == 10.0.1.0 limit rate 5/second":                  {Dest: prefix("10.0.0.0/8")},
		"ip saddr { 10.0.0.1, 10.0.0.2 } limit rate 5/second":                     {},
		"iifname lan0 oifname \"wan*\" limit rate 5/second":                       {In: "lan0"},
		"iifname != lan0 limit rate 5/second":                                     {},
		"oif lo limit rate 5/second":                                              {OutIndex: 1},
		"iifname lan0 ct bytes > 1000 drop":                                       {},
		"iifname lan0 udp dport 7 meta length > 500 ct bytes > 1000":              {DestPorts: PortRange{7, 7}},
		"ip saddr . udp dport { 10.0.0.1 . 7 } limit rate 5/second":               {},
		"udp dport 7 jump one":                                                    {DestPorts: PortRange{7, 7}},
		"ip saddr 10.0.0.1 jump one; udp dport 7 jump one":                        {},
		"iifname vmap { lan0 : jump two }":                                        {},
		"ip saddr 10.0.0.1 udp dport vmap { 7 : jump two }":                       {Source: prefix("10.0.0.1/32")},
		"udp dport 7 ip daddr 10.0.0.2 ip dscp set 9":                             {Dest: prefix("10.0.0.2/32"), DestPorts: PortRange{7, 7}},
		"meta mark 1 ct mark 2 limit rate 5/second":                               {},
		"udp dport 7 log":                                                         {DestPorts: PortRange{7, 7}},
		"meta mark set udp dport map { 7 : 1, 9 : 2 } limit rate 5/second accept": {DestPorts: PortRange{7, 9}},
	} {
		t.Run(rule, func(t *testing.T) {
			var out []PacketRule
			inNamespace(t, begin+strings.ReplaceAll(rule, "; ", "\n")+"\n}\n}\n", func() (err error) {
				out, err = PacketRules(t.Context(), false)
				return err
			})
			want.Protocol = unix.IPPROTO_UDP
			seen := false
			for _, r := range out {
				if r.Where.Protocol == unix.IPPROTO_UDP {
					seen = true
					if r.Where != want {
						t.Errorf("%s: %+v, want %+v", r, r.Where, want)
					}
				}
			}
			if !seen {
				t.Errorf("no rule depends on single packets of UDP: %v", out)
			}
		})
	}
}

// TestWhereIPv6 reads the conditions of a rule for IPv6, and of one at the ports of a bridge.
func TestWhereIPv6(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	for text, want := range map[string]Where{
		"table ip6 f {\nchain c { type filter hook forward priority 0;\nip6 saddr fd00:1::/64 ip6 daddr fd00::1 udp dport 7 limit rate 5/second\n}\n}\n": {
			Protocol: flow.UDP, Source: prefix("fd00:1::/64"), Dest: prefix("fd00::1/128"), DestPorts: PortRange{7, 7}},
		"table bridge f {\nchain c { type filter hook forward priority 0;\niifname port0 udp dport 7 limit rate 5/second\n}\n}\n": {Protocol: flow.UDP},
		"table inet f {\nchain i { type filter hook ingress device lo priority 0; }\nchain c { type filter hook forward priority 0;\niifname lan0 udp dport 7 limit rate 5/second\n}\n}\n": {
			Protocol: flow.UDP, DestPorts: PortRange{7, 7}},
	} {
		inNamespace(t, text, func() error {
			out, err := PacketRules(t.Context(), true)
			if err == nil && (len(out) != 1 || out[0].Where != want) {
				t.Errorf("%s: %+v, want %+v", text, out, want)
			}
			return err
		})
	}
}

// TestLegacyWhere reads the conditions of lines of iptables-legacy-save.
func TestLegacyWhere(t *testing.T) {
	for line, want := range map[string]Where{
		"-A FORWARD -m limit --limit 5/sec -j ACCEPT":                                                     {},
		"-A FORWARD -p udp -m limit --limit 5/sec -j ACCEPT":                                              {Protocol: flow.UDP},
		"-A FORWARD -s 10.0.0.0/8 -d 10.0.0.2/32 -i lan0 -o wan+ -p udp -m udp --dport 7:9 -j LOG":        {Protocol: flow.UDP, Source: prefix("10.0.0.0/8"), Dest: prefix("10.0.0.2/32"), In: "lan0", DestPorts: PortRange{7, 9}},
		"-A FORWARD -p udp -m limit --limit 5/sec -m udp --dport 7 -j ACCEPT":                             {Protocol: flow.UDP},
		"-A FORWARD ! -s 10.0.0.0/8 ! -i lan0 -p udp -m udp ! --dport 7 -j LOG":                           {Protocol: flow.UDP},
		"-A FORWARD -p tcp -m multiport --dports 80,443,8000:8010 -j LOG":                                 {Protocol: flow.TCP, DestPorts: PortRange{80, 8010}},
		"-A FORWARD -p tcp -m multiport ! --sports 80,443 -j LOG":                                         {Protocol: flow.TCP},
		"-A FORWARD -i lan0 -p tcp -m connbytes --connbytes 1:2 -j DROP":                                  {Protocol: flow.TCP},
		"-A FORWARD -p udp -m comment --comment -i -m length --length 5 -j DROP":                          {Protocol: flow.UDP},
		"-A FORWARD -p udp -m comment --comment -s -m comment --comment 10.0.0.1 -m length --length 1:99": {Protocol: flow.UDP},
	} {
		rules := legacyPacketRules("iptables", "*filter\n"+line+"\nCOMMIT\n")
		if len(rules) != 1 || rules[0].Where != want {
			t.Errorf("%s: %+v, want %+v", line, rules, want)
		}
	}
}
