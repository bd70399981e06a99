// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"fmt"
	"sync/atomic"

	"github.com/sluice-lb/sluice/config"
)

const portClasses = 3 // PORT_CLASSES of bpf/binding.h: TCP, UDP, ICMP

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

// reserve marks all ports of a pool address but those of a set as taken, without counting them as
// used: so the programs find the set's ports as they find any. ICMP's identifiers are its
// third class.
func (t *tables) reserve(number uint32, set config.PortSet) {
	var open [len(wirePortMap{}.Words)]uint64
	for _, r := range set {
		for port := int(r.First); port <= int(r.Last); port++ {
			bit := port&1<<15 | port>>1 // bit_of of bpf/port.h
			open[bit/64] |= 1 << (bit % 64)
		}
	}
	for class := range uint32(portClasses) {
		m := &t.ports.values[number*portClasses+class]
		for w := range m.Words {
			if atomic.OrUint64(&m.Words[w], ^open[w])|^open[w] == ^uint64(0) {
				atomic.OrUint64(&m.Full[w/64], 1<<(w%64))
			}
		}
	}
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
		if v.Lost = 0; v.Local != 0 && !h.owns(addrFrom(v.Addr, v.Family == uint8(wireFamilyFAMILY_6))) {
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

// putRuns writes the runs of pool addresses, where nothing in force has one.
func (d *Datapath) putRuns(want *desired) {
	for place, run := range want.runs {
		for i, n := range run {
			d.t.runs.values[int(place[0])+i] = uint64(n)
		}
	}
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
