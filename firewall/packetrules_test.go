// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestPacketRules loads rules and compares the parts that depend on single packets.
func TestPacketRules(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	const begin = "table inet f {\n set fixed { type ipv4_addr; }\n set late { type ipv4_addr; timeout 1m; }\n chain limited { limit rate 5/second drop; }\n" +
		"chain c { type filter hook forward priority 0; policy accept;\n"
	for rule, want := range map[string]string{
		"ct state established,related accept; limit rate 5/second drop": "",
		"ct state vmap { established : accept, invalid : drop }; log":   "",
		"ct state new limit rate 5/second accept":                       "",
		"tcp flags syn tcp option maxseg size set rt mtu":               "",
		"tcp flags syn / fin,syn,rst,ack log":                           "",
		"icmp type echo-request limit rate 5/second accept":             "",
		"meta nfproto ipv6 limit rate 5/second accept":                  "",
		"ip saddr 192.0.2.0/24 tcp dport { 80, 443 } counter accept":    "",
		"iifname lan0 oifname wan0 meta mark set 1":                     "",
		"ip saddr @fixed drop":                                          "",
		"ct state new jump limited":                                     "",
		"fib saddr . iif oif missing drop":                              "",
		"ip saddr 192.0.2.1 limit rate 5/second drop":                   "limit",
		"jump limited":                        "limit",
		"ct state established jump limited":   "limit",
		"log prefix x":                        "log",
		"quota over 5 mbytes drop":            "quota",
		"tcp flags rst drop":                  "TCP flags",
		"tcp flags & (psh | ack) == psh drop": "TCP flags",
		"meta length > 500 drop":              "length",
		"ip ttl 64 drop":                      "IP header",
		"ip dscp set cs1":                     "IP header",
		"tcp sport set 80":                    "change",
		"ct bytes > 1000 drop":                "counters",
		"numgen random mod 2 0 drop":          "number",
		"ip saddr @late drop":                 "elements expire",
		"meta nftrace set 1":                  "properties",
		"udp length 10 drop":                  "transport header",
		"ct state established accept; ct state related accept; ip length 50 drop":    "",
		"ct state related accept; ip length 50 drop":                                 "IP header",
		"iifname lan0 ct state established accept; iifname wan0 limit rate 5/second": "limit",
	} {
		t.Run(rule, func(t *testing.T) {
			var out []PacketRule
			inNamespace(t, begin+strings.ReplaceAll(rule, "; ", "\n")+"\n}\n}\n", func() (err error) {
				out, err = PacketRules(t.Context(), false)
				return err
			})
			switch {
			case want == "" && len(out) > 0:
				t.Errorf("%v depend on single packets", out)
			case want != "" && (len(out) == 0 || !strings.Contains(out[0].What, want)):
				t.Errorf("%v, want %s", out, want)
			}
		})
	}
}

// TestLegacyPacketRules parses lines of iptables-legacy-save.
func TestLegacyPacketRules(t *testing.T) {
	for line, want := range map[string]string{
		"-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT":                               "",
		"-A FORWARD -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu":                "",
		"-A FORWARD -p icmp -m limit --limit 5/sec -j ACCEPT":                                           "",
		"-A FORWARD -m conntrack --ctstate NEW -m limit --limit 5/sec -j ACCEPT":                        "",
		"-A FORWARD -s 10.0.0.0/8 -p tcp -m multiport --dports 80,443 -m comment --comment x -j DOCKER": "",
		"-A FORWARD -m limit --limit 5/sec -j ACCEPT":                                                   "match limit",
		"-A FORWARD -m set --match-set bad src -j DROP":                                                 "match set",
		"-A FORWARD -p tcp -m tcp --tcp-flags RST RST -j DROP":                                          "TCP flags",
		"-A FORWARD -j LOG":                          "target LOG",
		"-A FORWARD -p tcp -j TCPMSS --set-mss 1400": "target TCPMSS",
	} {
		rules := legacyPacketRules("iptables", "*filter\n:FORWARD ACCEPT [0:0]\n[1:2] "+line+"\nCOMMIT\n")
		switch {
		case want == "" && len(rules) > 0:
			t.Errorf("%s: %v", line, rules)
		case want != "" && (len(rules) != 1 || rules[0].What != want):
			t.Errorf("%s: %v, want %s", line, rules, want)
		}
	}
}

// TestPacketRulesOfFamilies loads rules that depend on single packets of one address family.
func TestPacketRulesOfFamilies(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("nft"))
	const v4, v6 = nftables.TableFamilyIPv4, nftables.TableFamilyIPv6
	for rule, want := range map[string][]nftables.TableFamily{
		"ip ttl 5 drop":                                  {v4},
		"ip6 hoplimit 5 drop":                            {v6},
		"ip6 dscp 1 drop":                                {v6},
		"ip6 nexthdr tcp ip6 daddr fd00::1 drop":         nil,
		"ip6 saddr fd00::/64 ip6 daddr fd00::1 drop":     nil,
		"meta nfproto ipv6 meta length 100 drop":         {v6},
		"meta l4proto { tcp, udp } meta length 100 drop": {v4, v6},
		"frag frag-off 1 drop":                           {v6},
	} {
		t.Run(rule, func(t *testing.T) {
			for _, family := range []nftables.TableFamily{v4, v6} {
				var out []PacketRule
				inNamespace(t, "table inet f {\nchain c { type filter hook forward priority 0;\n"+rule+"\n}\n}\n", func() (err error) {
					out, err = PacketRules(t.Context(), family == v6)
					return err
				})
				if found := len(out) > 0; found != slices.Contains(want, family) {
					t.Errorf("%s: %v depend on single packets", familyName(family), out)
				}
			}
		})
	}
}

// TestLegacyTables compares the stored rules before and after packets and a change.
func TestLegacyTables(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("iptables-legacy"), labtest.Tool("ip6tables-legacy"))
	inNamespace(t, "", func() error {
		if tables, err := LegacyTables(); err != nil || len(tables) != 0 {
			t.Errorf("without rules: %d tables, %v", len(tables), err)
		}
		for program, table := range map[string]string{"iptables-legacy": "ip_tables_names filter", "ip6tables-legacy": "ip6_tables_names filter"} {
			change := func(words ...string) string {
				if out, err := exec.Command(program, words...).CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				tables, err := LegacyTables()
				if err != nil || tables[table] == "" {
					t.Fatalf("%d tables, %v", len(tables), err)
				}
				return tables[table]
			}
			one := change("-A", "FORWARD", "-j", "DROP")
			same := change("-Z", "FORWARD")
			two := change("-A", "FORWARD", "-j", "ACCEPT")
			if one != same || one == two {
				t.Errorf("%s: the comparison of stored rules does not follow the changes", program)
			}
		}
		return nil
	})
}
