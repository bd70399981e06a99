// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Resolve returns a snapshot in which all listeners have an address. A listener that names only an interface gets the
// interface's first global address per family. The families are the ones of the service's backends or of the
// port-forward's target. It then accepts packets from every interface. address returns such an address.
//
// Without an address there is no listener: a service has none, a port-forward is omitted. The same applies to ports
// of the address that other listeners name explicitly.
func Resolve(s *Snapshot, address func(iface string, v6 bool) (netip.Addr, bool)) *Snapshot {
	forwards := func(n *config.NATRule) bool { return n.Listen != nil && n.Listen.Follows() }
	if !slices.ContainsFunc(s.Services, func(svc Service) bool { return slices.ContainsFunc(svc.Listen, config.Listen.Follows) }) &&
		!slices.ContainsFunc(s.NAT, forwards) {
		return s
	}
	r := resolver{address: address, taken: fixedListeners(s.Config)}
	out := *s
	out.Services = slices.Clone(s.Services)
	for i, svc := range s.Services {
		if slices.ContainsFunc(svc.Listen, config.Listen.Follows) {
			one := *svc.Service
			one.Listen = r.listeners(svc.Service)
			out.Services[i].Service = &one
		}
	}
	out.NAT = nil
	for _, n := range s.NAT {
		if !forwards(n) {
			out.NAT = append(out.NAT, n)
		} else if l, ok := r.currentListener(*n.Listen, n.Protocol, n.To.Address.Is6()); ok {
			one := *n
			one.Listen = &l
			out.NAT = append(out.NAT, &one)
		}
	}
	return &out
}

// resolver assigns addresses of interfaces to listeners.
type resolver struct {
	address func(iface string, v6 bool) (netip.Addr, bool)
	taken   []endpoint
}

// endpoint is a listener with an address.
type endpoint struct {
	config.Listen
	protocol flow.Protocol
}

// fixedListeners returns the listeners of a configuration that name an address.
func fixedListeners(c *config.Config) (list []endpoint) {
	for i := range c.Services {
		for _, l := range c.Services[i].Listen {
			if !l.Follows() {
				list = append(list, endpoint{l, c.Services[i].Protocol})
			}
		}
	}
	for i := range c.NAT {
		if l := c.NAT[i].Listen; l != nil && !l.Follows() {
			list = append(list, endpoint{*l, c.NAT[i].Protocol})
		}
	}
	return list
}

func (r *resolver) listeners(s *config.Service) (list []config.Listen) {
	for _, l := range s.Listen {
		if !l.Follows() {
			list = append(list, l)
			continue
		}
		for _, v6 := range []bool{false, true} {
			if !hasBackends(s, v6) {
				continue
			}
			if at, ok := r.currentListener(l, s.Protocol, v6); ok {
				list = append(list, at)
			}
		}
	}
	return list
}

// currentListener returns a listener on the current address of its interface.
func (r *resolver) currentListener(l config.Listen, protocol flow.Protocol, v6 bool) (at config.Listen, ok bool) {
	a, ok := r.address(l.Interface, v6)
	if !ok {
		return at, false
	}
	at.Address = a
	meets := func(e endpoint, p flow.Ports) bool {
		return e.Address == a && (e.protocol == protocol || e.protocol == flow.Any || protocol == flow.Any) && (len(e.Ports) == 0 ||
			p == flow.Ports{} || slices.ContainsFunc(e.Ports, func(q flow.Ports) bool { return p.First <= q.Last && q.First <= p.Last }))
	}
	free := func(p flow.Ports) bool {
		return !slices.ContainsFunc(r.taken, func(e endpoint) bool { return meets(e, p) })
	}
	if len(l.Ports) == 0 {
		return at, free(flow.Ports{})
	}
	for _, p := range l.Ports {
		if free(p) {
			at.Ports = append(at.Ports, p)
		}
	}
	return at, len(at.Ports) > 0
}

// hasBackends reports whether a service has backends of a family.
func hasBackends(s *config.Service, v6 bool) bool {
	return slices.ContainsFunc(s.Backends, func(b config.Backend) bool { return b.Address.Is6() == v6 })
}
