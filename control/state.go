// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/store"
)

// states are the states that an operator can set. "auto", which is not in the list, removes the
// setting.
var states = map[string]datapath.State{"up": datapath.Up, "drain": datapath.Drain, "down": datapath.Down}

// Treatments of the remaining connections at the end of a drain.
const (
	Keep  = "keep"  // They continue.
	Reset = "reset" // They are reset.
)

// MaxDeadline is the longest deadline of a drain.
const MaxDeadline = 30 * 24 * time.Hour

// Override is a state of a backend set by the operator.
type Override struct {
	State    string        // Up, drain, down, or auto: decided by configuration and check.
	Deadline time.Duration // Duration of a drain; 0: unlimited.
	Then     string        // Keep or Reset, with a deadline; "" is Keep.
}

// ErrState is wrapped by errors about an invalid state.
var ErrState = errors.New("not a state")

// check returns an error for an invalid state.
func (s Override) check() error {
	if err := s.validate(); err != nil {
		return stateError{err}
	}
	return nil
}

// stateError is an ErrState with its own message.
type stateError struct{ error }

func (stateError) Is(err error) bool { return err == ErrState }

func (s Override) validate() error {
	switch _, known := states[s.State]; {
	case !known && s.State != "auto":
		return fmt.Errorf("state %q: not one of up, drain, down, auto", s.State)
	case s.State != "drain" && (s.Deadline != 0 || s.Then != ""):
		return errors.New("only drain has a deadline, and something that follows then")
	case s.Then != "" && s.Then != Keep && s.Then != Reset:
		return fmt.Errorf("then %q: not one of keep, reset", s.Then)
	case s.Then != "" && s.Deadline == 0:
		return fmt.Errorf("then %s: without a deadline a drain never ends: name one, as in --deadline 5m", s.Then)
	case s.Deadline < 0 || s.Deadline > MaxDeadline || s.Deadline > 0 && s.Deadline < time.Second:
		return fmt.Errorf("deadline %v: not between 1s and %v", s.Deadline, MaxDeadline)
	}
	return nil
}

// SetState sets the state of a backend to up, drain or down until auto removes it. Without names it
// sets the whole gateway, which can only drain. The state survives restarts. SetState returns
// [engine.ErrChanged] if expected, which may be nil, rejects the configuration in force.
func (c *Control) SetState(ctx context.Context, by Author, service, backend string, to Override, expected func(*config.Config) bool) error {
	if err := to.check(); err != nil {
		return err
	}
	if service == "" && to.State != "drain" && to.State != "auto" {
		return stateError{fmt.Errorf("state %q: the whole gateway can drain alone", to.State)}
	}
	made := store.Override{Service: service, Backend: backend, State: to.State}
	if to.Deadline > 0 {
		made.Until, made.Then = time.Now().Add(to.Deadline).UTC().Truncate(time.Millisecond), to.Then
		if made.Then == "" {
			made.Then = Keep
		}
	}
	_, err := c.changeWithWaiting(&pendingChange{ctx: ctx, by: by, change: func(now store.Content) (store.Content, error) {
		if expected != nil && !expected(now.Config) {
			return now, engine.ErrChanged
		}
		if service != "" {
			if err := engine.MustHave(now.Config, service, backend); err != nil && !c.engine.Has(service, backend) {
				return now, err
			}
		}
		now.States = slices.DeleteFunc(slices.Clone(now.States), func(s store.Override) bool { return !s.Node && s.Service == service && s.Backend == backend })
		if to.State != "auto" {
			now.States = append(now.States, made)
		}
		return now, nil
	}})
	if err == nil && to.State == "drain" {
		select {
		case c.drains.begun <- struct{}{}:
		default:
		}
	}
	return err
}

// ErrNotAnnounced is returned for the drain of a node that announces no addresses.
var ErrNotAnnounced = errors.New("the configuration has no cluster.announce, so that no address would be withdrawn: 'sluice drain' refuses new connections instead")

// SetNode begins or ends the drain of this node, which withdraws the addresses that other nodes serve too. The drain
// survives restarts. The node serves the packets that still arrive.
func (c *Control) SetNode(ctx context.Context, by Author, drain bool) error {
	_, err := c.changeWithWaiting(&pendingChange{ctx: ctx, by: by, change: func(now store.Content) (store.Content, error) {
		if drain && now.Config.Announcements() == nil {
			return now, ErrNotAnnounced
		}
		now.States = slices.DeleteFunc(slices.Clone(now.States), func(s store.Override) bool { return s.Node })
		if drain {
			now.States = append(now.States, store.Override{Node: true, State: "drain"})
		}
		return now, nil
	}})
	return err
}

func overrides(of []store.Override) []engine.Override {
	var list []engine.Override
	for _, s := range of {
		list = append(list, engine.Override{Service: s.Service, Backend: s.Backend, Node: s.Node, State: states[s.State], Why: describeOverride(s)})
	}
	return list
}

// describeOverride describes a state set by the operator.
func describeOverride(s store.Override) string {
	who := "set by the operator"
	if s.Service == "" {
		who = "the gateway drains"
	}
	switch {
	case s.Then == "":
		return who
	case !s.Until.IsZero() && s.Then == Reset:
		return fmt.Sprintf("%s until %s, then its connections are ended", who, s.Until.Local().Format(time.DateTime))
	case !s.Until.IsZero():
		return fmt.Sprintf("%s until %s", who, s.Until.Local().Format(time.DateTime))
	case s.Then == Reset:
		return "drained: its connections were ended at the deadline"
	}
	return "drained: what connections it has after the deadline go on"
}
