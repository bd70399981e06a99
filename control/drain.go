// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/store"
)

// Drain is the progress of a draining backend.
type Drain struct {
	Until time.Time // Deadline; zero: none.
	Then  string    // Keep or Reset; "" without a deadline.
	Left  int       // Remaining connections; -1: unknown, for example without flow state.
	// Counted is the time of the last count; zero: not counted yet.
	Counted time.Time
	// Estimate is the remaining time if connections continue to end at the average rate since the
	// start of the drain; 0: unknown.
	Estimate time.Duration
}

// drainStates is the state of the draining backends.
type drainStates struct {
	begun chan struct{} // has one element after the start of a drain

	mu    sync.Mutex // protects the fields below
	of    map[engine.Backend]*backendDrain
	after time.Time // time of the next attempt after a refused end
}

// backendDrain is the state of one draining backend.
type backendDrain struct {
	began time.Time
	first int // connections at the start
	left  int
	at    time.Time // time of the last count
}

const (
	// drainTick is the longest wait between two looks at the deadlines, and the wait after a look that
	// found a due drain and could not end it.
	drainTick = time.Second
	// countEvery is the least time between two counts of connections. A count reads a table, and takes
	// 5 % of one CPU at most.
	countEvery = 2 * time.Second
)

// Run ends drains at their deadlines and counts the connections that are left, until the context ends. A
// long count does not delay the end of a drain.
func (c *Control) Run(ctx context.Context) {
	go c.countUntilDone(ctx)
	repeat(ctx, nil, func() time.Duration {
		c.endDrains(ctx, time.Now())
		return c.nextDeadline(time.Now())
	})
}

// repeat calls f until the context ends: after each time that f returns, and when wake has an element.
func repeat(ctx context.Context, wake <-chan struct{}, f func() time.Duration) {
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		case <-wake:
		}
		next.Reset(f())
	}
}

// nextDeadline returns the time to the next deadline of a drain, and at most drainTick.
func (c *Control) nextDeadline(now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait := drainTick
	for _, s := range c.store.States() {
		if left := s.Until.Sub(now); left > 0 {
			wait = min(wait, left)
		}
	}
	return wait
}

// countUntilDone counts connections until the context ends.
func (c *Control) countUntilDone(ctx context.Context) {
	repeat(ctx, c.drains.begun, func() time.Duration {
		start := time.Now()
		c.countDrains(ctx, start)
		return max(countEvery, 20*time.Since(start))
	})
}

// endDrains ends the drains with a past deadline. During the trial of a change it waits.
func (c *Control) endDrains(ctx context.Context, now time.Time) {
	due := func(s store.Override) bool { return !s.Until.IsZero() && !now.Before(s.Until) }
	c.mu.Lock()
	ending := slices.DeleteFunc(c.store.States(), func(s store.Override) bool { return !due(s) })
	wait := c.trial != nil || now.Before(c.drains.after)
	c.mu.Unlock()
	if len(ending) == 0 || wait {
		return
	}
	var names []string
	for _, s := range ending {
		names = append(names, fmt.Sprintf("%s (%s)", nameOf(s), s.Then))
	}
	by := Author{"sluice", "end of drain: " + joinNames(names)}
	_, err := c.changeWithWaiting(&pendingChange{ctx: ctx, by: by, change: func(now store.Content) (store.Content, error) {
		now.States = slices.Clone(now.States)
		for i, s := range now.States {
			if !due(s) {
				continue
			}
			if now.States[i].Until = (time.Time{}); s.Then == Reset {
				now.States[i].State = "down"
			}
		}
		return now, nil
	}})
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.drains.after = (time.Time{}); err != nil {
		c.drains.after = now.Add(retryBack)
	}
}

func nameOf(s store.Override) string {
	if s.Service == "" {
		return "the gateway"
	}
	return s.Service + "/" + s.Backend
}

// countDrains counts the connections of draining backends and reports a backend without
// connections.
func (c *Control) countDrains(ctx context.Context, now time.Time) {
	of := c.engine.Draining()
	if len(of) == 0 {
		c.drains.mu.Lock()
		defer c.drains.mu.Unlock()
		c.drains.of = nil
		return
	}
	counts, err := c.engine.CountConnections(ctx, of)
	if err != nil {
		return // the count failed: keep the previous one
	}
	c.drains.mu.Lock()
	defer c.drains.mu.Unlock()
	next := make(map[engine.Backend]*backendDrain, len(of))
	for _, b := range of {
		left := counts[b]
		d := c.drains.of[b]
		if d == nil {
			d = &backendDrain{began: now, first: left, left: left}
		} else if left == 0 && d.left > 0 {
			object := b.Service + "/" + b.Name
			c.Events.Add(event.Event{Kind: event.Backend, Object: object, State: "drain", Text: "backend " + object + " is drained: no connection is left"})
		}
		d.left, d.at = left, now
		next[b] = d
	}
	c.drains.of = next
}

// Drains returns the progress of draining backends. An entry without a name is the whole gateway.
func (c *Control) Drains() map[engine.Backend]Drain {
	c.mu.Lock()
	states := c.store.States()
	c.mu.Unlock()
	own := map[engine.Backend]store.Override{}
	for _, s := range states {
		if s.Node {
			continue
		}
		own[engine.Backend{Service: s.Service, Name: s.Backend}] = s
	}
	whole, all := own[engine.Backend{}]
	out := map[engine.Backend]Drain{}
	c.drains.mu.Lock()
	defer c.drains.mu.Unlock()
	sum := &backendDrain{at: time.Now()} // no backend: nothing to count
	for _, b := range c.engine.Draining() {
		d := c.drains.of[b]
		if d == nil { // not counted yet
			d = &backendDrain{left: -1}
		}
		s := own[b]
		if all && (s.Until.IsZero() || !whole.Until.IsZero() && whole.Until.Before(s.Until)) {
			s = whole
		}
		out[b] = Drain{Until: s.Until, Then: s.Then, Left: d.left, Counted: d.at, Estimate: d.estimate()}
		sum.add(d)
	}
	if all {
		if sum.at.IsZero() {
			sum.left = -1
		}
		out[engine.Backend{}] = Drain{Until: whole.Until, Then: whole.Then, Left: sum.left, Counted: sum.at, Estimate: sum.estimate()}
	}
	return out
}

// add adds the connections of another backend, with a count that may be unknown.
func (d *backendDrain) add(other *backendDrain) {
	d.left, d.first = d.left+max(0, other.left), d.first+max(0, other.first)
	if d.began.IsZero() || other.began.Before(d.began) {
		d.began = other.began
	}
	if other.at.Before(d.at) { // zero: not counted yet
		d.at = other.at
	}
}

// estimate is linear: it uses the average rate since the start of the drain.
func (d *backendDrain) estimate() time.Duration {
	ended, took := d.first-d.left, d.at.Sub(d.began)
	if ended <= 0 || d.left <= 0 || took <= 0 {
		return 0
	}
	return time.Duration(float64(took) / float64(ended) * float64(d.left)).Round(time.Second)
}
