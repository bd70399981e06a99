// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// placement says which datapath carries each object of a configuration. The keys
// are indices into the configuration's lists.
type placement struct {
	services []Place
	nat      []Place
	rules    []Place
}

// Place is where one object was put, and why not on the others.
type Place struct {
	// Datapaths that carry the object; a service or NAT rule has one, a firewall
	// rule may stand on several.
	Datapaths []string
	// Why says why a datapath that would have been preferred does not carry it.
	Why map[string]string
}

func (p Place) on(name string) bool {
	for _, d := range p.Datapaths {
		if d == name {
			return true
		}
	}
	return false
}

// place decides which datapath carries what. A service goes to the first
// datapath that carries all of it. NAT rules stay together where one datapath
// carries them all, because helpers, hairpin and exceptions look across rules.
// Traffic that a firewall rule must see goes where that rule can stand.
func (e *Engine) place(cfg *config.Config) (placement, error) {
	var p placement
	var errs []error
	barred := e.barred(cfg)
	for i := range cfg.Services {
		s := &cfg.Services[i]
		place, err := e.choose(choice(s.Datapath, cfg.Datapath), barred, func(d datapath.Datapath) error { return d.CarriesService(s) })
		if err != nil {
			errs = append(errs, fmt.Errorf("service %s: %w", s.Name, err))
		}
		p.services = append(p.services, place)
	}
	nat, err := e.placeNAT(cfg, barred)
	if err != nil {
		errs = append(errs, err)
	}
	p.nat = nat
	rules, err := e.placeRules(cfg, p)
	if err != nil {
		errs = append(errs, err)
	}
	p.rules = rules
	return p, errors.Join(errs...)
}

func choice(own, global config.DatapathChoice) config.DatapathChoice {
	if own != "" && own != config.DatapathAuto {
		return own
	}
	return global
}

// barred returns, for each datapath that cannot carry one of the firewall's
// rules while another can, why it must carry no traffic.
func (e *Engine) barred(cfg *config.Config) map[string]string {
	barred := map[string]string{}
	for i := range cfg.Firewall.Rules {
		r := &cfg.Firewall.Rules[i]
		carried := false
		why := map[string]string{}
		for _, d := range e.opt.Datapaths {
			if err := d.CarriesRule(r); err != nil {
				why[d.Name()] = fmt.Sprintf("firewall rule %s must see the traffic: %v", ruleName(r, i), err)
			} else {
				carried = true
			}
		}
		if !carried {
			continue // placeRules reports it
		}
		for name, reason := range why {
			if barred[name] == "" {
				barred[name] = reason
			}
		}
	}
	return barred
}

// choose returns the first datapath that carries an object.
func (e *Engine) choose(want config.DatapathChoice, barred map[string]string, carries func(datapath.Datapath) error) (Place, error) {
	place := Place{Why: map[string]string{}}
	var errs []error
	for _, d := range e.opt.Datapaths {
		if want != "" && want != config.DatapathAuto && string(want) != d.Name() {
			continue
		}
		if err := carries(d); err != nil {
			place.Why[d.Name()] = err.Error()
			errs = append(errs, fmt.Errorf("%s: %w", d.Name(), err))
			continue
		}
		if reason := barred[d.Name()]; reason != "" {
			place.Why[d.Name()] = reason
			errs = append(errs, fmt.Errorf("%s: %s", d.Name(), reason))
			continue
		}
		place.Datapaths = []string{d.Name()}
		return place, nil
	}
	if len(errs) == 0 {
		return place, fmt.Errorf("datapath %s is not available on this host", want)
	}
	return place, fmt.Errorf("no datapath carries it: %w", errors.Join(errs...))
}

func (e *Engine) placeNAT(cfg *config.Config, barred map[string]string) ([]Place, error) {
	var errs []error
	alone := make([]Place, len(cfg.NAT))
	for i := range cfg.NAT {
		n := &cfg.NAT[i]
		var err error
		alone[i], err = e.choose(choice(n.Datapath, cfg.Datapath), barred, func(d datapath.Datapath) error { return d.CarriesNAT(n) })
		if err != nil {
			errs = append(errs, fmt.Errorf("nat rule %s: %w", n.Name, err))
		}
	}
	if len(errs) > 0 {
		return alone, errors.Join(errs...)
	}
	for _, d := range e.opt.Datapaths {
		if together, ok := e.natTogether(cfg, d, barred, alone); ok {
			return together, nil
		}
	}
	return alone, nil
}

// natTogether places every NAT rule on d, if d carries them all.
func (e *Engine) natTogether(cfg *config.Config, d datapath.Datapath, barred map[string]string, alone []Place) ([]Place, bool) {
	if barred[d.Name()] != "" {
		return nil, false
	}
	together := make([]Place, len(cfg.NAT))
	for i := range cfg.NAT {
		n := &cfg.NAT[i]
		want := choice(n.Datapath, cfg.Datapath)
		if want != "" && want != config.DatapathAuto && string(want) != d.Name() || d.CarriesNAT(n) != nil {
			return nil, false
		}
		together[i] = Place{Datapaths: []string{d.Name()}, Why: alone[i].Why}
		if !alone[i].on(d.Name()) {
			together[i].Why = map[string]string{alone[i].Datapaths[0]: "the other NAT rules need " + d.Name()}
		}
	}
	return together, true
}

// placeRules puts every firewall rule on each datapath that carries traffic, so
// that no packet passes it by; without traffic, on the first that carries it.
func (e *Engine) placeRules(cfg *config.Config, p placement) ([]Place, error) {
	busy := map[string]bool{}
	for _, place := range append(append([]Place{}, p.services...), p.nat...) {
		for _, d := range place.Datapaths {
			busy[d] = true
		}
	}
	var errs []error
	places := make([]Place, len(cfg.Firewall.Rules))
	for i := range cfg.Firewall.Rules {
		r := &cfg.Firewall.Rules[i]
		place, err := e.choose("", nil, func(d datapath.Datapath) error { return d.CarriesRule(r) })
		if err != nil {
			errs = append(errs, fmt.Errorf("firewall rule %s: %w", ruleName(r, i), err))
			continue
		}
		var all []string
		for _, d := range e.opt.Datapaths {
			if busy[d.Name()] && d.CarriesRule(r) == nil {
				all = append(all, d.Name())
			}
		}
		if len(all) > 0 {
			place.Datapaths = all
		}
		places[i] = place
	}
	return places, errors.Join(errs...)
}

func ruleName(r *config.FirewallRule, i int) string {
	if r.Name != "" {
		return r.Name
	}
	return fmt.Sprintf("%d (%s)", i+1, r.Action)
}

// snapshots builds what each datapath is asked to be.
func (e *Engine) snapshots(cfg *config.Config, p placement) map[string]*datapath.Snapshot {
	all := map[string]*datapath.Snapshot{}
	for _, d := range e.opt.Datapaths {
		name := d.Name()
		s := &datapath.Snapshot{Revision: e.revision, Config: cfg}
		for i := range cfg.Services {
			if p.services[i].on(name) {
				s.Services = append(s.Services, e.service(&cfg.Services[i]))
			}
		}
		for i := range cfg.NAT {
			if p.nat[i].on(name) {
				s.NAT = append(s.NAT, &cfg.NAT[i])
			}
		}
		for i := range cfg.Firewall.Rules {
			if p.rules[i].on(name) {
				s.Rules = append(s.Rules, &cfg.Firewall.Rules[i])
			}
		}
		all[name] = s
	}
	return all
}

func (e *Engine) service(s *config.Service) datapath.Service {
	state := make([]datapath.State, len(s.Backends))
	for i := range state {
		state[i] = e.state(s, i)
	}
	return datapath.Service{Service: s, State: state}
}
