// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// placement assigns each object of a configuration to a datapath. The keys are indexes into the
// configuration's lists.
type placement struct {
	services []Place
	nat      []Place
	rules    []Place
	warnings []string // rules that affect traffic of a later datapath, because no other datapath supports them
}

// Place is the datapath of one object, and the reasons against the others.
type Place struct {
	// Datapaths that carry the object. A service or NAT rule has one; a firewall rule may have
	// several.
	Datapaths []string
	// Why is the reason, by datapath, that a preferred one does not carry it.
	Why map[string]string
}

func (p Place) carriedBy(name string) bool {
	for _, d := range p.Datapaths {
		if d == name {
			return true
		}
	}
	return false
}

// assignObjects assigns objects to datapaths. A service is placed on the first datapath that supports it
// completely. NAT rules stay together if one datapath supports all rules, because helpers,
// hairpinning and exceptions depend on other rules. They are not placed where they would translate
// the replies of a service on a later datapath as new connections. If a firewall rule must see
// traffic, that traffic is placed on a datapath that supports the rule.
func (e *Engine) assignObjects(cfg *config.Config) (placement, error) {
	var p placement
	var errs []error
	excluded := e.exclusionReasons(cfg)
	for i := range cfg.Services {
		s := &cfg.Services[i]
		place, err := e.chooseDatapath(effectiveDatapath(s.Datapath, cfg.Datapath), excluded, supportOfService(s))
		if err != nil {
			errs = append(errs, fmt.Errorf("service %s: %w", s.Name, err))
		}
		p.services = append(p.services, place)
	}
	nat, err := e.placeNAT(cfg, excluded, p.services)
	if err != nil {
		errs = append(errs, err)
	}
	p.nat = nat
	p.warnings = append(p.warnings, e.answersTaken(cfg, p.services, nat)...)
	for i := range cfg.NAT {
		if why := e.conflictReason(cfg, i, p.services, nat); why != "" {
			p.warnings = append(p.warnings, fmt.Sprintf("nat rule %s is on %s, but %s; put both on one datapath", cfg.NAT[i].Name, nat[i].Datapaths[0], why))
		}
	}
	rules, err := e.placeRules(cfg, p)
	if err != nil {
		errs = append(errs, err)
	}
	p.rules = rules
	return p, errors.Join(errs...)
}

func effectiveDatapath(own, global config.DatapathChoice) config.DatapathChoice {
	if own != "" && own != config.DatapathAuto {
		return own
	}
	return global
}

// exclusionReasons returns the reason why a datapath must carry no traffic: it does not support uplinks, or a
// firewall rule that another datapath supports.
func (e *Engine) exclusionReasons(cfg *config.Config) map[string]string {
	excluded := map[string]string{}
	if why := datapath.NeedsNftables(cfg); why != "" {
		excluded["ebpf"] = why
	}
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
			if excluded[name] == "" {
				excluded[name] = reason
			}
		}
	}
	return excluded
}

// objectSupport are the questions to a datapath about an object: whether it supports the object, and which
// rules the packets would bypass there.
type objectSupport struct{ carries, bypasses func(datapath.Datapath) error }

func supportOfService(s *config.Service) objectSupport {
	return objectSupport{
		carries:  func(d datapath.Datapath) error { return d.CarriesService(s) },
		bypasses: askBypasser(func(b datapath.Bypasser) error { return b.BypassesService(s) }),
	}
}

func supportOfNAT(n *config.NATRule) objectSupport {
	return objectSupport{
		carries:  func(d datapath.Datapath) error { return d.CarriesNAT(n) },
		bypasses: askBypasser(func(b datapath.Bypasser) error { return b.BypassesNAT(n) }),
	}
}

// askBypasser applies ask to datapaths that implement Bypasser. Other datapaths bypass nothing.
func askBypasser(ask func(datapath.Bypasser) error) func(datapath.Datapath) error {
	return func(d datapath.Datapath) error {
		if b, ok := d.(datapath.Bypasser); ok {
			return ask(b)
		}
		return nil
	}
}

// prefersOther reports whether another datapath is preferable for the object.
func (a objectSupport) prefersOther(d datapath.Datapath) bool {
	return a.carries(d) != nil || a.bypasses(d) != nil
}

// chooseDatapath returns the first datapath that supports an object. If the choice is free, a datapath on
// which its packets bypass something is the last resort.
func (e *Engine) chooseDatapath(want config.DatapathChoice, excluded map[string]string, of objectSupport) (Place, error) {
	var place Place
	decline := func(d datapath.Datapath, why string) {
		if place.Why == nil {
			place.Why = map[string]string{}
		}
		place.Why[d.Name()] = why
	}
	var errs []error
	var second datapath.Datapath
	free := want == "" || want == config.DatapathAuto
	for _, d := range e.opt.Datapaths {
		if !free && string(want) != d.Name() {
			continue
		}
		if err := of.carries(d); err != nil {
			decline(d, err.Error())
			errs = append(errs, fmt.Errorf("%s: %w", d.Name(), err))
			continue
		}
		if reason := excluded[d.Name()]; reason != "" {
			decline(d, reason)
			errs = append(errs, fmt.Errorf("%s: %s", d.Name(), reason))
			continue
		}
		if free && second == nil && of.bypasses != nil {
			if err := of.bypasses(d); err != nil {
				decline(d, err.Error())
				second = d
				continue
			}
		}
		place.Datapaths = []string{d.Name()}
		return place, nil
	}
	if second != nil {
		delete(place.Why, second.Name())
		place.Datapaths = []string{second.Name()}
		return place, nil
	}
	if len(errs) == 0 {
		return place, fmt.Errorf("datapath %s is not available on this host; the log of the daemon's start says why", want)
	}
	return place, fmt.Errorf("no datapath carries it: %w", errors.Join(errs...))
}

func (e *Engine) placeNAT(cfg *config.Config, excluded map[string]string, services []Place) ([]Place, error) {
	var errs []error
	alone := make([]Place, len(cfg.NAT))
	for i := range cfg.NAT {
		n := &cfg.NAT[i]
		var err error
		alone[i], err = e.chooseDatapath(effectiveDatapath(n.Datapath, cfg.Datapath), excluded, supportOfNAT(n))
		if err != nil {
			errs = append(errs, fmt.Errorf("nat rule %s: %w", n.Name, err))
		}
	}
	if len(errs) > 0 {
		return alone, errors.Join(errs...)
	}
	for i := range cfg.NAT {
		why := e.conflictReason(cfg, i, services, alone)
		if why == "" {
			continue
		}
		n, others := &cfg.NAT[i], maps.Clone(excluded)
		others[alone[i].Datapaths[0]] = why
		if place, err := e.chooseDatapath(effectiveDatapath(n.Datapath, cfg.Datapath), others, supportOfNAT(n)); err == nil {
			alone[i] = place
		}
	}
	for _, d := range e.opt.Datapaths {
		if places, ok := e.allNATOn(cfg, d, excluded, alone); ok {
			return places, nil
		}
	}
	return alone, nil
}

// conflictReason returns the reason why a NAT rule must not be on its datapath: it would translate
// packets of a service or rule on a later datapath. It returns "" if it would not.
func (e *Engine) conflictReason(cfg *config.Config, rule int, services, nat []Place) string {
	n := &cfg.NAT[rule]
	for i := range cfg.Services {
		s := &cfg.Services[i]
		if !e.processesBefore(nat[rule], services[i]) {
			continue
		}
		for _, l := range s.Listen {
			if hasOutsideAddress(n, l.Address) {
				return interferenceText("service "+s.Name, services[i], "packets to %s", l.Address)
			}
		}
		for _, b := range s.Backends {
			if (s.Mode == config.ModeDNAT || s.Mode == config.ModeStateless) && translatesSource(n, b.Address) {
				return interferenceText("service "+s.Name, services[i], "answers of %s", b.Address)
			}
		}
	}
	for i := range cfg.NAT {
		o := &cfg.NAT[i]
		switch {
		case !o.Type.Forwards() || !e.processesBefore(nat[rule], nat[i]):
		case hasOutsideAddress(n, o.Listen.Address):
			return interferenceText("nat rule "+o.Name, nat[i], "packets to %s", o.Listen.Address)
		case translatesSource(n, o.To.Address):
			return interferenceText("nat rule "+o.Name, nat[i], "answers of %s", o.To.Address)
		}
	}
	return ""
}

// answersTaken returns warnings about stateless services that would also match the replies of
// another service or port-forward on a later datapath, because one server port replies for both.
func (e *Engine) answersTaken(cfg *config.Config, services, nat []Place) (out []string) {
	for i := range cfg.Services {
		s := &cfg.Services[i]
		if s.Mode != config.ModeStateless {
			continue
		}
		tell := func(who string, on Place, protocol flow.Protocol, a netip.Addr, ports []flow.Ports) {
			same := protocol == s.Protocol || protocol == flow.Any || s.Protocol == flow.Any
			if !same || !e.processesBefore(services[i], on) {
				return
			}
			for _, b := range s.Backends {
				if b.Address == a && overlap(answerPorts(b.Port, s.Listen), ports) {
					out = append(out, fmt.Sprintf("service %s is on %s, but %s; put both on one datapath", s.Name, services[i].Datapaths[0], interferenceText(who, on, "answers of %s", a)))
					return
				}
			}
		}
		for j := range cfg.Services {
			if o := &cfg.Services[j]; o.Mode == config.ModeDNAT || o.Mode == config.ModeFullNAT {
				for _, b := range o.Backends {
					tell("service "+o.Name, services[j], o.Protocol, b.Address, answerPorts(b.Port, o.Listen))
				}
			}
		}
		for j := range cfg.NAT {
			if n := &cfg.NAT[j]; n.Type.Forwards() {
				tell("nat rule "+n.Name, nat[j], n.Protocol, n.To.Address, answerPorts(n.To.Port, []config.Listen{*n.Listen}))
			}
		}
	}
	return out
}

// answerPorts returns the source ports of a server's replies; none means all ports.
func answerPorts(port uint16, listen []config.Listen) (ports []flow.Ports) {
	if port != 0 {
		return []flow.Ports{{First: port, Last: port}}
	}
	for _, l := range listen {
		if len(l.Ports) == 0 {
			return nil
		}
		ports = append(ports, l.Ports...)
	}
	return ports
}

func overlap(a, b []flow.Ports) bool {
	return len(a) == 0 || len(b) == 0 || slices.ContainsFunc(a, func(p flow.Ports) bool { return slices.ContainsFunc(b, p.Overlaps) })
}

func interferenceText(who string, on Place, packets string, a netip.Addr) string {
	return fmt.Sprintf("%s is on %s: "+packets+" may be taken before they get there", who, on.Datapaths[0], a)
}

// hasOutsideAddress reports whether an address is one of the outside addresses of a rule.
func hasOutsideAddress(n *config.NATRule, a netip.Addr) bool {
	within := func(r config.AddressRange) bool { return r.Contains(a) }
	return n.External.Contains(a) || slices.ContainsFunc(n.To.Addresses, within) || slices.ContainsFunc(n.Pool, within)
}

// processesBefore reports whether the first object's datapath processes packets before the second's.
func (e *Engine) processesBefore(one, other Place) bool {
	for _, d := range e.opt.Datapaths {
		if one.carriedBy(d.Name()) || other.carriedBy(d.Name()) {
			return !other.carriedBy(d.Name()) && len(other.Datapaths) > 0
		}
	}
	return false
}

// translatesSource reports whether a rule changes the source of connections that an address opens.
func translatesSource(n *config.NATRule, a netip.Addr) bool {
	switch {
	case n.Type.RewritesSource():
		return len(n.Source) == 0 && (a.Is4() || n.Type == config.NATSNAT) ||
			slices.ContainsFunc(n.Source, func(p netip.Prefix) bool { return p.Contains(a) })
	case n.Type.OneToOne():
		return n.Internal.Contains(a)
	}
	return false
}

// allNATOn places every NAT rule on d if d supports them all.
func (e *Engine) allNATOn(cfg *config.Config, d datapath.Datapath, excluded map[string]string, alone []Place) ([]Place, bool) {
	if excluded[d.Name()] != "" {
		return nil, false
	}
	places := make([]Place, len(cfg.NAT))
	for i := range cfg.NAT {
		n := &cfg.NAT[i]
		want := effectiveDatapath(n.Datapath, cfg.Datapath)
		if want != "" && want != config.DatapathAuto && string(want) != d.Name() || d.CarriesNAT(n) != nil ||
			e.processesBefore(Place{Datapaths: []string{d.Name()}}, alone[i]) { // it was moved away from d
			return nil, false
		}
		places[i] = Place{Datapaths: []string{d.Name()}, Why: alone[i].Why}
		if !alone[i].carriedBy(d.Name()) {
			places[i].Why = map[string]string{alone[i].Datapaths[0]: "the other NAT rules need " + d.Name()}
		}
	}
	return places, true
}

// placeRules places every firewall rule on each datapath that carries traffic, so that the rule
// sees every packet. Without traffic, on the first datapath that supports it.
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
		place, err := e.chooseDatapath("", nil, objectSupport{carries: func(d datapath.Datapath) error { return d.CarriesRule(r) }})
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

// buildSnapshots builds the snapshot of each datapath.
func (e *Engine) buildSnapshots(cfg *config.Config, p placement, now time.Time) map[string]*datapath.Snapshot {
	all := map[string]*datapath.Snapshot{}
	inForce, uplinks := e.serviceFinder(), e.uplinks(cfg)
	for _, d := range e.opt.Datapaths {
		name := d.Name()
		s := &datapath.Snapshot{Revision: e.revision, Config: cfg, Uplinks: uplinks}
		for i := range cfg.Services {
			if p.services[i].carriedBy(name) {
				s.Services = append(s.Services, e.serviceSnapshot(&cfg.Services[i], inForce, now))
			}
		}
		for i := range cfg.NAT {
			if p.nat[i].carriedBy(name) {
				s.NAT = append(s.NAT, &cfg.NAT[i])
			}
		}
		for i := range cfg.Firewall.Rules {
			if p.rules[i].carriedBy(name) {
				s.Rules = append(s.Rules, &cfg.Firewall.Rules[i])
			}
		}
		all[name] = s
	}
	return all
}

func (e *Engine) serviceSnapshot(s *config.Service, inForce func(string) *datapath.Service, now time.Time) datapath.Service {
	out := datapath.Service{Service: s, State: make([]datapath.State, len(s.Backends))}
	for i := range out.State {
		out.State[i] = e.state(s, i)
	}
	if s.SlowStart > 0 {
		out.Weights = e.slowStartWeights(s, out.State, inForce(s.Name), now)
	}
	return out
}
