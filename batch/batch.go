// SPDX-License-Identifier: Apache-2.0

// Package batch combines concurrent requests into one operation, so that many callers share its cost.
package batch

import "sync"

// Queue collects requests while an operation for earlier requests runs. The next operation handles all waiting requests.
type Queue[T any] struct {
	turn chan struct{} // holds an element while an operation runs
	mu   sync.Mutex    // protects list
	list []pendingChange[T]
}

type pendingChange[T any] struct {
	request T
	done    chan struct{} // closed after the operation that handled the request
}

// New returns an empty queue.
func New[T any]() *Queue[T] { return &Queue[T]{turn: make(chan struct{}, 1)} }

// Do adds a request and returns after an operation has handled it. If none runs, it runs handle. handle calls take once
// to get the requests, and its operation includes those that arrive until then. take returns none if the previous
// operation has handled every request.
func (q *Queue[T]) Do(request T, handle func(take func() []T)) {
	own := pendingChange[T]{request, make(chan struct{})}
	q.mu.Lock()
	q.list = append(q.list, own)
	q.mu.Unlock()
	select {
	case <-own.done:
		return
	case q.turn <- struct{}{}:
	}
	var taken []pendingChange[T]
	defer func() {
		for _, w := range taken {
			close(w.done)
		}
		<-q.turn
	}()
	handle(func() (requests []T) {
		q.mu.Lock()
		taken, q.list = q.list, nil
		q.mu.Unlock()
		for _, w := range taken {
			requests = append(requests, w.request)
		}
		return requests
	})
}

// Len returns the number of requests that wait for an operation.
func (q *Queue[T]) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.list)
}
