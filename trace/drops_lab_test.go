// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// TestDropCauses creates every fault. Its cause must be the first of the report, and events and kernel counters
// must be equal.
func TestDropCauses(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Tool("nft"))
	for _, c := range append(faults.Cases(), faults.Drops()...) {
		if c.Cause == "" {
			continue
		}
		t.Run(c.Name, func(t *testing.T) { dropCause(t, c) })
	}
}

func dropCause(t *testing.T, c faults.Case) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	l := labtest.New(t, faults.Topology("trace"))
	// A router that needs no host-wide setting also waits until no other test has changed one.
	restore, err := faults.Borrow(ctx, c.Host)
	if err != nil {
		labtest.Lacks(t, "host-wide settings cannot be changed: %v", err)
	}
	defer func() {
		if err := restore(); err != nil {
			t.Error(err)
		}
	}()
	if err := c.Setup(ctx, l); err != nil {
		t.Fatal(err)
	}
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	w := trace.Watcher{
		Namespaces: []netdev.Namespace{ns},
		Options:    trace.DropOptions{Netns: ns.Inode, SamplesPerSecond: 50, Stacks: true},
	}
	if w.Probe, err = trace.OpenDrops(w.Options); err != nil {
		t.Fatal(err)
	}
	defer w.Probe.Close()
	if err := errors.Join(w.Probe.Pause(), w.Start(ctx)); err != nil {
		t.Fatal(err)
	}
	refused, err := c.Traffic(ctx, l)
	if err != nil {
		t.Fatal(err)
	}
	// Packets may still be in transit if ksoftirqd waits for the CPU.
	for end := time.Now().Add(time.Minute); seen(t, w.Probe) < uint64(refused) && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	r, err := w.Stop(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range r.Groups {
		t.Logf("%s: %d packets, %+v, rules %v", g.Cause.ID, g.Packets, g.Places, g.Rules)
		for _, s := range g.Samples {
			t.Logf("  %s  original %s  reply %s  on %q stack %v", s.Packet, s.Original, s.Reply, s.Interface, s.Stack)
		}
	}
	for _, line := range r.Reconciled {
		t.Log(line)
		if (line.Unexplained < 0 || line.Unexplained > int64(r.Hidden)) && len(line.Causes) > 0 && c.Cause != "accept-queue" {
			t.Errorf("events and counter differ: %s", line)
		}
	}
	if len(r.Limits) > 0 {
		t.Logf("limits: %s", strings.Join(r.Limits, "; "))
	}
	if len(r.Groups) == 0 || r.Groups[0].Cause.ID != c.Cause {
		t.Fatalf("first cause is not %s: %+v", c.Cause, r.Groups)
	}
	reported := r.Groups[0].Packets
	if refused > 0 && (reported > uint64(refused) || reported+r.Hidden < uint64(refused)) {
		t.Errorf("%d packets were refused, %d are reported and %d are hidden by this kernel", refused, reported, r.Hidden)
	}
}

// seen returns the number of drops that a probe has counted, including those that the kernel hides.
func seen(t *testing.T, p *trace.Drops) uint64 {
	t.Helper()
	counts, err := p.Counts()
	if err != nil {
		t.Fatal(err)
	}
	n := p.Missed().Hidden
	for _, c := range counts {
		n += c.Packets
	}
	return n
}

// TestListed expects the rules of a namespace to be listed only if a rule drops packets. The counters of two
// listings must identify this rule.
func TestListed(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF, labtest.Nftables, labtest.Tool("nft"))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	var c faults.Case
	for _, c = range faults.Cases() {
		if c.Name == "deny-rule" {
			break
		}
	}
	l := labtest.New(t, faults.Topology("trace"))
	if err := c.Setup(ctx, l); err != nil {
		t.Fatal(err)
	}
	ns, err := netdev.NamespaceAt(l.Node("gateway").Path())
	if err != nil {
		t.Fatal(err)
	}
	listed := map[uint64][]firewall.Rule{}
	watch := func(traffic func(context.Context, *lab.Lab) (int, error)) (rules []firewall.Rule) {
		w := trace.Watcher{Namespaces: []netdev.Namespace{ns}, Listed: listed,
			Options: trace.DropOptions{Netns: ns.Inode, SamplesPerSecond: 50, Stacks: true}}
		if err := w.Start(ctx); err != nil {
			t.Fatal(err)
		}
		if traffic != nil {
			if _, err := traffic(ctx, l); err != nil {
				t.Error(err)
			}
		}
		r, err := w.Stop(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range r.Groups {
			rules = append(rules, g.Rules...)
		}
		return rules
	}
	if watch(nil); len(listed) > 0 {
		t.Errorf("rules were listed although none dropped anything: %v", listed)
	}
	for range 2 {
		rules := watch(c.Traffic)
		if len(rules) == 0 || !slices.ContainsFunc(listed[ns.Inode], func(r firewall.Rule) bool { return r.ID() == rules[0].ID() }) {
			t.Errorf("rules %v are blamed, %v are kept", rules, listed)
		}
	}
}
