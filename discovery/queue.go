// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"

	"github.com/sluice-lb/sluice/config"
)

// pendingResult is a result for a service that waits for its application.
type pendingResult struct {
	service string
	list    []config.Backend
	err     error
}

// applyWaiting applies the result for a service, together with all waiting results. The results of many services, as at
// the start, thus need few changes.
func (f *Finder) applyWaiting(ctx context.Context, service string, list []config.Backend) error {
	r := &pendingResult{service: service, list: list}
	f.waiting.Do(r, func(take func() []*pendingResult) {
		all := take()
		if len(all) == 0 {
			return
		}
		found := map[string][]config.Backend{}
		for _, of := range all {
			found[of.service] = of.list
		}
		err := f.opt.Put(ctx, found)
		for _, of := range all {
			if of.err = err; err != nil && len(all) > 1 { // retry each alone, so that each gets its own error
				of.err = f.opt.Put(ctx, map[string][]config.Backend{of.service: of.list})
			}
		}
	})
	return r.err
}
