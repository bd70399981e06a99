// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/nftables"
)

// TestForwarded finds the ports of port forwards in every form of rule, and ignores ports of addresses outside the
// host. The host is 192.0.2.1.
func TestForwarded(t *testing.T) {
	for _, tc := range []struct{ family, more, rules, want string }{
		{"ip", "", "tcp dport 40000 dnat to 10.0.0.1", "40000"},
		{"ip", "", "ip daddr 192.0.2.1 tcp dport 40000 dnat to 10.0.0.1:80", "40000"},
		{"ip", "", "ip daddr 203.0.113.1 tcp dport 40000 dnat to 10.0.0.1:80", ""},
		{"ip", "", "ip daddr 192.0.2.0/24 tcp dport 40000 redirect to :80", "40000"},
		{"ip", "", "ip daddr 192.0.2.0/29 tcp dport 40000 redirect to :80", "40000"},
		{"ip", "", "ip daddr 10.96.0.0/12 tcp dport 40000 dnat to 10.0.0.1", ""},
		{"ip", "", "ip daddr { 192.0.2.1, 203.0.113.1 } tcp dport 40000 dnat to 10.0.0.1", "40000"},
		{"ip", "", "ip daddr { 203.0.113.1, 203.0.113.2 } tcp dport 40000 dnat to 10.0.0.1", ""},
		{"ip", "", "ip daddr != 203.0.113.1 tcp dport 40000 dnat to 10.0.0.1", "40000"},
		{"ip", "", "udp dport 40000-40010 dnat to 10.0.0.1", "40000-40010"},
		{"ip", "", "udp dport { 40000, 40002-40010 } dnat to 10.0.0.1", "40000 40002-40010"},
		{"ip", "", "tcp dport != 22 dnat to 10.0.0.1", ""},
		{"ip", "", "iifname lo dnat to 10.0.0.1", ""},
		{"ip", "", "dnat to tcp dport map { 40000 : 10.0.0.1, 40001 : 10.0.0.2 }", "40000 40001"},
		{"ip", "", "ip daddr . tcp dport { 192.0.2.1 . 40000, 203.0.113.1 . 40001 } dnat to 10.0.0.1", "40000"},
		{"ip", "", "ip daddr . tcp dport { 192.0.2.0/24 . 40000-40005, 203.0.113.1 . 40001 } dnat to 10.0.0.1", "40000-40005"},
		{"ip", "chain more { dnat to 10.0.0.1; }", "tcp dport 40000 jump more", "40000"},
		{"ip", "chain more { tcp dport 40001 dnat to 10.0.0.1; }", "jump more", "40001"},
		{"ip", "chain more { dnat to 10.0.0.1; }", "ip daddr 203.0.113.1 tcp dport 40000 goto more", ""},
		{"ip", "chain more { dnat to 10.0.0.1; }", "tcp dport vmap { 40000 : goto more, 40001 : accept }", "40000"},
		{"ip", "chain more { dnat to 10.0.0.1; }\nmap m { type ipv4_addr . inet_proto . inet_service : verdict; elements = { 192.0.2.1 . tcp . 40000 : goto more, 203.0.113.1 . tcp . 40001 : goto more }; }",
			"ip daddr . meta l4proto . th dport vmap @m", "40000"},
		{"ip", "chain out { type nat hook output priority -100; tcp dport 40001 dnat to 10.0.0.1; }", "tcp dport 40000 dnat to 10.0.0.1", "40000"},
		{"ip6", "", "ip6 daddr 2001:db8::1 tcp dport 40000 dnat to 2001:db8:1::1", "40000"},
		{"ip6", "", "ip6 daddr 2001:db8::/32 tcp dport 40000 dnat to 2001:db8:1::1", "40000"},
		{"ip6", "", "ip6 daddr 2001:db9::/32 tcp dport 40000 dnat to 2001:db8:1::1", ""},
		{"ip6", "", "ip6 daddr . udp dport { 2001:db8::1 . 40000, 2001:db9::1 . 40001 } dnat to 2001:db8:1::1", "40000"},
		{"inet", "", "udp dport 40000 dnat ip to 10.0.0.1; udp dport 40000 dnat ip6 to 2001:db8:1::1", "40000"},
	} {
		got := readRules(t, "nft", "table "+tc.family+" nat {\n"+tc.more+"\nchain pre { type nat hook prerouting priority dstnat; "+tc.rules+"; }\n}\n").Forwarded
		if text := strings.Trim(fmt.Sprint(got), "[]"); text != tc.want {
			t.Errorf("%s: %s, want %s", tc.rules, text, tc.want)
		}
	}
	const lines = "-A PREROUTING -d 192.0.2.1/32 -p tcp -m tcp --dport 40000 -j DNAT --to-destination 10.0.0.1:80\n" +
		"-A PREROUTING -p udp -m multiport --dports 40001,40003:40005 -j DNAT --to-destination 10.0.0.1\n" +
		"-A PREROUTING -p tcp -m multiport --sports 40006 -j DNAT --to-destination 10.0.0.1\n" +
		"-A PREROUTING -p udp -m udp --dport 40010:40012 -j SVC\n" +
		"-A PREROUTING -d 10.96.0.0/12 -p tcp -m tcp --dport 40020 -j SVC\n" +
		"-A PREROUTING -p tcp -m tcp ! --dport 40030 -j REDIRECT --to-ports 80\n" +
		"-A OUTPUT -p tcp -m tcp --dport 40040 -j DNAT --to-destination 10.0.0.1\n" +
		"-A SVC -j DNAT --to-destination 10.0.0.1\n"
	const want = "40000 40001 40003-40005 40010-40012"
	if got := readRules(t, "iptables-nft-restore", "*nat\n:SVC - [0:0]\n"+lines+"COMMIT\n").Forwarded; strings.Trim(fmt.Sprint(got), "[]") != want {
		t.Errorf("iptables: %v, want %s", got, want)
	}
	var legacy Ruleset
	legacy.addLegacy(nftables.TableFamilyIPv4, "*nat\n"+lines+"COMMIT\n", []netip.Addr{netip.MustParseAddr("192.0.2.1")})
	if got := strings.Trim(fmt.Sprint(legacy.Forwarded), "[]"); got != want {
		t.Errorf("iptables-legacy: %s, want %s", got, want)
	}
}

// TestNamed: the addresses of port forwards, whether the host has them or not.
func TestNamed(t *testing.T) {
	for rules, want := range map[string]string{
		"ip daddr 203.0.113.1 tcp dport 80 dnat to 10.0.0.1":                                            "203.0.113.1",
		"ip daddr { 203.0.113.2, 192.0.2.1 } dnat to 10.0.0.1":                                          "192.0.2.1 203.0.113.2",
		"ip daddr 203.0.113.0/24 dnat to 10.0.0.1":                                                      "",
		"dnat to ip daddr map { 203.0.113.3 : 10.0.0.3 }":                                               "203.0.113.3",
		"dnat to ip daddr . tcp dport map { 203.0.113.3 . 80 : 10.0.0.3, 203.0.113.4 . 80 : 10.0.0.4 }": "203.0.113.3 203.0.113.4",
		"ip daddr 203.0.113.1 drop":                                                                     "",
	} {
		got := readRules(t, "nft", "table ip nat {\nchain pre { type nat hook prerouting priority dstnat; "+rules+"; }\n}\n").Named
		if text := strings.Trim(fmt.Sprint(got), "[]"); text != want {
			t.Errorf("%s: %s, want %s", rules, text, want)
		}
	}
	var legacy Ruleset
	legacy.addLegacy(nftables.TableFamilyIPv4, "*nat\n-A PREROUTING -d 203.0.113.1/32 -p tcp -j DNAT --to-destination 10.0.0.1\nCOMMIT\n", nil)
	if len(legacy.Named) != 1 {
		t.Errorf("iptables-legacy: %v", legacy.Named)
	}
}

// TestOpened finds the ports that rules of the input hook accept by their number.
func TestOpened(t *testing.T) {
	for _, tc := range []struct{ more, rules, want string }{
		{"", "udp dport 1194 accept; tcp dport { 22, 8443 } accept", "22 1194 8443"},
		{"", "ct state established accept; iifname lo accept; tcp dport 25 drop; accept", ""},
		{"", "ip daddr 203.0.113.1 tcp dport 22 accept; ip daddr 192.0.2.1 tcp dport 23 accept", "23"},
		{"chain more { accept; }", "tcp dport 40000 jump more", "40000"},
		{"chain f { type filter hook forward priority 0; tcp dport 40001 accept; }", "", ""},
	} {
		got := readRules(t, "nft", "table ip filter {\n"+tc.more+"\nchain in { type filter hook input priority 0; "+tc.rules+"; }\n}\n").Opened
		if text := strings.Trim(fmt.Sprint(got), "[]"); text != tc.want {
			t.Errorf("%s: %s, want %s", tc.rules, text, tc.want)
		}
	}
	const lines = "*filter\n-A INPUT -p udp -m udp --dport 1194 -j ACCEPT\n-A INPUT -p tcp -m multiport --dports 22,80:81 -j ACCEPT\n-A INPUT -p tcp -m tcp --dport 25 -j DROP\n-A FORWARD -p tcp -m tcp --dport 40000 -j ACCEPT\nCOMMIT\n"
	var legacy Ruleset
	legacy.addLegacy(nftables.TableFamilyIPv4, lines, nil)
	if got := strings.Trim(fmt.Sprint(legacy.Opened), "[]"); got != "22 80-81 1194" {
		t.Errorf("iptables-legacy: %s", got)
	}
}
