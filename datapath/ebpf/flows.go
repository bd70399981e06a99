// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// bumpGeneration makes every flow look up its next hop again.
func bumpGeneration(c *table.Memory[wire.Control]) {
	if c.Values != nil {
		atomic.AddUint32(&c.Values[0].Generation, 1)
	}
}

// flowBatch is the number of entries read under the lock at once. A slow reader of flows must not
// delay changes of the rules.
const flowBatch = 1024

// Flows calls yield for each flow in the mapped tables.
func (d *Datapath) Flows(ctx context.Context, yield func(flow.Flow) bool) error {
	batch := make([]flow.Flow, 0, flowBatch)
	for at := 0; at >= 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		batch, at = d.flowsFrom(batch[:0], at)
		for i := range batch {
			if !yield(batch[i]) {
				return nil
			}
		}
	}
	return nil
}

// flowsFrom appends the flows of flowBatch entries, starting at entry first. next is the following
// entry, or -1 at the end.
func (d *Datapath) flowsFrom(list []flow.Flow, first int) (_ []flow.Flow, next int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.t == nil || d.inForce == nil {
		return list, -1
	}
	now, n := d.ticks(), 0
	for i := range d.t.Entries(first) {
		if n++; n > flowBatch {
			return list, i
		}
		if s, ok := d.t.Primary(i); ok {
			list = append(list, d.describe(s, d.t.Twin(s), now))
		}
	}
	return list, -1
}

// ticks computes the kernel's tick counter from the monotonic clock. User space cannot read the
// counter.
func (d *Datapath) ticks() uint32 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0
	}
	// Jiffies count from -300 s at boot (INITIAL_JIFFIES of include/linux/jiffies.h).
	ticks := uint64(ts.Nano()) / (uint64(time.Second) / uint64(d.hz))
	return uint32(ticks - 300*uint64(d.hz))
}

func (d *Datapath) describe(s, twin table.Entry, now uint32) flow.Flow {
	f := flow.Flow{
		Original: s.Key, Reply: twin.Key, Counted: true, Datapath: d.Name(),
		Packets: [2]uint64{s.Packets, twin.Packets}, Bytes: [2]uint64{s.Bytes, twin.Bytes},
		Replied: twin.Packets > 0, Assured: true,
	}
	idle := time.Duration(min(now+d.hz-s.Seen, now+d.hz-twin.Seen)) // plus one second: see elapsed of bpf/datapath/packet/parse.h
	left := time.Duration(d.timeout(s, twin)) + time.Duration(d.hz) - idle
	f.Timeout = max(0, left) * time.Second / time.Duration(d.hz)
	if s.Key.Protocol == flow.TCP {
		f.State = tcpState(s, twin)
	}
	if s.Flags&wire.EntryNAT != 0 {
		f.Owner = d.inForce.Names.Source[uint32(s.Owner)]
		return f
	}
	f.Owner = d.inForce.Names.Service[uint32(s.Owner)]
	if !d.inForce.Names.PortForward[uint32(s.Owner)] {
		f.Backend = d.inForce.Names.Backend[uint32(s.Backend)]
	}
	return f
}

func isTransitory(s, twin table.Entry, hz uint32) bool {
	return (s.Flags|twin.Flags)&wire.EntrySettled == 0 || s.Heard&twin.Heard&wire.HeardFIN != 0 ||
		s.Heard&wire.HeardRST != 0 && int32(twin.Seen-s.Seen-hz) <= 0 || twin.Heard&wire.HeardRST != 0 && int32(s.Seen-twin.Seen-hz) <= 0
}

func (d *Datapath) timeout(s, twin table.Entry) uint32 {
	w := d.switches
	switch s.Key.Protocol {
	case flow.TCP:
		if isTransitory(s, twin, d.hz) {
			return w.Transitory
		}
		return w.Established
	case flow.UDP:
		return w.UDP
	case flow.ICMP, flow.ICMPv6:
		return w.ICMP
	}
	return w.Other
}

// tcpState returns the nearest conntrack state.
func tcpState(s, twin table.Entry) string {
	switch {
	case (s.Heard|twin.Heard)&wire.HeardRST != 0:
		return "CLOSE"
	case s.Heard&twin.Heard&wire.HeardFIN != 0:
		return "TIME_WAIT"
	case (s.Heard|twin.Heard)&wire.HeardFIN != 0:
		return "FIN_WAIT"
	case (s.Flags|twin.Flags)&wire.EntrySettled != 0:
		return "ESTABLISHED"
	case twin.Heard&wire.HeardSYN != 0:
		return "SYN_RECV"
	}
	return "SYN_SENT"
}
