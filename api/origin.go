// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
)

// AllEdits returns the edits of the configuration, followed by the states that the operator set, in the form of edits.
// The path of a state ends with "@state" or "@node".
func (c *ConfigChanges) AllEdits() []config.Edit {
	edits := slices.Clone(c.Edits)
	for _, s := range c.States {
		path := config.Join("services", s.Service, "backends", s.Backend, "@state")
		switch {
		case s.Node:
			path = "@node"
		case s.Service == "":
			path = "@state"
		}
		edits = append(edits, config.Edit{Path: path, After: s.Text})
	}
	return edits
}

// Origin is the origin of a value that differs from the daemon's file.
type Origin struct {
	Path     string    `json:"path"`
	Value    string    `json:"value"` // value in force; empty if it was removed
	File     string    `json:"file"`  // value in the file; empty for none
	Revision uint64    `json:"revision,omitempty"`
	At       time.Time `json:"at,omitzero"`
	Who      string    `json:"who,omitempty"`
	Found    string    `json:"discovered,omitempty"` // source from which discovery read the value
}

// Origins finds the last revision that changed each value, and adds the discovered backends. Values older than the
// history have Revision 0.
func (c *ConfigChanges) Origins() []Origin {
	rows := []Origin{}
	for _, e := range c.AllEdits() {
		row := Origin{Path: e.Path, Value: e.After, File: e.Before}
		for _, r := range slices.Backward(c.History) {
			if slices.ContainsFunc(r.Edits, func(made config.Edit) bool { return overlap(made.Path, e.Path) }) {
				row.Revision, row.At, row.Who = r.Revision, r.At, r.Who
				break
			}
		}
		rows = append(rows, row)
	}
	for _, b := range c.Discovered {
		value := b.Address.String()
		if b.Port != 0 {
			value = netip.AddrPortFrom(b.Address, b.Port).String()
		}
		rows = append(rows, Origin{Path: config.Join("services", b.Service, "backends", b.Backend), Value: value, At: b.Since, Found: b.From})
	}
	return rows
}

// overlap reports whether two paths are equal, or one is a prefix of the other.
func overlap(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/")
}
