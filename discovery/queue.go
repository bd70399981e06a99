// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"sync"

	"github.com/sluice-lb/sluice/config"
)

// request is what was found for a service, and waits to be put in force.
type request struct {
	service string
	list    []config.Backend
	done    bool // err holds
	err     error
}

// queue holds what waits while something else is put in force: that of many services, as at the
// start, takes a few changes.
type queue struct {
	working sync.Mutex // held by the one who puts

	mu   sync.Mutex // protects list
	list []*request
}

func (q *queue) add(r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list = append(q.list, r)
}

func (q *queue) take() []*request {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := q.list
	q.list = nil
	return list
}

// put puts what was found for a service in force, together with all that waits then.
func (f *Finder) put(ctx context.Context, service string, list []config.Backend) error {
	r := &request{service: service, list: list}
	f.waiting.add(r)
	f.waiting.working.Lock()
	defer f.waiting.working.Unlock()
	if r.done { // by one who waited too
		return r.err
	}
	all := f.waiting.take()
	found := map[string][]config.Backend{}
	for _, of := range all {
		found[of.service] = of.list
	}
	err := f.opt.Put(ctx, found)
	for _, of := range all {
		if of.err = err; err != nil && len(all) > 1 { // each is refused for itself
			of.err = f.opt.Put(ctx, map[string][]config.Backend{of.service: of.list})
		}
		of.done = true
	}
	return r.err
}
