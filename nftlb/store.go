// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"fmt"
	"slices"
	"strings"
)

// store holds all objects. It is not safe for concurrent use.
type store struct {
	farms     []*farm
	addresses []*address
	policies  []*policy
	network   Network

	// The position in the document. A failed document leaves its position to the next.
	farm          *farm
	backend       *backend
	session       *session
	farmPolicy    *farmPolicy
	farmAddress   *farmAddress
	address       *address
	addressPolicy *addressPolicy
	policy        *policy
	element       int // index in policy.pending; -1 for none
	level         level
	key           string

	notes strings.Builder // notes for the reply
}

func newStore(n Network) *store { return &store{network: n, element: -1} }

func (s *store) addNote(format string, args ...any) { fmt.Fprintf(&s.notes, format, args...) }

// takeNotes returns the notes and clears them.
func (s *store) takeNotes() string {
	defer s.notes.Reset()
	return s.notes.String()
}

func (s *store) farmNamed(name string) *farm {
	for _, f := range s.farms {
		if f.Name == name {
			return f
		}
	}
	return nil
}

func (s *store) addressNamed(name string) *address {
	for _, a := range s.addresses {
		if a.Name == name {
			return a
		}
	}
	return nil
}

func (s *store) policyNamed(name string) *policy {
	for _, p := range s.policies {
		if p.Name == name {
			return p
		}
	}
	return nil
}

// level is the kind of object that the parser is in.
type level int

// Log levels.
const (
	ofRoot level = iota
	ofFarms
	ofBackends
	ofFarmPolicies
	ofPolicies
	ofElements
	ofSessions
	ofAddresses
	ofFarmAddresses
	ofAddressPolicies
)

// lists maps the lists in objects of a level to the level of their elements.
var lists = map[level]map[string]level{
	ofRoot:      {"farms": ofFarms, "policies": ofPolicies, "addresses": ofAddresses},
	ofFarms:     {"backends": ofBackends, "addresses": ofFarmAddresses, "sessions": ofSessions, "policies": ofFarmPolicies},
	ofPolicies:  {"elements": ofElements},
	ofAddresses: {"policies": ofAddressPolicies},
}

// places maps a list to its permitted levels. On other levels it is skipped.
var places = map[string][]level{
	"farms": {ofRoot}, "backends": {ofFarms}, "policies": {ofRoot, ofFarms, ofAddresses}, "addresses": {ofFarms, ofRoot},
	"sessions": {ofFarms}, "elements": {ofPolicies},
}

// load processes a document; apply is the action for elements of lists.
func (s *store) load(body []byte, apply action) result {
	n, err := read(body)
	if err != nil {
		return structure
	}
	return s.walk(n, ofRoot, "", apply)
}

func (s *store) walk(n node, at level, key string, apply action) result {
	switch n.kind {
	case '{':
		return s.walkObject(n, at, apply)
	case '[':
		if inner, is := lists[at][key]; is {
			at = inner
		}
		for _, item := range n.items {
			if r := s.walk(item, at, "", apply); r != ok {
				return r
			}
		}
	case 's':
		return s.text(n.text, apply)
	}
	return ok
}

func (s *store) walkObject(n node, at level, apply action) result {
	r := ok
	for _, m := range n.members {
		s.level = at
		number := slices.Index(keys, m.key)
		if number < 0 {
			s.addNote(". Unknown key '%s'", m.key)
			return wrong
		}
		s.key = m.key
		if levels, is := places[m.key]; is && !slices.Contains(levels, at) {
			if r = ok; number != 0 { // nftlb treats the number of the key as a result
				r = wrong
			}
			continue
		}
		if r = s.walk(m.node, at, m.key, apply); r != ok {
			return r
		}
	}
	return r
}

// text sets the value of the current key.
func (s *store) text(text string, apply action) result {
	value, note, r := parse(s.key, text)
	s.addNote("%s", note)
	if r != ok || s.key == "used" || s.key == "counter-packets" || s.key == "counter-bytes" {
		return r
	}
	key, at := s.key, s.level
	r = s.set(at, key, value, apply)
	s.key, s.level = "", -1
	return r
}

func (s *store) set(at level, key, value string, apply action) result {
	switch at {
	case ofFarms:
		return s.changeFarm(key, value)
	case ofBackends:
		return s.changeBackend(key, value)
	case ofSessions:
		return s.changeSession(key, value)
	case ofFarmPolicies:
		return s.changeFarmPolicy(key, value)
	case ofPolicies:
		return s.changePolicy(key, value)
	case ofElements:
		return s.changeElement(key, value, apply)
	case ofAddresses:
		if a := s.address; a != nil && !a.changed(key, value) {
			return ok
		}
		return s.setAddress(key, value)
	case ofFarmAddresses:
		return s.changeFarmAddress(key, value)
	case ofAddressPolicies:
		return s.changeAddressPolicy(key, value)
	}
	return structure
}

// runPending performs all pending actions: lists first, then addresses, then farms.
func (s *store) runPending() {
	s.forget()
	for _, p := range s.policies {
		s.settlePolicy(p)
	}
	s.settleAddresses()
	for _, f := range slices.Clone(s.farms) {
		s.settleFarm(f)
	}
}

// settleBackwards is settle in reverse order, for deletions.
func (s *store) settleBackwards() {
	s.forget()
	for _, f := range slices.Clone(s.farms) {
		s.settleFarm(f)
	}
	s.settleAddresses()
	for _, p := range s.policies {
		s.settlePolicy(p)
	}
}

func (s *store) settleAddresses() {
	for _, a := range s.addresses {
		if a.Used == 0 {
			a.action = none
		}
	}
}

// forget resets the position in the document.
func (s *store) forget() {
	s.farm, s.backend, s.session, s.farmPolicy, s.farmAddress, s.address, s.policy = nil, nil, nil, nil, nil, nil, nil
	s.element = -1
}
