// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// Backends that were found while the gateway runs join the configuration here, and nowhere before:
// Config returns it without them, so that they are neither written nor kept as a change.

// SetFound puts backends in force that were found for services, in the place of those that were found
// before. Services that are not named keep theirs. When the datapaths refuse them, nothing changes.
// Before the first Apply they wait for it.
func (e *Engine) SetFound(ctx context.Context, by map[string][]config.Backend) (Applied, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.found
	e.found = maps.Clone(before)
	if e.found == nil {
		e.found = map[string][]config.Backend{}
	}
	maps.Copy(e.found, by)
	if e.given == nil {
		return Applied{}, nil
	}
	for i := range e.given.Services {
		if s := &e.given.Services[i]; by[s.Name] != nil {
			if err := valid(e.given, e.joined(s)); err != nil {
				e.found = before
				return Applied{}, err
			}
		}
	}
	applied, err := e.apply(ctx, e.given)
	if err != nil {
		e.found = before
		return applied, err
	}
	e.report(applied)
	return applied, nil
}

// valid validates one service.
func valid(cfg *config.Config, s config.Service) error {
	alone := &config.Config{Services: []config.Service{s}, Firewall: config.Firewall{Sets: cfg.Firewall.Sets}}
	alone.SetDefaults()
	return alone.Validate()
}

// Found returns the backends in force that were found, by service.
func (e *Engine) Found() map[string][]config.Backend {
	e.mu.Lock()
	defer e.mu.Unlock()
	in := map[string][]config.Backend{}
	if e.given == nil {
		return in
	}
	for i := range e.given.Services {
		if s := &e.given.Services[i]; s.BackendsFrom != nil {
			in[s.Name] = e.joined(s).Backends[len(s.Backends):]
		}
	}
	return in
}

// withFound returns the configuration with what was found for its services; itself when that is
// nothing.
func (e *Engine) withFound(given *config.Config) *config.Config {
	whole := given
	for i := range given.Services {
		s := &given.Services[i]
		if s.BackendsFrom == nil || len(e.found[s.Name]) == 0 {
			continue
		}
		if whole == given {
			c := *given
			c.Services = slices.Clone(given.Services)
			whole = &c
		}
		whole.Services[i] = e.joined(s)
	}
	return whole
}

// joined returns the service with the backends that were found and that it does not have already.
func (e *Engine) joined(s *config.Service) config.Service {
	names, places := map[string]bool{}, map[netip.AddrPort]bool{}
	for _, b := range s.Backends {
		names[b.Name], places[netip.AddrPortFrom(b.Address, b.Port)] = true, true
	}
	joined := *s
	joined.Backends = slices.Clone(s.Backends)
	for _, b := range e.found[s.Name] {
		if at := netip.AddrPortFrom(b.Address, b.Port); !names[b.Name] && !places[at] {
			names[b.Name], places[at] = true, true
			joined.Backends = append(joined.Backends, b)
		}
	}
	return joined
}

// Has reports whether a service has a backend, be it in the configuration or found.
func (e *Engine) Has(service, backend string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return MustHave(e.config, service, backend) == nil
}
