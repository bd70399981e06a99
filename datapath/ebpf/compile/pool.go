// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// PoolRules returns the rules of each pool address, bit n for rule n.
func (d *Desired) PoolRules() map[uint32]uint64 {
	all := map[uint32]uint64{}
	for id, r := range d.Rules {
		for _, run := range [][2]uint16{{r.Pool, r.PoolLen}, {r.Pool6, r.Pool6Len}} {
			for _, n := range d.Runs[run] {
				all[n] |= 1 << id
			}
		}
	}
	return all
}

func PoolNumbers(want *Desired) map[wire.Addr]uint32 {
	out := map[wire.Addr]uint32{}
	for n, v := range want.Pools {
		if !want.unlisted[n] {
			out[v.Addr] = n
		}
	}
	return out
}

// Outside lists the pool addresses of a rule.
func (d *Desired) Outside(id uint32) (list []netip.Addr) {
	r := d.Rules[id]
	for _, run := range [][2]uint16{{r.Pool, r.PoolLen}, {r.Pool6, r.Pool6Len}} {
		for _, n := range d.Runs[run] {
			p := d.Pools[n]
			list = append(list, wire.AddrFrom(p.Addr, p.Family == wire.Family6))
		}
	}
	return list
}

// pool allocates the id of a pool address. usable lists the ports of this rule; ports of other
// rules are added. block is the size of port blocks. All rules of one address must use the same
// size.
func (c *compiler) pool(a netip.Addr, usable config.PortSet, block int) (uint32, error) {
	n, ok := c.poolIDs[a]
	if !ok {
		var err error
		if n, err = c.Draft.ID(ids.Pool, a.String()+geometry(usable, block), c.state.Pool, nil); err != nil {
			return 0, fmt.Errorf("pool address %s: the tables were made for %d pool addresses, and previous ones count while they are in force or their ports in use: remove these first, or %s",
				a, c.state.Pool, wire.WayOut)
		}
		c.poolIDs[a] = n
		v := wire.PoolAddr{Addr: wire.AddrOf(a), Family: wire.FamilyOf(a)}
		if c.host.Owns(a) {
			v.Local = 1
		}
		c.Pools[n] = v
	}
	set := usable
	if len(usable) == 1 {
		set = nil
	}
	if size, shared := c.Block[n]; shared && (size != block || block != 0 && !slices.Contains(c.Ports[n], usable.Span()) || !slices.Equal(c.Sets[n], set)) {
		return 0, fmt.Errorf("pool address %s: another rule allocates its ports in other blocks or ranges: set the same ports and port-block in both, or use separate addresses", a)
	}
	c.Block[n], c.Sets[n] = block, set
	c.Ports[n] = append(c.Ports[n], usable.Span())
	return n, nil
}

// geometry returns a suffix for names of objects divided into port blocks or port ranges. A rule
// with changed geometry gets a new id, and flows of the old id continue until they expire.
func geometry(ports config.PortSet, block int) string {
	if block == 0 && len(ports) == 1 {
		return ""
	}
	return fmt.Sprintf("\x00%s/%d", ports, block)
}

// poolRun allocates ids for the addresses of ranges. For each family it returns the position and
// the length of the ids' run in the map of runs.
func (c *compiler) poolRun(ranges []config.AddressRange, usable config.PortSet, block int) (first, count [2]uint16, err error) {
	for family := range 2 {
		var list []netip.Addr
		for _, r := range ranges {
			if r.Is4() != (family == 0) {
				continue
			}
			for a := r.First; ; a = a.Next() {
				if list = append(list, a); len(list) > wire.MaxPool {
					return first, count, fmt.Errorf("more than %d pool addresses", wire.MaxPool)
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
		if first[family], err = c.putRun(numbers); err != nil {
			return first, count, err
		}
		count[family] = uint16(len(list))
		c.Runs[[2]uint16{first[family], count[family]}] = numbers
	}
	return first, count, nil
}

// putRun returns the position of pool address ids in the map of runs. Consecutive ids have a fixed
// position. Other ids reuse an identical run or take a free place.
func (c *compiler) putRun(numbers []uint32) (uint16, error) {
	scattered := false
	for i, n := range numbers {
		scattered = scattered || n != numbers[0]+uint32(i)
	}
	switch {
	case len(numbers) == 0 || c.Draft.Short: // a short draft has invalid ids
		return 0, nil
	case !scattered:
		return uint16(numbers[0]), nil
	}
	if c.runs == nil {
		c.runs, c.usedRuns = c.state.Runs()
	}
	room := -1
	for first := int(c.state.Pool); first+len(numbers) <= len(c.runs); first++ {
		same, free := true, true
		for i, n := range numbers {
			same = same && c.runs[first+i] == uint64(n)
			if free = free && !c.usedRuns[first+i]; !same && !free {
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
		return 0, fmt.Errorf("the tables have no contiguous room for pools of addresses that were added one by one: %s", wire.WayOut)
	}
	for i, n := range numbers {
		c.runs[room+i], c.usedRuns[room+i] = uint64(n), true
	}
	return uint16(room), nil
}
