// SPDX-License-Identifier: Apache-2.0

package model

import (
	"github.com/sluice-lb/sluice/datapath"
)

// Retransmissions returns the number of SYN retransmissions to refused connections of a service. A
// datapath may lose its record of the first SYN and count some retransmissions as connections.
func (m *Model) Retransmissions(service string) uint64 {
	for _, s := range m.services {
		if s.Name == service {
			return s.retransmissions
		}
	}
	return 0
}

// Counters returns the packet counts since New by service, backend and rule. The byte counts begin
// at the network header of the received packet. ICMP errors are not counted. Packets that the hop
// limit or the MTU stops are counted.
func (m *Model) Counters() *datapath.Counters {
	c := &datapath.Counters{}
	for _, s := range m.services {
		if s.rule != nil {
			continue
		}
		sc := datapath.ServiceCounters{Name: s.Name, Connections: s.connections, Packets: s.packets, Bytes: s.bytes,
			Refused: s.refused, Active: s.active}
		for _, b := range s.backends {
			sc.Backends = append(sc.Backends, datapath.BackendCounters{Name: b.Name, Connections: b.connections,
				Packets: b.packets, Bytes: b.bytes, Active: b.active})
		}
		c.Services = append(c.Services, sc)
	}
	for _, r := range m.rules {
		rc := datapath.RuleCounters{Name: r.Name, Packets: r.packets, Bytes: r.bytes}
		if r.Type.Forwards() { // the rule's service has the counts
			for _, s := range m.services {
				if s.rule == r {
					rc.Packets, rc.Bytes = s.packets, s.bytes
				}
			}
		}
		if last := len(c.NAT) - 1; last >= 0 && c.NAT[last].Name == r.Name { // one rule with several interfaces
			rc.Packets, rc.Bytes = rc.Packets+c.NAT[last].Packets, rc.Bytes+c.NAT[last].Bytes
			c.NAT = c.NAT[:last]
		}
		c.NAT = append(c.NAT, rc)
	}
	return c
}
