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

// sentenceReply returns a reply of one sentence with the collected notes.
func (s *store) sentenceReply(r result, message string) reply {
	return reply{status: r.status(), body: sentence(message + s.takeNotes())}
}

// sentence formats a reply without objects.
func sentence(message string) []byte {
	b := []byte(`{"response": `)
	return append(append(b, quoteJSON(message)...), '}')
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
	answer := s.getObjects(path)
	answer.found = found
	return answer
}

func (s *store) getObjects(path string) reply {
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
			return reply{status: 200, body: text("farms", selectObjects(s.farms, name, func(f *farm) string { return f.Name }, (*farm).print))}
		}
		r = wrong
	case kind == "policies":
		return reply{status: 200, body: text("policies", selectObjects(s.policies, name, func(p *policy) string { return p.Name }, s.printPolicy))}
	case kind == "addresses":
		return reply{status: 200, body: text("addresses", selectObjects(s.addresses, name, func(a *address) string { return a.Name }, (*address).print))}
	}
	return s.sentenceReply(r, "invalid request")
}

// printPolicy returns a list as shown to clients. As in nftlb, reading its elements makes the next change recreate
// the farms that use it.
func (s *store) printPolicy(p *policy) object {
	if len(p.Elements) > 0 {
		s.setPolicyAction(p, reload)
	}
	return p.print()
}

// selectObjects returns the objects with a name, or all.
func selectObjects[T any](all []T, name string, nameOf func(T) string, print func(T) object) []object {
	list := []object{}
	for _, o := range all {
		if name == "" || nameOf(o) == name {
			list = append(list, print(o))
		}
	}
	return list
}

// postDocument processes a document with new or changed objects.
func (s *store) postDocument(path string, body []byte) reply {
	if !slices.Contains([]string{"farms", "policies", "addresses"}, strings.TrimPrefix(path, "/")) {
		return s.sentenceReply(unknown, "invalid request")
	}
	if r := s.load(body, start); r != ok {
		return s.rejectionReply(r)
	}
	s.runPending()
	return s.sentenceReply(ok, "success")
}

// rejectionReply returns the reason why a document was rejected.
func (s *store) rejectionReply(r result) reply {
	switch r {
	case structure:
		return s.sentenceReply(r, "the structure is invalid")
	case unknown:
		return s.sentenceReply(r, "the object to modify is unknown")
	}
	return s.sentenceReply(r, "error parsing buffer")
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
				s.addNote(". Unknown farm '%s'", name)
			}
			return s.sentenceReply(unknown, "the object to modify is unknown")
		}
		s.setFarmAction(f, reload)
		s.setFarmPolicies(f, stop)
		s.runPending()
		s.setFarmPolicies(f, remove)
		s.setFarmPolicies(f, none)
		if r := s.load(body, start); r != ok {
			return s.rejectionReply(r)
		}
	case kind == "policies":
		p := s.policyNamed(name)
		if p == nil {
			if name != "" {
				s.addNote(". Unknown policy '%s'", name)
			}
			return s.sentenceReply(unknown, "the object to modify is unknown")
		}
		if r := s.load(body, start); r != ok {
			return s.rejectionReply(r)
		}
		s.setPolicyAction(p, flush)
	default:
		return s.sentenceReply(unknown, "invalid request")
	}
	s.runPending()
	return s.sentenceReply(ok, "success")
}

// delete deletes the objects in the path, or the elements in the document.
func (s *store) delete(path string, body []byte) reply {
	p := parts(path, 5)
	kind, name, list, item, more := p[0], p[1], p[2], p[3], p[4]
	if !slices.Contains([]string{"farms", "policies", "addresses"}, kind) {
		return s.sentenceReply(unknown, "invalid request")
	}
	if len(body) > 0 {
		if r := s.load(body, stop); r != ok {
			return s.rejectionReply(r)
		}
		s.runPending()
		return s.sentenceReply(ok, "success")
	}
	switch {
	case kind == "farms" && list == "backends" && more == "sessions":
		return s.resultReply(s.deleteBackendSessions(name, item), "error deleting sessions from backend")
	case kind == "farms" && list == "backends":
		return s.resultReply(s.deleteBackends(name, item), "error deleting backend")
	case kind == "farms" && list == "sessions":
		return s.resultReply(s.deleteSessions(name, item), "error deleting session")
	case kind == "farms" && list == "addresses":
		return s.resultReply(s.deleteFarmAddresses(name, item), "error deleting farm address")
	case kind == "farms" && list == "policies":
		return s.resultReply(s.deleteFarmPolicies(name, item), "error deleting farm policy")
	case kind == "policies" && list == "elements":
		if more != "" { // a network
			item += "/" + more
		}
		return s.deleteElements(name, item)
	case kind == "farms" && list == "":
		return s.resultReply(deleteNamed(s, "farm", name, s.farms, s.farmNamed, func(f *farm, a action) { s.setFarmAction(f, a) }, s.runPending), "error deleting farm")
	case kind == "policies" && list == "":
		return s.resultReply(deleteNamed(s, "policy", name, s.policies, s.policyNamed, s.setPolicyAction, s.settleBackwards), "error stopping policy")
	case kind == "addresses" && list == "":
		return s.resultReply(deleteNamed(s, "address", name, s.addresses, s.addressNamed, func(a *address, to action) { s.setAddressAction(a, to) }, s.settleBackwards), "error stopping address")
	}
	return s.sentenceReply(structure, "invalid request")
}

func (s *store) resultReply(r result, trouble string) reply {
	if r != ok {
		return s.sentenceReply(r, trouble)
	}
	return s.sentenceReply(ok, "success")
}

// deleteNamed deletes the objects of a kind with a name, or all without a name. Between the actions stop and remove,
// settle makes the changes.
func deleteNamed[T comparable](s *store, kind, name string, all []T, named func(string) T, set func(T, action), settle func()) result {
	list := slices.Clone(all)
	if name != "" {
		var none T
		o := named(name)
		if o == none {
			s.addNote(". Unknown %s '%s'", kind, name)
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
	list, r := selectParts(s, f, "backend", name, f.Backends, f.backend)
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
		s.addNote(". Farm '%s' without session persistence", farm)
		return invalid
	}
	list, r := selectParts(s, f, "backend", name, nil, f.backend)
	if r != ok {
		return r
	}
	s.setFarmAction(f, reload)
	s.runPending()
	f.dropSessions(list[0])
	return ok
}

func (s *store) deleteSessions(farm, client string) result {
	f, r := s.farmFor(farm)
	if r != ok {
		return r
	}
	client = strings.ReplaceAll(client, "_", " ") // a client of several values is written with underscores
	if client != "" && f.session(client) == nil {
		return ok
	}
	s.setFarmAction(f, reload)
	s.runPending()
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
		s.addNote(". Unknown farm '%s'", name)
		return
	}
	s.setFarmAction(f, reload)
}

// farmFor returns the farm for the deletion of a part.
func (s *store) farmFor(name string) (*farm, result) {
	f := s.farmNamed(name)
	switch {
	case name == "":
		s.addNote(". Please select a valid farm")
		return nil, structure
	case f == nil:
		s.addNote(". Unknown farm '%s'", name)
		return nil, unknown
	}
	return f, ok
}

// selectParts returns the part of a farm with a name, or all parts without a name.
func selectParts[T comparable](s *store, f *farm, kind, name string, all []T, named func(string) T) ([]T, result) {
	if name == "" {
		return slices.Clone(all), ok
	}
	var none T
	part := named(name)
	if part == none {
		s.addNote(". Unknown %s '%s' in farm '%s'", kind, name, f.Name)
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
		s.runPending()
		for _, fa := range slices.Clone(f.addresses) {
			if fa.action > remove {
				s.removeFromFarm(fa)
			}
		}
		return ok
	}
	list, r := selectParts(s, f, "farm address", name, nil, f.address)
	if r != ok {
		return r
	}
	s.setFarmAddress(list[0], stop)
	s.runPending()
	s.removeFromFarm(list[0])
	return ok
}

func (s *store) deleteFarmPolicies(farm, name string) result {
	s.reloadFarm(farm)
	f, r := s.farmFor(farm)
	if r != ok {
		return r
	}
	list, r := selectParts(s, f, "farm policy", name, f.policies, f.policy)
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
	s.runPending()
	s.setFarmAction(f, reload)
	set(remove)
	return ok
}

func (s *store) deleteElements(policy, data string) reply {
	p := s.policyNamed(policy)
	if p == nil {
		s.addNote(". Unknown policy '%s'", policy)
		return s.sentenceReply(unknown, "could not get the policy elements")
	}
	if data == "" {
		s.setPolicyAction(p, flush)
		p.Elements = nil
		s.runPending()
		return s.sentenceReply(ok, "success")
	}
	if !slices.ContainsFunc(p.Elements, func(r config.AddressRange) bool { return r.String() == data }) {
		s.addNote(". Unknown element '%s' in policy '%s'", data, policy)
		return s.sentenceReply(unknown, "error deleting policy element")
	}
	p.pending = append(p.pending, element{data, stop})
	s.setPolicyAction(p, reload)
	s.runPending()
	return s.sentenceReply(ok, "success")
}
