// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
)

// retention decides how long missing backends remain in force.
type retention struct {
	hold  time.Duration
	least int
	known map[netip.AddrPort]*retainedBackend
	order int // sequence number for the next new backend
}

// retainedBackend is a backend with the time of its last discovery.
type retainedBackend struct {
	backend config.Backend
	seen    time.Time
	order   int
}

func newRetention(hold time.Duration, least int) *retention {
	return &retention{hold: hold, least: least, known: map[netip.AddrPort]*retainedBackend{}}
}

// update takes the current result and returns the backends to apply, in the order of their first discovery. kept is
// the number of backends that remain only because of the minimum number. next is the time when the next missing
// backend expires, or zero.
func (k *retention) update(found []config.Backend, now time.Time) (list []config.Backend, kept int, next time.Time) {
	for _, b := range found {
		at := netip.AddrPortFrom(b.Address, b.Port)
		if k.known[at] == nil {
			k.known[at] = &retainedBackend{order: k.order}
			k.order++
		}
		k.known[at].backend, k.known[at].seen = b, now
	}
	var gone []netip.AddrPort // expired, sorted by the time of the last discovery
	for at, h := range k.known {
		switch end := h.seen.Add(k.hold); {
		case h.seen.Equal(now):
		case !end.After(now):
			gone = append(gone, at)
		case next.IsZero() || end.Before(next):
			next = end
		}
	}
	slices.SortFunc(gone, func(a, b netip.AddrPort) int {
		return cmp.Or(k.known[a].seen.Compare(k.known[b].seen), cmp.Compare(k.known[a].order, k.known[b].order))
	})
	removable := min(len(gone), max(0, len(k.known)-k.least))
	for _, at := range gone[:removable] {
		delete(k.known, at)
	}
	all := make([]*retainedBackend, 0, len(k.known))
	for _, h := range k.known {
		all = append(all, h)
	}
	slices.SortFunc(all, func(a, b *retainedBackend) int { return cmp.Compare(a.order, b.order) })
	for _, h := range all {
		list = append(list, h.backend)
	}
	return list, len(gone) - removable, next
}
