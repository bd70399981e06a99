// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// state returns the state of one backend. The operator's override has precedence, then the health
// check, then "drain" of the configuration. While the whole gateway drains, no backend is up.
func (e *Engine) state(s *config.Service, i int) datapath.State {
	return max(e.stateWithoutOverride(s, i), e.override[backendKey{}].State)
}

func (e *Engine) stateWithoutOverride(s *config.Service, i int) datapath.State {
	b := &s.Backends[i]
	if o, ok := e.override[backendKey{s.Name, b.Name}]; ok {
		return o.State
	}
	if s.Check != nil && e.opt.Health != nil {
		switch healthy, known := e.opt.Health.Healthy(s.Name, b.Name); {
		case known && !healthy:
			return datapath.Down
		case !known:
			if state := e.stateBeforeProbe(s, b); state > datapath.Drain {
				return state
			}
		}
	}
	if b.Drain {
		return datapath.Drain
	}
	return datapath.Up
}

// priorState is the state of a backend in the snapshots in force.
type priorState struct {
	address netip.Addr
	port    uint16
	state   datapath.State
}

// stateBeforeProbe returns the state of a backend that has not been probed. A backend in force keeps its
// state, because a new or changed check must not end the connections of every backend. A new
// backend gets the "initial" state of its check. It may have connections from before a recent
// removal, which do not end because of that.
func (e *Engine) stateBeforeProbe(s *config.Service, b *config.Backend) datapath.State {
	if e.prior == nil {
		e.prior = map[backendKey]priorState{}
		for _, snapshot := range e.inForce {
			for _, in := range snapshot.Services {
				for i := range in.Backends {
					b := &in.Backends[i]
					e.prior[backendKey{in.Name, b.Name}] = priorState{b.Address, b.Port, in.State[i]}
				}
			}
		}
	}
	if was, ok := e.prior[backendKey{s.Name, b.Name}]; ok && was.address == b.Address && was.port == b.Port {
		return was.state
	}
	if s.Check.Initial == "up" {
		return datapath.Up
	}
	return datapath.Unprobed
}

// SetState overrides the state of a backend until ClearState; the change is
// applied before it returns.
func (e *Engine) SetState(ctx context.Context, service, backend string, state datapath.State) error {
	return e.changeOverride(ctx, service, backend, state.String(), func(k backendKey) { e.override[k] = Override{State: state} })
}

// ClearState removes the override of a backend.
func (e *Engine) ClearState(ctx context.Context, service, backend string) error {
	return e.changeOverride(ctx, service, backend, "auto", func(k backendKey) { delete(e.override, k) })
}

func (e *Engine) changeOverride(ctx context.Context, service, backend, to string, change func(backendKey)) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := MustHave(e.config, service, backend); err != nil {
		return err
	}
	before := maps.Clone(e.override)
	change(backendKey{service, backend})
	if e.statesChanged() {
		if _, err := e.commit(ctx, e.config, e.plan); err != nil {
			e.override = before
			return err
		}
	}
	e.opt.Log.Info("backend set by the operator", "service", service, "backend", backend, "state", to)
	return nil
}

// ErrNotFound is wrapped by errors about objects that do not exist.
var ErrNotFound = errors.New("not found")

// MustHave returns an error if the backend is not in the configuration, which may be nil.
func MustHave(cfg *config.Config, service, backend string) error {
	if cfg != nil {
		for i := range cfg.Services {
			s := &cfg.Services[i]
			if s.Name == service && slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return b.Name == backend }) {
				return nil
			}
		}
	}
	return fmt.Errorf("service %s has no backend %s: %w in force; 'sluice show backends' lists those that are", service, backend, ErrNotFound)
}
