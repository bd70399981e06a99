// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"sort"

	"github.com/sluice-lb/sluice/datapath"
)

// Counters reads what was counted since the tables were made.
func (d *Datapath) Counters(context.Context) (*datapath.Counters, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c, err := d.gauges()
	if err == nil && d.t != nil && d.inForce != nil {
		d.owned(c)
	}
	return c, err
}

// Gauges implements datapath.Gauger: without a look at every flow.
func (d *Datapath) Gauges(context.Context) (*datapath.Counters, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.gauges()
}

func (d *Datapath) gauges() (c *datapath.Counters, err error) {
	c = &datapath.Counters{Missed: d.missed.Load()}
	if d.t == nil || d.inForce == nil {
		return c, nil
	}
	if c.Reasons, err = d.t.reasons(); err != nil {
		return nil, err
	}
	c.Tables = d.t.use(d.switches.HalfOpen)
	return c, nil
}

// owned joins what has been counted of ended flows with what live ones hold.
func (d *Datapath) owned(c *datapath.Counters) {
	services, backends, rules := map[uint16]traffic{}, map[uint16]traffic{}, map[uint16]traffic{}
	add := func(m map[uint16]traffic, k uint16, s, twin side) {
		t := m[k]
		t.packets += s.packets + twin.packets
		t.bytes += s.bytes + twin.bytes
		m[k] = t
	}
	d.t.primaries(func(s side) bool {
		twin := d.t.twin(s)
		if s.flags&EntryNAT != 0 {
			add(rules, s.owner, s, twin)
		} else {
			add(services, s.owner, s, twin)
			add(backends, s.backend, s, twin)
		}
		return true
	})
	for id, list := range d.inForce.names.backends {
		for _, n := range list {
			t := d.t.tally(n)
			services[uint16(id)] = plus(services[uint16(id)], t)
			backends[uint16(n)] = plus(backends[uint16(n)], t)
		}
	}
	for id, name := range d.inForce.names.service {
		l, live := d.t.loads.values[id], services[uint16(id)]
		if d.inForce.names.portRule[id] {
			c.NAT = append(c.NAT, datapath.RuleCounters{Name: name, Packets: l.Packets + live.packets, Bytes: l.Bytes + live.bytes})
			continue
		}
		sc := datapath.ServiceCounters{Name: name, Connections: l.Flows, Packets: l.Packets + live.packets, Bytes: l.Bytes + live.bytes,
			Refused: l.Refused, Active: int(l.Active)}
		for _, n := range d.inForce.names.backends[id] {
			b, live := d.t.loadsB.values[n], backends[uint16(n)]
			sc.Backends = append(sc.Backends, datapath.BackendCounters{Name: d.inForce.names.backend[n], Connections: b.Flows,
				Packets: b.Packets + live.packets, Bytes: b.Bytes + live.bytes, Active: int(b.Active)})
		}
		c.Services = append(c.Services, sc)
	}
	sources := map[string]traffic{} // one rule may be several here
	for id, name := range d.inForce.names.source {
		r, live := d.t.rules.values[id], rules[uint16(id)]
		sources[name] = plus(sources[name], traffic{packets: r.Packets + live.packets, bytes: r.Bytes + live.bytes})
	}
	for name, t := range sources {
		c.NAT = append(c.NAT, datapath.RuleCounters{Name: name, Packets: t.packets, Bytes: t.bytes})
	}
	prefixes := map[uint32]traffic{}
	var k wirePrefixKey
	var v wirePrefix
	for it := d.t.maps["prefixes"].Iterate(); it.Next(&k, &v); {
		t := prefixes[uint32(v.Rule)]
		prefixes[uint32(v.Rule)] = traffic{packets: t.packets + v.Packets, bytes: t.bytes + v.Bytes}
	}
	for id, name := range d.inForce.names.prefix {
		c.NAT = append(c.NAT, datapath.RuleCounters{Name: name, Packets: prefixes[id].packets, Bytes: prefixes[id].bytes})
	}
	sort.Slice(c.Services, func(i, j int) bool { return c.Services[i].Name < c.Services[j].Name })
	sort.Slice(c.NAT, func(i, j int) bool { return c.NAT[i].Name < c.NAT[j].Name })
}
