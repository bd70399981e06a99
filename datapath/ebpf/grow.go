// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"time"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/cilium/ebpf"
)

const (
	// growthTick is how often the flow tables are looked at. A table is doubled when fewer than
	// 49,152 entries are left: in that time 1.2 million new flows a second take them.
	growthTick = 20 * time.Millisecond
	// growthRetry is how long a table stays as it is that the kernel had no memory for.
	growthRetry = 10 * time.Second
)

// growTables doubles the flow tables as flows come, until ctx is done.
func (d *Datapath) growTables(ctx context.Context) {
	tick := time.NewTicker(growthTick)
	defer tick.Stop()
	var later time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if now.Before(later) {
				continue
			}
			if err := d.grow(); err != nil {
				d.opt.Log.Warn("a flow table does not grow; new flows are refused when it is full", "error", err)
				later = now.Add(growthRetry)
			}
		}
	}
}

func (d *Datapath) grow() error {
	d.growing.Lock()
	defer d.growing.Unlock()
	return d.t.Grow(func(r *wire.Reindex) error {
		_, err := d.programs.Programs["fill_index"].Run(&ebpf.RunOptions{Context: r, ContextOut: r})
		return err
	})
}
