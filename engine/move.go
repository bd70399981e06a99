// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
)

// moves names services and port-forwards, as datapath.Listener does, that go to one datapath, by the
// datapath that they come from.
type moves map[string]map[string]bool

// moved returns what goes to each datapath when a configuration takes the place of the one in force.
func (e *Engine) moved(cfg *config.Config, plan placement) map[string]moves {
	if e.config == nil {
		return nil
	}
	was := map[string]string{}
	for i, p := range e.plan.services {
		if len(p.Datapaths) > 0 {
			was["service "+e.config.Services[i].Name] = p.Datapaths[0]
		}
	}
	for i, p := range e.plan.nat {
		if len(p.Datapaths) > 0 && e.config.NAT[i].Type == config.NATPortForward {
			was["nat "+e.config.NAT[i].Name] = p.Datapaths[0]
		}
	}
	all := map[string]moves{}
	note := func(name string, p Place) {
		from := was[name]
		if from == "" || len(p.Datapaths) == 0 || p.Datapaths[0] == from {
			return
		}
		to := p.Datapaths[0]
		if all[to] == nil {
			all[to] = moves{}
		}
		if all[to][from] == nil {
			all[to][from] = map[string]bool{}
		}
		all[to][from][name] = true
	}
	for i, p := range plan.services {
		note("service "+cfg.Services[i].Name, p)
	}
	for i, p := range plan.nat {
		if cfg.NAT[i].Type == config.NATPortForward {
			note("nat "+cfg.NAT[i].Name, p)
		}
	}
	return all
}

// noteMoves tells each datapath what comes to it from another one, and what goes.
func noteMoves(next map[string]*datapath.Snapshot, moved map[string]moves) {
	for to, by := range moved {
		next[to].Arriving = map[string]bool{}
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

// settle takes that out of snapshots that are in force.
func settle(next map[string]*datapath.Snapshot) {
	for name, s := range next {
		if s.Arriving != nil || s.Gone != nil {
			settled := *s
			settled.Arriving, settled.Gone = nil, nil
			next[name] = &settled
		}
	}
}

// moveFlows moves flows to a datapath that was applied from those that are still to be.
func (e *Engine) moveFlows(ctx context.Context, givers []datapath.Datapath, to datapath.Datapath, by moves) error {
	taker, ok := to.(datapath.Mover)
	if !ok || len(by) == 0 {
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
		text := fmt.Sprintf("%d of %d flows moved from %s to %s", made, len(flows), d.Name(), to.Name())
		e.opt.Log.Info(text)
		e.opt.Events.Add(event.Event{Kind: event.Apply, Object: to.Name(), Who: "sluice", What: "move", Text: text})
		delete(by, d.Name())
	}
	if len(by) == 0 {
		return nil
	}
	_, err := taker.Take(ctx, nil) // where the other one went first nothing is left to wait for
	return err
}
