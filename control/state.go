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

// states are what an operator can set a backend to; "auto", which is not among them, removes that setting.
var states = map[string]datapath.State{"up": datapath.Up, "drain": datapath.Drain, "down": datapath.Down}

// What becomes of the connections that are left when a drain ends.
const (
	Keep  = "keep"  // they go on
	Reset = "reset" // they are ended
)

// MaxDeadline bounds how long a drain may take.
const MaxDeadline = 30 * 24 * time.Hour

// State is what the operator makes of a backend.
type State struct {
	State    string        // up, drain, down, or auto: what configuration and check say
	Deadline time.Duration // of drain, until it ends; 0: never
	Then     string        // Keep or Reset, with a deadline; "" is Keep
}

// ErrState is wrapped by errors about a state that nobody can give a backend.
var ErrState = errors.New("not a state")

// check returns what is wrong with it.
func (s State) check() error {
	if err := s.wrong(); err != nil {
		return stateError{err}
	}
	return nil
}

// stateError is an ErrState in words of its own.
type stateError struct{ error }

func (stateError) Is(err error) bool { return err == ErrState }

func (s State) wrong() error {
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

// SetState gives a backend a state, up, drain or down, until auto takes it back; without names the whole
// gateway, which can drain alone. It survives restarts. SetState returns [engine.ErrChanged] when
// expected, which may be nil, does not accept the configuration in force.
func (c *Control) SetState(ctx context.Context, by Author, service, backend string, to State, expected func(*config.Config) bool) error {
	if err := to.check(); err != nil {
		return err
	}
	if service == "" && to.State != "drain" && to.State != "auto" {
		return stateError{fmt.Errorf("state %q: the whole gateway can drain alone", to.State)}
	}
	made := store.State{Service: service, Backend: backend, State: to.State}
	if to.Deadline > 0 {
		made.Until, made.Then = time.Now().Add(to.Deadline).UTC().Truncate(time.Millisecond), to.Then
		if made.Then == "" {
			made.Then = Keep
		}
	}
	_, err := c.together(&request{ctx: ctx, by: by, change: func(now store.Content) (store.Content, error) {
		if expected != nil && !expected(now.Config) {
			return now, engine.ErrChanged
		}
		if service != "" {
			if err := engine.MustHave(now.Config, service, backend); err != nil && !c.engine.Has(service, backend) {
				return now, err
			}
		}
		now.States = slices.DeleteFunc(slices.Clone(now.States), func(s store.State) bool { return s.Service == service && s.Backend == backend })
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

func overrides(of []store.State) []engine.Override {
	var list []engine.Override
	for _, s := range of {
		list = append(list, engine.Override{Service: s.Service, Backend: s.Backend, State: states[s.State], Why: why(s)})
	}
	return list
}

// why is what an operator made of a backend, in words.
func why(s store.State) string {
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
