// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

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
