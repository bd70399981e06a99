// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"

	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// neighbours gives the backends of services of mode dnat what clients on their own network get as
// a source: the address of the interface that leads there. With their own address they would be
// answered directly, under the backend's. Behind everything else that numbers pool addresses, so
// that nothing has to agree with it; where an address is given out in blocks or sets of ports,
// where nothing leads to the backend, and when the tables have no room, such clients are told by
// explain and show that they get no answer.
func (c *compiler) neighbours() {
	for _, id := range c.turning {
		for _, n := range c.Names.Backends[id] {
			w := c.Backends[n]
			a := wire.AddrFrom(wire.Addr(w.Addr), w.Family == wire.Family6)
			near, connected := datapath.Connected(c.host.Networks, a)
			group := near
			if !connected { // the backend alone is a client beside itself
				group, _ = a.Prefix(a.BitLen() / 2) // backends are looked up together
			}
			own, known := c.towardsNet[group]
			if !known {
				own, _ = c.host.sourceTowards(a)
				c.towardsNet[group] = own
			}
			if place, ok := c.ownSource(own); ok {
				w.NetworkLen, w.Pool, w.PoolLen = uint8(near.Bits()), place, 1
				c.Backends[n] = w
			}
		}
	}
	c.turning = nil
}

// ownSource numbers an address of this host whose ports are given to neighbours.
func (c *compiler) ownSource(a netip.Addr) (place uint16, ok bool) {
	if !a.IsValid() {
		return 0, false
	}
	n, numbered := c.pooled[a]
	if !numbered {
		var err error
		if n, err = c.pool(a, config.PortSet{{First: 1024, Last: 65535}}, 0); err != nil {
			return 0, false
		}
		c.unlisted[n] = true
	}
	if c.Block[n] != 0 || c.Sets[n] != nil {
		return 0, false
	}
	place, err := c.run([]uint32{n})
	if err != nil {
		return 0, false
	}
	c.Runs[[2]uint16{place, 1}] = []uint32{n}
	return place, true
}
