// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
)

// String returns the form of the state in an edit: "drain until 2026-11-25T20:00:00Z then reset".
func (s Override) String() string {
	text := s.State
	if !s.Until.IsZero() {
		text += " until " + s.Until.UTC().Format(time.RFC3339)
	}
	if s.Then != "" {
		text += " then " + s.Then
	}
	return text
}

// check returns an error for a state that no operator can set.
func (s Override) check() error {
	switch {
	case !slices.Contains([]string{"up", "drain", "down"}, s.State):
		return fmt.Errorf("state %q of backend %q of service %q: not one of up, drain, down", s.State, s.Backend, s.Service)
	case s.Node && s != Override{Node: true, State: "drain"}:
		return fmt.Errorf("state %q of the node: it can only be drain, without names or a deadline", s)
	case !slices.Contains([]string{"", "keep", "reset"}, s.Then):
		return fmt.Errorf("then %q of backend %q of service %q: not one of keep, reset", s.Then, s.Backend, s.Service)
	}
	return nil
}

// parseState parses the result of String.
func parseState(text string) (s Override) {
	words := strings.Fields(text)
	for i, word := range words {
		switch {
		case i == 0:
			s.State = word
		case words[i-1] == "until":
			s.Until, _ = time.Parse(time.RFC3339, word) // only Sluice writes this text
		case words[i-1] == "then":
			s.Then = word
		}
	}
	return s
}

// stateEdits returns the edits that turn the states from into the states to.
func stateEdits(from, to []Override) []config.Edit {
	values := map[string][2]string{}
	var paths []string
	for i, states := range [][]Override{from, to} {
		for _, s := range states {
			v := values[s.path()]
			v[i] = s.String()
			values[s.path()] = v
			paths = append(paths, s.path())
		}
	}
	slices.Sort(paths)
	var edits []config.Edit
	for _, p := range slices.Compact(paths) {
		if v := values[p]; v[0] != v[1] {
			edits = append(edits, config.Edit{Path: p, Before: v[0], After: v[1]})
		}
	}
	return edits
}

// splitEdits separates edits of the configuration from edits of states.
func splitEdits(edits []config.Edit) (ofConfig, ofStates []config.Edit) {
	for _, e := range edits {
		if e.Path == "@state" || e.Path == nodePath || strings.HasSuffix(e.Path, "/@state") {
			ofStates = append(ofStates, e)
		} else {
			ofConfig = append(ofConfig, e)
		}
	}
	return ofConfig, ofStates
}

// applyStateEdits applies edits to states.
func applyStateEdits(states []Override, edits []config.Edit) []Override {
	for _, e := range edits {
		s := parseState(e.After)
		s.Node = e.Path == nodePath
		if steps := config.Split(e.Path); len(steps) == 5 {
			s.Service, s.Backend = steps[1], steps[3]
		}
		states = slices.DeleteFunc(slices.Clone(states), func(old Override) bool { return old.path() == s.path() })
		if e.After != "" {
			states = append(states, s)
		}
	}
	return states
}
