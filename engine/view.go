// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/uplink"
)

// View is a copy of the state in force for display.
type View struct {
	Config   *config.Config // nil before the first Apply.
	Node     string         // This host's node in a cluster, or "".
	Applied  Applied        // Err is also set by a later configuration that was refused.
	Services []ServiceView
	NAT      []Place // Parallel to Config.NAT.
	Rules    []Place // Parallel to Config.Firewall.Rules.
	// Warnings are conditions of this host that prevent rules from working.
	Warnings []string
	// Addresses are the addresses of services and pools, and the hosts that answer for them.
	Addresses []hold.Status
	// NodeDrains reports that the operator withdrew the addresses of services.
	NodeDrains bool
	// Announcements are the announced and the withdrawn addresses.
	Announcements []announce.Status
	// Uplinks are the uplinks with their states.
	Uplinks []uplink.Status
	// Attachments are the hooks of the datapaths on the host's interfaces.
	Attachments []datapath.Attachment
}

// ServiceView is one service with its datapath and its backends' states.
type ServiceView struct {
	datapath.Service
	Place Place
	// Why is the reason of each backend's state, by index; may be empty.
	Why []string
}

// View returns the state in force.
func (e *Engine) View() View {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := View{Config: e.given, Node: e.node, NodeDrains: e.nodeDrains, Applied: e.lastApply, NAT: e.plan.nat, Rules: e.plan.rules, Warnings: e.warnings()}
	if v.Applied.Err == nil {
		v.Applied.Err = e.refused
	}
	if e.opt.Addresses != nil {
		v.Addresses = e.opt.Addresses.Statuses()
	}
	if e.opt.Announcer != nil {
		v.Announcements = e.opt.Announcer.Statuses()
	}
	if e.opt.Uplinks != nil {
		v.Uplinks = e.opt.Uplinks.Statuses()
	}
	for _, d := range e.opt.Datapaths {
		if a, ok := d.(datapath.Attacher); ok {
			v.Attachments = append(v.Attachments, a.Attachments()...)
		}
	}
	if e.config == nil {
		return v
	}
	// The states of the snapshots. Later results of checks are not in force before the next Apply
	// returns.
	inForce := servicesOf(e.inForce)
	v.Services = make([]ServiceView, 0, len(e.config.Services))
	for i := range e.config.Services {
		s, ok := inForce[e.config.Services[i].Name]
		if !ok {
			s = e.serviceSnapshot(&e.config.Services[i], e.serviceFinder(), time.Now())
		}
		view := ServiceView{Service: s, Place: e.plan.services[i], Why: make([]string, len(s.Backends))}
		for b := range s.Backends {
			view.Why[b] = joinTexts(e.stateReason(s.Service, b), slowStartText(&s, b))
		}
		v.Services = append(v.Services, view)
	}
	return v
}

// ViewOf returns the part of View about some services, as of this apply, with the places of the
// firewall rules. It avoids the cost of viewing thousands of unchanged services, and does not wait
// for a following apply.
func (a *Applied) ViewOf(services map[string]bool) View {
	v := View{Applied: *a, Warnings: slices.Clone(a.warnings)}
	if a.config == nil {
		return v
	}
	v.Config, v.Rules = &config.Config{Firewall: a.config.Firewall}, a.plan.rules
	for i := range a.config.Services {
		if s := &a.config.Services[i]; services[s.Name] {
			v.Config.Services = append(v.Config.Services, *s)
			v.Services = append(v.Services, ServiceView{Service: datapath.Service{Service: s}, Place: a.plan.services[i]})
		}
	}
	return v
}

// warnings returns the conditions of this host that prevent rules from working.
func (e *Engine) warnings() []string {
	list := slices.Clone(e.plan.warnings)
	for _, d := range e.opt.Datapaths {
		if w, ok := d.(datapath.Warner); ok {
			list = append(list, w.Warnings()...)
		}
	}
	list = append(list, e.foreignWarnings(time.Now())...)
	if e.unkept != "" {
		list = append(list, e.unkept)
	}
	return append(list, e.addressWarnings()...)
}

// joinTexts joins two texts; each may be empty.
func joinTexts(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "; " + b
}

func (e *Engine) stateReason(s *config.Service, i int) string {
	b := &s.Backends[i]
	if whole, ok := e.override[backendKey{}]; ok && whole.State > e.stateWithoutOverride(s, i) {
		return whole.Why
	}
	if o, ok := e.override[backendKey{s.Name, b.Name}]; ok {
		return cmp.Or(o.Why, "set by the operator")
	}
	if s.Check != nil && e.opt.Health != nil {
		if why := e.opt.Health.Why(s.Name, b.Name); why != "" {
			return why
		}
	}
	if b.Drain {
		return "drain in the configuration"
	}
	return ""
}

// Counters returns the counters of every datapath, by name.
func (e *Engine) Counters(ctx context.Context) (map[string]*datapath.Counters, error) {
	all := map[string]*datapath.Counters{}
	for _, d := range e.opt.Datapaths {
		c, err := d.Counters(ctx)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.Name(), err)
		}
		all[d.Name()] = c
	}
	return all, nil
}

// Flows calls yield for every flow of the named datapath, or of all for "", until yield returns
// false.
func (e *Engine) Flows(ctx context.Context, name string, yield func(flow.Flow) bool) error {
	more := true
	for _, d := range e.opt.Datapaths {
		if name != "" && name != d.Name() {
			continue
		}
		err := d.Flows(ctx, func(f flow.Flow) bool {
			more = yield(f)
			return more
		})
		if err != nil {
			return fmt.Errorf("%s: %w", d.Name(), err)
		}
		if !more {
			return nil
		}
	}
	return nil
}

// Explain asks the datapaths for their treatment of a packet, in processing order: eBPF precedes
// nftables, which receives the packets that eBPF passes.
//
// For a packet that no datapath handles, the result names the service or rule that came closest to
// matching.
func (e *Engine) Explain(ctx context.Context, q datapath.Question) (*datapath.Explanation, error) {
	answer, err := e.explain(ctx, q)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	cfg := e.config
	e.mu.Unlock()
	if cfg == nil {
		return answer, nil
	}
	if note := datapath.Unhelped(cfg, answer); note != "" {
		answer.Notes = append(answer.Notes, note)
	}
	if answer.Reason == "not-ours" || answer.Reason == "unserved" {
		if near := datapath.Nearest(cfg, q.Tuple, answer.Interface, answer.Out); near != "" {
			answer.Notes = append(answer.Notes, near)
		}
	}
	return answer, nil
}

func (e *Engine) explain(ctx context.Context, q datapath.Question) (*datapath.Explanation, error) {
	var answer *datapath.Explanation
	for _, d := range e.opt.Datapaths {
		x, ok := d.(datapath.Explainer)
		if !ok {
			continue
		}
		next, err := x.Explain(ctx, q)
		if errors.Is(err, datapath.ErrIdle) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.Name(), err)
		}
		next.Path = []string{d.Name()}
		if answer != nil {
			next.Path, next.Steps = append(answer.Path, d.Name()), append(answer.Steps, next.Steps...)
		}
		answer = next
		if answer.Action != "pass" || answer.Owner != "" {
			return answer, nil
		}
		q.Interface = answer.Interface
	}
	if answer == nil {
		return nil, fmt.Errorf("no datapath carries anything that could explain packets: %w", ErrNotFound)
	}
	return answer, nil
}

// Forecast is the predicted effect of an Apply.
type Forecast struct {
	Changes []*datapath.Change
	// Flows is the number of live flows that the change ends.
	Flows int
	// FlowsTotal is the number of checked live flows.
	FlowsTotal int
	Places     View // placement of the new configuration
}

// Forecast returns the changes that Apply(cfg) would make, without applying.
func (e *Engine) Forecast(ctx context.Context, cfg *config.Config) (*Forecast, error) {
	e.mu.Lock()
	node, err := e.identify(cfg)
	if err != nil {
		e.mu.Unlock()
		return nil, err
	}
	cfg = e.withFound(cfg).ForNode(node)
	plan, err := e.assignObjects(cfg)
	if err != nil {
		e.mu.Unlock()
		return nil, err
	}
	next := e.buildSnapshots(cfg, plan, time.Now())
	moved, _ := e.movesTo(cfg, plan)
	noteMoves(next, moved)
	announcements := e.announcements(cfg, plan, next)
	e.mu.Unlock()
	f := &Forecast{Places: View{Config: cfg, NAT: plan.nat, Rules: plan.rules}}
	for i := range cfg.Services {
		f.Places.Services = append(f.Places.Services, ServiceView{Place: plan.services[i]})
	}
	for _, d := range e.opt.Datapaths {
		change, err := d.Plan(ctx, next[d.Name()])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", d.Name(), err)
		}
		f.Changes = append(f.Changes, change)
		f.Flows += change.Ended
	}
	if e.opt.Addresses != nil {
		change, statuses, err := e.opt.Addresses.Plan(wantedAddresses(cfg, plan))
		if err != nil {
			return nil, err
		}
		if f.Places.Addresses = statuses; !change.Empty() {
			f.Changes = append(f.Changes, change)
		}
	}
	if e.opt.Announcer != nil {
		change, err := e.opt.Announcer.Plan(announcements)
		if err != nil {
			return nil, err
		}
		if !change.Empty() {
			f.Changes = append(f.Changes, change)
		}
	}
	if e.opt.Uplinks != nil {
		change, err := e.opt.Uplinks.Plan(cfg.Uplinks)
		if err != nil {
			return nil, err
		}
		if !change.Empty() {
			f.Changes = append(f.Changes, change)
		}
	}
	err = e.Flows(ctx, "", func(flow.Flow) bool {
		f.FlowsTotal++
		return true
	})
	return f, err
}
