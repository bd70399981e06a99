// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
	"github.com/sluice-lb/sluice/flow"
)

// replyPort returns the source port of a backend's replies, or 0 for several: a backend without a port replies
// from the listener's port, and the listeners have more than one.
//
// Several listed ports share one key. The map of replies then has room for every backend.
func replyPort(s *config.Service, b *config.Backend) uint16 {
	port := b.Port
	if port != 0 {
		return port
	}
	for _, l := range s.Listen {
		if len(l.Ports) != 1 || l.Ports[0].Len() != 1 || port != 0 && port != l.Ports[0].First {
			return 0
		}
		port = l.Ports[0].First
	}
	return port
}

// reverseKey returns the key of a backend's replies. Port 0 means several source ports.
func reverseKey(s *config.Service, b *config.Backend) wire.ListenerKey {
	return wire.ListenerKey{L4Proto: uint8(s.Protocol), Family: wire.FamilyOf(b.Address), Addr: wire.BytesOf(b.Address), Port: wire.PortOf(replyPort(s, b))}
}

// sources are the source ports of replies from one address and protocol.
type sources struct {
	single []wire.ListenerKey // Keys with a port.
	ranges []flow.Ports       // Ports that the key without a port covers.
}

func (s *sources) includesPort(port uint16) bool {
	return slices.ContainsFunc(s.ranges, func(r flow.Ports) bool { return r.Contains(port) })
}

// replies adds the entries that translate the replies of a service's backends. The error names a second
// endpoint with the same replies. The backends' ports are the listener's ports plus shift.
func (c *compiler) replies(id uint32, s *config.Service, shift uint16) (shared error) {
	for i := range s.Backends {
		b := &s.Backends[i]
		k := reverseKey(s, b)
		v := wire.Reverse{Service: uint16(id), Backend: uint16(c.Names.Backends[id][i])}
		var vips []config.Listen
		for _, l := range s.Listen {
			same := func(o config.Listen) bool { return o.Address == l.Address && slices.Equal(o.Ports, l.Ports) } // the same endpoint, perhaps on another interface
			if l.Address.Is4() == b.Address.Is4() && !slices.ContainsFunc(vips, same) {
				vips = append(vips, l)
			}
		}
		if len(vips) != 1 {
			v.Ambiguous = 1
		} else {
			v.Vip = wire.AddrOf(vips[0].Address)
			if k.Port != 0 {
				if ports := vips[0].Ports; len(ports) == 1 && ports[0].First == ports[0].Last {
					v.Port = wire.PortOf(ports[0].First)
				} else {
					v.Ambiguous = 1
				}
			}
		}
		if v.Ambiguous != 0 {
			shared = fmt.Errorf("backend %s replies for several virtual endpoints, and only flows distinguish them", b.Name)
		}
		old, taken := c.Reverses[k]
		old.Backend = v.Backend
		others := c.overlaps(k, s, shift)
		if taken && old != v {
			others = append(others, k)
		}
		for _, o := range others {
			v.Ambiguous = 1
			shared = c.markAmbiguous(id, o)
		}
		c.Reverses[k] = v
	}
	return shared
}

// overlaps adds the source ports of a key, and returns the other keys with the same ports. A lookup prefers
// a key with a port to the key without one, and therefore hides the second service.
func (c *compiler) overlaps(k wire.ListenerKey, s *config.Service, shift uint16) (others []wire.ListenerKey) {
	zero := k
	zero.Port = 0
	at := c.replyPorts[zero]
	if at == nil {
		at = &sources{}
		c.replyPorts[zero] = at
	}
	if k.Port != 0 {
		at.single = append(at.single, k)
		if at.includesPort(wire.PortOf(k.Port)) {
			return []wire.ListenerKey{zero}
		}
		return nil
	}
	var mine sources
	for _, l := range s.Listen {
		for _, p := range l.Ports {
			mine.ranges = append(mine.ranges, flow.Ports{First: p.First + shift, Last: p.Last + shift})
		}
		if len(l.Ports) == 0 {
			mine.ranges = append(mine.ranges, flow.Ports{})
		}
	}
	for _, o := range at.single {
		if mine.includesPort(wire.PortOf(o.Port)) {
			others = append(others, o)
		}
	}
	at.ranges = append(at.ranges, mine.ranges...)
	return others
}

// unshared are the flags of services with replies that belong to no other service.
const unshared = wire.ServiceSYNStateless | wire.ServiceNodes

// markAmbiguous marks the entry of a key that a second service shares, and returns the reason. The first service
// loses the entry too: its SYNs need flows.
func (c *compiler) markAmbiguous(second uint32, k wire.ListenerKey) error {
	v := c.Reverses[k]
	v.Ambiguous = 1
	c.Reverses[k] = v
	first := uint32(v.Service)
	shared := func(with uint32) error {
		what := "service "
		if c.Names.PortForward[with] {
			what = "nat rule "
		}
		return fmt.Errorf("backend %s has the same replies for %s, and only flows distinguish them: use another backend port, or mode dnat",
			c.Names.Backend[uint32(v.Backend)], what+c.Names.Service[with])
	}
	if w, compiled := c.Services[first]; compiled && first != second {
		w.Flags &^= unshared
		c.Services[first] = w
		if w.Mode == wire.ModeStateless && c.shared == nil {
			c.shared = fmt.Errorf("service %s: mode stateless: %w", c.Names.Service[first], shared(second))
		}
	}
	return shared(first)
}
