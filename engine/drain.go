// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// Backend names a backend of a service.
type Backend struct{ Service, Name string }

// Draining returns the backends in force that accept no new connections but keep existing ones.
func (e *Engine) Draining() (list []Backend) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, snapshot := range e.inForce {
		for _, s := range snapshot.Services {
			for i, state := range s.State {
				if state == datapath.Drain {
					list = append(list, Backend{s.Name, s.Backends[i].Name})
				}
			}
		}
	}
	return list
}

// closedStates are the states of TCP connections that carry no more data.
var closedStates = []string{"TIME_WAIT", "CLOSE", "LAST_ACK"}

// CountConnections counts the live connections of backends. The count is -1, unknown, for a backend
// without flows if its service may keep none in its mode.
func (e *Engine) CountConnections(ctx context.Context, of []Backend) (map[Backend]int, error) {
	counts := make(map[Backend]int, len(of))
	for _, b := range of {
		counts[b] = 0
	}
	err := e.Flows(ctx, "", func(f flow.Flow) bool {
		b := Backend{f.Owner, f.Backend}
		if n, ok := counts[b]; ok && !slices.Contains(closedStates, f.State) {
			counts[b] = n + 1
		}
		return true
	})
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, snapshot := range e.inForce {
		for _, s := range snapshot.Services {
			if s.Mode == config.ModeDNAT || s.Mode == config.ModeFullNAT {
				continue
			}
			for _, b := range s.Backends {
				if n, ok := counts[Backend{s.Name, b.Name}]; ok && n == 0 {
					counts[Backend{s.Name, b.Name}] = -1
				}
			}
		}
	}
	return counts, nil
}
