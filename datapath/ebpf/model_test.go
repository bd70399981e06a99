// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/nat"
	"github.com/sluice-lb/sluice/nat/judge"
)

// openScenarios are those in which program and model still disagree, and on what.
// They stand in docs/limits.md.
var openScenarios = map[string]string{
	"fullnat":      "truncated packets to a pool address: no-binding instead of truncated",
	"snat":         "ICMP errors about packets of no flow pass instead of being dropped",
	"snat-address": "ICMP errors about packets of no flow pass instead of being dropped",
	"forward":      "ICMP errors about packets of no flow pass instead of being dropped",
	"prefixes":     "fragments with an impossible offset follow their first one",
	"nat64":        "errors that quote a protocol unknown to the other family",
}

// ignore knows fragments that come before their first one, which the model holds and
// the program drops, and errors that quote an IPv6 packet with extension headers,
// which pass untranslated.
func ignore(in nat.Arrival, want, got nat.Outcome) bool {
	v6 := len(in.Frame) > 14 && in.Frame[14]>>4 == 6
	return want.Reason == nat.ReasonHeldFragment || v6 && want.Reason == nat.ReasonICMPError && got.Reason == nat.ReasonNotOurs
}

// TestModelAgrees sends random packet sequences through the program and holds
// every outcome against the reference model.
func TestModelAgrees(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	for _, sc := range judge.Scenarios() {
		t.Run(sc.Name, func(t *testing.T) {
			c, err := sc.Config()
			if err != nil {
				t.Fatal(err)
			}
			if err := refusal(c); err != nil {
				t.Skip(err)
			}
			d, n, err := judge.Run(newSubject(t, "xdp"), sc, judge.Options{Packets: 2000, PerReset: 1000, Seed: 1, Ignore: ignore})
			if err != nil {
				t.Fatal(err)
			}
			switch why := openScenarios[sc.Name]; {
			case why != "" && d == nil:
				t.Errorf("agrees, but is listed as open: %s", why)
			case why != "":
				t.Skipf("open: %s\n%v", why, d)
			case d != nil:
				t.Fatal(d)
			}
			t.Logf("%d packets", n)
		})
	}
}

// TestPathsAgree sends the same sequences with the straight path closed: what it does
// to a packet, the full path must do as well.
func TestPathsAgree(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	for _, sc := range judge.Scenarios() {
		c, err := sc.Config()
		if err != nil {
			t.Fatal(err)
		}
		if openScenarios[sc.Name] != "" || refusal(c) != nil {
			continue
		}
		t.Run(sc.Name, func(t *testing.T) {
			full := newSubject(t, "xdp")
			full.full = true
			d, _, err := judge.Run(full, sc, judge.Options{Packets: 1000, PerReset: 500, Seed: 2, Ignore: ignore})
			if err != nil {
				t.Fatal(err)
			}
			if d != nil {
				t.Fatal(d)
			}
		})
	}
}
