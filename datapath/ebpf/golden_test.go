// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/packet/golden"
)

// TestPacketCases runs every packet case on XDP, on TC, and on TC with a checksum
// over the whole packet. What the datapath refuses to carry is skipped in the
// words of the refusal.
func TestPacketCases(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	cases, err := golden.Load("../../testdata/packets")
	if err != nil {
		t.Fatal(err)
	}
	for _, hook := range []string{"xdp", "tc", "tc-complete"} {
		t.Run(hook, func(t *testing.T) {
			for _, c := range cases {
				t.Run(c.Name, func(t *testing.T) {
					t.Parallel()
					if why, skip := c.Skip[hook]; skip {
						t.Skip(why)
					}
					if err := refusal(c.Config); err != nil {
						t.Skip(err)
					}
					if err := c.Run(newSubject(t, hook)); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}
