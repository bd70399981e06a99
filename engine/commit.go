// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// commit applies the snapshots of a placement and stores them as in force.
func (e *Engine) commit(ctx context.Context, cfg *config.Config, plan placement) (Applied, error) {
	if e.stopped {
		return Applied{}, ErrStopped
	}
	e.revision++
	applied := Applied{Revision: e.revision, At: time.Now()}
	next := e.buildSnapshots(cfg, plan, applied.At)
	moved, order := e.movesTo(cfg, plan)
	noteMoves(next, moved)
	if e.config == nil {
		left, err := e.planAll(ctx, next)
		if err != nil {
			applied.Err, e.lastApply = err, applied
			return applied, err
		}
		if left {
			order = slices.Clone(order)
			slices.Reverse(order)
		}
	}
	for i, d := range order {
		change, err := d.Apply(ctx, next[d.Name()])
		changed := order[:i]
		if err == nil {
			applied.Changes = append(applied.Changes, change)
			if err = e.moveFlows(ctx, order[i+1:], d, moved[d.Name()]); err != nil {
				changed = slices.Concat(changed, order[i+1:]) // the datapaths that hand over flows have stopped opening new ones
			}
		}
		if err != nil {
			applied.Err = fmt.Errorf("%s: %w", d.Name(), err)
			if undo := e.restore(changed, d); undo != nil {
				applied.Err = errors.Join(applied.Err, undo)
			}
			e.lastApply = applied
			e.opt.Applied() // the undone change may have ended mappings
			return applied, applied.Err
		}
	}
	clearMoves(next)
	if change := e.holdAddresses(cfg, plan); change != nil && !change.Empty() {
		applied.Changes = append(applied.Changes, change)
	}
	e.missing = nil
	if change := e.announce(cfg, plan, next); change != nil && !change.Empty() {
		applied.Changes = append(applied.Changes, change)
	}
	e.recordStates(e.inForce, next)
	e.noteStarting(next, applied.At)
	e.config, e.plan, e.inForce, e.prior = cfg, plan, next, nil
	e.lastApply = applied
	e.opt.Applied()
	return applied, nil
}

// logApplied logs the changes of a requested apply, and each new warning once.
func (e *Engine) logApplied(a Applied) {
	for _, c := range a.Changes {
		if c.Empty() {
			continue
		}
		e.opt.Log.Info("applied", "datapath", c.Datapath, "revision", a.Revision, "rules", c.Rules, "elements", c.Elements, "objects", c.Objects, "took", c.Duration)
		if e.opt.Verbose {
			for _, line := range c.Lines {
				e.opt.Log.Info(line, "datapath", c.Datapath)
			}
		}
	}
	warnings := e.warnings()
	for _, w := range warnings {
		if !slices.Contains(e.warned, w) {
			e.opt.Log.Warn(w)
		}
	}
	e.warned = warnings
}

// planAll reports whether an earlier daemon left rules in the kernel. It is called before the first
// apply. Such rules carry traffic, and this process could not restore them after a failed apply.
// Every datapath therefore plans its snapshot first. nftables, which applies everything or nothing,
// is applied before eBPF.
func (e *Engine) planAll(ctx context.Context, next map[string]*datapath.Snapshot) (any bool, err error) {
	e.left = map[string]bool{}
	for _, d := range e.opt.Datapaths {
		l, ok := d.(datapath.Adopter)
		if !ok {
			continue
		}
		left, err := l.Left()
		if err != nil {
			return false, fmt.Errorf("%s: what an earlier daemon left: %w", d.Name(), err)
		}
		e.left[d.Name()] = left
		any = any || left
	}
	if !any {
		return false, nil
	}
	for _, d := range e.opt.Datapaths {
		if _, err := d.Plan(ctx, next[d.Name()]); err != nil {
			return false, fmt.Errorf("%s: %w", d.Name(), err)
		}
	}
	return true, nil
}

// restore applies the snapshots in force again, on the datapaths that accepted the newer ones and
// on the datapath that failed, which may have failed after its transaction or after creating
// tables. It runs even if the caller's context has ended.
func (e *Engine) restore(taken []datapath.Datapath, failed datapath.Datapath) error {
	var errs []error
	for _, d := range append(slices.Clone(taken), failed) {
		old := e.inForce[d.Name()]
		switch {
		case old != nil:
			if _, err := d.Apply(context.Background(), old); err != nil {
				errs = append(errs, fmt.Errorf("%s: going back to revision %d: %w", d.Name(), old.Revision, err))
			}
		case !e.left[d.Name()]:
			if err := d.Remove(context.Background()); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", d.Name(), err))
			}
		case d != failed:
			errs = append(errs, fmt.Errorf("%s has its part of the new rules: those that an earlier daemon left cannot be put back", d.Name()))
		}
	}
	return errors.Join(errs...)
}
