// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"slices"
	"testing"
)

func TestBacklogDrops(t *testing.T) {
	var g growth // 3: the CPU with the counts of the others is offline
	if got := []uint64{g.to(10), g.to(15), g.to(3), g.to(4)}; !slices.Equal(got, []uint64{0, 5, 0, 1}) {
		t.Errorf("the sum grew by %v", got)
	}
}
