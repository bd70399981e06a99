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

// recordStates records an event for each change of a backend's state. Added and removed backends
// are part of the event for the changed configuration.
func (e *Engine) recordStates(before, next map[string]*datapath.Snapshot) {
	if e.opt.Events == nil || e.config == nil {
		return
	}
	var byName map[string]datapath.Service // built if the order of services changed
	for datapathName, s := range next {
		old := before[datapathName]
		for i, sv := range s.Services {
			if old != nil && i < len(old.Services) && old.Services[i].Name == sv.Name {
				e.tellStatesOf(old.Services[i], sv)
				continue
			}
			if byName == nil {
				byName = servicesOf(before)
			}
			if was, ok := byName[sv.Name]; ok {
				e.tellStatesOf(was, sv)
			}
		}
	}
}

// servicesOf returns the services of all datapaths by their names.
func servicesOf(snapshots map[string]*datapath.Snapshot) map[string]datapath.Service {
	services := map[string]datapath.Service{}
	for _, s := range snapshots {
		for _, sv := range s.Services {
			services[sv.Name] = sv
		}
	}
	return services
}

func (e *Engine) tellStatesOf(old, now datapath.Service) {
	for i, b := range now.Backends {
		at := i
		if at >= len(old.Backends) || old.Backends[at].Name != b.Name {
			at = slices.IndexFunc(old.Backends, func(o config.Backend) bool { return o.Name == b.Name })
		}
		if at < 0 || old.State[at] == now.State[i] {
			continue
		}
		object, state, why := now.Name+"/"+b.Name, now.State[i].String(), e.stateReason(now.Service, i)
		text := fmt.Sprintf("backend %s is %s", object, state)
		if why != "" {
			text += ": " + why
		}
		e.opt.Events.Add(event.Event{Kind: event.Backend, Object: object, State: state, Why: why, Text: text})
	}
}

// Reading returns the fill level of the datapaths' tables, their drops, and the warnings.
func (e *Engine) Reading(ctx context.Context) (r event.Reading) {
	for _, d := range e.opt.Datapaths {
		g, ok := d.(datapath.Gauger)
		if !ok {
			continue
		}
		c, err := g.Gauges(ctx)
		if err != nil {
			continue // the next request for its counters returns the error
		}
		for _, t := range c.Tables {
			kind := event.Table
			if t.Name == "ports" {
				kind = event.Ports
			}
			r.Gauges = append(r.Gauges, event.Gauge{Kind: kind, Object: d.Name() + "/" + t.Name, Used: t.Used, Size: t.Size})
		}
		r.Drops = append(r.Drops, dropsByReason(d.Name(), c.Reasons)...)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r.Warnings = e.warnings()
	return r
}

// dropsByReason sums the dropped packets of all families by their reason.
func dropsByReason(name string, reasons []datapath.ReasonCounter) (out []event.Dropped) {
	for _, c := range reasons {
		if c.Action != "drop" {
			continue
		}
		object := name + "/" + c.Reason
		i := slices.IndexFunc(out, func(d event.Dropped) bool { return d.Object == object })
		if i < 0 {
			i, out = len(out), append(out, event.Dropped{Object: object})
		}
		out[i].Packets += c.Packets
	}
	return out
}
