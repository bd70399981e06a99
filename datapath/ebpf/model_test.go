// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/nat"
	"github.com/sluice-lb/sluice/nat/judge"
)

// TestModelAgrees sends random packet sequences through the program and holds
// every outcome against the reference model.
func TestModelAgrees(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	// Fragments that come before their first one are held by the model and dropped
	// here; those whose first one was not ours go the way of the first one.
	ignore := func(_ nat.Arrival, want, _ nat.Outcome) bool { return want.Reason == nat.ReasonHeldFragment }
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
			if d != nil {
				t.Fatal(d)
			}
			t.Logf("%d packets", n)
		})
	}
}
