// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// Drops returns a counter of drops caused by settings of this package: drops of conntrack in the
// given namespaces, and of full CPU backlogs. The list of namespaces is fixed when the counter is
// created.
func Drops(namespaces []netdev.Namespace) func(context.Context) (uint64, error) {
	last := map[uint64]conntrack.Counters{} // by inode: a name may be given to another one
	var backlog growth
	sum := uint64(0)
	return func(ctx context.Context) (uint64, error) {
		for _, ns := range namespaces {
			list, err := conntrack.ReadPerCPU(ctx, ns)
			if err != nil {
				if ctx.Err() != nil {
					return 0, ctx.Err()
				}
				continue // it is gone
			}
			now := conntrack.Total(list)
			if before, ok := last[ns.Inode]; ok {
				d := now.Sub(before)
				sum += uint64(d.Drop) + uint64(d.EarlyDrop) + uint64(d.ChainTooLong)
			}
			last[ns.Inode] = now
		}
		// Where it is not readable the connection trackers remain.
		if drops, err := trace.BacklogDrops(); err == nil {
			sum += backlog.to(drops)
		}
		return sum, nil
	}
}

// growth tracks a sum that falls when one of its counters wraps or its CPU goes offline.
type growth struct {
	last  uint64
	known bool
}

// to returns how much the sum has grown since it was last given.
func (g *growth) to(now uint64) (grown uint64) {
	if g.known && now > g.last {
		grown = now - g.last
	}
	g.last, g.known = now, true
	return grown
}
