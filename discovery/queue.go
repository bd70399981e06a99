// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"sync"

	"github.com/sluice-lb/sluice/config"
)

// pendingResult is a result for a service that waits for its application.
type pendingResult struct {
	service string
	list    []config.Backend
	done    bool // err is valid
	err     error
}

// pendingResults holds the waiting requests during an application. So the results of many services, as at the start, need few
// changes.
type pendingResults struct {
	working sync.Mutex // locked by the applying goroutine

	mu   sync.Mutex // protects list
	list []*pendingResult
}

func (q *pendingResults) add(r *pendingResult) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list = append(q.list, r)
}

func (q *pendingResults) take() []*pendingResult {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := q.list
	q.list = nil
	return list
}

// applyWaiting applies the result for a service, together with all waiting requests.
func (f *Finder) applyWaiting(ctx context.Context, service string, list []config.Backend) error {
	r := &pendingResult{service: service, list: list}
	f.waiting.add(r)
	f.waiting.working.Lock()
	defer f.waiting.working.Unlock()
	if r.done { // applied by another waiting goroutine
		return r.err
	}
	all := f.waiting.take()
	found := map[string][]config.Backend{}
	for _, of := range all {
		found[of.service] = of.list
	}
	err := f.opt.Put(ctx, found)
	for _, of := range all {
		if of.err = err; err != nil && len(all) > 1 { // retry each alone, so that each gets its own error
			of.err = f.opt.Put(ctx, map[string][]config.Backend{of.service: of.list})
		}
		of.done = true
	}
	return r.err
}
