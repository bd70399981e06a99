// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"

	"github.com/sluice-lb/sluice/datapath"
)

// amendment returns nil where a snapshot has to be compiled as a whole.
func (d *Datapath) amendment(s *datapath.Snapshot, h *host) *amendment {
	if !d.settled || d.away != nil || d.fits != d.seen || !h.sameAs(d.seen) {
		return nil
	}
	return amend(d.inForce, &d.uses, d.snapshot, s, stateOf(d.t, s), h)
}

// putAmendment brings an amendment into force.
func (d *Datapath) putAmendment(a *amendment, s *datapath.Snapshot) (ended int, err error) {
	d.settled = false
	if err := errors.Join(d.t.forgetOthers(a.small.draft), a.small.draft.keep()); err != nil {
		return 0, err
	}
	for n, b := range a.small.backends {
		d.t.backends.values[n] = b
	}
	if err := d.putServices(a.small); err != nil {
		return 0, err
	}
	d.putLists(a.small)
	if err := errors.Join(putChanges(d.t.maps["hosts"], a.hosts), putChanges(d.t.maps["reverses"], a.reverses)); err != nil {
		return 0, err
	}
	for n := range a.gone {
		d.leave(n)
	}
	d.bump()
	err = errors.Join(d.readBackWords(a.small), sameChanges(d.t.maps["hosts"], a.hosts), sameChanges(d.t.maps["reverses"], a.reverses))
	if err != nil {
		return 0, err
	}
	a.keepIn(d.inForce, &d.uses)
	old := (*stale)(nil)
	if a.endpoints {
		old = d.staleAfter(d.inForce, s)
	}
	d.snapshot, d.settled = s, true
	d.resolveBackends(a.small.backends, false)
	return d.end(old)
}
