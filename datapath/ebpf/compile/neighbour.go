// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"net/netip"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// neighbours gives dnat backends a source address for clients on the backend's network: the address
// of the egress interface. With the client's address as source, the backend would reply directly,
// and the client would not recognise the reply. neighbours runs after all other users of pool
// addresses, so none depends on it. Some backends get no source: the address has port blocks or
// port sets, the backend has no route, or the tables are full. Such clients get no reply; explain
// and show report this.
func (c *compiler) neighbours() {
	for _, id := range c.hairpins {
		for _, n := range c.Names.Backends[id] {
			w := c.Backends[n]
			a := wire.AddrFrom(wire.Addr(w.Addr), w.Family == wire.Family6)
			near, connected := datapath.Connected(c.host.Networks, a)
			group := near
			if !connected { // Only the backend itself shares its network.
				group, _ = a.Prefix(a.BitLen() / 2) // One route lookup for a group of backends.
			}
			own, known := c.ownSources[group]
			if !known {
				own, _ = c.host.sourceTowards(a)
				c.ownSources[group] = own
			}
			if place, ok := c.ownSource(own); ok {
				w.NetworkLen, w.Pool, w.PoolLen = uint8(near.Bits()), place, 1
				c.Backends[n] = w
			}
		}
	}
	c.hairpins = nil
}

// ownSource allocates an address of this host as a pool for neighbouring clients.
func (c *compiler) ownSource(a netip.Addr) (place uint16, ok bool) {
	if !a.IsValid() {
		return 0, false
	}
	n, numbered := c.poolIDs[a]
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
	place, err := c.putRun([]uint32{n})
	if err != nil {
		return 0, false
	}
	c.Runs[[2]uint16{place, 1}] = []uint32{n}
	return place, true
}
