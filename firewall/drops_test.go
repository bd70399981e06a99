// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

const ruleset = `table inet filter {
	set banned {
		type ipv4_addr
		elements = { 192.0.2.66 }
	}
	chain forward {
		type filter hook forward priority filter; policy drop;
		ct state established,related accept
		ip saddr @banned counter drop
		tcp dport { 25, 465 } drop
		iifname "wan0" udp dport 53 jump dns
		tcp dport vmap { 80 : accept, 81 : drop }
	}
	chain dns {
		ip daddr 198.51.100.0/24 reject
	}
}
table ip other {
	chain input {
		type filter hook input priority filter; policy accept;
		drop
	}
}
table netdev early {
	chain ingress {
		type filter hook ingress device "lo" priority 0;
		ip saddr 192.0.2.9 drop
	}
}
`

// inNamespace loads rules with the nft program into a namespace of their own, and does something
// there.
func inNamespace(t *testing.T, rules string, do func() error) {
	t.Helper()
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Tool("nft"))
	l := labtest.New(t, lab.Topology{Name: "drops", Nodes: []lab.NodeSpec{{Name: "gateway"}}})
	cmd := l.Node("gateway").Command(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s\n%s", err, out, rules)
	}
	if err := l.Node("gateway").Do(do); err != nil {
		t.Fatal(err)
	}
}

func TestDropRules(t *testing.T) {
	var got []Rule
	inNamespace(t, ruleset, func() (err error) {
		if got, err = DropRules(t.Context()); err != nil {
			return err
		}
		return Describe(t.Context(), got)
	})
	want := []Rule{
		{Chain: "inet filter forward", Hook: "forward", Text: "policy drop"},
		{Chain: "inet filter forward", Hook: "forward", Text: "ip saddr @banned drop", Counted: true},
		{Chain: "inet filter forward", Hook: "forward", Text: "tcp dport { 25, 465 } drop"},
		{Chain: "inet filter forward", Hook: "forward", Text: "tcp dport vmap { 80 : accept, 81 : drop }"},
		{Chain: "inet filter dns", Hook: "forward", Text: "ip daddr 198.51.100.0/24 reject with icmp port-unreachable"},
		{Chain: "ip other input", Hook: "input", Text: "drop"},
		{Chain: "netdev early ingress", Hook: "ingress", Text: "ip saddr 192.0.2.9 drop"},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreUnexported(Rule{}), cmpopts.IgnoreFields(Rule{}, "Handle")); diff != "" {
		t.Error(diff)
	}
	for _, r := range got {
		if (r.Handle == "") != r.Policy() {
			t.Errorf("%s: handle %q", r, r.Handle)
		}
	}
}

func TestRuleTexts(t *testing.T) {
	got := ruleTexts("table inet filter { # handle 1\n\tset banned { # handle 2\n\t\ttype ipv4_addr\n\t\telements = { 192.0.2.66 }\n\t}\n\n" +
		"\tchain forward { # handle 3\n\t\ttype filter hook forward priority filter; policy drop;\n" +
		"\t\tip saddr @banned counter packets 7 bytes 420 drop comment \"no # handle 9\" # handle 5\n\t}\n}\n")
	want := map[string]string{"inet filter forward\x005": `ip saddr @banned drop comment "no # handle 9"`}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestLegacyDropRules(t *testing.T) {
	saved := "*filter\n:INPUT ACCEPT [1:2]\n:FORWARD DROP [12:720]\n:mine - [0:0]\n" +
		"[3:180] -A FORWARD -p tcp --dport 25 -j DROP\n[5:1] -A mine -j REJECT\n[9:9] -A INPUT -j ACCEPT\n" +
		"[1:1] -A INPUT -m comment --comment \"say -j DROP\" -j ACCEPT\nCOMMIT\n"
	want := []Rule{
		{Chain: "iptables filter FORWARD", Hook: "forward", Text: "policy DROP", Packets: 12, Counted: true, Legacy: true},
		{Chain: "iptables filter FORWARD", Hook: "forward", Text: "-A FORWARD -p tcp --dport 25 -j DROP", Packets: 3, Counted: true, Legacy: true},
		{Chain: "iptables filter mine", Text: "-A mine -j REJECT", Packets: 5, Counted: true, Legacy: true},
	}
	if diff := cmp.Diff(want, legacyDropRules(nftables.TableFamilyIPv4, saved), cmpopts.IgnoreUnexported(Rule{})); diff != "" {
		t.Error(diff)
	}
}

// seen is a packet as rules see it, of a new connection.
func seen(p flow.Protocol, from, to string) *Packet {
	t := flow.Tuple{Protocol: p, Source: netip.MustParseAddrPort(from), Dest: netip.MustParseAddrPort(to)}
	var b []byte
	if t.Source.Addr().Is4() {
		b = make([]byte, 20)
		b[0], b[9] = 0x45, byte(p)
	} else {
		b = make([]byte, 8)
		b[0], b[6] = 0x60, byte(p)
	}
	source, dest := t.Source.Addr().AsSlice(), t.Dest.Addr().AsSlice()
	if t.Source.Addr().Is4() {
		copy(b[12:], source)
		copy(b[16:], dest)
	} else {
		b = append(append(b, source...), dest...)
	}
	b = binary.BigEndian.AppendUint16(b, t.Source.Port())
	b = binary.BigEndian.AppendUint16(b, t.Dest.Port())
	return &Packet{Header: append(b, make([]byte, 16)...), Tuple: t, In: "veth7", InIndex: 7, Mark: 3, States: []uint32{StateNew, StateRelated}}
}

// TestFits: conditions in the kernel's own form. What cannot be judged from the packet is no
// reason to leave the rule out.
func TestFits(t *testing.T) {
	tcp := seen(flow.TCP, "192.0.2.2:1024", "198.51.100.9:80")
	ping := seen(flow.ICMPv6, "[2001:db8::2]:7", "[2001:db8::9]:7")
	invalid := seen(flow.TCP, "192.0.2.2:1024", "198.51.100.9:80")
	invalid.States = []uint32{StateInvalid}
	for _, c := range []struct {
		rule   string
		packet *Packet
		want   bool
	}{
		{`iifname "veth*" drop`, tcp, true},
		{`iifname { "wan0", "veth7" } drop`, tcp, true},
		{`iifname "eth*" drop`, tcp, false},
		{`iifname != "veth*" drop`, tcp, false},
		{"iif 7 drop", tcp, true},
		{"iif 8 drop", tcp, false},
		{"meta mark 3 drop", tcp, true},
		{"meta mark & 0x1 == 0 drop", tcp, false},
		{"meta l4proto ipv6-icmp drop", ping, true},
		{"meta l4proto != ipv6-icmp drop", ping, false},
		{"meta l4proto { tcp, udp } drop", ping, false},
		{"meta l4proto { esp, udp } drop", tcp, false},
		{"ip saddr . tcp dport { 192.0.2.2 . 80, 192.0.2.3 . 81 } drop", tcp, true},
		{"ip saddr . tcp dport { 192.0.2.2 . 81, 192.0.2.3 . 80 } drop", tcp, false},
		{"ip saddr . tcp dport { 192.0.2.0/24 . 79-90 } drop", tcp, true},
		{"ip saddr . tcp dport { 192.0.2.0/24 . 81-90 } drop", tcp, false},
		{"ip protocol . tcp dport { tcp . 80 } drop", tcp, true},
		{"ip daddr vmap { 198.51.100.9 : drop }", tcp, true},
		{"ip daddr vmap { 198.51.100.9 : accept, 198.51.100.8 : drop }", tcp, false},
		{"ip daddr vmap { 198.51.100.7 : drop }", tcp, false},
		{"tcp dport vmap { 80 : accept, * : drop }", tcp, false},
		{"tcp dport vmap { 81 : accept, * : drop }", tcp, true},
		{"ip saddr & 255.255.0.255 == 192.0.0.2 drop", tcp, true},
		{"ip saddr & 255.255.0.255 == 192.0.0.3 drop", tcp, false},
		{"ip saddr { 192.0.2.0/31, 192.0.2.2-192.0.2.7 } drop", tcp, true},
		{"ip saddr 192.0.2.3 drop", tcp, false},
		{"ip6 saddr 2001:db8::/64 drop", tcp, false},
		{"ip6 saddr 2001:db8::/64 drop", ping, true},
		{"ct state new drop", tcp, true},
		{"ct state established drop", tcp, false},
		{"ct state invalid drop", tcp, false},
		{"ct state invalid drop", invalid, true},
		{"ct state vmap { invalid : drop, new : accept }", tcp, false},
		{"ct original ip daddr 203.0.113.1 drop", tcp, true}, // not known
		{"meta cgroup 5 drop", tcp, true},                    // not known
		{"tcp dport != 80 drop", tcp, false},
		{"tcp dport 79-81 drop", tcp, true},
		{"tcp dport != 79-81 drop", tcp, false},
		{"tcp flags & (syn | ack) == syn drop", tcp, false}, // its flags are zero
	} {
		rules := "table inet t { chain forward { type filter hook forward priority 0; " + c.rule + "; }\n}\n"
		inNamespace(t, rules, func() error {
			list, err := DropRules(t.Context())
			if err == nil && len(list) != 1 {
				err = errors.New("not one rule")
			}
			if err != nil {
				t.Errorf("%s: %v: %v", c.rule, list, err)
			} else if got := list[0].Fits(c.packet); got != c.want {
				t.Errorf("%s: fits %s: %v, want %v", c.rule, c.packet.Tuple, got, c.want)
			}
			return nil
		})
	}
}

// TestFitsBehindJumps: the rules that lead to a chain have conditions too.
func TestFitsBehindJumps(t *testing.T) {
	inNamespace(t, `table inet t {
		chain deep { drop; }
		chain dns { ip daddr 198.51.100.0/24 jump deep; }
		chain other { tcp dport 443 goto deep; }
		chain forward { type filter hook forward priority 0; udp dport vmap { 53 : jump dns }; jump other; }
		chain input { type filter hook input priority 0; jump other; }
	}
	`, func() error {
		list, err := DropRules(t.Context())
		if err != nil || len(list) != 1 {
			t.Fatalf("%v, %v", list, err)
		}
		if list[0].Hook != "" {
			t.Errorf("hook %q, there are two", list[0].Hook)
		}
		for to, want := range map[*Packet]bool{
			seen(flow.UDP, "192.0.2.2:1024", "198.51.100.9:53"): true,
			seen(flow.UDP, "192.0.2.2:1024", "203.0.113.9:53"):  false,
			seen(flow.UDP, "192.0.2.2:1024", "198.51.100.9:54"): false,
			seen(flow.TCP, "192.0.2.2:1024", "203.0.113.9:443"): true,
			seen(flow.TCP, "192.0.2.2:1024", "203.0.113.9:80"):  false,
		} {
			if got := list[0].Fits(to); got != want {
				t.Errorf("%s: %v, want %v", to.Tuple, got, want)
			}
		}
		return nil
	})
}

func TestLegacyFits(t *testing.T) {
	tcp := seen(flow.TCP, "192.0.2.2:1024", "198.51.100.9:80")
	for rule, want := range map[string]bool{
		"-s 192.0.2.0/24": true, "-s 192.0.3.0/24": false, "! -s 192.0.2.0/24": false, "-d 198.51.100.9/32": true, "-p tcp": true, "-p udp": false,
		"-p tcp -m tcp --dport 80": true, "-p tcp -m tcp --dport 81:90": false, "-p tcp -m multiport --dports 22,79:81": true, "-i veth+": true, "-i eth0": false,
		"-m conntrack --ctstate INVALID": false, "-m conntrack --ctstate NEW": true, "-m set --match-set banned src": true,
	} {
		list := legacyDropRules(nftables.TableFamilyIPv4, "*filter\n[0:0] -A FORWARD "+rule+" -j DROP\nCOMMIT\n")
		if len(list) != 1 || list[0].Fits(tcp) != want {
			t.Errorf("%s: %v, want %v", rule, list, want)
		}
	}
	if legacyDropRules(nftables.TableFamilyIPv6, "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n")[0].Fits(tcp) {
		t.Error("a policy of ip6tables drops IPv4")
	}
}

// TestUnknownExpressions: rules that ask for a direction of connections, and expressions that are
// not decoded, leave the others readable; what cannot be understood is said.
func TestUnknownExpressions(t *testing.T) {
	got := readRules(t, "nft", `table ip t {
		map backends { typeof ct original ip daddr : ip daddr; }
		chain pre {
			type filter hook prerouting priority -150;
			ct original ip daddr 203.0.113.1 accept
			meta l4proto tcp ct reply proto-src 80 ct mark set 1
			meta l4proto tcp socket transparent 1 accept
			tcp dport 80 tproxy to :8080
		}
		chain nat { type nat hook prerouting priority dstnat; dnat to ct original ip daddr map @backends; }
		chain post { type nat hook postrouting priority srcnat; ct original ip daddr 203.0.113.1 masquerade; }
	}
	`)
	if got.SourceNAT != 1 || got.DestNAT != 1 || got.Tracking != 5 || len(got.NotUnderstood) != 0 || len(got.Chains) != 3 {
		t.Errorf("%+v", got)
	}
	encode := func(name string, data []byte) []byte {
		b, err := mdnetlink.MarshalAttributes([]mdnetlink.Attribute{{Type: unix.NFTA_EXPR_NAME, Data: append([]byte(name), 0)}, {Type: unix.NFTA_EXPR_DATA, Data: data}})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, data := range map[string][]byte{"novel": nil, "cmp": {1, 2, 3}, "ct": {9, 0, 2, 0, 1}} {
		e, _ := decode(unix.NFPROTO_IPV4, encode(name, data))
		if o, is := e.(*undecodedExpr); !is || o.name != name || o.err == nil {
			t.Errorf("%s: %#v", name, e)
		}
	}
	if isUnconditional(&nftables.Rule{Exprs: []expr.Any{&undecodedExpr{name: "novel"}, &expr.Verdict{Kind: expr.VerdictAccept}}}) {
		t.Error("an expression that is not decoded is no condition")
	}
}
