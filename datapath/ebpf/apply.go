// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// Plan returns what Apply would change.
func (d *Datapath) Plan(_ context.Context, s *datapath.Snapshot) (change *datapath.Change, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err = d.inside(func() error {
		h, err := readHost()
		if err != nil {
			return err
		}
		t := d.t
		if t == nil && d.idle(s) {
			change = &datapath.Change{Datapath: d.Name()}
			return nil
		}
		if t == nil { // numbers as they would be in new tables
			t = &tables{ids: &ids{known: map[idKey]uint32{}, used: map[idKind]map[uint32]bool{}}, hz: d.hz,
				sizes: sizes{pool: maxPool, hosts: 1 << 21}, loadsB: &memory[wireLoad]{values: make([]wireLoad, maxBackends)},
				rules: &memory[wireNatRule]{}, services: &memory[wireService]{}, backends: &memory[wireBackend]{},
				ports: &memory[wirePortMap]{}, flows4: &memory[wireFlow4]{}, flows6: &memory[wireFlow6]{}}
			t.runs = &memory[uint64]{values: make([]uint64, t.places())}
		}
		want, err := compile(s, t, h)
		if err != nil {
			return err
		}
		change = d.compare(want)
		return nil
	})
	return change, err
}

// idle tells whether there is nothing to do for a snapshot, and nothing was left by an
// earlier process.
func (d *Datapath) idle(s *datapath.Snapshot) bool {
	return len(s.Services)+len(s.NAT)+len(s.Rules) == 0 && !d.pinnedBefore()
}

// Apply makes the kernel's state equal to the snapshot.
func (d *Datapath) Apply(_ context.Context, s *datapath.Snapshot) (change *datapath.Change, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	start := time.Now()
	err = d.inside(func() error {
		h, err := readHost()
		if err != nil {
			return err
		}
		if d.t == nil {
			if d.idle(s) {
				change = &datapath.Change{Datapath: d.Name()}
				return nil
			}
			if err := d.open(s, h); err != nil {
				return err
			}
		}
		want, err := compile(s, d.t, h)
		if err != nil {
			return err
		}
		change = d.compare(want)
		if err := d.put(want, s, h); err != nil {
			return errors.Join(err, d.back(h))
		}
		return nil
	})
	if change != nil {
		change.Duration = time.Since(start)
	}
	return change, err
}

// pinnedBefore reports whether an earlier process left tables.
func (d *Datapath) pinnedBefore() bool {
	dir, err := d.pinDir(false)
	if err != nil || dir == "" {
		return false
	}
	m, err := ebpf.LoadPinnedMap(dir+"/ids", nil)
	if err != nil {
		return false
	}
	m.Close()
	return true
}

// open adopts or makes the tables.
func (d *Datapath) open(s *datapath.Snapshot, h *host) (err error) {
	if d.dir, err = d.pinDir(true); err != nil {
		return err
	}
	slots, pool, hosts := 0, 0, 0
	for i := range s.Services {
		slots += len(schedule(&s.Services[i]))
		pool += poolSize(s.Services[i].SourcePool)
		if s.Services[i].Mode == config.ModeFullNAT && len(s.Services[i].SourcePool) == 0 {
			pool += 2
		}
	}
	for _, n := range s.NAT {
		pool += poolSize(n.To.Addresses) + poolSize(n.Pool) + 2
	}
	for _, set := range s.Config.Firewall.Sets {
		hosts += len(set)
	}
	if d.t, err = openTables(d.dir, sizesFor(s.Config.Tables, slots, pool, hosts), d.hz); err != nil {
		return err
	}
	d.t.observed, d.t.fullPath = d.opt.NoAttach, d.opt.FullPath
	for id, v := range d.t.services.values {
		if v.Active != 0 {
			d.regions[uint32(id)] = regionOf(v.Slots)
		}
	}
	return nil
}

func poolSize(ranges []config.AddressRange) (n int) {
	for _, r := range ranges {
		for a := r.First; n <= maxPool; a = a.Next() {
			if n++; a == r.Last {
				break
			}
		}
	}
	return n
}

// back puts what was in force in force again.
func (d *Datapath) back(h *host) error {
	if d.inForce == nil {
		return nil
	}
	if err := d.put(d.inForce, d.snapshot, h); err != nil {
		return fmt.Errorf("going back: %w", err)
	}
	return nil
}

// put writes a desired state: first what others refer to, then the services that
// refer to it, then the listeners, and at last takes away what is not wanted.
func (d *Datapath) put(want *desired, s *datapath.Snapshot, h *host) error {
	t := d.t
	for k, n := range want.draft.fresh {
		if _, known := t.ids.known[k]; k.Kind == idPool && !known {
			t.blocks.values[n] = wireBlockMap{} // the address that had the number before may have had other blocks
		}
	}
	if err := want.draft.keep(); err != nil {
		return err
	}
	d.putPools(want)
	d.putRuns(want)
	for n, b := range want.backends {
		t.backends.values[n] = b
	}
	if err := d.putServices(want); err != nil {
		return err
	}
	d.putRules(want)
	d.putOrder(want)
	directs := placeDirects(want.directs)
	for i, r := range want.firewall {
		if err := t.maps["firewall_rules"].Put(uint32(i), &r); err != nil {
			return fmt.Errorf("firewall rule %d: %w", i+1, err)
		}
	}
	programs, err := d.load(want.switches)
	if err != nil {
		return err
	}
	err = errors.Join(
		equalise(t.maps["hosts"], want.hosts, nil), equalise(t.maps["members"], want.members, nil), equalise(t.maps["sessions"], want.sessions, nil),
		equalise(t.maps["reverses"], want.reverses, nil), equalise(t.maps["prefixes"], want.prefixes, keepPrefixCounts),
		equalise(t.maps["interfaces"], want.ifaces, nil), equalise(t.maps["pool_numbers"], poolNumbers(want), nil),
		equalise(t.maps["listeners"], want.listeners, nil), equalise(t.maps["listener_ranges"], want.ranges, nil))
	if err == nil {
		d.putDirects(directs)
		err = d.attach(s.Config, h, programs)
	}
	if err == nil && programs != d.programs {
		err = startSweeper(programs)
	}
	if err != nil {
		if programs != d.programs {
			programs.Close()
		}
		return err
	}
	if programs != d.programs {
		if d.programs != nil {
			d.programs.Close()
		}
		d.programs, d.switches = programs, want.switches
		d.forgetMapper()
	}
	if want.switches.Mappings {
		if err := d.loadMapper(want.switches); err != nil {
			return fmt.Errorf("pcp: %w", err)
		}
	}
	if err := d.retireMappings(want); err != nil {
		return err
	}
	d.retire(want)
	if err := d.retirePools(want, h); err != nil {
		return err
	}
	d.bump()
	d.inForce, d.snapshot, d.seen = want, s, h
	t.ids.inForce = want.draft.want
	d.logs.Store(&want.names.log)
	d.sourceNames.Store(&want.names.source)
	if d.stop == nil && !d.opt.NoAttach {
		d.watch()
	}
	d.resolveBackends(want)
	return d.readBack(want)
}

// bump makes every flow look up its next hop again.
func (d *Datapath) bump() { atomic.AddUint32(&d.t.control.values[0].Generation, 1) }

// load returns the programs in force, or new ones when a switch has changed.
func (d *Datapath) load(s switches) (*ebpf.Collection, error) {
	if d.programs != nil && d.switches == s {
		return d.programs, nil
	}
	d.t.routeEvery = d.opt.RouteEveryPacket
	return d.t.program(s, false)
}

func startSweeper(c *ebpf.Collection) error {
	ret, err := c.Programs["sweep_start"].Run(&ebpf.RunOptions{Context: make([]byte, 8)})
	if err == nil && ret != 0 {
		err = fmt.Errorf("step %d refused", ret)
	}
	if err != nil {
		return fmt.Errorf("sweeper: %w", err)
	}
	return nil
}

// putPools writes pool addresses and the rules that may use them from now on, and marks
// the ports that no rule may use as taken.
func (d *Datapath) putPools(want *desired) {
	for n, rules := range want.poolRules() {
		atomic.OrUint64(&d.t.pooled.values[n], rules)
	}
	for n, v := range want.pools {
		d.t.maps["pools"].Put(n, &v)
		if size := want.block[n]; size > 0 {
			for b := want.ports[n][0].Len() / size; b < maxBlocks; b++ { // there are no such blocks
				atomic.OrUint64(&d.t.blocks.values[n].Words[b/64], 1<<(b%64))
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
		out[v.Addr] = n
	}
	return out
}

// putRules writes NAT rules field by field: their counts go on.
func (d *Datapath) putRules(want *desired) {
	for id, r := range want.rules {
		v := &d.t.rules.values[id]
		r.Packets, r.Bytes, r.Flows = v.Packets, v.Bytes, v.Flows
		if v.Active == 0 {
			r.Packets, r.Bytes, r.Flows = 0, 0, 0
		}
		*v = r
	}
}

// putOrder switches to the order of the configuration, all rules at once. It comes between
// the rules and the lists of their sources: no source is of a rule that has no place. What
// is to be retired stands behind, because those lists still name it for a moment.
func (d *Datapath) putOrder(want *desired) {
	all := slices.Clone(want.order)
	for id := range d.t.rules.values {
		if d.t.rules.values[id].Active != 0 && !slices.Contains(all, uint32(id)) {
			all = append(all, uint32(id))
		}
	}
	var order wireNatOrder
	for i, id := range all {
		order.Rules[i] = uint8(id) + 1
	}
	now := &d.t.control.values[0].NatOrder
	next := 1 - *now&1
	d.t.orders.values[next] = order
	atomic.StoreUint32(now, next)
}

// region of the slots map.
type region struct{ first, count uint32 }

func regionOf(word uint64) region { return region{uint32(word >> 32), uint32(word)} }

func (r region) word() uint64 { return uint64(r.first)<<32 | uint64(r.count) }

// putServices writes the scheduler tables that changed into free regions and
// then switches the services to them.
func (d *Datapath) putServices(want *desired) error {
	fresh := map[uint32]region{}
	gaps := d.gaps()
	for id, w := range want.services {
		now := d.regions[id]
		if _, known := d.regions[id]; !known || !d.slotsEqual(now, want.slots[id]) {
			r, ok := place(gaps, uint32(len(want.slots[id])))
			if !ok {
				return fmt.Errorf("service %s: its scheduler table of %d slots finds no room among %d; use a scheduler without a hash, or make larger tables: %s",
					want.names.service[id], len(want.slots[id]), d.t.slots*4, wayOut)
			}
			d.writeSlots(r, want.slots[id])
			fresh[id] = r
			now = r
		}
		w.Slots = now.word()
		v := &d.t.services.values[id]
		if v.Active == 0 {
			l := &d.t.loads.values[id] // but for Active: flows that have not ended yet still count
			l.Flows, l.Packets, l.Bytes, l.Refused = 0, 0, 0, 0
			l.Tat, l.ResetTat, l.Sequence, l.Cookie = 0, 0, 0, 0
		}
		slots := w.Slots
		w.Slots = v.Slots
		*v = w
		atomic.StoreUint64(&v.Slots, slots)
	}
	for id, r := range fresh {
		d.regions[id] = r
	}
	return nil
}

func (d *Datapath) slotsEqual(r region, slots []uint16) bool {
	if int(r.count) != len(slots) {
		return false
	}
	for i, s := range slots {
		at := r.first + uint32(i)
		if uint16(d.t.slotMem.values[at/4]>>(at%4*16)) != s {
			return false
		}
	}
	return true
}

func (d *Datapath) writeSlots(r region, slots []uint16) {
	for i := 0; i < len(slots); i += 4 {
		var word uint64
		for k := 0; k < 4 && i+k < len(slots); k++ {
			word |= uint64(slots[i+k]) << (k * 16)
		}
		d.t.slotMem.values[int(r.first)/4+i/4] = word
	}
}

// gaps lists the free parts of the slots map, between the tables in force.
func (d *Datapath) gaps() []region {
	taken := make([]region, 0, len(d.regions))
	for _, r := range d.regions {
		if r.count > 0 {
			taken = append(taken, r)
		}
	}
	slices.SortFunc(taken, func(a, b region) int { return cmp.Compare(a.first, b.first) })
	var free []region
	at := uint32(0)
	for _, r := range taken {
		if r.first > at {
			free = append(free, region{at, r.first - at})
		}
		at = max(at, r.first+wholeWords(r.count))
	}
	if end := d.t.slots * 4; end > at {
		free = append(free, region{at, end - at})
	}
	return free
}

// wholeWords rounds a number of slots up to the words that hold them.
func wholeWords(slots uint32) uint32 { return (slots + 3) / 4 * 4 }

// place takes room for a scheduler table out of the first gap that has it.
func place(gaps []region, count uint32) (region, bool) {
	for i := range gaps {
		if g := &gaps[i]; g.count >= wholeWords(count) {
			r := region{g.first, count}
			g.first += wholeWords(count)
			g.count -= wholeWords(count)
			return r, true
		}
	}
	return region{}, false
}

// retire ends what is not wanted any more. Flows of a backend or rule that is
// gone are ended by the sweeper.
func (d *Datapath) retire(want *desired) {
	for id := range d.t.services.values {
		v := &d.t.services.values[id]
		if _, ok := want.services[uint32(id)]; !ok && v.Active != 0 {
			v.Active = 0
			atomic.StoreUint64(&v.Slots, 0)
			delete(d.regions, uint32(id))
		}
	}
	// A backend that left the configuration keeps its flows, and handshakes that
	// are under way; the flows of a service that left end with it.
	if d.inForce != nil {
		for n := range d.inForce.backends {
			if _, ok := want.backends[n]; !ok {
				d.leave(n)
			}
		}
	} else {
		for k, n := range d.t.ids.known {
			if _, ok := want.backends[n]; k.Kind == idBackend && !ok {
				d.leave(n)
			}
		}
	}
	for id := range d.t.rules.values {
		if _, ok := want.rules[uint32(id)]; !ok {
			d.t.rules.values[id].Active = 0
		}
	}
}

// leave has a backend keep its flows and take no new ones, so that it needs no source for
// them, and its pool addresses may go to others.
func (d *Datapath) leave(n uint32) {
	b := &d.t.backends.values[n]
	b.State, b.PoolLen = backendDrain, 0
}

// content reads a whole map.
func content[K comparable, V any](m *ebpf.Map) (map[K]V, error) {
	all := map[K]V{}
	keys, values := make([]K, 4096), make([]V, 4096)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i, k := range keys[:n] {
			all[k] = values[i]
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) { // that was the last part
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("map %s: %w", m, err)
		}
	}
}

// equalise makes a map equal to what is wanted: additions and changes first.
func equalise[K comparable, V comparable](m *ebpf.Map, want map[K]V, merge func(old V, v *V)) error {
	have, err := content[K, V](m)
	if err != nil {
		return err
	}
	for k, v := range want {
		old, ok := have[k]
		if ok && merge != nil {
			merge(old, &v)
		}
		if ok && old == v {
			continue
		}
		if err := m.Put(&k, &v); err != nil {
			return fmt.Errorf("map %s: %w", m, err)
		}
	}
	for k := range have {
		if _, ok := want[k]; ok {
			continue
		}
		if err := m.Delete(&k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("map %s: %w", m, err)
		}
	}
	return nil
}

func keepPrefixCounts(old wirePrefix, v *wirePrefix) {
	v.Packets, v.Bytes = old.Packets, old.Bytes
}

// readBack compares what the kernel holds with what it was given.
func (d *Datapath) readBack(want *desired) error {
	for id, w := range want.services {
		v := d.t.services.values[id]
		v.Slots = 0
		if v != w {
			return fmt.Errorf("service %s: the kernel does not hold what it was given", want.names.service[id])
		}
	}
	for n, w := range want.backends {
		if d.t.backends.values[n] != w {
			return fmt.Errorf("backend %s: the kernel does not hold what it was given", want.names.backend[n])
		}
	}
	return errors.Join(
		same(d.t.maps["listeners"], want.listeners), same(d.t.maps["listener_ranges"], want.ranges),
		same(d.t.maps["hosts"], want.hosts), same(d.t.maps["members"], want.members), same(d.t.maps["reverses"], want.reverses), same(d.t.maps["sessions"], want.sessions))
}

func same[K comparable, V comparable](m *ebpf.Map, want map[K]V) error {
	have, err := content[K, V](m)
	if err != nil {
		return err
	}
	if !maps.Equal(have, want) {
		return fmt.Errorf("map %s: the kernel does not hold what it was given", m)
	}
	return nil
}
