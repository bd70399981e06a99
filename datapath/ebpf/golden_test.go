// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/nat/golden"
)

// TestPacketCases runs every packet case on XDP, on TC, on TC with a checksum over the
// whole packet, and on XDP with TC behind it. What the datapath refuses to carry is skipped
// in the words of the refusal. The first two use programs with what each case needs and no
// more, the others the same programs for many cases, with every feature on.
//
// With SLUICE_FEW_PROGRAMS=1 all do so, and leave out cases with constants of their own: the
// verifier takes a minute for programs on an emulated machine.
func TestPacketCases(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	cases, err := golden.Load("../../testdata/packets")
	if err != nil {
		t.Fatal(err)
	}
	few := number(t, "SLUICE_FEW_PROGRAMS", 0) > 0
	for _, hook := range []string{"xdp", "tc", "tc-complete", "pair"} {
		t.Run(hook, func(t *testing.T) {
			pool := newProgramPool(t)
			pool.few, pool.allOn = few, few || hook == "tc-complete" || hook == "pair"
			for _, c := range cases {
				t.Run(c.Name, func(t *testing.T) {
					t.Parallel()
					on := hook
					if hook == "pair" {
						on = "tc"
					}
					if why, skip := c.Skip[on]; skip {
						t.Skip(why)
					}
					if err := refusal(c.Config); err != nil {
						t.Skip(err)
					}
					s := newSubject(t, hook)
					s.programPool = pool
					if err := c.Run(s); few && errors.Is(err, errOtherConstants) {
						t.Skip(err)
					} else if err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}
