// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
)

// TestHelpers: a rule that asks for no port gives its helper to all connections.
func TestHelpers(t *testing.T) {
	helper := &expr.Objref{Type: int(nftables.ObjTypeCtHelper), Name: "ftp"}
	named, unnamed := make(xt.Unknown, 64), make(xt.Unknown, 64)
	copy(named[12:], "ftp")
	port := &expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
	base := &nftables.Chain{Table: &nftables.Table{Name: "raw"}, Hooknum: nftables.ChainHookPrerouting}
	for _, tc := range []struct {
		name          string
		chain         *nftables.Chain
		exprs         []expr.Any
		helpers, wide int
	}{
		{"of a port", base, []expr.Any{port, helper}, 1, 0},
		{"of all", base, []expr.Any{&expr.Meta{}, helper}, 1, 1},
		{"behind a jump", &nftables.Chain{Table: base.Table}, []expr.Any{helper}, 1, 0},
		{"iptables, of a port", base, []expr.Any{port, &expr.Target{Name: "CT", Info: &named}}, 1, 0},
		{"iptables, of ports", base, []expr.Any{&expr.Match{Name: "multiport"}, &expr.Target{Name: "CT", Info: &named}}, 1, 0},
		{"iptables, of all", base, []expr.Any{&expr.Target{Name: "CT", Info: &named}}, 1, 1},
		{"iptables, no helper", base, []expr.Any{&expr.Target{Name: "CT", Info: &unnamed}}, 0, 0},
	} {
		var r Ruleset
		if r.scan(tc.chain, []*nftables.Rule{{Table: base.Table, Exprs: tc.exprs}}); r.Helpers != tc.helpers || r.WideHelpers != tc.wide || r.Tracking != tc.helpers {
			t.Errorf("%s: %d helpers, %d of all ports, %d rules track", tc.name, r.Helpers, r.WideHelpers, r.Tracking)
		}
	}
	var r Ruleset
	r.addLegacy(nftables.TableFamilyIPv4, "*raw\n-A PREROUTING -p tcp -m tcp --dport 21 -j CT --helper ftp\n-A PREROUTING -p tcp -j CT --helper ftp\n-A PREROUTING -p udp -j CT --notrack\nCOMMIT\n", nil)
	if r.Helpers != 2 || r.WideHelpers != 1 || r.Untracked.IPv4 != 1 {
		t.Errorf("iptables-legacy: %d helpers, %d of all ports, %d not tracked", r.Helpers, r.WideHelpers, r.Untracked.IPv4)
	}
}

// TestHelperMaps: helpers assigned by a map are distinguished from other mapped objects.
func TestHelperMaps(t *testing.T) {
	for _, tc := range []struct {
		rule          string
		helpers, wide int
		tracking      int
	}{
		{`ct helper set tcp dport map { 21 : "ftp-21", 2121 : "ftp-21" }`, 1, 0, 1},
		{`ct helper set ip saddr map { 10.0.0.1 : "ftp-21" }`, 1, 1, 1},
		{`counter name tcp dport map { 21 : "web" }`, 0, 0, 0},
		{`counter name ip saddr map @counters ct helper set tcp dport map { 21 : "ftp-21" }`, 1, 0, 1},
		{`counter name "web" ct helper set tcp dport map { 21 : "ftp-21" }`, 1, 0, 1},
		{`ct timeout set tcp dport map { 21 : "short" }`, 0, 0, 1},
	} {
		r := readRules(t, "nft", `table ip t {
			ct helper ftp-21 { type "ftp" protocol tcp; }
			ct timeout short { protocol tcp; policy = { established: 100 }; }
			counter web { }
			map counters { type ipv4_addr : counter; elements = { 10.0.0.1 : "web" }; }
			chain pre { type filter hook prerouting priority 0; tcp dport 80 counter; `+tc.rule+`; }
		}`)
		if r.Helpers != tc.helpers || r.WideHelpers != tc.wide || r.Tracking != tc.tracking {
			t.Errorf("%s: %d helpers, %d of all ports, %d rules track", tc.rule, r.Helpers, r.WideHelpers, r.Tracking)
		}
	}
}
