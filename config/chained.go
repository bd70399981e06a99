// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"

	"github.com/sluice-lb/sluice/flow"
)

// checkChained reports backends and targets that are listeners of another service or port-forward. A
// packet is translated once and would not reach a server there.
func (v *validator) checkChained(all []claim) {
	at := map[netip.Addr][]claim{}
	for _, c := range all {
		if c.follows == "" && c.iface == "" {
			at[c.address] = append(at[c.address], c)
		}
	}
	check := func(p path, to netip.AddrPort, protocol flow.Protocol, ports []flow.Ports) {
		if to.Port() != 0 {
			ports = []flow.Ports{{First: to.Port(), Last: to.Port()}}
		}
		for _, c := range at[to.Addr()] {
			if c.path[0] == p[0] && c.path[1] == p[1] || c.protocol != protocol && c.protocol != flow.Any && protocol != flow.Any {
				continue // its own listener is reported elsewhere
			}
			for _, r := range portsOrAll(ports) {
				if r.First <= c.ports.Last && c.ports.First <= r.Last {
					v.errorf(p, "write the servers of "+c.owner+" in its place, or give "+c.owner+" the listener of this one too",
						"%s listens on %s, and packets are translated once", c.owner, c).depends =
						[]path{c.path, c.path[:2].key("protocol"), p[:2].key("listen"), p[:2].key("protocol"), p[:2].key("mode")}
					return
				}
			}
		}
	}
	for i := range v.c.Services {
		s := &v.c.Services[i]
		if s.Mode != ModeDNAT && s.Mode != ModeFullNAT && s.Mode != ModeStateless {
			continue
		}
		var ports []flow.Ports
		for _, l := range s.Listen {
			ports = append(ports, portsOrAll(l.Ports)...)
		}
		for j, b := range s.Backends {
			check(path{{key: "services"}, {index: i}, {key: "backends"}, {index: j}, {key: "address"}},
				netip.AddrPortFrom(b.Address, b.Port), s.Protocol, ports)
		}
	}
	for i := range v.c.NAT {
		if r := &v.c.NAT[i]; r.Listens() {
			check(path{{key: "nat"}, {index: i}, {key: "to"}, {key: "address"}}, netip.AddrPortFrom(r.To.Address, r.To.Port), r.Protocol, r.Listen.Ports)
		}
	}
}
