// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
)

// TestLongest: a packet traverses the rules of one of many services and all unconditional rules. Comments do not
// matter.
func TestLongest(t *testing.T) {
	var b strings.Builder
	b.WriteString("*filter\n:SERVICES - [0:0]\n:EVERY - [0:0]\n")
	for i := range 100 {
		fmt.Fprintf(&b, ":SVC-%d - [0:0]\n", i)
	}
	b.WriteString("-A FORWARD -m comment --comment all -j SERVICES\n-A FORWARD -j EVERY\n-A EVERY -p tcp -j RETURN\n-A EVERY -p udp -j RETURN\n")
	for i := range 100 {
		fmt.Fprintf(&b, "-A SERVICES -d 10.0.0.%d/32 -j SVC-%d\n-A SVC-%d -p tcp -j RETURN\n", i, i, i)
	}
	b.WriteString("-A SVC-50 -p udp -j RETURN\n-A SVC-50 -p sctp -j RETURN\nCOMMIT\n")
	got := readRules(t, "iptables-nft-restore", b.String())
	i := slices.IndexFunc(got.Chains, func(c Chain) bool { return c.Hook == "forward" })
	// Two rules in FORWARD, 100 services, three of the longest one, two in EVERY.
	if want := 2 + 100 + 3 + 2; i < 0 || got.Chains[i].Longest != want {
		t.Errorf("%+v, want %d", got.Chains, want)
	}
}

// TestLongestLegacy: jumps of iptables-legacy count like those in nftables, and so does the rule where established
// connections leave the chain.
func TestLongestLegacy(t *testing.T) {
	for _, tc := range []struct {
		rules string
		want  Chain
	}{
		{"-A FORWARD -j MORE\n-A FORWARD -s 10.0.0.1/32 -j LESS\n-A FORWARD -s 10.0.0.2/32 -j DROP\n", Chain{Longest: 3 + 3 + 1, Established: -1, Drops: 1}},
		{"-A FORWARD -s 10.0.0.1/32 -j MORE\n-A FORWARD -s 10.0.0.2/32 -j LESS\n", Chain{Longest: 2 + 3, Established: -1}},
		{"-A FORWARD -j LESS\n-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -j MORE\n", Chain{Longest: 3 + 1 + 3, Established: 1, UpTo: 3}},
		{"-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A FORWARD -j MORE\n", Chain{Longest: 2 + 3, Established: -1}},
		// as ufw and kube-proxy have it, in a chain that every packet is sent to
		{"-A FORWARD -j LESS\n-A FORWARD -m comment --comment \"kubernetes \\\"forwarding\\\" rules\" -j KNOWN\n-A FORWARD -j MORE\n",
			Chain{Longest: 3 + 1 + 3 + 3, Established: 1, UpTo: 2 + 1 + 2}},
		{"-A FORWARD -p tcp -j KNOWN\n-A FORWARD -j MORE\n", Chain{Longest: 2 + 3 + 3, Established: -1}},
		{"-A FORWARD -j LEFT\n-A FORWARD -j MORE\n", Chain{Longest: 2 + 2 + 3, Established: -1}},
	} {
		tc.want.Name, tc.want.Hook, tc.want.PolicyDrop = "iptables filter FORWARD", "forward", true
		var r Ruleset
		r.addLegacy(nftables.TableFamilyIPv4, "*filter\n:FORWARD DROP [0:0]\n:LESS - [0:0]\n"+tc.rules+
			"-A MORE -p tcp -j RETURN\n-A MORE -p udp -j RETURN\n-A MORE -p icmp -j RETURN\n-A LESS -p tcp -j RETURN\n"+
			"-A KNOWN -i lo -j ACCEPT\n-A KNOWN -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A KNOWN -p udp -j DROP\n"+
			"-A LEFT -s 10.0.0.3/32 -j RETURN\n-A LEFT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\nCOMMIT\n", nil)
		if diff := cmp.Diff([]Chain{tc.want}, r.Chains); diff != "" {
			t.Errorf("%s%s", tc.rules, diff)
		}
	}
}

// TestAcceptsKnown: connections that are known leave nftables' chains where a rule looks at
// their state alone, there or in a chain that every packet is sent to.
func TestAcceptsKnown(t *testing.T) {
	for _, tc := range []struct {
		rules    string
		at, upTo int
	}{
		{"ct state established,related accept", 0, 1},
		{"ip saddr 10.0.0.1 drop; ct state established counter accept", 1, 2},
		{"ct state vmap { established : accept, invalid : drop }", 0, 1},
		{"ct state new accept", -1, 0},
		{"iifname docker0 ct state established accept", -1, 0},
		{"ip saddr 10.0.0.1 drop; jump known; tcp dport 22 accept", 1, 2 + 2},
		{"tcp dport 80 jump known", -1, 0},
		{"jump left", -1, 0},
	} {
		r := readRules(t, "nft", `table inet t {
			chain known { iifname lo accept; ct state established,related accept; udp dport 53 accept; }
			chain left { ip saddr 10.0.0.3 return; ct state established accept; }
			chain forward { type filter hook forward priority filter; `+tc.rules+`; }
		}`)
		if len(r.Chains) != 1 || r.Chains[0].Established != tc.at || r.Chains[0].UpTo != tc.upTo {
			t.Errorf("%s: %+v", tc.rules, r.Chains)
		}
	}
	r := readRules(t, "iptables-nft-restore", "*filter\n:KNOWN - [0:0]\n-A FORWARD -o docker0 -m conntrack --ctstate ESTABLISHED -j ACCEPT\n-A FORWARD -m comment --comment x -j KNOWN\n"+
		"-A KNOWN -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\nCOMMIT\n")
	for _, c := range r.Chains {
		if c.Hook == "forward" && (c.Established != 1 || c.UpTo != 3) {
			t.Errorf("iptables-nft: %+v", c)
		}
	}
}

// TestLongestMaps: a packet traverses one chain of a verdict map, and the longest counts. The map's name and depth do
// not matter.
func TestLongestMaps(t *testing.T) {
	for _, tc := range []struct {
		name, chains, rules string
		want                int
	}{
		{"anonymous", "", "ip saddr vmap { 10.0.0.1 : jump short, 10.0.0.2 : jump long, 10.0.0.3 : accept }", 1 + 4},
		{"of ranges", "", "ip saddr vmap { 10.0.0.0/24 : jump short, 10.0.1.0-10.0.3.7 : goto long }", 1 + 4},
		{"of concatenations", "", "ip saddr . tcp dport vmap { 10.0.0.1 . 80 : jump long }", 1 + 4},
		{"named", "map m { type ipv4_addr : verdict; elements = { 10.0.0.1 : jump long, 10.0.0.2 : drop } }", "ip saddr vmap @m", 1 + 4},
		{"empty", "map m { type ipv4_addr : verdict; }", "ip saddr vmap @m", 1},
		{"behind a match", "", "iifname lo ip saddr vmap { 10.0.0.1 : jump long }", 1 + 4},
		{"one of a map or of a jump", "", "ip saddr 10.0.0.1 jump short; ip saddr vmap { 10.0.0.1 : jump long }", 2 + 4},
		{"below a map", "chain more { tcp dport vmap { 80 : goto long, 81 : goto short }; }", "ip saddr vmap { 10.0.0.1 : goto more }", 1 + 1 + 4},
		{"of states", "", "ct state vmap { established : accept, new : jump long }", 1 + 4},
	} {
		got := readRules(t, "nft", "table ip filter {\nchain long { counter; counter; counter; counter; }\nchain short { counter; }\n"+
			tc.chains+"\nchain forward { type filter hook forward priority 0; "+tc.rules+"; }\n}\n")
		if len(got.Chains) != 1 || got.Chains[0].Longest != tc.want || got.Unread != 0 {
			t.Errorf("%s: %+v and %d maps unread, want %d", tc.name, got.Chains, got.Unread, tc.want)
		}
	}
	var b strings.Builder
	b.WriteString("table ip filter { chain long { counter; counter; }\nchain forward { type filter hook forward priority 0;\n")
	for i := range mostMaps + 10 {
		fmt.Fprintf(&b, "ip saddr vmap { 10.0.%d.%d : jump long }\n", i/250, i%250)
	}
	b.WriteString("}\n}\n")
	if got := readRules(t, "nft", b.String()); got.Unread != 10 {
		t.Errorf("%d of %d maps unread, want 10", got.Unread, mostMaps+10)
	}
}

// TestLargeMaps: a map with too many elements for a checkup counts as unread. A large set of sources does not affect
// forwarded ports.
func TestLargeMaps(t *testing.T) {
	addresses := func(format string, n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format+",", i>>16, i>>8&255, i&255)
		}
		return b.String()
	}
	got := readRules(t, "nft", `table ip t {
		map most { type ipv4_addr : verdict; elements = { `+addresses("10.%d.%d.%d : goto long", mostElements)+` } }
		map more { type ipv4_addr : verdict; elements = { `+addresses("10.%d.%d.%d : goto short", mostElements+1000)+` } }
		set deny { type ipv4_addr; elements = { `+addresses("10.%d.%d.%d", mostElements+1000)+` } }
		chain long { counter; counter; counter; counter; }
		chain short { counter; }
		chain pre { type nat hook prerouting priority -100; ip saddr @deny drop; tcp dport 80 dnat to 198.51.100.2; }
		chain forward { type filter hook forward priority 0; ip saddr vmap @most; ip saddr vmap @more; }
	}`)
	i := slices.IndexFunc(got.Chains, func(c Chain) bool { return c.Hook == "forward" })
	if i < 0 || got.Chains[i].Longest != 2+4 || got.Unread != 1 {
		t.Errorf("%+v, %d maps unread; want 6 rules and 1 map", got.Chains, got.Unread)
	}
	if len(got.Forwarded) != 1 || got.Forwarded[0].Low != 80 {
		t.Errorf("forwarded ports %v", got.Forwarded)
	}
}
