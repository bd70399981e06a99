// SPDX-License-Identifier: Apache-2.0

// Package engine is the reconciler: it places services and rules on datapaths,
// joins the configuration with the health of the backends into snapshots, and is
// the only caller of datapath.Apply.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
)

// Health tells which backends work.
type Health interface {
	// Configure replaces what is checked. Backends that stay keep their state.
	Configure(*config.Config)
	// Healthy returns the state of a backend; known is false until its first
	// probe has ended.
	Healthy(service, backend string) (healthy, known bool)
	// Why says in words why the backend is in its state.
	Why(service, backend string) string
}

// Options of an engine.
type Options struct {
	// Datapaths in the order in which a packet meets them: eBPF, then nftables. The engine
	// prefers the first that can carry a service or rule.
	Datapaths []datapath.Datapath
	Health    Health       // nil: every backend is up
	Log       *slog.Logger // nil: slog.Default()
	Verbose   bool         // log every change of every object
	// Addresses holds the addresses of services and pools; nil: they are not held.
	Addresses Addresses
	// Coming is the file that keeps since when backends come by slow-start, over restarts of the daemon;
	// "": it is not kept.
	Coming string
	// Settle is how long the first Apply waits for the first probes, so that a restarted daemon
	// does not declare working backends down; 0 means 5 s.
	Settle time.Duration
	// Applied is called after the datapaths applied a snapshot: also when it was undone again, and also
	// when a change of the network was the cause. It may be nil. It must not call the engine.
	Applied func()
	// Events is told of backends that change their state, and of rules that were put back; nil for nobody.
	Events *event.Log
}

// Engine holds what is in force.
type Engine struct {
	opt            Options
	backendChanged chan struct{} // has one element when a backend changed
	networkChanged chan struct{} // has one element when the network changed

	mu        sync.Mutex                  // serialises every Apply; protects all below
	given     *config.Config              // as it was given to Apply
	found     map[string][]config.Backend // by service: joins given
	config    *config.Config              // both together
	plan      placement
	inForce   map[string]*datapath.Snapshot // by datapath
	override  map[backendKey]Override       // by the operator, until cleared; of no backend: of the whole gateway
	prior     map[backendKey]priorState     // backends of inForce; nil until needed
	since     map[backendKey]time.Time      // backends that come by slow-start, and since when
	earlier   []coming                      // those that an earlier daemon saw come; nil after the first apply
	kept      []coming                      // what the file of them says
	left      map[string]bool               // datapaths that held an earlier daemon's rules before the first apply
	revision  uint64
	lastApply Applied
	refused   error    // why the last configuration is not in force; nil when it is
	warned    []string // what the last report warned of
	stopped   bool
}

type backendKey struct{ service, backend string }

// Applied is the outcome of an Apply.
type Applied struct {
	Revision uint64
	At       time.Time
	Changes  []*datapath.Change
	Err      error
	// Given is the configuration that is in force since then, as it was given to Apply; nil after an error.
	Given *config.Config

	config   *config.Config // with what was found
	plan     placement
	warnings []string
}

// New returns an engine with nothing in force.
func New(opt Options) *Engine {
	if opt.Log == nil {
		opt.Log = slog.Default()
	}
	if opt.Applied == nil {
		opt.Applied = func() {}
	}
	if opt.Settle == 0 {
		opt.Settle = 5 * time.Second
	}
	e := &Engine{
		opt:            opt,
		backendChanged: make(chan struct{}, 1),
		networkChanged: make(chan struct{}, 1),
		inForce:        map[string]*datapath.Snapshot{},
		override:       map[backendKey]Override{},
	}
	e.readComing()
	return e
}

// Kick tells the engine that the health of a backend changed. It never blocks.
func (e *Engine) Kick() { signal(e.backendChanged) }

// NetworkChanged tells the engine that an interface, address or route came, went
// or changed. It never blocks.
func (e *Engine) NetworkChanged() { signal(e.networkChanged) }

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Apply puts a validated configuration in force on all datapaths, or none: when
// one refuses, those that had accepted go back to what they had.
func (e *Engine) Apply(ctx context.Context, cfg *config.Config) (Applied, error) {
	return e.ApplyIf(ctx, cfg, nil)
}

// ErrChanged is what ApplyIf returns when it must not apply.
var ErrChanged = errors.New("another configuration is in force")

// ErrStopped is returned by every change after Stop.
var ErrStopped = errors.New("the daemon is ending")

// Refuse records why a configuration was refused before Apply.
func (e *Engine) Refuse(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refused = err
}

// ApplyIf is Apply on the condition that the configuration in force, nil for none, is
// still the one that is expected; nil expects any.
func (e *Engine) ApplyIf(ctx context.Context, cfg *config.Config, expected func(*config.Config) bool) (Applied, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.applyIf(ctx, cfg, expected)
}

// Override is the state that the operator gave a backend, or without a name the whole gateway: no
// backend is in a better one.
type Override struct {
	Service, Backend string
	State            datapath.State
	Why              string // "": set by the operator
}

// Config returns the configuration in force, nil before the first Apply.
func (e *Engine) Config() *config.Config {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.given
}

// ApplyStates is Apply of a configuration together with all states that the operator gives to
// backends; others have none from then on. Of the configuration in force it changes only the states.
func (e *Engine) ApplyStates(ctx context.Context, cfg *config.Config, states []Override) (Applied, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.override
	e.override = map[backendKey]Override{}
	for _, o := range states {
		e.override[backendKey{o.Service, o.Backend}] = o
	}
	apply := func() (Applied, error) { return e.applyIf(ctx, cfg, nil) }
	if cfg == e.given {
		apply = func() (Applied, error) { return e.applyStates(ctx) }
	}
	applied, err := apply()
	if err != nil {
		e.override = before
		return applied, err
	}
	return e.view(applied), nil
}

// view notes in the outcome of an Apply what is in force, and the last warnings.
func (e *Engine) view(a Applied) Applied {
	if a.Given, a.config, a.plan = e.given, e.config, e.plan; a.warnings == nil {
		a.warnings = e.warned
	}
	return a
}

// applyStates has the datapaths follow the operator's states.
func (e *Engine) applyStates(ctx context.Context) (Applied, error) {
	if !e.stale() {
		return Applied{Revision: e.lastApply.Revision, At: e.lastApply.At, warnings: e.warnings()}, nil
	}
	return e.commit(ctx, e.config, e.plan)
}

func (e *Engine) applyIf(ctx context.Context, cfg *config.Config, expected func(*config.Config) bool) (Applied, error) {
	if expected != nil && !expected(e.given) {
		return Applied{}, ErrChanged
	}
	applied, err := e.apply(ctx, cfg)
	if e.refused = err; err != nil {
		return applied, err
	}
	e.report(applied)
	return e.view(applied), nil
}

func (e *Engine) apply(ctx context.Context, given *config.Config) (Applied, error) {
	cfg := e.withFound(given)
	plan, err := e.place(cfg)
	if err != nil {
		return Applied{}, err
	}
	first := e.config == nil
	e.check(cfg)
	if first {
		e.settle(ctx, cfg)
	}
	applied, err := e.commit(ctx, cfg, plan)
	if err != nil {
		e.check(e.config)
		return applied, err
	}
	e.given = given
	return applied, nil
}

// check hands the configuration to the health monitor; nil stops all probes.
func (e *Engine) check(cfg *config.Config) {
	if e.opt.Health == nil {
		return
	}
	if cfg == nil {
		cfg = &config.Config{}
	}
	e.opt.Health.Configure(cfg)
}

// settle waits until every backend with a check was probed once.
func (e *Engine) settle(ctx context.Context, cfg *config.Config) {
	if e.opt.Health == nil {
		return
	}
	deadline := time.NewTimer(e.opt.Settle)
	defer deadline.Stop()
	for !e.allKnown(cfg) {
		select {
		case <-ctx.Done():
			return
		case <-deadline.C:
			e.opt.Log.Warn("not every backend was probed before the first apply", "waited", e.opt.Settle)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (e *Engine) allKnown(cfg *config.Config) bool {
	for _, s := range cfg.Services {
		if s.Check == nil {
			continue
		}
		for _, b := range s.Backends {
			if _, known := e.opt.Health.Healthy(s.Name, b.Name); !known {
				return false
			}
		}
	}
	return true
}

// Changes of the network come in groups, for example a link with its addresses and routes, or a whole
// routing table. The engine collects them for settleDelay and applies at most once every
// followInterval. Every repairInterval it asks the datapaths whether another program changed their
// rules, for example by "nft flush ruleset".
const (
	settleDelay    = 100 * time.Millisecond
	followInterval = time.Second
	retryInterval  = time.Second
	repairInterval = 2 * time.Second
)

// Run follows the health of the backends and the network, and repairs what other
// programs do to the rules, until the context ends.
func (e *Engine) Run(ctx context.Context) {
	var again, network <-chan time.Time
	var followed time.Time // when the datapaths last followed the network
	followError := ""      // last one logged
	repairError := ""      // last one logged
	go e.slowStarts(ctx)
	repairs := time.NewTicker(repairInterval)
	defer repairs.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-repairs.C:
			text, start := "", time.Now()
			err := e.repair(ctx)
			// A program that changes rules all the time must not make this one read them all the time: at most 5 %.
			repairs.Reset(max(repairInterval, 20*time.Since(start)))
			if errors.Is(err, ErrStopped) {
				return
			}
			if err != nil {
				if text = err.Error(); text != repairError {
					e.opt.Log.Error("another program may have changed the rules, and they could not be put back; trying again", "every", repairInterval, "error", err)
				}
			}
			repairError = text
			continue
		case <-e.networkChanged:
			if network == nil {
				network = time.After(max(settleDelay, followInterval-time.Since(followed)))
			}
			continue
		case <-network:
			network, followed = nil, time.Now()
			err := e.reapply(ctx)
			if errors.Is(err, ErrStopped) {
				return
			}
			if err == nil {
				followError = ""
				continue
			}
			if err.Error() != followError {
				followError = err.Error()
				e.opt.Log.Error("the network changed, but the datapath did not follow; trying again", "every", retryInterval, "error", err)
			}
			network = time.After(retryInterval)
			continue
		case <-e.backendChanged:
		case <-again:
		}
		again = nil
		err := e.refresh(ctx)
		if errors.Is(err, ErrStopped) {
			return
		}
		if err != nil {
			e.opt.Log.Error("backends changed, but the datapath did not follow; trying again", "after", retryInterval, "error", err)
			again = time.After(retryInterval)
		}
	}
}

// state of one backend. The operator's override comes first, then the health check, then "drain" of
// the configuration. While the whole gateway drains, none is up.
func (e *Engine) state(s *config.Service, i int) datapath.State {
	return max(e.ownState(s, i), e.override[backendKey{}].State)
}

func (e *Engine) ownState(s *config.Service, i int) datapath.State {
	b := &s.Backends[i]
	if o, ok := e.override[backendKey{s.Name, b.Name}]; ok {
		return o.State
	}
	if s.Check != nil && e.opt.Health != nil {
		switch healthy, known := e.opt.Health.Healthy(s.Name, b.Name); {
		case known && !healthy:
			return datapath.Down
		case !known:
			if state := e.unprobed(s, b); state > datapath.Drain {
				return state
			}
		}
	}
	if b.Drain {
		return datapath.Drain
	}
	return datapath.Up
}

// priorState is a backend as the snapshots in force have it.
type priorState struct {
	address netip.Addr
	port    uint16
	state   datapath.State
}

// unprobed is the state of a backend that was not probed yet. A backend that is already in force keeps its state,
// because a new or changed check must not end the connections of every backend. A new backend has the state that the
// check's "initial" gives; it may have connections from before it left a moment ago, which do not end for that.
func (e *Engine) unprobed(s *config.Service, b *config.Backend) datapath.State {
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

// ClearState gives a backend back to its configuration and its check.
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
	if e.stale() {
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

// MustHave returns why a backend is not one of the configuration's, which may be nil.
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

// Stop ends the engine. With keep the rules stay in the kernel and traffic goes
// on; otherwise everything of Sluice's is removed.
func (e *Engine) Stop(ctx context.Context, keep bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = true // a change that waits for the lock must not put back what is removed
	var errs []error
	if e.opt.Addresses != nil { // first, so that clients are not sent to a host that no longer serves them
		errs = append(errs, e.opt.Addresses.Release(keep))
	}
	for _, d := range e.opt.Datapaths {
		if !keep {
			if err := d.Remove(ctx); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", d.Name(), err))
			}
		}
		if err := d.Close(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d.Name(), err))
		}
	}
	return errors.Join(errs...)
}
