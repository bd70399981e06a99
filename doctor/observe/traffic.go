// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/doctor/outcome"
	"github.com/sluice-lb/sluice/trace"
)

// traffic observes the packets of a window and groups them into exchanges, one collector for each
// namespace.
type traffic struct {
	packets    *trace.Packets
	began      time.Time
	collectors map[uint64]*outcome.Collector
	stop       context.CancelFunc
	reading    sync.WaitGroup
	err        error // of reading
	ended      time.Duration
	lost       trace.PacketLoss
}

// watchTraffic begins to observe the packets of the namespaces, which were read once. Without the
// right to, it notes why.
func (s *Sample) watchTraffic(ctx context.Context, o Options) *traffic {
	if o.NoDrops || len(s.Namespaces) == 0 {
		return nil
	}
	t := &traffic{collectors: map[uint64]*outcome.Collector{}}
	only := uint64(0)
	if len(s.Namespaces) == 1 {
		only = s.Namespaces[0].Inode
	}
	budget := outcome.NewBudget()
	for _, n := range s.Namespaces {
		host := hostOf(n.Before.Links)
		host.IPsec = len(n.Before.Routing.Policies) > 0
		if o.Probed != nil {
			for _, a := range o.Probed(ctx, n.Namespace) {
				host.Probed[a] = true
			}
		}
		t.collectors[n.Inode] = outcome.NewCollector(host, budget)
	}
	var err error
	if t.packets, err = trace.OpenPackets(only); err != nil {
		s.Limits = append(s.Limits, fmt.Sprintf("packets are not seen, so which connections fail is not known: %v", err))
		return nil
	}
	t.began = time.Now()
	reading, stop := context.WithCancel(context.WithoutCancel(ctx))
	t.stop = stop
	t.reading.Go(func() {
		t.err = t.packets.Read(reading, func(p *trace.Packet) {
			if c := t.collectors[p.Netns]; c != nil {
				c.Add(p)
			}
		})
	})
	return t
}

// left is the rest of the window: the readings before it take seconds on a loaded host, and packets of less
// time are poor evidence.
func (t *traffic) left(o Options) time.Duration {
	if t == nil || o.During != nil {
		return 0
	}
	return o.Window - time.Since(t.began)
}

// hostOf describes a namespace by its interfaces.
func hostOf(links []Link) outcome.Host {
	h := outcome.Host{Addresses: map[netip.Addr]bool{}, MACs: map[[6]byte]bool{}, Ports: map[string]string{}, Probed: map[netip.Addr]bool{}}
	bridges := map[int]string{}
	for _, l := range links {
		if l.Kind == "bridge" {
			bridges[l.Index] = l.Name
		}
		h.MACs[l.MAC] = true
		for _, p := range l.Addresses {
			h.Addresses[p.Addr()] = true
			h.Networks = append(h.Networks, outcome.Network{Prefix: p.Masked(), Interface: l.Name})
		}
	}
	for _, l := range links {
		if bridge := bridges[l.Master]; l.Master != 0 && bridge != "" {
			h.Ports[l.Name] = bridge
		}
	}
	return h
}

// end ends the observation, and reads the remaining packets.
func (t *traffic) end() {
	if t == nil {
		return
	}
	t.ended = monotonic()
	_ = t.packets.Detach() // the rest of the ring is still read
	t.stop()
	t.reading.Wait()
	t.lost = t.packets.Lost()
	_ = t.packets.Close()
}

// collectTraffic gives each namespace the outcomes of an observation that ended. The counters of the window were read.
func (s *Sample) collectTraffic(t *traffic) {
	switch {
	case t == nil:
		return
	case t.err != nil:
		s.Limits = append(s.Limits, t.err.Error())
		return
	}
	for _, n := range s.Namespaces {
		n.Traffic = t.collectors[n.Inode].Report(t.ended, t.lost, func(c trace.Cause) trace.Cause { return trace.Refine(c, n.Delta) })
	}
	if l := t.lost; l != (trace.PacketLoss{}) {
		s.Limits = append(s.Limits, fmt.Sprintf("packets that were not observed: %d openings and errors, %d others, %d unreadable, %d in interrupts", l.Openings, l.Others, l.Unreadable, l.Interrupted))
	}
}
