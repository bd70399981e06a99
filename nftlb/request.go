// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// reply is an answer: objects, or a sentence about the result.
type reply struct {
	status int
	body   []byte
	// found reports that a lookup of a farm succeeded.
	found bool
}

// say returns a reply of one sentence with the collected notes.
func (s *store) say(r result, message string) reply {
	return reply{status: r.status(), body: sentence(message + s.takeNotes())}
}

// sentence formats a reply without objects.
func sentence(message string) []byte {
	b := []byte(`{"response": `)
	return append(append(b, quoted(message)...), '}')
}

// parts returns up to n parts of a path. The last part contains the rest. Parts after an empty part are ignored.
func parts(path string, n int) []string {
	all := strings.SplitN(strings.TrimPrefix(path, "/"), "/", n)
	if end := slices.Index(all, ""); end >= 0 {
		all = all[:end]
	}
	return append(all, make([]string, n-len(all))...)
}

// get returns objects.
func (s *store) get(path string) reply {
	found := s.refresh()
	answer := s.look(path)
	answer.found = found
	return answer
}

func (s *store) look(path string) reply {
	p := parts(path, 4)
	kind, name, list := p[0], p[1], p[2]
	r := structure
	switch {
	case kind == "farms" && list == "sessions":
		f := s.farmNamed(name)
		if name != "" && f != nil {
			return reply{status: 200, body: text("sessions", f.printSessions())}
		}
		if name != "" {
			r = unknown
		}
	case kind == "farms" && list == "":
		if name == "" || s.farmNamed(name) != nil {
			return reply{status: 200, body: text("farms", printed(s.farms, name, func(f *farm) string { return f.Name }, (*farm).print))}
		}
		r = wrong
	case kind == "policies":
		return reply{status: 200, body: text("policies", printed(s.policies, name, func(p *policy) string { return p.Name }, s.printPolicy))}
	case kind == "addresses":
		return reply{status: 200, body: text("addresses", printed(s.addresses, name, func(a *address) string { return a.Name }, (*address).print))}
	}
	return s.say(r, "invalid request")
}

// printPolicy returns a list as shown to clients. As in nftlb, reading its elements makes the next change recreate
// the farms that use it.
func (s *store) printPolicy(p *policy) object {
	if len(p.Elements) > 0 {
		s.setPolicyAction(p, reload)
	}
	return p.print()
}

// printed returns the objects with a name, or all.
func printed[T any](all []T, name string, nameOf func(T) string, print func(T) object) []object {
	list := []object{}
	for _, o := range all {
		if name == "" || nameOf(o) == name {
			list = append(list, print(o))
		}
	}
	return list
}

// post processes a document with new or changed objects.
func (s *store) post(path string, body []byte) reply {
	if !slices.Contains([]string{"farms", "policies", "addresses"}, strings.TrimPrefix(path, "/")) {
		return s.say(unknown, "invalid request")
	}
	if r := s.load(body, start); r != ok {
		return s.refuse(r)
	}
	s.settle()
	return s.say(ok, "success")
}

// refuse returns the reason why a document was rejected.
func (s *store) refuse(r result) reply {
	switch r {
	case structure:
		return s.say(r, "the structure is invalid")
	case unknown:
		return s.say(r, "the object to modify is unknown")
	}
	return s.say(r, "error parsing buffer")
}

// patch replaces the lists of a farm, or the elements of a list.
func (s *store) patch(path string, body []byte) reply {
	p := parts(path, 3)
	kind, name, list := p[0], p[1], p[2]
	switch {
	case kind == "farms" && list == "policies":
		f := s.farmNamed(name)
		if f == nil {
			if name != "" {
				s.note(". Unknown farm '%s'", name)
			}
			return s.say(unknown, "the object to modify is unknown")
		}
		s.setFarmAction(f, reload)
		s.setFarmPolicies(f, stop)
		s.settle()
		s.setFarmPolicies(f, remove)
		s.setFarmPolicies(f, none)
		if r := s.load(body, start); r != ok {
			return s.refuse(r)
		}
	case kind == "policies":
		p := s.policyNamed(name)
		if p == nil {
			if name != "" {
				s.note(". Unknown policy '%s'", name)
			}
			return s.say(unknown, "the object to modify is unknown")
		}
		if r := s.load(body, start); r != ok {
			return s.refuse(r)
		}
		s.setPolicyAction(p, flush)
	default:
		return s.say(unknown, "invalid request")
	}
	s.settle()
	return s.say(ok, "success")
}

// delete deletes the objects in the path, or the elements in the document.
func (s *store) delete(path string, body []byte) reply {
	p := parts(path, 5)
	kind, name, list, item, more := p[0], p[1], p[2], p[3], p[4]
	if !slices.Contains([]string{"farms", "policies", "addresses"}, kind) {
		return s.say(unknown, "invalid request")
	}
	if len(body) > 0 {
		if r := s.load(body, stop); r != ok {
			return s.refuse(r)
		}
		s.settle()
		return s.say(ok, "success")
	}
	switch {
	case kind == "farms" && list == "backends" && more == "sessions":
		return s.outcome(s.deleteBackendSessions(name, item), "error deleting sessions from backend")
	case kind == "farms" && list == "backends":
		return s.outcome(s.deleteBackends(name, item), "error deleting backend")
	case kind == "farms" && list == "sessions":
		return s.outcome(s.deleteSessions(name, item), "error deleting session")
	case kind == "farms" && list == "addresses":
		return s.outcome(s.deleteFarmAddresses(name, item), "error deleting farm address")
	case kind == "farms" && list == "policies":
		return s.outcome(s.deleteFarmPolicies(name, item), "error deleting farm policy")
	case kind == "policies" && list == "elements":
		if more != "" { // a network
			item += "/" + more
		}
		return s.deleteElements(name, item)
	case kind == "farms" && list == "":
		return s.outcome(deleteNamed(s, "farm", name, s.farms, s.farmNamed, func(f *farm, a action) { s.setFarmAction(f, a) }, s.settle), "error deleting farm")
	case kind == "policies" && list == "":
		return s.outcome(deleteNamed(s, "policy", name, s.policies, s.policyNamed, s.setPolicyAction, s.settleBackwards), "error stopping policy")
	case kind == "addresses" && list == "":
		return s.outcome(deleteNamed(s, "address", name, s.addresses, s.addressNamed, func(a *address, to action) { s.setAddressAction(a, to) }, s.settleBackwards), "error stopping address")
	}
	return s.say(structure, "invalid request")
}

func (s *store) outcome(r result, trouble string) reply {
	if r != ok {
		return s.say(r, trouble)
	}
	return s.say(ok, "success")
}

// deleteNamed deletes the objects of a kind with a name, or all without a name. Between the actions stop and remove,
// settle makes the changes.
func deleteNamed[T comparable](s *store, kind, name string, all []T, named func(string) T, set func(T, action), settle func()) result {
	list := slices.Clone(all)
	if name != "" {
		var none T
		o := named(name)
		if o == none {
			s.note(". Unknown %s '%s'", kind, name)
			return unknown
		}
		list = []T{o}
	}
	for _, o := range list {
		set(o, stop)
	}
	settle()
	for _, o := range list {
		set(o, remove)
	}
	return ok
}

func (s *store) deleteBackends(farm, name string) result {
	if farm == "" {
		return structure
	}
	f, r := s.farmFor(farm)
	if r != ok {
		return r
	}
	list, r := chosen(s, f, "backend", name, f.Backends, f.backend)
	for _, b := range list {
		s.deleteBackend(b)
	}
	return r
}

func (s *store) deleteBackendSessions(farm, name string) result {
	if farm == "" || name == "" {
		return structure
	}
	f, r := s.farmFor(farm)
	if r != ok {
		return r
	}
	if f.Attributes["persistence"] == "none" {
		s.note(". Farm '%s' without session persistence", farm)
		return invalid
	}
	list, r := chosen(s, f, "backend", name, nil, f.backend)
	if r != ok {
		return r
	}
	s.setFarmAction(f, reload)
	s.settle()
	f.dropSessions(list[0])
	return ok
}

func (s *store) deleteSessions(farm, client string) result {
	f, r := s.farmFor(farm)
	if r != ok {
		return r
	}
	client = strings.ReplaceAll(client, "_", " ") // a client with several values
	if client != "" && f.session(client) == nil {
		return ok
	}
	s.setFarmAction(f, reload)
	s.settle()
	f.Sessions = slices.DeleteFunc(f.Sessions, func(s *session) bool { return client == "" || s.Client == client })
	return ok
}

// reloadFarm marks a farm for recreation, or all without a name.
func (s *store) reloadFarm(name string) {
	if name == "" {
		for _, f := range slices.Clone(s.farms) {
			s.setFarmAction(f, reload)
		}
		return
	}
	f := s.farmNamed(name)
	if f == nil {
		s.note(". Unknown farm '%s'", name)
		return
	}
	s.setFarmAction(f, reload)
}

// farmFor returns the farm for the deletion of a part.
func (s *store) farmFor(name string) (*farm, result) {
	f := s.farmNamed(name)
	switch {
	case name == "":
		s.note(". Please select a valid farm")
		return nil, structure
	case f == nil:
		s.note(". Unknown farm '%s'", name)
		return nil, unknown
	}
	return f, ok
}

// chosen returns the part of a farm with a name, or all parts without a name.
func chosen[T comparable](s *store, f *farm, kind, name string, all []T, named func(string) T) ([]T, result) {
	if name == "" {
		return slices.Clone(all), ok
	}
	var none T
	part := named(name)
	if part == none {
		s.note(". Unknown %s '%s' in farm '%s'", kind, name, f.Name)
		return nil, unknown
	}
	return []T{part}, ok
}

func (s *store) deleteFarmAddresses(farm, name string) result {
	s.reloadFarm(farm)
	f, r := s.farmFor(farm)
	if r != ok {
		return r
	}
	if name == "" {
		f.setAddresses(stop)
		s.settle()
		for _, fa := range slices.Clone(f.addresses) {
			if fa.action > remove {
				s.leave(fa)
			}
		}
		return ok
	}
	list, r := chosen(s, f, "farm address", name, nil, f.address)
	if r != ok {
		return r
	}
	s.setFarmAddress(list[0], stop)
	s.settle()
	s.leave(list[0])
	return ok
}

func (s *store) deleteFarmPolicies(farm, name string) result {
	s.reloadFarm(farm)
	f, r := s.farmFor(farm)
	if r != ok {
		return r
	}
	list, r := chosen(s, f, "farm policy", name, f.policies, f.policy)
	if r != ok {
		return r
	}
	set := func(a action) {
		for _, fp := range list {
			s.setFarmPolicy(fp, a)
		}
		if name == "" {
			f.policiesAction = a
		}
	}
	set(stop)
	s.settle()
	s.setFarmAction(f, reload)
	set(remove)
	return ok
}

func (s *store) deleteElements(policy, data string) reply {
	p := s.policyNamed(policy)
	if p == nil {
		s.note(". Unknown policy '%s'", policy)
		return s.say(unknown, "could not get the policy elements")
	}
	if data == "" {
		s.setPolicyAction(p, flush)
		p.Elements = nil
		s.settle()
		return s.say(ok, "success")
	}
	if !slices.ContainsFunc(p.Elements, func(r config.AddressRange) bool { return r.String() == data }) {
		s.note(". Unknown element '%s' in policy '%s'", data, policy)
		return s.say(unknown, "error deleting policy element")
	}
	p.pending = append(p.pending, element{data, stop})
	s.setPolicyAction(p, reload)
	s.settle()
	return s.say(ok, "success")
}
