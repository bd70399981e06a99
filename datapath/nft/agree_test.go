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

// TestPacketCases sends the packets of every case that nftables supports through the kernel. The leaving packets
// and interfaces must equal the eBPF datapath's. Under "skip", a case names the line from which the two differ,
// and why. Before this line they must agree, and from it on they must differ, or may differ if the kernel
// chooses at random.
func TestPacketCases(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack)
	cases, err := golden.Load("../../testdata/packets")
	if err != nil {
		t.Fatal(err)
	}
	refused := map[string][]string{} // names of cases by the reason why nftables does not support them
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
