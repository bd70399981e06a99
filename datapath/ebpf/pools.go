// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"sync/atomic"
)

// putPools writes pool addresses and the rules that may use them from now on, and marks
// the ports that no rule may use as taken.
func (d *Datapath) putPools(want *desired) error {
	for n, rules := range want.poolRules() {
		atomic.OrUint64(&d.t.pooled.values[n], rules)
	}
	for n, v := range want.pools {
		if err := d.t.maps["pools"].Put(n, &v); err != nil {
			return fmt.Errorf("pools: %w", err)
		}
		if len(want.sets[n]) > 0 {
			d.t.reserve(n, want.sets[n])
		}
		if size := want.block[n]; size > 0 {
			for b := want.ports[n][0].Len() / size; b < maxBlocks; b++ { // there are no such blocks
				atomic.OrUint64(&d.t.blocks.values[n].Words[b/64], 1<<(b%64))
			}
		}
	}
	return nil
}

// retirePools takes the addresses that left a pool from its rule, when that has others.
// Their flows live on until they end, or end now where an address was the host's own and
// is so no more.
func (d *Datapath) retirePools(want *desired, h *host) error {
	rules := want.poolRules()
	for n := range d.t.pooled.values {
		if bits := rules[uint32(n)]; d.t.pooled.values[n] != bits {
			atomic.StoreUint64(&d.t.pooled.values[n], bits)
		}
	}
	for k, n := range d.t.ids.known {
		if _, wanted := want.pools[n]; k.Kind != idPool || wanted {
			continue
		}
		var v wirePoolAddr
		if err := d.t.maps["pools"].Lookup(n, &v); err != nil {
			return fmt.Errorf("pools: %w", err)
		}
		was := v.Lost
		if v.Lost = 0; v.Local != 0 && !h.owns(addrFrom(v.Addr, v.Family == Family6)) {
			v.Lost = 1
		}
		if v.Lost != was {
			if err := d.t.maps["pools"].Put(n, &v); err != nil {
				return fmt.Errorf("pools: %w", err)
			}
		}
	}
	return nil
}

// putRuns writes the runs of pool addresses, where nothing in force has one.
func (d *Datapath) putRuns(want *desired) {
	for place, run := range want.runs {
		for i, n := range run {
			d.t.runs.values[int(place[0])+i] = uint64(n)
		}
	}
}
