// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// earlyDropRules returns the rules that drop sources without another condition, and that no accept rule and
// no rule with a rate precedes. A packet that matches one is dropped, whatever other rules it
// matches. The programs check these sources before they parse the packet.
func earlyDropRules(rules []*config.FirewallRule) (list []*config.FirewallRule) {
	for _, r := range rules {
		if r.Action != config.ActionDrop || !r.Rate.IsZero() {
			break
		}
		if !r.Source.IsZero() && r.Destination.IsZero() && r.Protocol == flow.Any && r.In == "" && len(r.Ports) == 0 {
			list = append(list, r)
		}
	}
	return list
}

// deny compiles the early rules, and all sets but those that only early rules use.
func (c *compiler) deny() error {
	s := c.snapshot
	only, list := map[string]bool{}, earlyDropRules(s.Rules)
	for _, r := range list {
		only[r.Source.Set] = true
		prefixes := []netip.Prefix{r.Source.Prefix}
		if r.Source.Set != "" {
			prefixes = s.Config.Firewall.Sets[r.Source.Set]
		}
		for _, p := range prefixes {
			g, prefix := wire.DeniedOf(p)
			c.Denied[g] = append(c.Denied[g], prefix)
		}
	}
	for g, prefixes := range c.Denied {
		if !slices.IsSortedFunc(prefixes, wire.DeniedPrefix.Compare) {
			slices.SortFunc(prefixes, wire.DeniedPrefix.Compare)
		}
		c.Denied[g] = slices.Compact(prefixes)
	}
	c.rules = slices.DeleteFunc(slices.Clone(s.Rules), func(r *config.FirewallRule) bool { return slices.Contains(list, r) })
	for _, r := range c.rules {
		delete(only, r.Source.Set)
		delete(only, r.Destination.Set)
	}
	for i := range s.Services {
		for _, name := range slices.Concat(s.Services[i].Allow, s.Services[i].Deny) {
			delete(only, name)
		}
	}
	for name, prefixes := range s.Config.Firewall.Sets {
		if only[name] {
			continue
		}
		if _, err := c.set(name, prefixes); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}

// rule compiles a firewall rule for the ingress hook.
func (c *compiler) rule(r *config.FirewallRule) (err error) {
	w := wire.FirewallRule{L4Proto: uint8(r.Protocol), Action: wire.ActionPass}
	if r.Action == config.ActionDrop {
		w.Action = wire.ActionDrop
	}
	w.Ifindex = c.iface(r.In)
	if w.Sources, err = c.match(r.Source); err != nil {
		return err
	}
	if w.Dests, err = c.match(r.Destination); err != nil {
		return err
	}
	if !r.Rate.IsZero() {
		w.RateNs = uint64(r.Rate.Per) / uint64(r.Rate.Count)
		w.BurstNs = w.RateNs * uint64(max(r.Burst, 1)-1)
	}
	ports := r.Ports
	if len(ports) == 0 {
		ports = []flow.Ports{{}}
	}
	for _, p := range ports {
		if len(c.Firewall) == 64 {
			return fmt.Errorf("more than 64 rules and port ranges at ingress")
		}
		w.First, w.Last = p.First, p.Last
		c.Firewall = append(c.Firewall, w)
	}
	return nil
}

func (c *compiler) match(m config.Match) (uint64, error) {
	if m.IsZero() {
		return 0, nil
	}
	if m.Set != "" {
		return c.set(m.Set, nil)
	}
	return c.set("="+m.Prefix.String(), []netip.Prefix{m.Prefix})
}
