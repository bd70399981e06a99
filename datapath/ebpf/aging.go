// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/netdev"
)

const (
	// agingInterval is the time between two searches for used next hops with an unconfirmed
	// address.
	agingInterval = time.Second
	// probesPerTick limits the requests of one search. The next searches probe the remaining
	// neighbours.
	probesPerTick = 1024
)

// probeAging probes the neighbours that the programs use and that the kernel has not confirmed for
// longer than base_reachable_time. The kernel does the same for packets that it sends itself, five
// seconds later (delay_first_probe_time). lost reports that changes of neighbours were not received.
func (d *Datapath) probeAging(ctx context.Context, w *netdev.Watcher, lost *atomic.Bool) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := netdev.EnterNamespace(d.ns); err != nil {
		d.opt.Log.Warn("next hops are not probed; a host that changes its hardware address is lost until the kernel finds out", "error", err)
		return
	}
	var hops usedHops
	tick := time.NewTicker(agingInterval)
	defer tick.Stop()
	for {
		d.stampWatched()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if lost.Swap(false) {
			if err := w.Relist(); err != nil {
				lost.Store(true)
				d.opt.Log.Debug("neighbours cannot be listed", "error", err)
			}
		}
		list := w.Aging()
		if len(list) == 0 {
			continue
		}
		if err := hops.read(d.t.Maps["hops"]); err != nil {
			d.opt.Log.Debug("next hops cannot be read", "error", err)
			continue
		}
		probed := 0
		for _, n := range list {
			if probed == probesPerTick {
				break
			}
			if !hops.wasUsed(n) {
				continue
			}
			probed++
			if err := netdev.Probe(n); err != nil {
				d.failedEvents.Add(1)
				d.opt.Log.Debug("a next hop is not probed", "error", err)
			}
		}
	}
}

// stampWatched records for the programs that user space probes neighbours.
func (d *Datapath) stampWatched() {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) == nil {
		atomic.StoreUint64(&d.t.Control.Values[0].Watched, uint64(now.Nano()))
	}
}

// stampStopped reports to the programs that the daemon ends. They then pass unresolved packets to the kernel
// immediately, not only ten seconds after the daemon's last time stamp.
func (d *Datapath) stampStopped() { atomic.StoreUint64(&d.t.Control.Values[0].Watched, 1) }

// usedHops is the set of next hops used by packets between two readings. Packets of a next hop
// write hop.checked about once a second.
type usedHops struct {
	last []uint32 // hop.checked of each hop slot at the last reading
	used map[hopKey]bool
	full bool // most hop slots are used, so new next hops may have no slot
}

type hopKey struct {
	ifindex uint32
	mac     [6]uint8
}

func (u *usedHops) read(m *ebpf.Map) error {
	size := int(m.MaxEntries())
	if u.last == nil {
		u.last = make([]uint32, size)
	}
	u.used = map[hopKey]bool{}
	keys, values := make([]uint32, size), make([]wire.Hop, size)
	var cursor ebpf.MapBatchCursor
	n, err := m.BatchLookup(&cursor, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // the end of the map returns this error
		return fmt.Errorf("hops: %w", err)
	}
	for i, h := range values[:n] {
		if at := keys[i]; h.Checked != u.last[at] {
			u.last[at] = h.Checked
			u.used[hopKey{h.Ifindex, h.Dmac}] = true
		}
	}
	u.full = len(u.used) > size*3/4
	return nil
}

// wasUsed reports whether packets were sent to the hardware address of a neighbour.
func (u *usedHops) wasUsed(n netdev.Aging) bool {
	return u.full || u.used[hopKey{uint32(n.Ifindex), [6]uint8(n.MAC)}]
}
