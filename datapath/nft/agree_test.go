// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/model/golden"
)

// TestPacketCases sends the packets of every case whose rules nftables carries through
// the kernel: what leaves, and where, must be what leaves the eBPF datapath. A case says
// under "skip" at which line the two differ, and why; before it they must agree, and in all
// they must differ, or may, from a line on, where the kernel leaves it to chance.
func TestPacketCases(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack)
	cases, err := golden.Load("../../testdata/packets")
	if err != nil {
		t.Fatal(err)
	}
	refused := map[string][]string{} // names of cases by why nftables does not carry them
	for _, c := range cases {
		if err := golden.Refusal((*Datapath)(nil), c.Config); err != nil {
			refused[err.Error()] = append(refused[err.Error()], c.Name)
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			line, why := 0, c.Skip["nftables"]
			place, chance := strings.CutPrefix(why, "from ")
			if _, err := fmt.Sscanf(place, "line %d:", &line); err != nil && why != "" {
				t.Fatalf("%q does not begin with its line", why)
			}
			if err := c.OnTheWire(line).Run(newSubject(t)); err != nil {
				t.Error(err)
			}
			if why != "" && !chance && c.OnTheWire(0).Run(newSubject(t)) == nil {
				t.Errorf("the datapaths agree, though the case says: %s", why)
			}
		})
	}
	for _, why := range slices.Sorted(maps.Keys(refused)) {
		t.Run("not carried", func(t *testing.T) { t.Skipf("%s: %s", why, strings.Join(refused[why], ", ")) })
	}
}
