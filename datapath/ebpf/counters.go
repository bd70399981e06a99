// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"fmt"
	"sort"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// Counters returns the counters since the tables were created.
func (d *Datapath) Counters(context.Context) (*datapath.Counters, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, err := d.gauges()
	if err == nil && d.t != nil && d.inForce != nil {
		err = d.addOwnerCounters(c)
	}
	return c, err
}

// Gauges implements datapath.Gauger. It does not read the flows.
func (d *Datapath) Gauges(context.Context) (*datapath.Counters, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.gauges()
}

func (d *Datapath) gauges() (c *datapath.Counters, err error) {
	c = &datapath.Counters{Missed: d.failedEvents.Load()}
	if d.t == nil || d.inForce == nil {
		return c, nil
	}
	if c.Reasons, err = d.t.Reasons(); err != nil {
		return nil, err
	}
	c.Tables = d.t.Use(d.switches.HalfOpen)
	return c, nil
}

// addOwnerCounters adds the counters of ended and live flows.
func (d *Datapath) addOwnerCounters(c *datapath.Counters) error {
	services, backends, rules := map[uint16]table.Traffic{}, map[uint16]table.Traffic{}, map[uint16]table.Traffic{}
	add := func(m map[uint16]table.Traffic, k uint16, s, twin table.Entry) {
		t := m[k]
		t.Packets += s.Packets + twin.Packets
		t.Bytes += s.Bytes + twin.Bytes
		m[k] = t
	}
	d.t.Primaries(func(s table.Entry) bool {
		twin := d.t.Twin(s)
		if s.Flags&wire.EntryNAT != 0 {
			add(rules, s.Owner, s, twin)
		} else {
			add(services, s.Owner, s, twin)
			add(backends, s.Backend, s, twin)
		}
		return true
	})
	tallies, err := d.backendCounters()
	if err != nil {
		return err
	}
	for k, n := range d.t.IDs.Known { // includes removed backends
		if k.Kind == ids.Backend {
			t, id := tallies[n], d.t.Backends.Values[n].Service
			services[id] = table.Plus(services[id], t)
			backends[uint16(n)] = table.Plus(backends[uint16(n)], t)
		}
	}
	for id, name := range d.inForce.Names.Service {
		l, live := d.t.ServiceLoads.Values[id], services[uint16(id)]
		if d.inForce.Names.PortForward[id] {
			c.NAT = append(c.NAT, datapath.RuleCounters{Name: name, Packets: l.Packets + live.Packets, Bytes: l.Bytes + live.Bytes})
			continue
		}
		sc := datapath.ServiceCounters{Name: name, Connections: l.Flows, Packets: l.Packets + live.Packets, Bytes: l.Bytes + live.Bytes,
			Refused: l.Refused, Active: int(l.Active)}
		for _, n := range d.inForce.Names.Backends[id] {
			b, live := d.t.BackendLoads.Values[n], backends[uint16(n)]
			sc.Backends = append(sc.Backends, datapath.BackendCounters{Name: d.inForce.Names.Backend[n], Connections: b.Flows,
				Packets: b.Packets + live.Packets, Bytes: b.Bytes + live.Bytes, Active: int(b.Active)})
		}
		c.Services = append(c.Services, sc)
	}
	sources := map[string]table.Traffic{} // one configured rule may have several entries
	for id, name := range d.inForce.Names.Source {
		r, live := d.t.Rules.Values[id], rules[uint16(id)]
		sources[name] = table.Plus(sources[name], table.Traffic{Packets: r.Packets + live.Packets, Bytes: r.Bytes + live.Bytes})
	}
	for id := range d.t.Rules.Values { // adds the counters of rules' removed flows
		r, live := &d.t.Rules.Values[id], rules[uint16(id)]
		if name, ok := d.inForce.Names.Source[uint32(r.Group)-1]; ok && r.Active == 0 {
			sources[name] = table.Plus(sources[name], table.Traffic{Packets: r.Packets + live.Packets, Bytes: r.Bytes + live.Bytes})
		}
	}
	for name, t := range sources {
		c.NAT = append(c.NAT, datapath.RuleCounters{Name: name, Packets: t.Packets, Bytes: t.Bytes})
	}
	prefixes := map[uint32]table.Traffic{}
	var k wire.PrefixKey
	var v wire.Prefix
	for it := d.t.Maps["prefixes"].Iterate(); it.Next(&k, &v); {
		t := prefixes[uint32(v.Rule)]
		prefixes[uint32(v.Rule)] = table.Traffic{Packets: t.Packets + v.Packets, Bytes: t.Bytes + v.Bytes}
	}
	for id, name := range d.inForce.Names.Prefix {
		c.NAT = append(c.NAT, datapath.RuleCounters{Name: name, Packets: prefixes[id].Packets, Bytes: prefixes[id].Bytes})
	}
	sort.Slice(c.Services, func(i, j int) bool { return c.Services[i].Name < c.Services[j].Name })
	sort.Slice(c.NAT, func(i, j int) bool { return c.NAT[i].Name < c.NAT[j].Name })
	return nil
}

// backendCounters returns the counters of all backends with an id.
func (d *Datapath) backendCounters() ([]table.Traffic, error) {
	below := uint32(0)
	for k, n := range d.t.IDs.Known {
		if k.Kind == ids.Backend {
			below = max(below, n+1)
		}
	}
	return d.t.Tallies(below)
}

// resetBackends resets the counters of the services' backends, including removed backends.
func (d *Datapath) resetBackends(services map[uint16]bool) error {
	if len(services) == 0 {
		return nil
	}
	tallies, err := d.backendCounters()
	if err != nil {
		return err
	}
	for k, n := range d.t.IDs.Known {
		if k.Kind != ids.Backend || !services[d.t.Backends.Values[n].Service] || d.t.Backends.Values[n].Family == 0 {
			continue
		}
		l := &d.t.BackendLoads.Values[n]
		l.Flows, l.Packets, l.Bytes = 0, 0, 0
		if tallies[n] == (table.Traffic{}) {
			continue
		}
		if err := d.t.Maps["tallies"].Put(n, make([]wire.Tally, ebpf.MustPossibleCPU())); err != nil {
			return fmt.Errorf("tallies: %w", err)
		}
	}
	return nil
}
