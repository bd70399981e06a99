// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"maps"
	"net/netip"
	"sync/atomic"

	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// putPools writes pool addresses and adds the rules that may use them. It marks ports that no rule
// may use as taken.
func (d *Datapath) putPools(want *compile.Desired) error {
	if err := d.t.UsePools(maps.Keys(want.Pools)); err != nil {
		return err
	}
	for n, rules := range want.PoolRules() {
		atomic.OrUint64(&d.t.PoolRules.Values[n], rules)
	}
	for n, v := range want.Pools {
		if err := d.t.Maps["pools"].Put(n, &v); err != nil {
			return fmt.Errorf("pools: %w", err)
		}
		if len(want.Sets[n]) > 0 {
			d.t.Reserve(n, want.Sets[n])
		}
		if size := want.Block[n]; size > 0 {
			for b := want.Ports[n][0].Len() / size; b < compile.MaxBlocks; b++ { // marks blocks beyond the port range as taken
				atomic.OrUint64(&d.t.Blocks.Values[n].Words[b/64], 1<<(b%64))
			}
		}
	}
	return nil
}

// retirePools removes addresses from the pools of their rules. Their flows continue until they
// expire. Flows of an address that the host has lost end immediately.
func (d *Datapath) retirePools(want *compile.Desired, h *compile.Host) error {
	rules := want.PoolRules()
	for n := range d.t.PoolRules.Values {
		if bits := rules[uint32(n)]; d.t.PoolRules.Values[n] != bits {
			atomic.StoreUint64(&d.t.PoolRules.Values[n], bits)
		}
	}
	return d.removedPools(want, h, func(n uint32, v wire.PoolAddr, gone bool) error {
		was := v.Lost
		if v.Lost = 0; gone {
			v.Lost = 1
		}
		if v.Lost == was {
			return nil
		}
		return d.t.Maps["pools"].Put(n, &v)
	})
}

// removedPools calls visit for each address that is no longer in a pool. gone reports whether the
// address was the host's own and the host has lost it.
func (d *Datapath) removedPools(want *compile.Desired, h *compile.Host, visit func(n uint32, v wire.PoolAddr, gone bool) error) error {
	for k, n := range d.t.IDs.Known {
		if _, wanted := want.Pools[n]; k.Kind != ids.Pool || wanted {
			continue
		}
		var v wire.PoolAddr
		if err := d.t.Maps["pools"].Lookup(n, &v); err != nil {
			return fmt.Errorf("pools: %w", err)
		}
		if err := visit(n, v, v.Local != 0 && !h.Owns(wire.AddrFrom(v.Addr, v.Family == wire.Family6))); err != nil {
			return fmt.Errorf("pools: %w", err)
		}
	}
	return nil
}

// lostAddresses returns the pool addresses that the host has lost since the last Apply.
func (d *Datapath) lostAddresses(want *compile.Desired, h *compile.Host) (list []netip.Addr) {
	_ = d.removedPools(want, h, func(_ uint32, v wire.PoolAddr, gone bool) error {
		if gone && v.Lost == 0 {
			list = append(list, wire.AddrFrom(v.Addr, v.Family == wire.Family6))
		}
		return nil
	})
	return list
}

// putRuns writes the runs of pool addresses. It overwrites no run in force.
func (d *Datapath) putRuns(want *compile.Desired) {
	for place, run := range want.Runs {
		for i, n := range run {
			d.t.Runs.Values[int(place[0])+i] = uint64(n)
		}
	}
}
