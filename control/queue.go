// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/store"
)

// An apply writes to disk and to the kernel, and reads back. Changes that arrive meanwhile wait,
// and the next apply makes them together. Many clients thus share the cost of one apply.

// pendingChange is a change that waits for its apply.
type pendingChange struct {
	ctx context.Context
	by  Author
	// change returns the new content in place of the present one, or an error. It may change a
	// draft in place.
	change func(now store.Content) (store.Content, error)

	applied engine.Applied // result of the change, valid when done is closed
	err     error
}

func (r *pendingChange) end(applied engine.Applied, err error) { r.applied, r.err = applied, err }

// Clients that make one change after another send the next within this time after a reply. Waiting
// for them combines two applies into one.
const gather = time.Millisecond

// changeWithWaiting makes a change together with all waiting changes, and returns when it is in force or
// refused. It does not wait for changes that arrive later.
func (c *Control) changeWithWaiting(r *pendingChange) (engine.Applied, error) {
	c.waiting.Do(r, func(take func() []*pendingChange) {
		if c.many {
			time.Sleep(gather)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		list := take()
		if len(list) == 0 {
			return
		}
		c.many = len(list) > 1
		c.makeChanges(list)
		for _, r := range list {
			c.report(r.by, r.err)
		}
	})
	return r.applied, r.err
}

// makeChanges makes changes in order and puts the result in force. Each change is refused separately.
func (c *Control) makeChanges(list []*pendingChange) {
	before := store.Content{Config: c.engine.Config(), States: c.store.States()}
	if before.Config == nil {
		before.Config = c.file
	}
	draft := before.Config.Draft()
	wanted := store.Content{Config: draft, States: before.States}
	var accepted []*pendingChange
	for _, r := range list {
		if err := r.ctx.Err(); err != nil {
			r.end(engine.Applied{}, err) // the client no longer waits for the result
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
		wanted.Config = before.Config // the change affects only the states set by the operator
	}
	ctx := accepted[0].ctx
	if len(accepted) > 1 {
		ctx = context.WithoutCancel(ctx) // a client that disconnects does not cancel the changes of others
	}
	applied, err := c.storeAndApply(authors(accepted), wanted, func() (engine.Applied, error) {
		return c.engine.ApplyStates(ctx, wanted.Config, overrides(wanted.States))
	})
	if err != nil && len(accepted) > 1 && !errors.Is(err, ErrTrial) {
		for _, r := range accepted { // so that only invalid changes are refused
			c.makeChanges([]*pendingChange{r})
		}
		return
	}
	for _, r := range accepted {
		r.end(applied, err)
	}
}

// mostNamed is the maximum number of combined changes that are named in the history.
const mostNamed = 8

// authors returns the combined author of several changes.
func authors(list []*pendingChange) Author {
	var who, what []string
	for _, r := range list {
		if !slices.Contains(who, r.by.Who) {
			who = append(who, r.by.Who)
		}
		what = append(what, r.by.What)
	}
	return Author{joinNames(who), joinNames(what)}
}

func joinNames(list []string) string {
	if more := len(list) - mostNamed; more > 0 {
		list = append(slices.Clone(list[:mostNamed]), fmt.Sprintf("%d more", more))
	}
	return strings.Join(list, ", ")
}
