// SPDX-License-Identifier: Apache-2.0

package table

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"maps"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
)

// mostPool is how many pool addresses a table can have: each has three classes of ports, and
// 16 bits number them (port_slot of bpf/binding.h).
const mostPool = 1 << 16 / 3

// Sizes of the tables that are chosen when they are made.
type Sizes struct {
	Entries4, Entries6 uint32 // flow table entries
	Clients            uint32
	Slots              uint32 // words of four slots
	Pool               uint32 // pool addresses
	Hosts              uint32 // single addresses in sets and lists
	// Whole flow tables are made at once; others grow (see grow.go).
	Whole bool
}

// Bytes of a flow in tables that have room for flows of NAT rules alone: two and a
// half entries (see entries), and their share of the index (see buckets).
const (
	flowBytes4 = 64*5/2 + bucketBytes*5/2/8
	flowBytes6 = 128*5/2 + bucketBytes*5/2/8

	bucketBytes = 64
	hintBytes   = 16
	maxHints    = 128 << 10 / hintBytes
)

// flowsFor takes the configured numbers of flows, or shares of the machine's
// memory.
func flowsFor(c config.Tables) (flows4, flows6 int) {
	share := int(memoryTotal() / 32)
	if flows4 = c.Flows; flows4 == 0 {
		flows4 = min(max(share/2/flowBytes4, 16384), 4<<20)
	}
	if flows6 = c.Flows6; flows6 == 0 {
		flows6 = min(max(share/2/flowBytes6, 16384), 2<<20)
	}
	return flows4, flows6
}

// HalfOpenFor takes the configured quota of handshakes in progress, or a quarter
// of the flows.
func HalfOpenFor(c config.Tables) uint32 {
	if c.HalfOpen != 0 {
		return uint32(c.HalfOpen)
	}
	flows4, flows6 := flowsFor(c)
	return uint32((flows4 + flows6) / 4)
}

func SizesFor(c config.Tables, slots, pool, hosts int) Sizes {
	flows4, flows6 := flowsFor(c)
	clients := c.Clients
	if clients == 0 {
		clients = 65536
	}
	return Sizes{
		Entries4: entries(flows4), Entries6: entries(flows6), Clients: uint32(clients),
		Slots: uint32(max(1<<18, slots/2)),
		Pool:  uint32(min(max(64, pool+pool/2), mostPool)), // 64 addresses let a later configuration bring a pool, and take 1.6 MB as long as none is used
		Hosts: uint32(min(max(65536, hosts*3/2), 1<<21)),
	}
}

// Differs says which sizes a configuration asks for that the tables in force do
// not have; "" for none.
func (t *Tables) Differs(c config.Tables) string {
	want := SizesFor(c, 0, 0, 0)
	var out []string
	for _, s := range []struct {
		name       string
		asked      int
		want, have uint32
	}{{"flows", c.Flows, want.Entries4, t.Entries4}, {"flows6", c.Flows6, want.Entries6, t.Entries6}, {"clients", c.Clients, want.Clients, t.Clients}} {
		if s.asked != 0 && s.want != s.have {
			out = append(out, fmt.Sprintf("tables.%s: %d is not in force, the table that is has %d %% of that", s.name, s.asked, uint64(s.have)*100/uint64(s.want)))
		}
	}
	if out == nil {
		return ""
	}
	return strings.Join(out, "; ") + ": " + wire.WayOut
}

// entries for a number of flows: one for each direction, and one for every second
// flow, because a binding has one as soon as two flows of a NAT rule share it.
func entries(flows int) uint32 { return uint32(flows*5/2 + 32) }

// buckets of fifteen slots for a number of entries, with 9.6 of them used at most: a flow,
// which takes two and a half entries, has a slot for each direction, and one for the
// binding that it holds, or held; or two flows have one for the entry of theirs. Of twenty
// million keys none found both of its buckets full (by simulation). Small tables get spare
// buckets, because chance fills some of them first.
func buckets(entries uint32) uint32 { return entries/8 + 16 }

// hints of four slots for a number of entries: one slot for each second entry at least, up
// to 128 KiB. With half as many 50,000 flows gain little, with four times as many short
// flows lose what they need of the CPU's cache (bench/results/hints.txt).
func hints(entries uint32) uint32 { return min(uint32(1)<<bits.Len32(entries/8), maxHints) }

// entryMask has the bits of the numbers 1 to entries: the rest of a slot is tag. Of
// four million flows eight bits are left, and one search in forty looks at a wrong entry.
func entryMask(entries uint32) uint32 { return 1<<bits.Len32(entries) - 1 }

func memoryTotal() uint64 {
	b, _ := os.ReadFile("/proc/meminfo")
	var kib uint64
	fmt.Sscanf(string(b), "MemTotal: %d kB", &kib)
	return kib << 10
}

// Tables are the pinned maps and what must stay the same while they live.
type Tables struct {
	Dir            string
	Maps           map[string]*ebpf.Map
	IDs            *ids.IDs
	HZ             uint32
	key            [12]uint32
	HashMultiplier uint64
	Sizes

	Flows4       *Parts[wire.Flow4]
	Flows6       *Parts[wire.Flow6]
	Index4       *Parts[wire.Bucket]
	Index6       *Parts[wire.Bucket]
	Stock4       *Memory[wire.Stock]
	Stock6       *Memory[wire.Stock]
	Control      *Memory[wire.Control]
	Directs      *Memory[wire.Direct]
	Stations     *Memory[uint64]
	Services     *Memory[wire.Service]
	Backends     *Memory[wire.Backend]
	SlotWords    *Memory[uint64]
	ServiceLoads *Memory[wire.Load] // of services
	BackendLoads *Memory[wire.Load] // of backends
	Rules        *Memory[wire.NatRule]
	Orders       *Memory[wire.NatOrder]
	Ports        *Memory[wire.PortMap]
	Owners       *Parts[wire.OwnerPair]
	Blocks       *Memory[wire.BlockMap]
	Runs         *Memory[uint64]
	PoolRules    *Memory[uint64] // rules of pool addresses
	late         map[string]*lateMap
	adopted      bool

	RouteEvery bool // Options.RouteEveryPacket
	// For tests: observed and fullPath are switches; allOn has every feature on, whether a
	// configuration needs it or not.
	Observed, FullPath, AllOn bool
}

// ErrLayout is wrapped when pinned tables are of another version of Sluice.
var ErrLayout = errors.New("tables of another version of Sluice, which forward on as they are")

// Open adopts the maps pinned in dir, or makes them.
func Open(dir string, want Sizes, hz uint32) (_ *Tables, err error) {
	t := &Tables{Dir: dir, Maps: map[string]*ebpf.Map{}, Sizes: want, HZ: hz}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.Close())
		}
	}()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("tables: %w", err)
	}
	idMap, made, err := pinned(filepath.Join(dir, "ids"), idSpec)
	if err != nil {
		return nil, err
	}
	t.Maps["ids"] = idMap
	if t.IDs, err = LoadIDs(idMap); err != nil {
		return nil, err
	}
	t.adopted = !made
	if err := t.meta(); err != nil {
		return nil, err
	}
	spec, err := wire.Spec()
	if err != nil {
		return nil, err
	}
	t.size(spec)
	if err := t.openLate(spec); err != nil {
		return nil, err
	}
	for name, m := range spec.Maps {
		if name == "works" || t.late[name] != nil || m.Type == ebpf.Array && name[0] == '.' {
			continue
		}
		if t.Maps[name], _, err = pinned(filepath.Join(dir, name), m); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(t.mapAll(), t.mapParts(spec)); err != nil {
		return nil, err
	}
	if err := t.begin(want.Whole); err != nil {
		return nil, err
	}
	for n := range t.Pool {
		t.Runs.Values[n] = uint64(n)
	}
	return t, nil
}

// pinned opens a pinned map of the given shape, or makes and pins one.
func pinned(path string, spec *ebpf.MapSpec) (m *ebpf.Map, made bool, err error) {
	m, err = ebpf.LoadPinnedMap(path, nil)
	if err == nil {
		if err = spec.Compatible(m); err != nil {
			m.Close()
			return nil, false, fmt.Errorf("%s: %w: %w: %s", path, ErrLayout, err, wire.WayOut)
		}
		return m, false, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, false, fmt.Errorf("%s: %w", path, err)
	}
	if m, err = ebpf.NewMap(spec); err != nil {
		return nil, false, fmt.Errorf("map %s: %w", spec.Name, err)
	}
	if err := m.Pin(path); err != nil {
		m.Close()
		return nil, false, fmt.Errorf("%s: %w", path, err)
	}
	return m, true, nil
}

// meta reads the words that must not change while the tables live, or chooses
// them.
func (t *Tables) meta() error {
	d := t.IDs.Draft()
	word := func(name string, v *uint32) {
		k := ids.KeyOf(ids.Meta, name)
		if known, ok := t.IDs.Known[k]; ok {
			*v = known
			return
		}
		d.Fresh[k] = *v
	}
	version := uint32(wire.Layout)
	if word("layout", &version); version != wire.Layout {
		return fmt.Errorf("%s: %w: layout %d, not %d: %s", t.Dir, ErrLayout, version, wire.Layout, wire.WayOut)
	}
	var random [14]uint32
	if err := binary.Read(rand.Reader, binary.NativeEndian, &random); err != nil {
		return err
	}
	for i := range t.key {
		t.key[i] = random[i]
		word(fmt.Sprintf("hash-key-%d", i), &t.key[i])
	}
	low, high := random[12]|1, random[13]
	word("hash-multiplier-low", &low)
	word("hash-multiplier-high", &high)
	t.HashMultiplier = uint64(high)<<32 | uint64(low)
	word("entries4", &t.Entries4)
	word("entries6", &t.Entries6)
	word("clients", &t.Clients)
	word("slots", &t.Slots)
	word("pool", &t.Pool)
	word("hosts", &t.Hosts)
	return d.Keep()
}

// size sets the sizes of the maps that have one.
func (t *Tables) size(spec *ebpf.CollectionSpec) {
	for name, n := range map[string]uint32{
		"flows4": parts(t.Entries4, wire.PartBits), "flows6": parts(t.Entries6, wire.PartBits),
		"index4": 2 * indexParts(t.Entries4), "index6": 2 * indexParts(t.Entries6),
		"hints4": hints(t.Entries4), "hints6": hints(t.Entries6),
		"clients": t.Clients, "client_rates": leastLate, "stickies": leastLate, "adjusts": leastLate,
		"slots": t.Slots, "pools": t.Pool, "block_maps": t.Pool, "hosts": t.Hosts, "port_maps": t.Pool * wire.PortClasses, "port_owners": t.Pool * wire.PortClasses,
		"runs": t.Places(), "pool_rules": t.Pool,
	} {
		spec.Maps[name].MaxEntries = n
	}
}

func (t *Tables) mapAll() (err error) {
	return errors.Join(
		mapInto(&t.Stock4, t.Maps["stock4"]), mapInto(&t.Stock6, t.Maps["stock6"]), mapInto(&t.Directs, t.Maps["directs"]),
		mapInto(&t.Stations, t.Maps["own_stations"]),
		mapInto(&t.Control, t.Maps["control"]), mapInto(&t.Services, t.Maps["services"]),
		mapInto(&t.Backends, t.Maps["backends"]), mapInto(&t.SlotWords, t.Maps["slots"]),
		mapInto(&t.ServiceLoads, t.Maps["service_loads"]), mapInto(&t.BackendLoads, t.Maps["backend_loads"]),
		mapInto(&t.Rules, t.Maps["nat_rules"]), mapInto(&t.Orders, t.Maps["nat_orders"]), mapInto(&t.Ports, t.Maps["port_maps"]),
		mapInto(&t.Blocks, t.Maps["block_maps"]), mapInto(&t.Runs, t.Maps["runs"]),
		mapInto(&t.PoolRules, t.Maps["pool_rules"]))
}

// mapParts maps the tables that grow.
func (t *Tables) mapParts(spec *ebpf.CollectionSpec) (err error) {
	inner := func(name string) *ebpf.MapSpec { return spec.Maps[name].InnerMap }
	if t.Owners, err = MapParts[wire.OwnerPair](t.Maps["port_owners"], inner("port_owners"), t.Pool*wire.PortClasses<<15); err != nil {
		return err
	}
	if t.Flows4, err = MapParts[wire.Flow4](t.Maps["flows4"], inner("flows4"), t.Entries4); err != nil {
		return err
	}
	if t.Flows6, err = MapParts[wire.Flow6](t.Maps["flows6"], inner("flows6"), t.Entries6); err != nil {
		return err
	}
	if t.Index4, err = MapParts[wire.Bucket](t.Maps["index4"], inner("index4"), t.Maps["index4"].MaxEntries()<<wire.IndexPartBits); err != nil {
		return err
	}
	t.Index6, err = MapParts[wire.Bucket](t.Maps["index6"], inner("index6"), t.Maps["index6"].MaxEntries()<<wire.IndexPartBits)
	return err
}

// Places is how many the map of runs has: those that are their own numbers, and twice
// all lists of addresses that pools may have.
func (t *Tables) Places() uint32 { return min(t.Pool+2*wire.MaxPool, 1<<16) }

func mapInto[T any](into **Memory[T], m *ebpf.Map) (err error) {
	*into, err = MapMemory[T](m)
	return err
}

func (t *Tables) Close() error {
	errs := []error{t.Flows4.Close(), t.Flows6.Close(), t.Index4.Close(), t.Index6.Close(), t.Stock4.Close(), t.Stock6.Close(), t.Control.Close(), t.Directs.Close(), t.Stations.Close(), t.Services.Close(), t.Backends.Close(),
		t.SlotWords.Close(), t.ServiceLoads.Close(), t.BackendLoads.Close(), t.Rules.Close(), t.Orders.Close(), t.Ports.Close(), t.Owners.Close(), t.Blocks.Close(),
		t.Runs.Close(), t.PoolRules.Close()}
	for _, m := range t.Maps {
		errs = append(errs, m.Close())
	}
	errs = append(errs, t.closeLate())
	t.Maps = nil
	return errors.Join(errs...)
}

// Program loads the programs with their constants set; or only some of them, as a
// gateway of their own on the same tables, which holds no fragments.
func (t *Tables) Program(s wire.Switches, dryRun bool, only ...string) (*ebpf.Collection, error) {
	p, err := t.Prepare(s, dryRun, only...)
	if err != nil {
		return nil, err
	}
	return p.Load()
}

// Programs are programs that are yet to be loaded, which takes up to seconds and needs the tables no more.
type Programs struct {
	spec *ebpf.CollectionSpec
	maps map[string]*ebpf.Map // handles of their own
}

// Load loads the programs, once.
func (p *Programs) Load() (*ebpf.Collection, error) {
	defer p.Close()
	c, err := ebpf.NewCollectionWithOptions(p.spec, ebpf.CollectionOptions{MapReplacements: p.maps})
	if err != nil {
		return nil, fmt.Errorf("programs: %w", err)
	}
	return c, nil
}

// Close gives back the maps of programs that are not loaded.
func (p *Programs) Close() {
	for _, m := range p.maps {
		m.Close()
	}
	p.maps = nil
}

// Prepare is the part of Program that needs the tables.
func (t *Tables) Prepare(s wire.Switches, dryRun bool, only ...string) (*Programs, error) {
	spec, err := wire.Spec()
	if err != nil {
		return nil, err
	}
	t.size(spec)
	shortest := min(s.Established, s.Transitory, s.UDP, s.ICMP, s.Other)
	sweep := min(max(shortest*1000/t.HZ/8, 200), 4000)
	for name, v := range map[string]any{
		"hash_key": t.key, "hash_multiplier": t.HashMultiplier, "hash_seed": balance.Seed, "entry_mask4": entryMask(t.Entries4), "entry_mask6": entryMask(t.Entries6),
		"hint_mask4": hints(t.Entries4) - 1, "hint_mask6": hints(t.Entries6) - 1,
		"hz": t.HZ, "half_open_max": s.HalfOpen, "sweep_ms": sweep, "hold_ticks": s.Hold,
		"timeout_established": s.Established, "timeout_transitory": s.Transitory, "timeout_udp": s.UDP, "timeout_icmp": s.ICMP,
		"timeout_other": s.Other, "have_services": s.Services, "have_owned": s.Owned, "have_reverse": s.Reverse, "have_nat": s.NAT,
		"nat_by_egress": s.ByEgress, "have_prefixes": s.Prefixes, "have_crossing": s.Crossing, "have_family_change": s.FamilyChange, "have_pools": s.Pools, "have_blocks": s.Blocks, "have_mappings": s.Mappings, "host_lists": s.HostLists,
		"trie_lists": s.TrieLists, "have_rules": s.Rules,
		"have_ranges": s.Ranges, "have_iface_listeners": s.IfaceListeners, "have_any": s.Any, "have_direct": s.Direct, "have_mac_keys": s.MACKeys, "have_edits": s.Edits,
		"have_cookies": s.Cookies, "have_resets": s.Resets, "have_forwards": s.Forwards, "local_port_last": s.LocalPortLast,
		"rule_count": s.RuleCount, "dry_run": dryRun, "tc_behind": s.Paired && !dryRun, "cache_hops": !t.RouteEvery, "hold_fragments": len(only) == 0,
		"lowest_ipv6_mtu": s.LowestIPv6MTU, "cross_by_egress": s.CrossByEgress, "errors_per_second": s.Errors, "summed_at": summedAt(), "observed": t.Observed, "straight_off": t.FullPath || len(only) > 0,
	} {
		if err := spec.Variables[name].Set(v); err != nil {
			return nil, fmt.Errorf("switch %s: %w", name, err)
		}
	}
	delete(spec.Programs, "read_clocks")
	if len(only) == 0 {
		for _, name := range []string{"map_open", "map_close", "flow_take", "sweep_end"} { // loaded apart, when one is to run
			delete(spec.Programs, name)
		}
		if !t.Observed {
			delete(spec.Programs, "sweep_all") // only tests run it
		}
	}
	if len(only) > 0 {
		maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !slices.Contains(only, name) })
	} else {
		for name, needed := range map[string]bool{"sluice_xdp": s.XDP, "sluice_tc": s.TC, "sluice_bare": s.Bare} {
			if !needed {
				delete(spec.Programs, name)
			}
		}
	}
	p := &Programs{spec: spec, maps: map[string]*ebpf.Map{}}
	replace := map[string]*ebpf.Map{}
	for name, m := range t.Maps {
		if name != "ids" {
			replace[name] = m
		}
	}
	if err := t.replaceLate(s, spec, replace); err != nil {
		return nil, err
	}
	for name, m := range replace {
		if p.maps[name], err = m.Clone(); err != nil {
			p.Close()
			return nil, fmt.Errorf("map %s: %w", name, err)
		}
	}
	return p, nil
}

// UsePools makes what keeps the ports of pool addresses that come into use.
func (t *Tables) UsePools(numbers iter.Seq[uint32]) error {
	return t.Owners.Add(func(yield func(uint32) bool) {
		for n := range numbers {
			for class := range uint32(wire.PortClasses) {
				if !yield(n*wire.PortClasses + class) {
					return
				}
			}
		}
	})
}

// Reserve marks all ports of a pool address but those of a set as taken, without counting them as
// used: so the programs find the set's ports as they find any. ICMP's identifiers are its
// third class.
func (t *Tables) Reserve(number uint32, set config.PortSet) {
	var open [len(wire.PortMap{}.Words)]uint64
	for _, r := range set {
		for port := int(r.First); port <= int(r.Last); port++ {
			bit := port&1<<15 | port>>1 // bit_of of bpf/port.h
			open[bit/64] |= 1 << (bit % 64)
		}
	}
	for class := range uint32(wire.PortClasses) {
		m := &t.Ports.Values[number*wire.PortClasses+class]
		for w := range m.Words {
			if atomic.OrUint64(&m.Words[w], ^open[w])|^open[w] == ^uint64(0) {
				atomic.OrUint64(&m.Full[w/64], 1<<(w%64))
			}
		}
	}
}
