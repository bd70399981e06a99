// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"slices"

	"github.com/sluice-lb/sluice/config"
)

func (s *store) changePolicy(key, value string) result {
	p := s.policy
	if p != nil && !p.changed(key, value) {
		return ok
	}
	if p != nil {
		switch key {
		case "name":
		case "family", "timeout":
			s.setPolicyAction(p, stop)
		default:
			s.setPolicyAction(p, reload)
		}
	}
	if r := s.setPolicy(key, value); r != ok {
		return r
	}
	switch p = s.policy; key {
	case "name":
	case "family", "type", "timeout":
		s.setPolicyAction(p, start)
	default:
		s.setPolicyAction(p, reload)
	}
	return ok
}

// changed reports whether a value differs from the list's current one. Keys that lists do not have, and the route,
// never differ.
func (p *policy) changed(key, value string) bool {
	switch key {
	case "name":
		return true
	case "type", "family", "timeout", "log-prefix":
		return p.Attributes[key] != value
	}
	return false
}

func (s *store) setPolicy(key, value string) result {
	p := s.policy
	if key == "name" {
		if p = s.policyNamed(value); p == nil {
			p = newPolicy(value)
			s.policies = append(s.policies, p)
		} else {
			s.setPolicyAction(p, reload)
		}
		s.policy = p
		return ok
	}
	if p == nil {
		return unknown
	}
	if key == "family" && value == "inet" {
		return ok // a list has one family
	}
	p.Attributes[key] = value
	return ok
}

// setPolicyAction passes an action to the users of the list.
func (s *store) setPolicyAction(p *policy, a action) {
	switch {
	case p.action == a || p.action == start && a == reload:
		return
	case a == remove:
		s.setPolicyInFarms(p, a)
		s.policies = slices.DeleteFunc(s.policies, func(other *policy) bool { return other == p })
		if s.policy == p {
			s.policy = nil
		}
		return
	case a == stop || a == reload:
		s.setPolicyInFarms(p, a)
		s.setPolicyInAddresses(p, a)
	}
	p.action = a
}

func (s *store) setPolicyInFarms(p *policy, a action) {
	for _, f := range s.farms {
		if fp := f.policy(p.Name); fp != nil && s.setFarmPolicy(fp, a) {
			s.setFarmAction(f, reload)
			f.setAddresses(reload)
		}
	}
}

func (s *store) changeElement(key, value string, apply action) result {
	p := s.policy
	if p == nil || key != "data" && s.element < 0 {
		return unknown
	}
	switch key {
	case "data":
		p.pending = append(p.pending, element{value, start})
		s.element = len(p.pending) - 1
		if apply != start {
			p.pending[s.element].action = apply
			s.setPolicyAction(p, reload)
		}
	case "action":
		p.pending[s.element].action = actionOf(value)
		s.setPolicyAction(p, reload)
	default:
		return wrong
	}
	return ok
}

// settlePolicy applies the pending elements to the set.
func (s *store) settlePolicy(p *policy) {
	if p.action == none {
		return
	}
	var more, less []config.AddressRange
	for _, e := range p.pending {
		r, fits := rangeOf(e.data, p.Attributes["family"])
		switch {
		case !fits:
			s.addNote(". Element '%s' of policy '%s' is no address, network or range of %s", e.data, p.Name, p.Attributes["family"])
		case e.action == start || p.action == start:
			more = append(more, r)
		case e.action == stop || e.action == remove:
			less = append(less, r)
		}
	}
	switch p.action {
	case stop, remove:
		p.Elements = nil
	case flush:
		if len(p.pending) > 0 {
			p.Elements = nil
		}
		fallthrough
	default:
		p.Elements = p.Elements.add(more...).remove(less...)
	}
	p.action = none
	if len(p.pending) > 0 {
		p.pending = nil
		s.setPolicyAction(p, reload)
	}
}
