// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"net/netip"
	"slices"
)

// changed reports whether a value differs from the address's current one. Keys that addresses do not have never
// differ.
func (a *address) changed(key, value string) bool {
	switch key {
	case "name":
		return true
	case "iface":
		return a.In.Name != value
	case "action":
		return a.action != actionOf(value)
	case "family", "ip-addr", "ports", "protocol", "verdict", "log-prefix":
		return a.Attributes[key] != value
	}
	return false
}

func (s *store) setAddress(key, value string) result {
	a := s.address
	if key == "name" {
		if a = s.addressNamed(value); a == nil {
			a = newAddress(value)
			s.addresses = append(s.addresses, a)
		}
		s.address = a
		return ok
	}
	if a == nil {
		return unknown
	}
	switch key {
	case "iface":
		a.In.Name = device(value)
	case "family", "protocol", "log-prefix":
		a.Attributes[key] = value
	case "ether-addr":
		a.In.MAC = value
	case "ip-addr":
		a.Attributes[key] = value
		s.findAddressLink(a)
	case "ports":
		a.setPorts(value)
	case "verdict":
		if value == "none" {
			return failed
		}
		a.Attributes[key] = value
	case "action":
		if s.setAddressAction(a, actionOf(value)) { // nftlb treats this as a failure
			return failed
		}
	default:
		return structure
	}
	return ok
}

// setPorts sets the list of ports. "0" keeps the list; an empty list means all ports of all protocols.
func (a *address) setPorts(value string) {
	if value != "0" {
		a.Attributes["ports"] = value
	}
	if value == "" {
		a.Attributes["protocol"] = "all"
	}
}

// findAddressLink finds the interface with the address.
func (s *store) findAddressLink(a *address) {
	if a.In.Name == "lo" {
		a.In.Index = 0
	} else if ip, err := netip.ParseAddr(a.Attributes["ip-addr"]); err == nil {
		if name, index, mac, found := s.network.Holder(ip); found {
			a.In = link{device(name), index, mac}
		}
	}
	if a.In.Name == "" {
		return
	}
	for _, f := range s.farms {
		if f.Out.Index == -1 && f.address(a.Name) != nil {
			f.Out = a.In
		}
	}
}

// setAddressAction reports whether the address had another action.
func (s *store) setAddressAction(a *address, to action) bool {
	if a.action == to {
		return false
	}
	if to == remove {
		if !s.setAddressInFarms(a.Name, to) {
			s.deleteAddress(a)
		}
		return true
	}
	if to == stop {
		s.setAddressInFarms(a.Name, to)
	}
	a.action = min(a.action, to)
	return true
}

// setAddressInFarms sets the action in farms with the address, and reports whether one has new work.
func (s *store) setAddressInFarms(name string, to action) bool {
	any := false
	for _, f := range s.farms {
		if fa := f.address(name); fa != nil && s.setFarmAddress(fa, to) {
			f.action = reload
			any = true
		}
	}
	return any
}

func (s *store) deleteAddress(a *address) {
	s.addresses = slices.DeleteFunc(s.addresses, func(other *address) bool { return other == a })
	if s.address == a {
		s.address = nil
	}
}

// setFarmAddress reports whether the use of the address has new work.
func (s *store) setFarmAddress(fa *farmAddress, to action) bool {
	if to == remove {
		s.removeFromFarm(fa)
		return true
	}
	if fa.action == to {
		return false
	}
	fa.set(to)
	return true
}

func (fa *farmAddress) set(to action) {
	fa.action = to
	if to != reload && len(fa.farm.policies) > 0 {
		fa.farm.policiesAction = to
	}
}

// setAddresses sets the action of the farm's addresses with a higher action.
func (f *farm) setAddresses(to action) {
	for _, fa := range f.addresses {
		if fa.action > to {
			fa.set(to)
		}
	}
}

// removeFromFarm removes an address from a farm, and deletes it if it is unused.
func (s *store) removeFromFarm(fa *farmAddress) {
	f, a := fa.farm, fa.address
	f.addresses = slices.DeleteFunc(f.addresses, func(other *farmAddress) bool { return other == fa })
	a.Used = max(0, a.Used-1)
	if a.Used == 0 && len(a.policies) == 0 {
		s.deleteAddress(a)
	}
}

func (s *store) changeFarmAddress(key, value string) result {
	f := s.farm
	active := f == nil || s.setFarmAction(f, reload)
	r := s.setFarmAddressKey(key, value)
	if active && s.farmAddress != nil && s.farm != nil {
		s.setFarmAction(s.farm, reload)
	}
	return r
}

func (s *store) setFarmAddressKey(key, value string) result {
	f := s.farm
	if f == nil {
		return unknown
	}
	if key != "name" {
		return s.setAddress(key, value)
	}
	a := s.addressNamed(value)
	if a == nil {
		a = newAddress(value)
		s.addresses = append(s.addresses, a)
	}
	s.address = a
	if f.address(value) == nil {
		s.farmAddress = f.join(a)
	}
	return ok
}

func (s *store) changeAddressPolicy(key, value string) result {
	a := s.address
	if a == nil {
		return unknown
	}
	s.setAddressAction(a, reload)
	if a.Used == 0 {
		a.action = none
	}
	if key != "name" {
		return structure
	}
	p := s.policyNamed(value)
	if p == nil {
		return wrong
	}
	if slices.ContainsFunc(a.policies, func(ap *addressPolicy) bool { return ap.policy == p }) {
		return ok
	}
	p.Used++
	a.policies = append(a.policies, &addressPolicy{policy: p, action: start})
	s.addressPolicy = a.policies[len(a.policies)-1]
	s.setAddressAction(a, reload)
	return ok
}

// setPolicyInAddresses passes a list's action to the addresses that use it.
func (s *store) setPolicyInAddresses(p *policy, to action) {
	for _, a := range s.addresses {
		at := slices.IndexFunc(a.policies, func(ap *addressPolicy) bool { return ap.policy == p })
		if at < 0 {
			continue
		}
		switch ap := a.policies[at]; {
		case to == remove || to == stop:
			a.policies = slices.Delete(a.policies, at, at+1)
			p.Used = max(0, p.Used-1)
		case ap.action > to:
			ap.action = to
		default:
			continue
		}
		s.setAddressAction(a, reload)
	}
}
