// SPDX-License-Identifier: Apache-2.0

package vitals

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

func TestParseLog(t *testing.T) {
	got := ParseLog([]string{
		"4,100,5000000,-;nf_conntrack: nf_conntrack: table full in netns 4026532876, dropping packet\n SUBSYSTEM=x",
		"4,101,6000000,-;nf_conntrack: nf_conntrack: table full, dropping packet",
		"6,102,7000000,-;eth0: link up",
		"4,103,8000000,-;nf_conntrack: expectation table full",
		"broken",
	}, time.Minute)
	want := []LogLine{
		{Age: 55 * time.Second, Text: "nf_conntrack: nf_conntrack: table full in netns 4026532876, dropping packet", Netns: 4026532876},
		{Age: 54 * time.Second, Text: "nf_conntrack: nf_conntrack: table full, dropping packet"},
		{Age: 52 * time.Second, Text: "nf_conntrack: expectation table full"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestParseSoftnet(t *testing.T) {
	got := parseSoftnet("00000010 00000002 00000003\n" + // nine and fewer columns: old kernels
		"0000000a 00000000 00000001 0 0 0 0 0 0 00000007 00000000 00000000 00000001 00000000 00000000\n")
	want := []SoftnetCPU{{Processed: 16, Dropped: 2, Squeezed: 3}, {Processed: 10, Squeezed: 1, RPS: 7}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestParseNetlink(t *testing.T) {
	const head = "sk               Eth Pid        Groups   Rmem\n"
	for line, want := range map[string]int{
		"0 12  100        00000001 0\n": 1, // new flows
		"0 12  100        00000007 0\n": 1, // all
		"0 12  100        00000004 0\n": 0, // destroyed flows only: cheap
		"0 0   100        00000001 0\n": 0, // routes
	} {
		if got := parseNetlink(head + line); got != want {
			t.Errorf("%q: %d, want %d", line, got, want)
		}
	}
}

func TestHexEndpoint(t *testing.T) {
	for in, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"B80D0120000000000000000001000000:0035": "[2001:db8::1]:53",
		"0000000000000000FFFF00000100007F:0016": "127.0.0.1:22",
	} {
		if got, ok := hexEndpoint(in); !ok || got.String() != want {
			t.Errorf("%s: %s %v, want %s", in, got, ok, want)
		}
	}
	if _, ok := hexEndpoint("xyz"); ok {
		t.Error("nonsense was read")
	}
}

func TestParseInterrupts(t *testing.T) {
	got := parseInterrupts("           CPU0       CPU1\n 24:       5000       7   PCI-MSI 65536-edge      virtio0-input.0\n" +
		" 25:  1 2 PCI-MSI 1-edge ahci\nLOC:    1000000    1000000   Local timer interrupts\n")
	if diff := cmp.Diff(map[string][]uint64{"virtio0-input.0 24:": {5000, 7}}, got); diff != "" {
		t.Error(diff)
	}
}

// TestRuleset reads rules of the kernel back: how long the way through them is,
// and what they do.
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
	}
}
table ip nat {
	chain post {
		type nat hook postrouting priority srcnat
		oifname "a" ip protocol tcp snat to 203.0.113.1:2000-2019
		masquerade
	}
	chain pre {
		type nat hook prerouting priority dstnat
		tcp dport 80 dnat to 198.51.100.2:8080
	}
}
`)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var got *Ruleset
	err := l.Node("gateway").Do(func() (err error) {
		got, err = readNft()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(got.Chains, func(a, b Chain) int { return strings.Compare(a.Name, b.Name) })
	want := &Ruleset{
		Tables: 2, SourceNAT: 2, DestNAT: 1, Tracking: 1, Notrack: 1, Logs: 1, MSSClamp: true, NATPorts: 20,
		Chains: []Chain{
			{Name: "inet filter forward", Hook: "forward", Longest: 7, Established: 1, Drops: 1},
			{Name: "inet filter raw", Hook: "prerouting", Longest: 1, Established: -1},
			{Name: "ip nat post", Hook: "postrouting", Longest: 2, Established: -1},
			{Name: "ip nat pre", Hook: "prerouting", Longest: 1, Established: -1},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestLegacyRules(t *testing.T) {
	r := &Ruleset{}
	r.addLegacy("*nat\n:POSTROUTING ACCEPT [0:0]\n-A POSTROUTING -o eth0 -j MASQUERADE\nCOMMIT\n" +
		"*filter\n-A FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT\n-A FORWARD -j LOG\n-A KUBE-SERVICES -j X\nCOMMIT\n")
	want := &Ruleset{SourceNAT: 1, Tracking: 1, Logs: 1, KubeServices: 1,
		Legacy: map[string]int{"nat POSTROUTING": 1, "filter FORWARD": 2, "filter KUBE-SERVICES": 1}}
	if diff := cmp.Diff(want, r); diff != "" {
		t.Error(diff)
	}
}
