// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
)

// movesBySource are the services and NAT rules that move to one datapath, by source datapath. They are
// named as in datapath.Listener.
type movesBySource map[string]map[string]bool

// movesTo returns the moves to each datapath if a configuration replaces the one in force, and the
// order of applying the datapaths. The receiver of a service is applied before its present owner,
// because in between no datapath would carry it. If two datapaths exchange services, the moves to
// the first one are omitted.
func (e *Engine) movesTo(cfg *config.Config, plan placement) (map[string]movesBySource, []datapath.Datapath) {
	if e.config == nil || samePlaces(e.config, e.plan, cfg, plan) {
		return nil, e.opt.Datapaths
	}
	was := map[string]string{}
	eachPlace(e.config, e.plan, func(name, at string) { was[name] = at })
	all := map[string]movesBySource{}
	order := e.opt.Datapaths
	eachPlace(cfg, plan, func(name, to string) {
		from := was[name]
		if from == "" || from == to {
			return
		}
		if all[to] == nil {
			all[to] = movesBySource{}
		}
		if all[to][from] == nil {
			all[to][from] = map[string]bool{}
		}
		all[to][from][name] = true
		if from == order[0].Name() {
			order = slices.Clone(e.opt.Datapaths)
			slices.Reverse(order)
		}
	})
	for i, to := range order {
		for _, from := range order[:i] {
			delete(all[to.Name()], from.Name())
		}
	}
	return all, order
}

// samePlaces reports whether two configurations have the same services and NAT rules on the same datapaths, in
// the same order.
func samePlaces(a *config.Config, at placement, b *config.Config, bt placement) bool {
	same := func(p, q Place) bool { return slices.Equal(p.Datapaths, q.Datapaths) }
	if !slices.EqualFunc(at.services, bt.services, same) || !slices.EqualFunc(at.nat, bt.nat, same) {
		return false
	}
	for i := range a.Services {
		if a.Services[i].Name != b.Services[i].Name {
			return false
		}
	}
	for i := range a.NAT {
		if a.NAT[i].Name != b.NAT[i].Name {
			return false
		}
	}
	return true
}

// eachPlace calls yield for each service and NAT rule with its datapath.
func eachPlace(cfg *config.Config, plan placement, yield func(name, at string)) {
	for i, p := range plan.services {
		if len(p.Datapaths) > 0 {
			yield("service "+cfg.Services[i].Name, p.Datapaths[0])
		}
	}
	for i, p := range plan.nat {
		if len(p.Datapaths) > 0 {
			yield("nat "+cfg.NAT[i].Name, p.Datapaths[0])
		}
	}
}

// noteMoves adds the moved services and rules to the snapshots of sender and receiver.
func noteMoves(next map[string]*datapath.Snapshot, moved map[string]movesBySource) {
	for to, by := range moved {
		if len(by) > 0 {
			next[to].Arriving = map[string]bool{}
		}
		for from, names := range by {
			if next[from].Gone == nil {
				next[from].Gone = map[string]bool{}
			}
			for name := range names {
				next[to].Arriving[name] = true
				next[from].Gone[name] = true
			}
		}
	}
}

// clearMoves removes the moves from snapshots that are in force.
func clearMoves(next map[string]*datapath.Snapshot) {
	for name, s := range next {
		if s.Arriving != nil || s.Gone != nil {
			settled := *s
			settled.Arriving, settled.Gone = nil, nil
			next[name] = &settled
		}
	}
}

// moveFlows transfers flows to an applied datapath from datapaths that are applied later.
func (e *Engine) moveFlows(ctx context.Context, givers []datapath.Datapath, to datapath.Datapath, by movesBySource) error {
	taker, ok := to.(datapath.Mover)
	if !ok {
		return nil
	}
	for _, d := range givers {
		giver, ok := d.(datapath.Mover)
		if !ok || by[d.Name()] == nil {
			continue
		}
		flows, err := giver.Give(ctx, by[d.Name()])
		if err != nil {
			return fmt.Errorf("flows of %s: %w", d.Name(), err)
		}
		made, err := taker.Take(ctx, flows)
		if err != nil {
			return err
		}
		if len(flows) > 0 {
			text := fmt.Sprintf("%d of %d flows moved from %s to %s", made, len(flows), d.Name(), to.Name())
			e.opt.Log.Info(text)
			e.opt.Events.Add(event.Event{Kind: event.Apply, Object: to.Name(), Who: "sluice", What: "move", Text: text})
		}
	}
	return nil
}
