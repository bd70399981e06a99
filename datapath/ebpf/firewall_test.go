// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/model"
)

// TestFirewallRateGoesOn applies a configuration again, as each change of a backend does. A rate limit
// continues: packets of the last minute still count.
func TestFirewallRateGoesOn(t *testing.T) {
	const yaml = "firewall: {rules: [{name: pings, protocol: icmp, hook: ingress, rate: 1/hour, burst: 1, action: drop}]}\n" +
		"nat: [{name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}]\n"
	s := changing(t, yaml)
	ping := "ip4(src=10.0.2.2,dst=198.18.0.1)/icmp(type=echo,id=7)"
	for i, want := range []model.Reason{model.ReasonNewFlow, model.ReasonDenied, model.ReasonDenied} {
		if out := send(t, s, "lan0", ping); out.Reason != want {
			t.Errorf("ping %d: %s, want %s", i+1, out.Reason, want)
		}
		if i > 0 {
			s.mustChange(yaml)
		}
	}
}

// whileLoading applies a configuration with programs that cannot be loaded. It calls watch until the load fails,
// which takes as long as a verification.
func (s *subject) whileLoading(yaml string, watch func()) {
	s.t.Helper()
	clients := s.d.t.Maps["clients"]
	s.d.t.Maps["clients"] = s.d.t.Maps["control"] // a map of another shape makes the load fail
	var done atomic.Bool
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for !done.Load() && !s.t.Failed() {
			watch()
		}
	})
	err := s.change(yaml)
	done.Store(true)
	watcher.Wait()
	s.d.t.Maps["clients"] = clients
	if err == nil {
		s.t.Error("programs were loaded with a wrong map")
	}
}

// TestFirewallBeforePrograms: while new programs load, which may take seconds, the programs in force apply all
// firewall rules that they were loaded for.
func TestFirewallBeforePrograms(t *testing.T) {
	const nat, old = "nat: [{name: office, type: snat, source: [10.0.2.0/24], out: wan0, to: [203.0.113.1]}]\n",
		"{name: second, hook: ingress, protocol: udp, ports: [2], action: drop}"
	s := changing(t, nat+"firewall: {rules: ["+old+"]}\n")
	rules := s.d.t.Maps["firewall_rules"]
	s.whileLoading(nat+"firewall: {rules: [{name: first, hook: ingress, protocol: udp, ports: [1], action: drop}, "+old+"]}\n", func() {
		var is wire.FirewallRule
		if err := rules.Lookup(uint32(0), &is); err != nil || is.First != 2 {
			t.Errorf("the only rule that programs in force know of has become that of port %d, %v", is.First, err)
		}
	})
}

// TestListsBeforePrograms: a service that gets its first list of sources refuses no packet until programs that
// look sources up are loaded.
func TestListsBeforePrograms(t *testing.T) {
	const before = "services:\n" +
		"  - {name: dns, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]"
	const after = "firewall: {sets: {office: [198.18.0.0/24]}}\n" + before + ", allow: [office]}\n"
	s := changing(t, before+"}\n")
	s.whileLoading(after, func() {
		if allow := atomic.LoadUint64(&s.d.t.Services.Values[0].Allow); allow != 0 {
			t.Errorf("the service in force allows the sets %b", allow)
		}
	})
	s.mustChange(after)
	for from, want := range map[string]model.Reason{"198.18.0.1": model.ReasonNewFlow, "198.18.1.1": model.ReasonNotAllowed} {
		if out := send(t, s, "wan0", "ip4(src="+from+",dst=192.0.2.10)/udp(sport=4000,dport=53)"); out.Reason != want {
			t.Errorf("from %s: %s, want %s", from, out.Reason, want)
		}
	}
}

// TestRulesBeforePrograms: a nat64 rule that becomes bound to an interface keeps its previous match until
// programs that check the egress interface are loaded.
func TestRulesBeforePrograms(t *testing.T) {
	const yaml = "nat: [{name: v6only, type: nat64, prefix: \"64:ff9b::/96\", source: [\"fd00:2::/64\"], pool: [203.0.113.1]"
	s := changing(t, yaml+"}]\n")
	s.whileLoading(yaml+", out: wan0}]\n", func() {
		if out := atomic.LoadUint32(&s.d.t.Rules.Values[0].Out); out != 0 {
			t.Errorf("programs in force look for a way out by interface %d", out)
		}
	})
}
