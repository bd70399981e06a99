// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/nftables"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestRuleset reads rules from the kernel: the number of rules on a packet's path, and their effects.
func TestRuleset(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, lab.Topology{Name: "vitals", Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	cmd := l.Node("gateway").Command(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(`table inet filter {
	chain extra {
		ip saddr 192.0.2.1 drop
		ip saddr 192.0.2.2 drop
	}
	chain forward {
		type filter hook forward priority filter; policy drop;
		tcp flags syn tcp option maxseg size set rt mtu
		ct state established,related accept
		jump extra
		log prefix "x"
		limit rate 1/second log
	}
	chain raw {
		type filter hook prerouting priority raw
		udp dport 53 notrack
		ip saddr 10.0.0.0/8 notrack
		iifname "lo" notrack
		ip daddr 10.0.0.1 notrack
		meta l4proto ipv6-icmp notrack
		iifname "a" meta l4proto tcp notrack
	}
}
table ip nat {
	chain post {
		type nat hook postrouting priority srcnat
		oifname "a" ip protocol tcp snat to 203.0.113.1:2000-2019
		masquerade fully-random
	}
	chain pre {
		type nat hook prerouting priority dstnat
		tcp dport 80 dnat to 198.51.100.2:8080
		tcp dport 81 dnat to numgen inc mod 2 map { 0 : 198.51.100.3, 1 : 198.51.100.4 }
		udp dport vmap { 53 : goto servers }
	}
	map backends { typeof ip saddr . udp dport : ip daddr . udp dport; elements = { 10.0.0.1 . 53 : 198.51.100.5 . 5353 } }
	chain servers {
		dnat to ip saddr . udp dport map @backends
	}
}
`)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var got *Ruleset
	err := l.Node("gateway").Do(func() (err error) {
		got, err = Read(t.Context())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(got.Chains, func(a, b Chain) int { return strings.Compare(a.Name, b.Name) })
	want := &Ruleset{
		Tables: 2, SourceNAT: 2, InOrder: 1, DestNAT: 3, Forwards: Forwards{IPv4: 5}, Targets: addresses("198.51.100.2", "198.51.100.3", "198.51.100.4", "198.51.100.5"), Tracking: 1, Untracked: Forwards{IPv4: 1, Either: 1}, Logs: 1, LogIn: "inet filter forward", MSSClamp: true,
		Forwarded: []PortRange{{53, 53}, {80, 80}, {81, 81}},
		Sources:   []SourceRule{{Chain: "ip nat post", Out: []string{"a"}}, {Chain: "ip nat post"}},
		Pools:     Pools{Smallest: 20, ByAddress: map[netip.Addr]uint32{netip.MustParseAddr("203.0.113.1"): 20}, Other: 64512},
		Chains: []Chain{
			{Name: "inet filter forward", Hook: "forward", Longest: 7, Established: 1, UpTo: 2, Drops: 1, PolicyDrop: true},
			{Name: "inet filter raw", Hook: "prerouting", Longest: 6, Established: -1},
			{Name: "ip nat post", Hook: "postrouting", NAT: true, Longest: 2, Established: -1},
			{Name: "ip nat pre", Hook: "prerouting", NAT: true, Longest: 4, Established: -1},
		},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(SourceRule{})); diff != "" {
		t.Error(diff)
	}
}

func addresses(list ...string) Targets {
	t := Targets{Addresses: map[netip.Addr]bool{}}
	for _, a := range list {
		t.Addresses[netip.MustParseAddr(a)] = true
	}
	return t
}

// TestTargetsUnclear: unknown targets are counted, not guessed.
func TestTargetsUnclear(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, lab.Topology{Name: "targets", Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	for _, rule := range []string{
		"tcp dport 80 dnat to 198.51.100.2-198.51.100.9", "tcp dport 80 redirect to :8080", "tcp dport 80 dnat to :8080",
		"dnat ip prefix to ip daddr map { 192.0.2.0/24 : 198.51.100.0/24 }",
	} {
		cmd := l.Node("gateway").Command(t.Context(), "nft", "-f", "-")
		cmd.Stdin = strings.NewReader("flush ruleset\ntable ip nat { chain pre { type nat hook prerouting priority dstnat; " + rule + "; }\n}\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", rule, err, out)
		}
		var got *Ruleset
		err := l.Node("gateway").Do(func() (err error) { got, err = Read(t.Context()); return err })
		if err != nil || got.Targets.Unclear == 0 {
			t.Errorf("%s: %v, targets %+v", rule, err, got.Targets)
		}
	}
}

// readRules has a program load rules, nft or iptables-nft-restore, and reads them back
// in a namespace that has the address 192.0.2.1.
func readRules(t *testing.T, program, rules string) *Ruleset {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Tool(program))
	l := labtest.New(t, lab.Topology{Name: "rules", Nodes: []lab.NodeSpec{{Name: "gateway", Addresses: []string{"192.0.2.1/32", "2001:db8::1/128"}}}})
	args := []string{}
	if program == "nft" {
		args = []string{"-f", "-"}
	}
	cmd := l.Node("gateway").Command(t.Context(), program, args...)
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var got *Ruleset
	if err := l.Node("gateway").Do(func() (err error) { got, err = Read(t.Context()); return err }); err != nil {
		t.Fatal(err)
	}
	return got
}

// TestCompatTargets: a NETMAP has a target for every address.
func TestCompatTargets(t *testing.T) {
	got := readRules(t, "iptables-nft-restore", "*nat\n-A PREROUTING -p udp -j DNAT --to-destination 10.0.0.1\n-A PREROUTING -d 192.0.2.0/24 -j NETMAP --to 10.0.0.0/24\nCOMMIT\n").Targets
	want := addresses("10.0.0.1")
	want.Unclear = 1
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestPools: a port range belongs to the address of its rule.
func TestPools(t *testing.T) {
	pools := func(smallest, other uint32, of map[string]uint32) Pools {
		p := Pools{Smallest: smallest, Other: other}
		for a, n := range of {
			if p.ByAddress == nil {
				p.ByAddress = map[netip.Addr]uint32{}
			}
			p.ByAddress[netip.MustParseAddr(a)] = n
		}
		return p
	}
	unclear := func(p Pools) Pools { p.Unclear = 1; return p }
	const all = 64512
	for _, tc := range []struct {
		rules string
		want  Pools
	}{
		{"udp sport 5060 snat to 203.0.113.5:5060; masquerade", pools(1, all, map[string]uint32{"203.0.113.5": 1})},
		{"ip protocol tcp masquerade to :2000-2019", pools(20, 20, nil)},
		{"ip protocol tcp snat to 203.0.113.5:2000-2019; snat to 203.0.113.5", pools(20, 0, map[string]uint32{"203.0.113.5": all})},
		{"snat to 203.0.113.5-203.0.113.6", unclear(pools(0, all, nil))},
		{"ip protocol tcp snat to 203.0.113.5-203.0.113.6:2000-2019", unclear(pools(20, 20, nil))},
		{"snat to ip saddr map { 10.0.0.1 : 203.0.113.5 }", unclear(pools(0, all, nil))},
	} {
		got := readRules(t, "nft", "table ip nat { chain post { type nat hook postrouting priority srcnat; "+tc.rules+"; }\n}\n").Pools
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: %s", tc.rules, diff)
		}
	}
	const lines = "-A POSTROUTING -p tcp -j SNAT --to-source 203.0.113.5:2000-2019\n-A POSTROUTING -j SNAT --to-source 203.0.113.6\n" +
		"-A POSTROUTING -p tcp -j SNAT --to-source 203.0.113.7-203.0.113.8:2000-2009\n-A POSTROUTING -p udp -j MASQUERADE --to-ports 3000-3099\n"
	want := unclear(pools(10, 100, map[string]uint32{"203.0.113.5": 20, "203.0.113.6": all}))
	if diff := cmp.Diff(want, readRules(t, "iptables-nft-restore", "*nat\n"+lines+"COMMIT\n").Pools); diff != "" {
		t.Errorf("iptables: %s", diff)
	}
	const lines6 = "-A POSTROUTING -p tcp -j SNAT --to-source [2001:db8::5]:2000-2019\n-A POSTROUTING -j SNAT --to-source 2001:db8::6\n-A POSTROUTING -p udp -j MASQUERADE --to-ports 3000-3099\n"
	want6 := pools(20, 100, map[string]uint32{"2001:db8::5": 20, "2001:db8::6": all})
	if diff := cmp.Diff(want6, readRules(t, "ip6tables-nft-restore", "*nat\n"+lines6+"COMMIT\n").Pools); diff != "" {
		t.Errorf("ip6tables: %s", diff)
	}
	for text, want := range map[string]Pools{lines: want, lines6: want6} {
		var legacy Pools
		for line := range strings.Lines(text) {
			legacy.addLegacyLine(strings.Fields(line))
		}
		if diff := cmp.Diff(want, legacy); diff != "" {
			t.Errorf("iptables-legacy: %s", diff)
		}
	}
}

// TestTracking: what asks connection tracking without the word for its states.
func TestTracking(t *testing.T) {
	for _, rule := range []string{"ct count over 10 drop", "ct mark set 1", "add @seen { ip saddr ct count over 10 } drop"} {
		got := readRules(t, "nft", "table ip filter { set seen { type ipv4_addr; flags dynamic; }\n"+
			"chain forward { type filter hook forward priority 0; tcp dport 80 "+rule+"; }\n}\n")
		if got.Tracking != 1 {
			t.Errorf("%s: %d rules use connection tracking, want 1", rule, got.Tracking)
		}
	}
	got := readRules(t, "iptables-nft-restore", "*mangle\n-A FORWARD -m connmark --mark 1 -j ACCEPT\n-A FORWARD -j CONNMARK --save-mark\n-A FORWARD -p tcp -m connlimit --connlimit-above 9 -j DROP\nCOMMIT\n")
	if got.Tracking != 3 {
		t.Errorf("iptables: %d rules use connection tracking, want 3", got.Tracking)
	}
}

// TestForwards: what the host redirects, sends itself or takes itself needs no forwarding.
func TestForwards(t *testing.T) {
	for _, tc := range []struct {
		rules string
		want  Forwards
	}{
		{"table ip nat { chain pre { type nat hook prerouting priority dstnat; tcp dport 80 redirect to :8080; }\n}", Forwards{}},
		{"table ip nat { chain pre { type nat hook prerouting priority dstnat; tcp dport 80 dnat to 192.0.2.1:8080; }\n}", Forwards{}},
		{"table ip nat { chain pre { type nat hook prerouting priority dstnat; tcp dport 80 dnat to 127.0.0.1; tcp dport 81 dnat to :82; }\n}", Forwards{}},
		{"table ip6 nat { chain pre { type nat hook prerouting priority dstnat; tcp dport 80 dnat to [2001:db8::1]:8080; }\n}", Forwards{}},
		{"table ip nat { chain out { type nat hook output priority -100; tcp dport 80 jump more; }\nchain more { dnat to 198.51.100.2; }\n}", Forwards{}},
		{"table ip nat { chain out { type nat hook output priority -100; jump more; }\nchain pre { type nat hook prerouting priority dstnat; jump more; }\nchain more { dnat to 198.51.100.2; }\n}", Forwards{IPv4: 1}},
		{"table ip nat { chain pre { type nat hook prerouting priority dstnat; tcp dport vmap { 80 : goto more }; }\nchain more { dnat to 198.51.100.2; }\n}", Forwards{IPv4: 1}},
		{"table ip nat { chain out { type nat hook output priority -100; tcp dport vmap { 80 : goto more }; }\nchain more { dnat to 198.51.100.2; }\n}", Forwards{}},
		{"table ip6 nat { chain post { type nat hook postrouting priority srcnat; masquerade; }\n}", Forwards{IPv6: 1}},
		{"table inet nat { chain post { type nat hook postrouting priority srcnat; masquerade; }\n}", Forwards{Either: 1}},
		{"table inet nat { chain post { type nat hook postrouting priority srcnat; ip saddr 10.0.0.0/8 masquerade; meta nfproto ipv6 masquerade; }\n}", Forwards{IPv4: 1, IPv6: 1}},
		{"table inet nat { chain pre { type nat hook prerouting priority dstnat; dnat ip to 198.51.100.2; dnat ip6 to 2001:db8::2; }\n}", Forwards{IPv4: 1, IPv6: 1}},
	} {
		if got := readRules(t, "nft", tc.rules+"\n").Forwards; got != tc.want {
			t.Errorf("%s: %+v, want %+v", tc.rules, got, tc.want)
		}
	}
	got := readRules(t, "iptables-nft-restore", "*nat\n-A PREROUTING -p tcp -j REDIRECT --to-ports 8080\n-A PREROUTING -p tcp -j DNAT --to-destination 192.0.2.1:80\n"+
		"-A OUTPUT -p tcp -j DNAT --to-destination 198.51.100.2\n-A PREROUTING -p tcp -j DNAT --to-destination 198.51.100.2\n-A POSTROUTING -j MASQUERADE\nCOMMIT\n").Forwards
	if want := (Forwards{IPv4: 2}); got != want {
		t.Errorf("iptables: %+v, want %+v", got, want)
	}
	var legacy Forwards
	for _, line := range []string{"-A PREROUTING -p tcp -j REDIRECT --to-ports 8080", "-A PREROUTING -j DNAT --to-destination 192.0.2.1:80",
		"-A OUTPUT -j DNAT --to-destination 198.51.100.2", "-A PREROUTING -j DNAT --to-destination 198.51.100.2", "-A POSTROUTING -j MASQUERADE"} {
		legacy.addLegacyLine(nftables.TableFamilyIPv4, strings.Fields(line), []netip.Addr{netip.MustParseAddr("192.0.2.1")})
	}
	if legacy != got {
		t.Errorf("iptables-legacy: %+v, want %+v", legacy, got)
	}
}

func TestLegacyRules(t *testing.T) {
	r := &Ruleset{}
	r.addLegacy(nftables.TableFamilyIPv4, "*nat\n:POSTROUTING ACCEPT [0:0]\n-A POSTROUTING -o eth0 -j MASQUERADE\n-A POSTROUTING -o eth1 -j MASQUERADE --random-fully\nCOMMIT\n"+
		"*nat\n-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.1\n-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.2:80\n"+
		"-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.3:80-90\n-A PREROUTING -p tcp -j DNAT --to-destination [fd00::1]:80\n"+
		"-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.4-10.0.0.9\n-A PREROUTING -p tcp -j REDIRECT --to-ports 8080\n"+
		"-A PREROUTING -d 192.0.2.0/24 -j NETMAP --to 10.0.0.0/24\nCOMMIT\n"+
		"*filter\n-A FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT\n-A FORWARD -j LOG\n-A KUBE-SERVICES -j X\nCOMMIT\n", nil)
	targets := addresses("10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1")
	targets.Unclear = 3
	want := &Ruleset{SourceNAT: 3, DestNAT: 6, Forwards: Forwards{IPv4: 8}, Pools: Pools{Other: 64512, Unclear: 1}, Targets: targets, InOrder: 2, Tracking: 1, Logs: 1, LogIn: "iptables filter FORWARD", KubeServices: 1,
		Legacy: 12, Chains: []Chain{
			{Name: "iptables nat POSTROUTING", Hook: "postrouting", NAT: true, Longest: 2, Established: -1},
			{Name: "iptables nat PREROUTING", Hook: "prerouting", NAT: true, Longest: 7, Established: -1},
			{Name: "iptables filter FORWARD", Hook: "forward", Longest: 2, Established: 0, UpTo: 1},
		}}
	if diff := cmp.Diff(want, r, cmpopts.IgnoreUnexported(SourceRule{})); diff != "" {
		t.Error(diff)
	}
}

// TestLogs: a rule logs without limit if no limit precedes the log, and if it writes to the kernel's own log.
func TestLogs(t *testing.T) {
	for rule, want := range map[string]int{
		"log": 1, "log level info counter": 1, "log limit rate 5/minute": 1,
		"limit rate 5/minute log": 0, `limit name "few" log`: 0, `limit name tcp dport map { 22 : "few" } log`: 0,
		"add @met { ip saddr limit rate 1/minute } log": 0, "log group 1": 0, "log level audit": 0,
	} {
		r := readRules(t, "nft", `table inet t {
			limit few { rate 5/minute; }
			set met { type ipv4_addr; flags dynamic; }
			chain c { type filter hook input priority 0; `+rule+`; }
		}`)
		if r.Logs != want {
			t.Errorf("nft %s: %d logs", rule, r.Logs)
		}
	}
	for rule, want := range map[string]int{
		"-j LOG": 1, "-m limit --limit 5/min -j LOG": 0, "-j NFLOG --nflog-group 2": 0,
		"-m hashlimit --hashlimit-upto 5/min --hashlimit-name x -j LOG": 0, "-m connlimit --connlimit-above 5 -j LOG": 1,
	} {
		saved := "*filter\n-A INPUT " + rule + "\nCOMMIT\n"
		var legacy Ruleset
		legacy.addLegacy(nftables.TableFamilyIPv4, saved, nil)
		if r := readRules(t, "iptables-nft-restore", saved); r.Logs != want || legacy.Logs != want {
			t.Errorf("iptables %s: %d logs, legacy %d", rule, r.Logs, legacy.Logs)
		}
	}
}
