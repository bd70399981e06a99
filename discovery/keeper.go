// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
)

// keeper decides how long missing backends remain in force.
type keeper struct {
	hold  time.Duration
	least int
	known map[netip.AddrPort]*held
	order int // of the next backend
}

// held is a backend with the time of its last discovery.
type held struct {
	backend config.Backend
	seen    time.Time
	order   int
}

func newKeeper(hold time.Duration, least int) *keeper {
	return &keeper{hold: hold, least: least, known: map[netip.AddrPort]*held{}}
}

// update takes the current result and returns the backends to apply, in the order of their first discovery. kept is
// the number of backends that remain only because of the minimum number. next is the time when the next missing
// backend expires, or zero.
func (k *keeper) update(found []config.Backend, now time.Time) (list []config.Backend, kept int, next time.Time) {
	for _, b := range found {
		at := netip.AddrPortFrom(b.Address, b.Port)
		if k.known[at] == nil {
			k.known[at] = &held{order: k.order}
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
	all := make([]*held, 0, len(k.known))
	for _, h := range k.known {
		all = append(all, h)
	}
	slices.SortFunc(all, func(a, b *held) int { return cmp.Compare(a.order, b.order) })
	for _, h := range all {
		list = append(list, h.backend)
	}
	return list, len(gone) - removable, next
}
