// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// foreign are tables of the kind that Docker and firewalld create.
const foreign = `
table ip nat {
	chain DOCKER { iifname "docker0" counter return; }
	chain PREROUTING { type nat hook prerouting priority dstnat; policy accept; fib daddr type local counter jump DOCKER; }
	chain POSTROUTING { type nat hook postrouting priority srcnat; policy accept; ip saddr 172.17.0.0/16 oifname != "docker0" counter masquerade; }
}
table ip filter {
	chain DOCKER-USER { counter return; }
	chain FORWARD { type filter hook forward priority filter; policy accept; counter jump DOCKER-USER; }
}
table inet firewalld {
	set bad { type ipv4_addr; flags interval; elements = { 203.0.113.0/24 } }
	chain filter_INPUT { type filter hook input priority filter + 10; policy accept; ct state { established, related } accept; ip saddr @bad drop; }
}
`

// others returns the text of every foreign table, with handles.
func (b *bench) others() string {
	b.Helper()
	var text strings.Builder
	for _, table := range []string{"ip nat", "ip filter", "inet firewalld"} {
		args := append([]string{"-a", "list", "table"}, strings.Fields(table)...)
		out, err := b.gateway.Command(context.Background(), "nft", args...).CombinedOutput()
		if err != nil {
			b.Fatalf("nft: %v\n%s", err, out)
		}
		text.Write(out)
	}
	return text.String()
}

func (b *bench) nft(script string) {
	b.Helper()
	cmd := b.gateway.Command(context.Background(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("nft: %v\n%s", err, out)
	}
}

func everything() *config.Config {
	c := one(web(config.ModeDNAT, config.SchedulerMaglev))
	c.Services[0].Persistence = &config.Persistence{}
	c.Services = append(c.Services, config.Service{
		Name: "video", Protocol: flow.TCP, Mode: config.ModeDSR, Scheduler: config.SchedulerRR,
		Listen: []config.Listen{listen("192.0.2.30", "80")}, Backends: []config.Backend{backend("a", "10.0.2.2", 0)},
	})
	c.NAT = []config.NATRule{
		{Name: "office", Type: config.NATMasquerade, Source: []prefixT{prefix("10.1.10.0/24"), prefix("10.1.30.0/24")}, Out: "wan0"},
		{Name: "renumber", Type: config.NATNPT66, External: prefix("2001:db8:a::/48"), Internal: prefix("fd00:a::/48")},
	}
	c.Firewall.Sets = map[string][]prefixT{"banned": {prefix("198.51.100.0/24"), prefix("2001:db8:bad::/48")}}
	c.Firewall.Rules = []config.FirewallRule{{Action: config.ActionDrop, Source: config.Match{Set: "banned"}}, {Action: config.ActionLog, Prefix: "x"}}
	return c
}

func TestForeignTablesAreNeverTouched(t *testing.T) {
	labtest.Require(t, labtest.Tool("nft"))
	b := newBench(t, lab.Balancer())
	b.nft(foreign)
	before := b.others()
	same := func(when string) {
		t.Helper()
		if after := b.others(); after != before {
			t.Errorf("%s: foreign tables changed from\n%s\nto\n%s", when, before, after)
		}
	}
	b.apply(everything())
	same("apply")
	c := everything()
	c.Services[0].Backends = c.Services[0].Backends[:5]
	b.apply(c)
	same("reload")
	if err := b.d.Remove(context.Background()); err != nil {
		t.Fatal(err)
	}
	same("remove")
	if text := b.ruleset(); strings.Contains(text, "sluice") {
		t.Errorf("something of Sluice is left:\n%s", text)
	}
	if err := b.d.Remove(context.Background()); err != nil {
		t.Errorf("second remove: %v", err)
	}
}

func TestRefusedApplyLeavesThePreviousRules(t *testing.T) {
	labtest.Require(t, labtest.Tool("nft"))
	b := newBench(t, lab.Balancer())
	b.apply(everything())
	before := b.ruleset()
	c := everything()
	c.Flowtable = config.SwitchOn
	c.Services[0].Listen[0] = listen("192.0.2.99", "80")
	_, err := b.d.Apply(context.Background(), b.snapshot(c))
	if err == nil {
		t.Skip("this kernel has flowtables, so nothing is refused")
	}
	for _, word := range []string{"flowtable", "no such file or directory", "CONFIG_NF_FLOW_TABLE"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
	if after := b.ruleset(); after != before {
		t.Errorf("the rules in force changed from\n%s\nto\n%s", before, after)
	}
	if change := b.applySnapshot(b.snapshot(everything())); !change.Empty() {
		t.Errorf("the previous configuration is no longer in force: %+v", change)
	}
}

func TestEditsOfOthersAreRepaired(t *testing.T) {
	labtest.Require(t, labtest.Tool("nft"))
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerRR))
	b.apply(c)
	before := b.ruleset()
	touched := func(when string, want bool) {
		t.Helper()
		if got, err := b.d.Touched(); got != want || err != nil {
			t.Errorf("%s: touched %v, error %v", when, got, err)
		}
	}
	touched("in force", false)
	b.nft("flush chain ip sluice service/web; delete element ip sluice services { 192.0.2.10 . tcp . 80 }")
	touched("edited", true)
	change := b.applySnapshot(b.snapshot(c))
	if change.Rules.Added != 3 || change.Elements.Added != 1 {
		t.Errorf("repair: %+v", change)
	}
	touched("repaired", false)
	b.nft("flush ruleset")
	touched("flushed", true)
	b.applySnapshot(b.snapshot(c))
	if after := b.ruleset(); after != before {
		t.Errorf("repaired to\n%s\nfrom\n%s", after, before)
	}
	b.spread(3, func(int) (answer, error) { return b.tcp("client", "", virtual["ipv4"]) })
}

func TestPlanSaysWhatApplyDoes(t *testing.T) {
	b := newBench(t, lab.Balancer())
	c := one(web(config.ModeDNAT, config.SchedulerMaglev))
	b.apply(c)
	s := b.snapshot(c)
	s.Services[0].State[1] = datapath.Down
	plan, err := b.d.Plan(context.Background(), s)
	if err != nil {
		t.Fatal(err)
	}
	again, err := b.d.Plan(context.Background(), s)
	if err != nil || again.Elements != plan.Elements {
		t.Errorf("planning changed something: %+v, then %+v", plan, again)
	}
	change := b.applySnapshot(s)
	if plan.Elements != change.Elements || plan.Slots != change.Slots || plan.Rules != change.Rules {
		t.Errorf("plan %+v, apply %+v", plan, change)
	}
	// The slot tables of one backend of three, in one of two families.
	if share := float64(plan.Slots) / float64(plan.SlotsTotal/2); share > 1.0/3+0.02 {
		t.Errorf("%d of %d slots move", plan.Slots, plan.SlotsTotal)
	}
	if len(plan.Lines) == 0 || plan.Lines[0] == "" {
		t.Error("the plan says nothing")
	}
}

func TestForwardingOffIsSaid(t *testing.T) {
	topology := lab.Balancer()
	for i := range topology.Nodes {
		if topology.Nodes[i].Name == "gateway" {
			topology.Nodes[i].Forward = false
		}
	}
	b := newBench(t, topology)
	b.apply(one(web(config.ModeDNAT, config.SchedulerRR)))
	text := strings.Join(b.d.Warnings(), "\n")
	for _, want := range []string{"net.ipv4.ip_forward is 0", "net.ipv6.conf.all.forwarding is 0"} {
		if !strings.Contains(text, want) {
			t.Errorf("warnings %q do not say %q", text, want)
		}
	}
}

// TestCountsSurviveReloads removes a third of a hash service's slots and adds them again.
func TestCountsSurviveReloads(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerMaglev))
	b.apply(c)
	for range 2 {
		b.spread(20, func(i int) (answer, error) { return b.tcp("client", clientAddr("ipv4", i), virtual["ipv4"]) })
		s := b.snapshot(c)
		s.Services[0].State[1] = datapath.Drain
		b.applySnapshot(s)
		b.apply(c)
	}
	counters, err := b.d.Counters(context.Background())
	if err != nil || counters.Services[0].Connections != 40 {
		t.Errorf("counters %+v, %v, want 40 connections", counters.Services, err)
	}
}

func TestFlowsAreLabelled(t *testing.T) {
	b := newBench(t, lab.Balancer())
	b.tcpServers(8080, "s1", "s2", "s3")
	c := one(web(config.ModeDNAT, config.SchedulerRR))
	s := b.apply(c)
	open := b.held(3, 3, "10.64.0.1", virtual["ipv4"])
	if len(open) != 3 {
		t.Fatalf("%d connections", len(open))
	}
	count := func() map[string]int {
		seen := make(map[string]int)
		err := b.d.Flows(context.Background(), func(f flow.Flow) bool {
			seen[f.Owner+"/"+f.Backend]++
			return true
		})
		if err != nil {
			t.Fatal(err)
		}
		return seen
	}
	seen := count()
	for _, k := range []string{"web/a", "web/b", "web/c"} {
		if seen[k] != 1 {
			t.Errorf("flows %v, want one of %s", seen, k)
		}
	}
	counters, err := b.d.Counters(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if got := counters.Services[0]; got.Connections != 3 || got.Backends[0].Connections != 1 {
		t.Errorf("counters %+v", got)
	}
	down := b.snapshot(c)
	down.Services[0].State[0] = datapath.Down
	b.applySnapshot(down)
	if seen = count(); seen["web/a"] != 0 || seen["web/b"] != 1 {
		t.Errorf("backend a went down, flows are %v", seen)
	}
	b.applySnapshot(s)
	if counters, err = b.d.Counters(context.Background()); err != nil || counters.Services[0].Connections != 3 {
		t.Errorf("counters went to %+v, %v", counters.Services[0], err)
	}
}

// TestOpenWithoutRights drops the thread's capabilities first.
func TestOpenWithoutRights(t *testing.T) {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&header, &none[0]); err != nil {
			done <- err
			return
		}
		d, err := Open()
		if err == nil {
			d.Close()
		}
		done <- err
	}()
	err := <-done
	if err == nil || !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), "run as root or with CAP_NET_ADMIN") {
		t.Errorf("error %v", err)
	}
}
