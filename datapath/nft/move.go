// SPDX-License-Identifier: Apache-2.0

package nft

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

var _ datapath.Mover = (*Datapath)(nil)

// Give returns the tracked connections of services and port-forwards that move to another datapath.
// The programs of that datapath run first, so that no new connection is tracked here.
func (d *Datapath) Give(ctx context.Context, names map[string]bool) (list []flow.Flow, err error) {
	d.mu.Lock()
	listeners := datapath.NewListeners(d.resolveAddresses(d.snapshot))
	d.mu.Unlock()
	c, err := d.tracking.Sibling()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	err = c.Dump(ctx, nil, func(e *conntrack.Entry) error {
		f := e.Flow()
		moves := func(l datapath.Listener) bool { return names[l.Name()] }
		if e.DestTranslated() && !e.CutOff() && slices.ContainsFunc(listeners.Find(f.Original.Protocol, f.Original.Dest), moves) {
			list = append(list, f)
		}
		return nil
	})
	if errors.Is(err, conntrack.ErrInterrupted) { // lacks only entries added or removed during the dump
		err = nil
	}
	return list, err
}

// Take inserts the connections of another datapath into connection tracking, with the same
// translation.
func (d *Datapath) Take(ctx context.Context, flows []flow.Flow) (int, error) {
	c, err := d.tracking.Sibling()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	var entries, translated []conntrack.Entry
	for i := range flows {
		f := flows[i]
		if f.Original.Protocol != flow.TCP && f.Original.Protocol != flow.UDP || f.Original.Source.Addr().Is4() != f.Reply.Source.Addr().Is4() {
			continue
		}
		if f.State == "TIME_WAIT" || f.State == "CLOSE" { // a busy service has many more than open ones
			continue
		}
		f.Timeout = max(f.Timeout, time.Second)
		var e conntrack.Entry
		e.SetFlow(&f)
		entries = append(entries, e)
		// The kernel may track the translated packets of the other datapath. Such an entry would
		// conflict with the new one.
		e.Original.Source, e.Original.SourcePort = e.Reply.Dest, e.Reply.DestPort
		e.Original.Dest, e.Original.DestPort = e.Reply.Source, e.Reply.SourcePort
		translated = append(translated, e)
	}
	if _, err := c.DeleteOf(ctx, translated); err != nil {
		return 0, fmt.Errorf("connections that move: %w", err)
	}
	n, err := c.InsertNAT(ctx, entries)
	switch {
	case errors.Is(err, unix.ENOMEM): // returned by nf_conntrack_alloc of the kernel
		return n, fmt.Errorf("connections that move: the connection table has no room for %d more; raise net.netfilter.nf_conntrack_max: %w", len(entries)-n, err)
	case err != nil:
		return n, fmt.Errorf("connections that move: %w", err)
	}
	return n, nil
}
