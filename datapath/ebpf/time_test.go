// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// TestTimeLeft computes the remaining time of a flow, also if it exceeds half the range of the programs' clock,
// and if one direction is silent for that long.
func TestTimeLeft(t *testing.T) {
	const hz, day = 1000, 24 * 3600 * 1000
	for _, c := range []struct {
		timeout, idle, twinIdle uint32
		want                    time.Duration
	}{
		{hz, 0, 0, time.Second},
		{hz, 600, 400, 600 * time.Millisecond},
		{hz, 2 * hz, 2 * hz, 0},
		{30 * day, day, 2 * day, 29 * 24 * time.Hour},
		{day, 26 * day, 0, 24 * time.Hour},
		{day, 0, 26 * day, 24 * time.Hour},
	} {
		d := &Datapath{hz: hz, inForce: &compile.Desired{}, switches: wire.Switches{UDP: c.timeout}}
		const now = 12345 // the clock has wrapped recently
		key := flow.Tuple{Protocol: flow.UDP}
		if got := d.describe(table.Entry{Key: key, Seen: now - c.idle}, table.Entry{Key: key, Seen: now - c.twinIdle}, now).Timeout; got != c.want {
			t.Errorf("timeout of %d ticks, silent for %d and %d: %s left, want %s", c.timeout, c.idle, c.twinIdle, got, c.want)
		}
	}
}

// TestPoolsHaveNumbers: each port of each pool address has a 32-bit number.
func TestPoolsHaveNumbers(t *testing.T) {
	for _, pool := range []int{0, 4096, 14563, 14564, 100000} {
		if s := table.SizesFor(config.Tables{}, 0, pool, 0); uint64(s.Pool)*3<<16 > 1<<32 {
			t.Errorf("%d pool addresses: tables for %d have more ports than numbers", pool, s.Pool)
		}
	}
}
