// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
)

// poolRules are the rules of each pool address, bit n for rule n.
func (d *desired) poolRules() map[uint32]uint64 {
	all := map[uint32]uint64{}
	for id, r := range d.rules {
		for _, run := range [][2]uint16{{r.Pool, r.PoolLen}, {r.Pool6, r.Pool6Len}} {
			for _, n := range d.runs[run] {
				all[n] |= 1 << id
			}
		}
	}
	return all
}

func poolNumbers(want *desired) map[wireAddr]uint32 {
	out := map[wireAddr]uint32{}
	for n, v := range want.pools {
		if !want.unlisted[n] {
			out[v.Addr] = n
		}
	}
	return out
}

// outside lists the pool addresses of a rule.
func (d *desired) outside(id uint32) (list []netip.Addr) {
	r := d.rules[id]
	for _, run := range [][2]uint16{{r.Pool, r.PoolLen}, {r.Pool6, r.Pool6Len}} {
		for _, n := range d.runs[run] {
			p := d.pools[n]
			list = append(list, addrFrom(p.Addr, p.Family == Family6))
		}
	}
	return list
}

// pool gives an address of a pool its number. usable are the ports that may be
// allocated, in addition to those of other rules; block is the size of the blocks
// that they are given out in, which all rules of the address must agree on.
func (c *compiler) pool(a netip.Addr, usable config.PortSet, block int) (uint32, error) {
	n, ok := c.pooled[a]
	if !ok {
		var err error
		if n, err = c.draft.id(idPool, a.String()+geometry(usable, block), c.state.pool, nil); err != nil {
			return 0, fmt.Errorf("pool address %s: the tables were made for %d pool addresses, and those of before count while they are in force or their ports in use: take these out first, or %s",
				a, c.state.pool, wayOut)
		}
		c.pooled[a] = n
		v := wirePoolAddr{Addr: addrOf(a), Family: familyOf(a)}
		if c.host.owns(a) {
			v.Local = 1
		}
		c.pools[n] = v
	}
	set := usable
	if len(usable) == 1 {
		set = nil
	}
	if size, shared := c.block[n]; shared && (size != block || block != 0 && !slices.Contains(c.ports[n], usable.Span()) || !slices.Equal(c.sets[n], set)) {
		return 0, fmt.Errorf("pool address %s: another rule gives out its ports in other blocks or ranges: let both have the same ports and port-block, or give each its own addresses", a)
	}
	c.block[n], c.sets[n] = block, set
	c.ports[n] = append(c.ports[n], usable.Span())
	return n, nil
}

// geometry of blocks, and of several ranges of ports, is part of the names of what is divided into
// them: other ones begin anew, beside the flows that still end.
func geometry(ports config.PortSet, block int) string {
	if block == 0 && len(ports) == 1 {
		return ""
	}
	return fmt.Sprintf("\x00%s/%d", ports, block)
}

// poolRun numbers the addresses of ranges, and returns where in the map of runs the
// numbers of each family stand one behind the other, and how many they are.
func (c *compiler) poolRun(ranges []config.AddressRange, usable config.PortSet, block int) (first, count [2]uint16, err error) {
	for family := range 2 {
		var list []netip.Addr
		for _, r := range ranges {
			if r.Is4() != (family == 0) {
				continue
			}
			for a := r.First; ; a = a.Next() {
				if list = append(list, a); len(list) > maxPool {
					return first, count, fmt.Errorf("more than %d pool addresses", maxPool)
				}
				if a == r.Last {
					break
				}
			}
		}
		var numbers []uint32
		for _, a := range list {
			n, err := c.pool(a, usable, block)
			if err != nil {
				return first, count, err
			}
			numbers = append(numbers, n)
		}
		if first[family], err = c.run(numbers); err != nil {
			return first, count, err
		}
		count[family] = uint16(len(list))
		c.runs[[2]uint16{first[family], count[family]}] = numbers
	}
	return first, count, nil
}

// run finds a place for the numbers of a pool: where they are neighbours the one that
// each number has, else one where they stand already, else one that nobody uses.
func (c *compiler) run(numbers []uint32) (uint16, error) {
	scattered := false
	for i, n := range numbers {
		scattered = scattered || n != numbers[0]+uint32(i)
	}
	switch {
	case len(numbers) == 0 || c.draft.short: // the latter has ids that are none
		return 0, nil
	case !scattered:
		return uint16(numbers[0]), nil
	}
	if c.places == nil {
		c.places, c.held = c.state.runs()
	}
	room := -1
	for first := int(c.state.pool); first+len(numbers) <= len(c.places); first++ {
		same, free := true, true
		for i, n := range numbers {
			same = same && c.places[first+i] == uint64(n)
			if free = free && !c.held[first+i]; !same && !free {
				break
			}
		}
		if same {
			room = first
			break
		}
		if free && room < 0 {
			room = first
		}
	}
	if room < 0 {
		return 0, fmt.Errorf("pools of addresses that have come one by one find no room in the tables: %s", wayOut)
	}
	for i, n := range numbers {
		c.places[room+i], c.held[room+i] = uint64(n), true
	}
	return uint16(room), nil
}
