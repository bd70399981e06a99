// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/netdev"
)

// correctRaced corrects the cause of packets that found their tuple taken although ports were not
// short: two packets at once had chosen the same one.
func (w *Watcher) correctRaced(ctx context.Context, ns netdev.Namespace, groups map[string]*DropGroup) {
	g := groups[CausePortsExhausted.ID]
	if !w.PortsInUse || g == nil || !portsLeft(ctx, ns, g.Samples) {
		return
	}
	delete(groups, g.Cause.ID)
	g.Cause = CauseConfirmRace
	if other := groups[g.Cause.ID]; other != nil {
		g.Packets, g.Bytes = g.Packets+other.Packets, g.Bytes+other.Bytes
		g.Places, g.Samples = append(g.Places, other.Places...), append(g.Samples, other.Samples...)
	}
	groups[g.Cause.ID] = g
}

// portsLeft reports whether the ports in use towards the destination of a dropped packet have free
// ports between them: a pool without a free port is dense.
func portsLeft(ctx context.Context, ns netdev.Namespace, samples []*DropSample) bool {
	for _, s := range samples {
		if !s.Reply.IsValid() {
			continue
		}
		c, err := conntrack.OpenIn(ns)
		if err != nil {
			return false
		}
		defer c.Close()
		var used, first, last uint64
		err = c.Dump(ctx, nil, func(e *conntrack.Entry) error {
			if e.Protocol != s.Reply.Protocol || e.Reply.Dest.Netip() != s.Reply.Dest.Addr() || e.Reply.Source.Netip() != s.Reply.Source.Addr() ||
				e.Protocol.HasPorts() && e.Reply.SourcePort != s.Reply.Source.Port() {
				return nil
			}
			port := uint64(e.Reply.DestPort)
			if used++; used == 1 {
				first, last = port, port
			}
			first, last = min(first, port), max(last, port)
			return nil
		})
		if err != nil && !errors.Is(err, conntrack.ErrInterrupted) {
			return false
		}
		return mostlyFree(used, first, last)
	}
	return false
}

// mostlyFree reports whether more than a fifth of the ports in a range are free.
func mostlyFree(used, first, last uint64) bool { return used > 0 && 5*used < 4*(last-first+1) }
