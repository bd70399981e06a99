// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// restarts are the keys with changes that remove and recreate the farm's rules.
var restarts = []string{
	"newname", "family", "virtual-addr", "virtual-ports", "source-addr", "mode", "responsettl", "protocol", "persistence", "persist-ttl",
	"flow-offload", "log", "helper", "intra-connect", "limits-ttl",
}

// stateful are the keys that affect no rule of farms at the ingress hook.
var stateful = []string{
	"new-rtlimit", "new-rtlimit-burst", "rst-rtlimit", "rst-rtlimit-burst", "est-connlimit", "tcp-strict", "queue", "flow-offload",
	"new-rtlimit-log-prefix", "rst-rtlimit-log-prefix", "est-connlimit-log-prefix", "tcp-strict-log-prefix",
}

func (s *store) changeFarm(key, value string) result {
	if f := s.farm; f != nil && !s.farmChanged(f, key, value) {
		return ok
	}
	active := s.farm == nil || !s.farm.ingress() || !slices.Contains(stateful, key)
	if f := s.farm; f != nil && active && slices.Contains(restarts, key) && s.setFarmAction(f, stop) {
		s.settleFarm(f)
	}
	if r := s.setFarm(key, value); r != ok || !active {
		return r
	}
	switch {
	case s.farm == nil || key == "name" || key == "state":
	case slices.Contains(restarts, key):
		s.setFarmAction(s.farm, start)
	default:
		s.setFarmAction(s.farm, reload)
	}
	return ok
}

// farmChanged reports whether a value differs from the farm's current one. Keys that farms do not have never differ.
func (s *store) farmChanged(f *farm, key, value string) bool {
	fa := s.farmAddress
	if fa == nil && len(f.addresses) > 0 {
		fa = f.addresses[0]
	}
	ofAddress := func(now func(*address) string) bool { return fa == nil || now(fa.address) != value }
	switch key {
	case "name", "ether-addr":
		return true
	case "newname":
		return f.Name != value
	case "iface":
		return ofAddress(func(a *address) string { return a.In.Name })
	case "virtual-addr":
		return ofAddress(func(a *address) string { return a.Attributes["ip-addr"] })
	case "virtual-ports":
		return ofAddress(func(a *address) string { return a.Attributes["ports"] })
	case "family", "protocol":
		return ofAddress(func(a *address) string { return a.Attributes[key] })
	case "oface":
		return f.Out.Name != value
	case "source-addr":
		return f.Attributes[key] != value
	case "state":
		return f.State != value
	case "action":
		return f.action != actionOf(value)
	}
	now, has := f.Attributes[key]
	return has && now != value
}

func (s *store) setFarm(key, value string) result {
	f := s.farm
	if key == "name" {
		if f = s.farmNamed(value); f == nil {
			f = newFarm(value)
			s.farms = append(s.farms, f)
		}
		s.farm, s.farmAddress, s.farmPolicy = f, nil, nil
		return ok
	}
	if f == nil {
		return unknown
	}
	switch key {
	case "newname":
		if s.farmNamed(value) == nil {
			s.renameDefaultAddress(f, value)
			f.Name = value
		}
	case "iface", "family", "ether-addr", "virtual-addr", "virtual-ports", "protocol":
		s.setFarmsAddress(f, key, value)
	case "oface":
		f.Out.Name = device(value)
		s.findFarmLinks(f)
	case "mode":
		f.Attributes[key] = value
		s.findFarmLinks(f)
		s.validateBackends(f)
	case "scheduler":
		f.setScheduler(value)
	case "persistence":
		f.Sessions = nil
		f.Attributes[key] = value
	case "helper":
		return f.setHelper(value)
	case "mark":
		if !f.ingress() && uint32(leadingNumber(value, 16))&masquerade == 0 {
			f.Attributes[key] = value
		}
	case "state":
		if value != configError {
			s.setFarmState(f, value)
		}
	case "action":
		if s.setFarmAction(f, actionOf(value)) { // nftlb treats this as a failure
			return failed
		}
	case "verdict":
		if value == "none" {
			return failed
		}
		f.Attributes[key] = value
		s.setFarmPolicies(f, reload)
		f.setAddresses(reload)
	case "log-rtlimit":
		f.Attributes[key] = value
		if f.needsPolicies() {
			s.setFarmPolicies(f, reload)
		}
	case "rst-rtlimit":
		if integer(f.Attributes[key]) != integer(value) {
			f.Attributes[key] = value
		}
	case "flow-offload":
		f.Attributes[key] = value
		s.findFarmLinks(f)
	default:
		f.Attributes[key] = value
	}
	return ok
}

func (f *farm) setScheduler(value string) {
	f.Attributes["scheduler"] = value
	if value != "hash" {
		f.Attributes["sched-param"] = "none"
	} else if f.Attributes["sched-param"] == "none" {
		f.Attributes["sched-param"] = "srcip "
	}
}

// helperProtocols are the protocols of the kernel's helpers.
var helperProtocols = map[string][]string{
	"ftp": {"tcp"}, "pptp": {"tcp"}, "tftp": {"udp"}, "snmp": {"udp"}, "sip": {"tcp", "udp", "all"}, "none": {"tcp", "udp", "sctp", "all"},
}

func (f *farm) setHelper(value string) result {
	for _, fa := range f.addresses {
		if !slices.Contains(helperProtocols[value], fa.address.Attributes["protocol"]) {
			return invalid
		}
	}
	f.Attributes["helper"] = value
	return ok
}

// setFarmsAddress sets a key of the farm in its first address, and creates the address if necessary.
func (s *store) setFarmsAddress(f *farm, key, value string) {
	if len(f.addresses) == 0 {
		a := newAddress(s.defaultAddressName(f.Name))
		s.addresses = append(s.addresses, a)
		s.address = a
		f.join(a)
	}
	s.farmAddress = f.addresses[0]
	a := s.farmAddress.address
	switch key {
	case "iface":
		a.In.Name = device(value)
		s.findAddressLink(a)
	case "family", "protocol":
		a.Attributes[key] = value
	case "ether-addr":
		a.In.MAC, f.Out.MAC = value, value
	case "virtual-addr":
		a.Attributes["ip-addr"] = value
		s.findAddressLink(a)
	case "virtual-ports":
		a.setPorts(value)
	}
}

func (s *store) defaultAddressName(farm string) string {
	name := farm + "-addr"
	for i := 0; s.addressNamed(name) != nil; i++ {
		name = fmt.Sprintf("%s-addr-%d", farm, i)
	}
	return name
}

func (s *store) renameDefaultAddress(f *farm, name string) {
	if len(f.addresses) == 0 {
		return
	}
	if a := f.addresses[0].address; strings.Contains(a.Name, "-addr") {
		a.Name = ""
		a.Name = s.defaultAddressName(name)
	}
}

// join adds an address to the farm.
func (f *farm) join(a *address) *farmAddress {
	fa := &farmAddress{farm: f, address: a, action: start}
	f.addresses = append(f.addresses, fa)
	a.Used++
	if len(f.policies) > 0 {
		f.policiesAction = start
	}
	return fa
}

func (s *store) setFarmState(f *farm, value string) {
	switch was := f.State; {
	case value == configError:
		f.State = value
		s.setFarmAction(f, none)
	case was != up && value == up:
		s.setFarmAction(f, start)
		f.State = value
		s.findFarmLinks(f)
	case was == up && value != up:
		s.setFarmAction(f, stop)
		f.State = value
	default:
		f.State = value
	}
}

// setFarmAction reports whether the farm has new work.
func (s *store) setFarmAction(f *farm, a action) bool {
	force := a == stop && f.State == configError
	if force {
		f.policiesAction = none
		if s.validFarm(f) {
			f.State = up
		}
	}
	if a == stop && f.State != up {
		return false
	}
	if a == reload && f.State != up && f.State != configError {
		a = start
	}
	if a != none && a != reload && len(f.policies) > 0 {
		f.policiesAction = a
	}
	if a == remove {
		s.deleteFarm(f)
		return true
	}
	if f.action <= a && !force {
		return false
	}
	s.generatePriority(f)
	f.action = a
	s.findFarmLinks(f)
	s.validateBackends(f)
	if a == stop || a == start {
		f.setAddresses(a)
	}
	return true
}

func (s *store) deleteFarm(f *farm) {
	for _, p := range f.policies {
		p.policy.Used = max(0, p.policy.Used-1)
	}
	for _, fa := range slices.Clone(f.addresses) {
		s.removeFromFarm(fa)
	}
	f.Backends, f.policies = nil, nil
	s.farms = slices.DeleteFunc(s.farms, func(other *farm) bool { return other == f })
	if s.farm == f {
		s.farm = nil
	}
}

// validFarm reports whether all required properties of the farm's interfaces are known.
func (s *store) validFarm(f *farm) bool {
	for _, fa := range f.addresses {
		if !slices.Contains(helperProtocols[f.Attributes["helper"]], fa.address.Attributes["protocol"]) && fa.address.Attributes["protocol"] != "sctp" {
			s.addNote(". Farm '%s' doesn't validate helper protocol", f.Name)
			return false
		}
	}
	if f.needsPolicies() && !f.validAddresses() {
		return false
	}
	return !f.ingress() && !f.flowtable() || f.validAddresses() && f.Out.Name != "" && f.Out.MAC != ""
}

// validAddresses reports whether one of the addresses is on an interface.
func (f *farm) validAddresses() bool {
	any := false
	for _, fa := range f.addresses {
		if in := fa.address.In; in.Name == "" || in.MAC == "" {
			fa.action = none
			continue
		}
		any = true
	}
	return any
}

// settleFarm performs the farm's action.
func (s *store) settleFarm(f *farm) {
	if f.action == none {
		return
	}
	if f.State == configError && s.validFarm(f) {
		s.setFarmState(f, up)
	}
	if (f.action == start || f.action == reload) && !(f.State == up && s.validFarm(f)) || f.State == configError {
		if f.State == up {
			s.setFarmState(f, configError)
		}
		f.action = none
		return
	}
	if f.needsPolicies() && f.policiesAction != none && f.policiesAction != flush {
		f.policiesDone()
	}
	for _, b := range f.Backends {
		b.action = none
	}
	for _, fa := range f.addresses {
		fa.action = none
	}
	f.action, f.policiesAction = none, none
}

func (f *farm) policiesDone() {
	if !slices.ContainsFunc(f.addresses, func(fa *farmAddress) bool { return f.ingress() || fa.action != none }) {
		return
	}
	for _, p := range f.policies {
		p.action = none
	}
}

// findFarmLinks finds the interfaces and hardware addresses that the farm needs.
func (s *store) findFarmLinks(f *farm) {
	if f.State != up {
		return
	}
	if f.ingress() {
		if !s.findOut(f) {
			return
		}
		for _, b := range f.Backends {
			if !b.isComplete() {
				s.findBackendLinks(b)
			}
		}
	} else if f.flowtable() {
		s.findOut(f)
	}
}

// findOut finds the interface towards the first backend. It fails if there is a backend without a route.
func (s *store) findOut(f *farm) bool {
	if f.Out.Name == "lo" {
		f.Out.Index = 0
		return true
	}
	if len(f.Backends) == 0 || f.Backends[0].Attributes["ip-addr"] == "" {
		return true
	}
	out, found := s.routeInterface(f.Backends[0].Attributes["ip-addr"])
	if found {
		f.Out = out
	}
	return found
}

// routeInterface returns the interface of the route to an address.
func (s *store) routeInterface(text string) (link, bool) {
	to, err := netip.ParseAddr(text)
	if err != nil {
		return link{}, false
	}
	name, index, mac, found := s.network.Towards(to)
	return link{device(name), index, mac}, found
}

// change of a farm's lists

func (s *store) changeFarmPolicy(key, value string) result {
	f := s.farm
	if f == nil {
		return unknown
	}
	s.setFarmAction(f, reload)
	f.setAddresses(reload)
	s.settleFarm(f)
	if key != "name" {
		return structure
	}
	p := s.policyNamed(value)
	if p == nil {
		s.addNote(". Unknown policy '%s'", value)
		return unknown
	}
	if f.policy(value) == nil {
		f.usePolicy(p)
		s.farmPolicy = f.policies[len(f.policies)-1]
	}
	if s.farmPolicy != nil {
		s.setFarmAction(f, reload)
		f.setAddresses(reload)
	}
	return ok
}

func (f *farm) usePolicy(p *policy) {
	p.Used++
	f.policiesAction = start
	if len(f.policies) > 0 && f.action == reload {
		f.policiesAction = reload
	}
	f.policies = append(f.policies, &farmPolicy{farm: f, policy: p, action: start})
}

// setFarmPolicy reports whether the use of the list has new work.
func (s *store) setFarmPolicy(fp *farmPolicy, a action) bool {
	f := fp.farm
	switch {
	case a == remove:
		f.policies = slices.DeleteFunc(f.policies, func(other *farmPolicy) bool { return other == fp })
		fp.policy.Used = max(0, fp.policy.Used-1)
		f.setAddresses(reload)
		return true
	case fp.action <= a:
		return false
	}
	fp.action, fp.policy.action = a, reload
	f.policiesAction = reload
	if len(f.policies) == 1 && a == stop {
		f.policiesAction = a
	}
	f.setAddresses(reload)
	return true
}

func (s *store) setFarmPolicies(f *farm, a action) {
	for _, fp := range slices.Clone(f.policies) {
		s.setFarmPolicy(fp, a)
	}
	f.policiesAction = a
}
