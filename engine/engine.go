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
	"sync"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
)

// Health reports the health of backends.
type Health interface {
	// Configure replaces the set of checked backends. Backends in both sets keep their state.
	Configure(*config.Config)
	// Healthy returns the state of a backend; known is false until its first
	// probe has ended.
	Healthy(service, backend string) (healthy, known bool)
	// Why describes the reason for the backend's state.
	Why(service, backend string) string
}

// Options of an engine.
type Options struct {
	// Datapaths in the order in which they process a packet: eBPF, then nftables. The engine
	// prefers the first that supports a service or rule.
	Datapaths []datapath.Datapath
	Health    Health       // nil: every backend is up.
	Log       *slog.Logger // nil: slog.Default().
	Verbose   bool         // Log every change of every object.
	// Addresses holds the addresses of services and pools; nil: they are not held.
	Addresses Addresses
	// Announcer announces the addresses of services and pools; nil: they are not announced.
	Announcer Announcer
	// Node returns the node of a cluster that this host is, or an error if it is none. It may be nil without clusters.
	Node func(*config.Config) (string, error)
	// Uplinks follows the uplinks of the host; nil: a configuration with uplinks is refused.
	Uplinks Uplinks
	// Coming is the path of the file that stores the backends in slow start across restarts of the
	// daemon; "" disables it.
	Coming string
	// Settle is the maximum time that the first Apply waits for the first probes, so that a
	// restarted daemon does not declare working backends down. 0 means 5 s.
	Settle time.Duration
	// Applied is called after the datapaths applied a snapshot, including snapshots that were
	// reverted and those after a change of the network. It may be nil. It must not call the engine.
	Applied func()
	// Events receives state changes of backends and repairs of rules; may be nil.
	Events *event.Log
}

// Engine holds the configuration and the snapshots in force.
type Engine struct {
	opt            Options
	backendChanged chan struct{} // Has one element when a backend changed.
	networkChanged chan struct{} // Has one element when the network changed.

	mu       sync.Mutex                  // Serialises every Apply; protects all below.
	given    *config.Config              // The configuration passed to Apply.
	found    map[string][]config.Backend // Discovered backends by service.
	node     string                      // This host's node in given; "" without a cluster.
	config   *config.Config              // Given together with found, with the node's share of the pools.
	plan     placement
	inForce  map[string]*datapath.Snapshot // by datapath
	override map[backendKey]Override       // Set by the operator until cleared; an entry without a backend covers the whole gateway.
	// nodeDrains withdraws the addresses that other nodes serve too.
	nodeDrains bool
	prior      map[backendKey]priorState // Backends of inForce; nil until needed.
	since      map[backendKey]time.Time  // Start of each backend in slow start.
	earlier    []savedSlowStart          // Backends in slow start under the previous daemon; nil after the first apply.
	kept       []savedSlowStart          // Current content of the slow-start file.
	foreign    map[string][]time.Time    // Times at which rules changed by another program were put back, by datapath.
	missing    map[string]int            // Consecutive repairs that failed, by datapath, up to missingAfter.
	unkept     string                    // Why the slow-start file does not have that content; "" if it has.
	left       map[string]bool           // Datapaths with rules of an earlier daemon before the first apply.
	revision   uint64
	lastApply  Applied
	refused    error    // Error of the last refused configuration; nil if it is in force.
	warned     []string // Warnings of the last report.
	stopped    bool
}

type backendKey struct{ service, backend string }

// Applied is the outcome of an Apply.
type Applied struct {
	Revision uint64
	At       time.Time
	Changes  []*datapath.Change
	Err      error
	// Given is the configuration in force as passed to Apply; nil after an error.
	Given *config.Config

	config   *config.Config // including discovered backends
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
	e.readStarting()
	return e
}

// BackendChanged notifies the engine of a change in a backend's health. It never blocks.
func (e *Engine) BackendChanged() { signal(e.backendChanged) }

// NetworkChanged notifies the engine of a change of an interface, address or route. It never
// blocks.
func (e *Engine) NetworkChanged() { signal(e.networkChanged) }

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Apply puts a validated configuration in force on all datapaths, or on none: if one refuses, those
// that accepted are restored.
func (e *Engine) Apply(ctx context.Context, cfg *config.Config) (Applied, error) {
	return e.ApplyIf(ctx, cfg, nil)
}

// ErrChanged is returned by ApplyIf if another configuration is in force.
var ErrChanged = errors.New("another configuration is in force")

// ErrStopped is returned by every change after Stop.
var ErrStopped = errors.New("the daemon is ending")

// RecordRefusal records the error of a configuration that was refused before Apply.
func (e *Engine) RecordRefusal(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refused = err
}

// ApplyIf is Apply if expected accepts the configuration in force, which is nil before the first
// Apply. A nil expected accepts any.
func (e *Engine) ApplyIf(ctx context.Context, cfg *config.Config, expected func(*config.Config) bool) (Applied, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.applyIf(ctx, cfg, expected)
}

// Override is a state set by the operator, for a backend or, without a name, for the whole gateway.
// It is an upper limit: a backend is never in a better state.
type Override struct {
	Service, Backend string
	Node             bool // The node drains: its addresses are withdrawn, and it serves as before. State has no effect.
	State            datapath.State
	Why              string // "": set by the operator
}

// Config returns the configuration in force, nil before the first Apply.
func (e *Engine) Config() *config.Config {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.given
}

// ApplyStates is Apply of a configuration together with the complete list of operator states. Other
// backends lose theirs. If the configuration is already in force, only the states change.
func (e *Engine) ApplyStates(ctx context.Context, cfg *config.Config, states []Override) (Applied, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	before, nodeBefore := e.override, e.nodeDrains
	e.override, e.nodeDrains = map[backendKey]Override{}, false
	for _, o := range states {
		if o.Node {
			e.nodeDrains = true
			continue
		}
		e.override[backendKey{o.Service, o.Backend}] = o
	}
	e.withdrawBeforeDrain(before, nodeBefore)
	apply := func() (Applied, error) { return e.applyIf(ctx, cfg, nil) }
	if cfg == e.given {
		apply = func() (Applied, error) { return e.applyStates(ctx) }
	}
	applied, err := apply()
	if err != nil {
		e.override, e.nodeDrains = before, nodeBefore
		if e.config != nil {
			e.announce(e.config, e.plan, e.inForce)
		}
		return applied, err
	}
	if nodeBefore != e.nodeDrains {
		e.announce(e.config, e.plan, e.inForce) // no datapath may have changed
	}
	return e.publishView(applied), nil
}

// publishView stores the configuration in force and the last warnings in the outcome of an Apply.
func (e *Engine) publishView(a Applied) Applied {
	if a.Given, a.config, a.plan = e.given, e.config, e.plan; a.warnings == nil {
		a.warnings = e.warned
	}
	return a
}

// applyStates updates the datapaths after a change of the operator's states.
func (e *Engine) applyStates(ctx context.Context) (Applied, error) {
	if !e.statesChanged() {
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
	e.logApplied(applied)
	return e.publishView(applied), nil
}

func (e *Engine) apply(ctx context.Context, given *config.Config) (Applied, error) {
	if e.given == nil {
		e.dropUnfit(given)
	}
	node, err := e.identify(given)
	if err != nil {
		return Applied{}, err
	}
	cfg := e.withFound(given).ForNode(node)
	plan, err := e.assignObjects(cfg)
	if err != nil {
		return Applied{}, err
	}
	first := e.config == nil
	change, err := e.setUplinks(cfg)
	if err != nil {
		return Applied{}, err
	}
	e.configureHealth(cfg)
	if first {
		e.awaitFirstProbes(ctx, cfg)
	}
	applied, err := e.commit(ctx, cfg, plan)
	if err != nil {
		e.configureHealth(e.config)
		return applied, errors.Join(err, e.restoreUplinks())
	}
	if change != nil && !change.Empty() {
		applied.Changes = append(applied.Changes, change)
	}
	e.given, e.node = given, node
	return applied, nil
}

// configureHealth passes the configuration to the health monitor; nil stops all probes.
func (e *Engine) configureHealth(cfg *config.Config) {
	if e.opt.Health == nil {
		return
	}
	if cfg == nil {
		cfg = &config.Config{}
	}
	e.opt.Health.Configure(cfg)
}

// awaitFirstProbes waits until every backend with a check, and every uplink, has been probed once.
func (e *Engine) awaitFirstProbes(ctx context.Context, cfg *config.Config) {
	if e.opt.Health == nil && len(cfg.Uplinks) == 0 {
		return
	}
	deadline := time.NewTimer(e.opt.Settle)
	defer deadline.Stop()
	for !e.allKnown(cfg) {
		select {
		case <-ctx.Done():
			return
		case <-deadline.C:
			e.opt.Log.Warn("not every backend and uplink was probed before the first apply", "waited", e.opt.Settle)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (e *Engine) allKnown(cfg *config.Config) bool {
	if len(cfg.Uplinks) > 0 && !e.opt.Uplinks.Known() {
		return false
	}
	if e.opt.Health == nil {
		return true
	}
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

// Changes of the network arrive in groups, for example a link with its addresses and routes, or a
// whole routing table. The engine collects them for settleDelay and applies at most once every
// followInterval. Every repairInterval it checks whether another program changed the datapaths'
// rules, for example by "nft flush ruleset".
const (
	settleDelay    = 100 * time.Millisecond
	followInterval = time.Second
	retryInterval  = time.Second
	repairInterval = 2 * time.Second
)

// Run updates the datapaths after changes of backend health and of the network, and repairs rules
// that other programs changed, until the context ends.
func (e *Engine) Run(ctx context.Context) {
	var again, network <-chan time.Time
	var followed time.Time // Time of the last update after a network change.
	followError := ""      // Last one logged.
	repairError := ""      // Last one logged.
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
			// If a program changes rules continuously, reading them may use at most 5 % of the
			// time.
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
			err := e.applyAgain(ctx)
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

// Stop ends the engine. With keep the rules stay in the kernel and traffic continues. Otherwise all
// of Sluice's objects are removed.
func (e *Engine) Stop(ctx context.Context, keep bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = true // a change that waits for the lock must not restore them
	var errs []error
	if e.opt.Announcer != nil { // first, so that routers send no packets to a host that no longer serves them
		errs = append(errs, e.opt.Announcer.Release(keep))
	}
	if e.opt.Addresses != nil { // the same for neighbours
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
	if e.opt.Uplinks != nil {
		errs = append(errs, e.opt.Uplinks.Release(keep))
	}
	return errors.Join(errs...)
}
