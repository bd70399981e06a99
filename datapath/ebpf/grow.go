// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
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
			err := d.grow()
			if d.stunted.Store(&err); err != nil {
				later = now.Add(growthRetry)
			}
		}
	}
}

// stuntedWarning is nil, or says why the tables do not grow.
func (d *Datapath) stuntedWarning() []string {
	if err := d.stunted.Load(); err != nil && *err != nil {
		return []string{fmt.Sprintf("a flow table does not grow, and refuses new flows when it is full: %v; memory that is given back is used within %s", *err, growthRetry)}
	}
	return nil
}

func (d *Datapath) grow() error {
	d.growing.Lock()
	defer d.growing.Unlock()
	return d.t.Grow(func(r *wire.Reindex) error {
		_, err := d.programs.Programs["fill_index"].Run(&ebpf.RunOptions{Context: r, ContextOut: r})
		return err
	})
}
