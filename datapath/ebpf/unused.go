// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/netdev"
)

// needsNoProgram reports whether the configuration works without a program on an interface. No rule may
// name the interface, no configured address may be in one of its networks, and no default route may
// use it.
func needsNoProgram(c *config.Config, h *compile.Host, i netdev.Interface) bool {
	var addresses []netip.Addr
	var prefixes []netip.Prefix
	names := func(which config.Interfaces) bool { return which != "" && which.Has(i.Name) }
	for _, s := range c.Services {
		for _, l := range s.Listen {
			if l.Interface == i.Name {
				return false
			}
			addresses = append(addresses, l.Address)
		}
		for _, b := range s.Backends {
			addresses = append(addresses, b.Address)
		}
	}
	for _, r := range c.NAT {
		open := r.In == "" && r.Listen == nil && len(r.Source) == 0 && !r.Internal.IsValid() // applies to packets of every interface
		if open || names(r.In) || names(r.Out) || r.Listen != nil && r.Listen.Interface == i.Name {
			return false
		}
		prefixes = append(append(prefixes, r.Source...), r.Internal)
		addresses = append(addresses, r.To.Address)
		if r.Listen != nil {
			addresses = append(addresses, r.Listen.Address)
		}
	}
	for _, r := range c.Firewall.Rules {
		if r.In == "" || r.In == i.Name {
			return false
		}
	}
	for _, a := range h.Details[i.Index] {
		near := func(b netip.Addr) bool { return b.IsValid() && a.Network.Contains(b) }
		if slices.ContainsFunc(addresses, near) || slices.ContainsFunc(prefixes, a.Network.Overlaps) {
			return false
		}
	}
	return !defaultRoute(i.Index)
}

// defaultRoute reports whether a default route uses an interface. A read error counts as true.
func defaultRoute(index int) bool {
	list, err := netdev.Whole(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{LinkIndex: index}, netlink.RT_FILTER_OIF)
	})
	return err != nil || slices.ContainsFunc(list, func(r netlink.Route) bool {
		if r.Dst == nil {
			return true
		}
		bits, _ := r.Dst.Mask.Size()
		return bits == 0
	})
}
