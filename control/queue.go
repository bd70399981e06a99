// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/store"
)

// An apply writes to the disk and to the kernel, and reads back. Changes that come meanwhile wait, and
// are made by the next one together, so that many of them cost few applies.

// request is a change that waits for its turn.
type request struct {
	ctx context.Context
	by  Author
	// change returns what is to be in force in place of what is, or why that cannot be. It may
	// change a draft in place.
	change func(now store.Content) (store.Content, error)

	done    chan struct{} // closed when what follows holds, and was told of
	applied engine.Applied
	err     error
}

func (r *request) end(applied engine.Applied, err error) { r.applied, r.err = applied, err }

// queue holds the changes that wait.
type queue struct {
	turn chan struct{} // whoever has put one element there makes changes
	mu   sync.Mutex
	list []*request
	many bool // the last changes were more than one; belongs to whoever has the turn
}

// Where many clients make one change after the other, those that have their answer send the next one
// within this time. To wait for them makes one apply of what would be two.
const gather = time.Millisecond

func (q *queue) add(r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.list = append(q.list, r)
}

// take empties the queue.
func (q *queue) take() []*request {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := q.list
	q.list = nil
	return list
}

// together makes a change, with all others that wait then, and returns when it is in force, or is
// refused. Nobody whose change is made waits for those that come after it.
func (c *Control) together(r *request) (engine.Applied, error) {
	r.done = make(chan struct{})
	c.waiting.add(r)
	select {
	case <-r.done:
	case c.waiting.turn <- struct{}{}:
		c.makeWaiting()
	}
	<-r.done
	return r.applied, r.err
}

// makeWaiting makes the changes that wait; the caller has the turn, and gives it back.
func (c *Control) makeWaiting() {
	defer func() { <-c.waiting.turn }()
	if c.waiting.many {
		time.Sleep(gather)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	list := c.waiting.take()
	if len(list) == 0 {
		return // whoever had the turn before has made them
	}
	c.waiting.many = len(list) > 1
	c.make(list)
	for _, r := range list {
		c.tell(r.by, r.err)
		close(r.done)
	}
}

// make makes changes one after the other, and puts the result in force. Each is refused for itself.
func (c *Control) make(list []*request) {
	before := store.Content{Config: c.engine.Config(), States: c.store.States()}
	if before.Config == nil {
		before.Config = c.file
	}
	draft := before.Config.Draft()
	wanted := store.Content{Config: draft, States: before.States}
	var accepted []*request
	for _, r := range list {
		if err := r.ctx.Err(); err != nil {
			r.end(engine.Applied{}, err) // nobody waits for the answer any more
			continue
		}
		next, err := r.change(wanted)
		if err != nil {
			r.end(engine.Applied{}, err)
			continue
		}
		if next.Config != draft {
			draft = next.Config.Draft()
		}
		wanted = store.Content{Config: draft, States: next.States}
		accepted = append(accepted, r)
	}
	if len(accepted) == 0 {
		return
	}
	draft.Finish()
	if before.Config.Same(draft) {
		wanted.Config = before.Config // only states change
	}
	ctx := accepted[0].ctx
	if len(accepted) > 1 {
		ctx = context.WithoutCancel(ctx) // one who goes away does not end the changes of others
	}
	applied, err := c.keep(authors(accepted), wanted, func() (engine.Applied, error) {
		return c.engine.ApplyStates(ctx, wanted.Config, overrides(wanted.States))
	})
	if err != nil && len(accepted) > 1 && !errors.Is(err, ErrTrial) {
		for _, r := range accepted { // so that only those are refused that cannot be
			c.make([]*request{r})
		}
		return
	}
	for _, r := range accepted {
		r.end(applied, err)
	}
}

// mostNamed is how many of the changes that were made together are named in the history.
const mostNamed = 8

// authors says who made changes together, and which.
func authors(list []*request) Author {
	var who, what []string
	for _, r := range list {
		if !slices.Contains(who, r.by.Who) {
			who = append(who, r.by.Who)
		}
		what = append(what, r.by.What)
	}
	return Author{named(who), named(what)}
}

func named(list []string) string {
	if more := len(list) - mostNamed; more > 0 {
		list = append(slices.Clone(list[:mostNamed]), fmt.Sprintf("%d more", more))
	}
	return strings.Join(list, ", ")
}
