// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

const (
	// growthTick is the interval of checks of the flow tables. A table doubles when fewer than
	// 49,152 entries are free. At 1.2 million new flows a second, these entries last for 40 ms.
	growthTick = 20 * time.Millisecond
	// growthRetry is the delay after the kernel had no memory for a larger table.
	growthRetry = 10 * time.Second
)

// growTables doubles the flow tables on demand, until ctx is done.
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
			if d.growthErr.Store(&err); err != nil {
				later = now.Add(growthRetry)
			}
		}
	}
}

// growthWarning returns a warning if the flow tables cannot grow.
func (d *Datapath) growthWarning() []string {
	if err := d.growthErr.Load(); err != nil && *err != nil {
		return []string{fmt.Sprintf("a flow table does not grow, and refuses new flows when it is full: %v; memory that is given back is used within %s", *err, growthRetry)}
	}
	return nil
}

func (d *Datapath) grow() error {
	d.growMu.Lock()
	defer d.growMu.Unlock()
	return d.t.Grow(func(r *wire.Reindex) error {
		_, err := d.programs.Programs["fill_index"].Run(&ebpf.RunOptions{Context: r, ContextOut: r})
		return err
	})
}
