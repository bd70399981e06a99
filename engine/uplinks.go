// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/uplink"
)

// Uplinks follows the uplinks of the host: an uplink.Tracker, except in tests.
type Uplinks interface {
	// Plan returns the changes that Set would make. It changes nothing.
	Plan([]config.Uplink) (*datapath.Change, error)
	// Set replaces the uplinks with their rules and routes, and returns the change.
	Set([]config.Uplink) (*datapath.Change, error)
	// States returns the states of the uplinks of a configuration.
	States([]config.Uplink) []datapath.Uplink
	// Known reports whether every uplink has been probed once.
	Known() bool
	Statuses() []uplink.Status
	// Release removes the rules and routes, unless keep is set, and ends the tracker.
	Release(keep bool) error
}

// setUplinks writes the rules and routes of the uplinks. They precede the rules of the datapath, which mark packets for
// them, and the probes, which use them.
func (e *Engine) setUplinks(cfg *config.Config) (*datapath.Change, error) {
	if e.opt.Uplinks == nil {
		if len(cfg.Uplinks) > 0 {
			return nil, errors.New("uplinks are not available here")
		}
		return nil, nil
	}
	change, err := e.opt.Uplinks.Set(cfg.Uplinks)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("uplinks: %w", err), e.restoreUplinks())
	}
	return change, nil
}

// restoreUplinks returns to the uplinks in force. The rules of an earlier daemon stay, because its datapath stays too.
func (e *Engine) restoreUplinks() error {
	if e.opt.Uplinks == nil {
		return nil
	}
	var list []config.Uplink
	if e.config != nil {
		list = e.config.Uplinks
	}
	for _, left := range e.left {
		if left && e.config == nil {
			return nil
		}
	}
	_, err := e.opt.Uplinks.Set(list)
	return err
}

// uplinks returns the states of the uplinks of a configuration.
func (e *Engine) uplinks(cfg *config.Config) []datapath.Uplink {
	if len(cfg.Uplinks) == 0 || e.opt.Uplinks == nil {
		return nil
	}
	return e.opt.Uplinks.States(cfg.Uplinks)
}
