// SPDX-License-Identifier: Apache-2.0

package model

import (
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/datapath"
)

// Map creates the mapping that a host requests by PCP (RFC 6887), with exactly the requested
// outside endpoint. The binding exists without sessions, and its filter admits every remote
// endpoint.
func (m *Model) Map(w datapath.Mapping) error {
	for _, r := range m.rules {
		if r.Name != w.Rule || !r.PCP {
			continue
		}
		key := bindingKey{rule: r, protocol: w.Protocol, inside: w.Inside}
		b, endpoint := m.bindings[key], outsideKey{portClass(w.Protocol), w.Outside}
		c := m.client(clientKey{rule: r, address: w.Inside.Addr()})
		if b != nil && !b.acceptsSessions() {
			b = nil
		}
		pinned := c.address.IsValid() && m.portsOf(c) > 0 && (r.poolContains(c.address) || r.PortBlock > 0)
		switch {
		case !r.poolContains(w.Outside.Addr()):
			return datapath.ErrNoPort
		case b != nil && b.outside != endpoint:
			return datapath.ErrNoPort
		case b == nil && r.PortsPerClient > 0 && m.portsOf(c) >= r.PortsPerClient:
			return datapath.ErrQuota
		case b == nil && (m.outside[endpoint] != nil || m.ports[endpoint] > m.now || pinned && c.address != w.Outside.Addr()):
			return datapath.ErrNoPort
		case b == nil:
			c.address = w.Outside.Addr()
			b = &binding{counted: r.counts(), rule: r, protocol: w.Protocol, inside: w.Inside, outside: endpoint, client: c, remotes: map[netip.Addr]bool{}}
			m.bindings[key], m.outside[endpoint] = b, b
			if b.counted {
				c.ports++
			}
		}
		b.sessions++
		b.mapped = true
		return nil
	}
	return datapath.ErrNoPort
}

// MayAsk reports whether the rule of a mapping permits PCP requests from the mapping's host.
func (m *Model) MayAsk(w datapath.Mapping) bool {
	return slices.ContainsFunc(m.rules, func(r *rule) bool { return r.Name == w.Rule && r.PCP && contains(r.Source, w.Inside.Addr()) })
}

// Unmap ends the request. The sessions of the binding continue.
func (m *Model) Unmap(w datapath.Mapping) {
	if b := m.outside[outsideKey{portClass(w.Protocol), w.Outside}]; b != nil && b.mapped {
		m.removeMapping(b)
	}
}

func (m *Model) removeMapping(b *binding) {
	b.mapped = false
	b.sessions--
	m.dropUnused(b)
}
