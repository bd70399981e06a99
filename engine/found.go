// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// Discovered backends are added to the configuration here and nowhere else. Config returns the
// configuration without them, so that they are neither written to the file nor stored as a change.

// SetFound replaces the discovered backends of the named services and applies the result. Other
// services keep theirs. If the datapaths refuse, nothing changes. Before the first Apply the
// backends wait for that.
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
			if err := validateService(e.given, e.withDiscovered(s)); err != nil {
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
	e.logApplied(applied)
	return applied, nil
}

// dropUnfit removes backends found by an earlier process that a service cannot have: they must not keep
// the configuration from being in force.
func (e *Engine) dropUnfit(given *config.Config) {
	for i := range given.Services {
		s := &given.Services[i]
		if len(e.found[s.Name]) == 0 {
			continue
		}
		if err := validateService(given, e.withDiscovered(s)); err != nil {
			e.opt.Log.Warn("the backends found before the start are not used", "service", s.Name, "error", err)
			delete(e.found, s.Name)
		}
	}
}

// validateService validates one service.
func validateService(cfg *config.Config, s config.Service) error {
	alone := &config.Config{Services: []config.Service{s}, Firewall: config.Firewall{Sets: cfg.Firewall.Sets}}
	alone.SetDefaults()
	return alone.Validate()
}

// Found returns the discovered backends in force, by service.
func (e *Engine) Found() map[string][]config.Backend {
	e.mu.Lock()
	defer e.mu.Unlock()
	in := map[string][]config.Backend{}
	if e.given == nil {
		return in
	}
	for i := range e.given.Services {
		if s := &e.given.Services[i]; s.BackendsFrom != nil {
			in[s.Name] = e.withDiscovered(s).Backends[len(s.Backends):]
		}
	}
	return in
}

// withFound returns the configuration with the discovered backends; without any, the configuration
// itself.
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
		whole.Services[i] = e.withDiscovered(s)
	}
	return whole
}

// withDiscovered returns the service with its discovered backends, except duplicates of configured ones.
func (e *Engine) withDiscovered(s *config.Service) config.Service {
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

// Has reports whether a service has a backend, configured or discovered.
func (e *Engine) Has(service, backend string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return MustHave(e.config, service, backend) == nil
}
