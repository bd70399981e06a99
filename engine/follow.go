// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
)

// The reactions of the engine to changes of the host and of backends since the last apply.

// applyAgain applies the snapshots in force again, because their result depends on the host's
// interfaces, addresses and routes. A rule that waited for an interface moves to another datapath
// if its own does not support that interface.
func (e *Engine) applyAgain(ctx context.Context) error {
	if e.opt.Addresses != nil {
		e.opt.Addresses.Kick()
	}
	err := e.move(ctx)
	if errors.Is(err, ErrStopped) {
		return err
	}
	return errors.Join(err, e.reapplyWhere(ctx, slog.LevelInfo, "the network changed", func(datapath.Datapath) (bool, error) { return true, nil }))
}

// move repeats the placement if a datapath no longer supports one of its services or rules. Without
// an alternative, nothing changes.
func (e *Engine) move(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped || e.config == nil || !e.placementOutdated() {
		return nil
	}
	plan, err := e.assignObjects(e.config)
	if err != nil || samePlaces(e.config, e.plan, e.config, plan) {
		return err
	}
	applied, err := e.commit(ctx, e.config, plan)
	if err == nil {
		e.opt.Log.Info("the network changed: something is on another datapath now", "revision", applied.Revision)
		e.logApplied(applied)
	}
	return err
}

// placementOutdated reports whether a datapath no longer supports, or should no longer carry, a service or
// rule.
func (e *Engine) placementOutdated() bool {
	for _, d := range e.opt.Datapaths {
		s := e.inForce[d.Name()]
		if s == nil {
			continue
		}
		for i := range s.Services {
			if supportOfService(s.Services[i].Service).prefersOther(d) {
				return true
			}
		}
		for _, n := range s.NAT {
			if supportOfNAT(n).prefersOther(d) {
				return true
			}
		}
	}
	return false
}

// repair restores objects that other programs removed or changed.
func (e *Engine) repair(ctx context.Context) error {
	return e.reapplyWhere(ctx, slog.LevelWarn, "another program changed the rules: they are put back", func(d datapath.Datapath) (bool, error) {
		t, ok := d.(datapath.ChangeDetector)
		if !ok {
			return false, nil
		}
		return t.Touched()
	})
}

// Another program that changes the rules foreignTimes within foreignPeriod is probably another gateway, for
// example one of an older version, which knows no lock of the network namespace.
const (
	foreignTimes  = 3
	foreignPeriod = time.Minute
)

// noteForeign records that rules of a datapath were put back.
func (e *Engine) noteForeign(datapath string, now time.Time) {
	if e.foreign == nil {
		e.foreign = map[string][]time.Time{}
	}
	times := append(e.foreign[datapath], now)
	e.foreign[datapath] = times[max(0, len(times)-foreignTimes):]
}

// foreignWarnings returns the datapaths whose rules another program changes again and again.
func (e *Engine) foreignWarnings(now time.Time) (list []string) {
	for _, name := range slices.Sorted(maps.Keys(e.foreign)) {
		if times := e.foreign[name]; len(times) == foreignTimes && now.Sub(times[0]) < foreignPeriod {
			list = append(list, fmt.Sprintf("another program changes the rules of Sluice on %s again and again, and they are put back each time: is another gateway running in this network namespace?", name))
		}
	}
	return list
}

// reapplyWhere applies the snapshots in force to the datapaths that need it, and logs the reason if that
// changed something.
func (e *Engine) reapplyWhere(ctx context.Context, level slog.Level, why string, needs func(datapath.Datapath) (bool, error)) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped {
		return ErrStopped
	}
	var errs []error
	done := false
	for _, d := range e.opt.Datapaths {
		s := e.inForce[d.Name()]
		if s == nil {
			continue
		}
		need, err := needs(d)
		if need {
			var change *datapath.Change
			if change, err = d.Apply(ctx, s); err == nil && !change.Empty() {
				if level == slog.LevelWarn { // the change was made by a repair
					e.noteForeign(d.Name(), time.Now())
				}
				e.opt.Log.Log(ctx, level, why, "datapath", d.Name(), "objects", change.Objects, "rules", change.Rules, "elements", change.Elements)
				e.opt.Events.Add(event.Event{Kind: event.Apply, Object: d.Name(), Who: "sluice", What: why, Text: fmt.Sprintf("%s: %s", d.Name(), why)})
			}
			done = true
			if level == slog.LevelWarn || err == nil { // a failed apply leaves the present rules
				e.noteMissing(d.Name(), err != nil)
			}
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d.Name(), err))
		}
	}
	if done {
		e.opt.Applied()
	}
	return errors.Join(errs...)
}

// refresh applies the configuration in force if the state of a backend or an uplink differs from the snapshots.
func (e *Engine) refresh(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.config == nil || !e.statesChanged() {
		return nil
	}
	applied, err := e.commit(ctx, e.config, e.plan)
	if err == nil {
		e.opt.Log.Info("backends or uplinks changed", "revision", applied.Revision)
	}
	return err
}

func (e *Engine) statesChanged() bool {
	now, uplinks := time.Now(), e.uplinks(e.config)
	for _, snapshot := range e.inForce {
		if !datapath.SameUplinks(uplinks, snapshot.Uplinks) {
			return true
		}
		for k := range snapshot.Services {
			s := &snapshot.Services[k]
			for i := range s.Backends {
				if e.state(s.Service, i) != s.State[i] {
					return true
				}
			}
			if s.SlowStart > 0 && !slices.Equal(e.slowStartWeights(s.Service, s.State, s, now), s.Weights) {
				return true
			}
		}
	}
	return false
}
