// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// errEnough ends a dump on request of the caller.
var errEnough = errors.New("enough")

// Flows calls yield for each connection that the kernel tracks, with its service or NAT rule. It
// omits connections of the modes dsr and stateless, which are not tracked, and connections cut off
// with their backend.
func (d *Datapath) Flows(ctx context.Context, yield func(flow.Flow) bool) error {
	d.mu.Lock()
	labels := d.labels()
	d.mu.Unlock()
	c, err := d.tracking.Sibling()
	if err != nil {
		return err
	}
	defer c.Close()
	err = c.Dump(ctx, nil, func(e *conntrack.Entry) error {
		if e.CutOff() {
			return nil
		}
		f := e.Flow()
		labels.set(&f)
		if !yield(f) {
			return errEnough
		}
		return nil
	})
	// An interrupted dump lacks only entries that were added or removed during the dump.
	if errors.Is(err, errEnough) || errors.Is(err, conntrack.ErrInterrupted) {
		return nil
	}
	return err
}

// labels finds the owner of a connection by its original destination.
type labels struct {
	listeners *datapath.Listeners
	nat       []*config.NATRule
}

// labels returns an index of the active snapshot.
func (d *Datapath) labels() *labels {
	l := &labels{listeners: datapath.NewListeners(d.resolveAddresses(d.snapshot))}
	if d.snapshot != nil {
		l.nat = d.snapshot.NAT
	}
	return l
}

// set labels a flow.
func (l *labels) set(f *flow.Flow) {
	f.Datapath = "nftables"
	for _, at := range l.listeners.Find(f.Original.Protocol, f.Original.Dest) {
		if at.Service == nil {
			continue
		}
		f.Owner = at.Service.Name
		for _, b := range at.Service.Backends {
			if b.Address == f.Reply.Source.Addr() && (b.Port == 0 || b.Port == f.Reply.Source.Port()) {
				f.Backend = b.Name
				return
			}
		}
	}
	if f.Owner != "" {
		return
	}
	for _, n := range l.nat {
		if owns(n, f) {
			f.Owner = n.Name
			return
		}
	}
	f.Datapath = "kernel"
}

// owns reports whether a NAT rule translates the flow.
func owns(n *config.NATRule, f *flow.Flow) bool {
	switch {
	case n.Type.Forwards():
		return (n.Listen.Address == f.Original.Dest.Addr() || !n.Listen.Address.IsValid() && n.To.Address == f.Reply.Source.Addr()) && f.DestTranslated() &&
			(n.Protocol == flow.Any || n.Protocol == f.Original.Protocol) && inPorts(n.Listen.Ports, f.Original.Dest.Port())
	case n.Type == config.NATStatic:
		return n.External.Contains(f.Original.Dest.Addr()) && f.DestTranslated() ||
			n.Internal.Contains(f.Original.Source.Addr()) && f.SourceTranslated()
	case n.Type.RewritesSource():
		if !f.SourceTranslated() || !inPrefixes(n.Source, f.Original.Source.Addr()) {
			return false
		}
		for _, r := range n.To.Addresses {
			if r.Contains(f.Reply.Dest.Addr()) {
				return true
			}
		}
		return len(n.To.Addresses) == 0
	}
	return false
}

func inPorts(list []flow.Ports, port uint16) bool {
	for _, p := range list {
		if p.Contains(port) {
			return true
		}
	}
	return len(list) == 0
}

func inPrefixes(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return len(list) == 0
}

func isTracked(m config.Mode) bool { return m == config.ModeDNAT || m == config.ModeFullNAT }
