// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// apply writes the objects to disk and puts them in force.
func (a *API) apply(ctx context.Context, who, what string) error {
	if err := a.write(); err != nil {
		a.late = true
		return err
	}
	a.unkept = ""
	return a.enforceObjects(ctx, who, what)
}

// enforceObjects puts the objects in force.
func (a *API) enforceObjects(ctx context.Context, who, what string) error {
	used, err := a.put(ctx, who, what, a.store.wantedPortions())
	if err != nil {
		used, err = a.applyEach(ctx, who, what, err)
	}
	a.logNew(used)
	a.late = err != nil
	return err
}

// put replaces the active portions, and returns the new ones with their warnings.
func (a *API) put(ctx context.Context, who, what string, all []*portion) (used []*portion, err error) {
	now := a.opt.InForce()
	if now != nil {
		var next *config.Config
		if next, used = assemble(now, all); len(config.Diff(now, next)) == 0 {
			return used, nil
		}
	}
	err = a.opt.Change(ctx, who, what, func(now *config.Config) (*config.Config, error) {
		var next *config.Config
		next, used = assemble(now, all)
		return next, nil
	})
	return used, err
}

// applyEach applies the portions one by one, after all together were refused: an invalid farm must not affect others. It
// fails if no portion can be applied.
func (a *API) applyEach(ctx context.Context, who, what string, cause error) (used []*portion, err error) {
	var good []*portion
	for _, p := range a.store.wantedPortions() {
		if _, err := a.put(ctx, who, what, append(slices.Clone(good), p)); err != nil {
			p.addWarning("it is not in force: %v", err)
			used = append(used, &portion{warnings: p.warnings})
			continue
		}
		good, cause = append(good, p), nil
		used = append(used, p)
	}
	return used, cause
}

// logNew logs new warnings.
func (a *API) logNew(used []*portion) {
	var all []string
	for _, p := range used {
		for _, w := range p.warnings {
			if !slices.Contains(a.unserved, w) {
				a.opt.Log.Warn(w)
			}
			all = append(all, w)
		}
	}
	a.unserved = all
}

// assemble returns a configuration with replaced portions, and the portions with their warnings. It omits invalid
// portions.
func assemble(inForce *config.Config, all []*portion) (*config.Config, []*portion) {
	for _, p := range all {
		alone := &config.Config{}
		p.addTo(alone)
		alone.SetDefaults()
		if err := alone.Validate(); err != nil {
			p.leaveOut(err)
			continue
		}
		p.services, p.rules = alone.Services, alone.Firewall.Rules
	}
	for {
		next := withoutObjects(inForce)
		for _, p := range all {
			p.addTo(next)
		}
		err := next.Validate()
		if err == nil {
			return next, all
		}
		if !dropInvalid(all, err) {
			return next, all // it will be refused with the reason
		}
	}
}

// dropInvalid removes the portions with errors, and reports whether there were any.
func dropInvalid(all []*portion, err error) bool {
	found := false
	var list config.Errors
	_ = errors.As(err, &list)
	for _, p := range all {
		for _, e := range list {
			if !p.isEmpty() && p.concerns(e.Object) {
				p.leaveOut(e)
				found = true
			}
		}
	}
	return found
}

// concerns reports whether an error about an object concerns the portion.
func (p *portion) concerns(object string) bool {
	object, _, _ = strings.Cut(object, ":")
	return slices.ContainsFunc(p.services, func(s config.Service) bool { return object == "service "+s.Name }) ||
		slices.ContainsFunc(p.rules, func(r config.FirewallRule) bool { return object == "firewall rule "+r.Name })
}

func (p *portion) leaveOut(err error) {
	p.addWarning("it is not in force: %s", strings.ReplaceAll(err.Error(), "\n", "; "))
	p.services, p.rules, p.sets = nil, nil, nil
}

func (p *portion) addTo(c *config.Config) {
	c.Services = append(c.Services, p.services...)
	c.Firewall.Rules = append(c.Firewall.Rules, p.rules...)
	if len(p.sets) > 0 && c.Firewall.Sets == nil {
		c.Firewall.Sets = map[string][]netip.Prefix{}
	}
	maps.Copy(c.Firewall.Sets, p.sets)
}

// withoutObjects returns the configuration without the objects of the API.
func withoutObjects(c *config.Config) *config.Config {
	next := *c
	next.Services = slices.DeleteFunc(slices.Clone(c.Services), func(s config.Service) bool { return strings.HasPrefix(s.Name, owned) })
	next.Firewall.Rules = slices.DeleteFunc(slices.Clone(c.Firewall.Rules), func(r config.FirewallRule) bool { return strings.HasPrefix(r.Name, owned) })
	next.Firewall.Sets = maps.Clone(c.Firewall.Sets)
	maps.DeleteFunc(next.Firewall.Sets, func(name string, _ []netip.Prefix) bool { return strings.HasPrefix(name, owned) })
	return &next
}
