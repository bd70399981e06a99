// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
)

// amendment returns the change of backends for a snapshot, or nil if it needs a full compilation.
func (d *Datapath) amendment(s *datapath.Snapshot, h *compile.Host) *compile.Amendment {
	if !d.verified || d.inForce == nil || d.snapshot == nil || d.mismatch != nil || d.appliedHost != d.lastHost || !h.SameAs(d.lastHost) {
		return nil
	}
	return compile.Amend(d.inForce, &d.uses, d.snapshot, s, stateOf(d.t, s), h)
}

// putAmendment writes an amendment and returns the number of ended flows.
func (d *Datapath) putAmendment(a *compile.Amendment, s *datapath.Snapshot) (ended int, err error) {
	d.verified = false
	if err := errors.Join(d.t.ForgetOthers(a.Small.Draft), a.Small.Draft.Keep()); err != nil {
		return 0, err
	}
	for n, b := range a.Small.Backends {
		d.t.Backends.Values[n] = b
	}
	if err := d.putServices(a.Small); err != nil {
		return 0, err
	}
	d.putLists(a.Small)
	if err := errors.Join(table.PutChanges(d.t.Maps["hosts"], a.Hosts), table.PutChanges(d.t.Maps["reverses"], a.Reverses)); err != nil {
		return 0, err
	}
	for n := range a.Gone {
		d.drainBackend(n)
	}
	d.invalidateHops()
	err = errors.Join(d.readBackWords(a.Small), table.SameChanges(d.t.Maps["hosts"], a.Hosts), table.SameChanges(d.t.Maps["reverses"], a.Reverses))
	if err != nil {
		return 0, err
	}
	a.KeepIn(d.inForce, &d.uses)
	old := (*staleFlows)(nil)
	if a.Endpoints {
		old = d.staleAfter(d.inForce, s)
	}
	d.snapshot, d.verified = s, true
	if len(a.Gone) > 0 {
		d.keepResolved(d.inForce.Backends, true)
	} else {
		d.keepResolved(a.Small.Backends, false)
	}
	return d.end(old)
}
