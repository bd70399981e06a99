// SPDX-License-Identifier: Apache-2.0

package store

import (
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// stateEdits returns the edits that make the states to of the states from.
func stateEdits(from, to []State) []config.Edit {
	values := map[string][2]string{}
	var paths []string
	for i, states := range [][]State{from, to} {
		for _, s := range states {
			v := values[s.path()]
			v[i] = s.State
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

// split separates edits of the configuration from those of states.
func split(edits []config.Edit) (ofConfig, ofStates []config.Edit) {
	for _, e := range edits {
		if strings.HasSuffix(e.Path, "/@state") {
			ofStates = append(ofStates, e)
		} else {
			ofConfig = append(ofConfig, e)
		}
	}
	return ofConfig, ofStates
}

// undo makes edits of states.
func undo(states []State, edits []config.Edit) []State {
	for _, e := range edits {
		steps := config.Split(e.Path)
		s := State{steps[1], steps[3], e.After}
		states = slices.DeleteFunc(slices.Clone(states), func(old State) bool { return old.path() == s.path() })
		if e.After != "" {
			states = append(states, s)
		}
	}
	return states
}
