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

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/balance"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// mostPool is the maximum number of pool addresses: each has three classes of ports, and 16 bits number them
// (port_slot of bpf/datapath/nat/binding.h).
const mostPool = 1 << 16 / 3

// Sizes of the tables, fixed at their creation.
type Sizes struct {
	Entries4, Entries6 uint32 // flow table entries
	Clients            uint32
	Slots              uint32 // Words of four slots.
	Pool               uint32 // Pool addresses.
	Hosts              uint32 // Single addresses in sets and lists.
	// Whole creates flow tables at full size; others grow (see grow.go).
	Whole bool
}

// Bytes per flow in tables sized for flows of NAT rules only: two and a half entries (see entries), and their share
// of the index (see buckets).
const (
	flowBytes4 = 64*5/2 + bucketBytes*5/2/8
	flowBytes6 = 128*5/2 + bucketBytes*5/2/8

	bucketBytes = 64
	hintBytes   = 16
	maxHints    = 128 << 10 / hintBytes
)

// flowsFor returns the configured numbers of flows, or shares of the machine's memory.
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

// HalfOpenFor returns the configured quota of handshakes in progress, or a quarter of the flows.
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
		Pool:  uint32(min(max(64, pool+pool/2), mostPool)), // 64 spare addresses allow a later configuration to add a pool, and take 1.6 MB while unused
		Hosts: uint32(min(max(65536, hosts*3/2), 1<<21)),
	}
}

// Differs describes the sizes that a configuration requests and the current tables do not have; "" if there are none.
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

// entries returns the entries for a number of flows: one per direction, and one per two flows, because two flows of a
// NAT rule that share a binding need an entry for it.
func entries(flows int) uint32 { return uint32(flows*5/2 + 32) }

// buckets returns the number of buckets of fifteen slots for a number of entries, with at most 9.6 slots used on
// average. A flow takes two and a half entries. It uses a slot per direction, and one for its current or former
// binding; or two flows share one for the entry of their binding. In a simulation, none of twenty million keys found
// both of its buckets full. Small tables get spare buckets, because random placement fills some of their buckets
// early.
func buckets(entries uint32) uint32 { return entries/8 + 16 }

// hintCount returns the number of hints of four slots for a number of entries: at least one slot per two entries, up to
// 128 KiB. With half as many, 50,000 flows gain little. With four times as many, short flows lose space in the CPU's
// cache (bench/results/hints.txt).
func hintCount(entries uint32) uint32 { return min(uint32(1)<<bits.Len32(entries/8), maxHints) }

// entryMask returns the bits of the numbers 1 to entries; the other bits of a slot are the tag. With four million
// flows the tag has eight bits, and one search in forty inspects a wrong entry.
func entryMask(entries uint32) uint32 { return 1<<bits.Len32(entries) - 1 }

func memoryTotal() uint64 {
	b, _ := os.ReadFile("/proc/meminfo")
	var kib uint64
	fmt.Sscanf(string(b), "MemTotal: %d kB", &kib)
	return kib << 10
}

// Tables are the pinned maps and the values that are constant during their lifetime.
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
	// For tests: Observed and FullPath are switches; AllOn enables every feature, even if the configuration does not
	// need it.
	Observed, FullPath, AllOn bool
}

// ErrLayout is wrapped if the pinned tables belong to another version of Sluice.
var ErrLayout = errors.New("tables of another version of Sluice, which forward on as they are")

// Open adopts the maps pinned in dir, or creates them.
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
	idMap, made, err := openOrPin(filepath.Join(dir, "ids"), idSpec)
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
		if t.Maps[name], _, err = openOrPin(filepath.Join(dir, name), m); err != nil {
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

// openOrPin opens a pinned map of the given shape, or creates and pins one.
func openOrPin(path string, spec *ebpf.MapSpec) (m *ebpf.Map, made bool, err error) {
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

// meta reads the words that are constant during the tables' lifetime, or chooses them.
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

// size sets the sizes of variable maps.
func (t *Tables) size(spec *ebpf.CollectionSpec) {
	for name, n := range map[string]uint32{
		"flows4": parts(t.Entries4, wire.PartBits), "flows6": parts(t.Entries6, wire.PartBits),
		"index4": 2 * indexParts(t.Entries4), "index6": 2 * indexParts(t.Entries6),
		"hints4": hintCount(t.Entries4), "hints6": hintCount(t.Entries6),
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

// mapParts maps the growing tables.
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

// Places returns the size of the map of runs: one place for each pool address by number, and twice the lists of
// addresses that pools may have.
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

// Program loads the programs with their constants. With only, it loads a subset as a separate gateway on the same
// tables, which stores no fragments.
func (t *Tables) Program(s wire.Switches, dryRun bool, only ...string) (*ebpf.Collection, error) {
	p, err := t.Prepare(s, dryRun, only...)
	if err != nil {
		return nil, err
	}
	return p.Load()
}

// Programs are prepared programs. Loading takes up to seconds and does not use the tables.
type Programs struct {
	spec *ebpf.CollectionSpec
	maps map[string]*ebpf.Map // separate handles
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

// Close releases the maps of programs that are not loaded.
func (p *Programs) Close() {
	for _, m := range p.maps {
		m.Close()
	}
	p.maps = nil
}

// Prepare is the part of Program that uses the tables.
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
		"hint_mask4": hintCount(t.Entries4) - 1, "hint_mask6": hintCount(t.Entries6) - 1,
		"hz": t.HZ, "half_open_max": s.HalfOpen, "sweep_ms": sweep, "hold_ticks": s.Hold,
		"timeout_established": s.Established, "timeout_transitory": s.Transitory, "timeout_udp": s.UDP, "timeout_icmp": s.ICMP,
		"timeout_other": s.Other, "have_services": s.Services, "have_owned": s.Owned, "have_reverse": s.Reverse, "have_nat": s.NAT,
		"nat_by_egress": s.ByEgress, "have_prefixes": s.Prefixes, "have_crossing": s.Crossing, "have_family_change": s.FamilyChange, "have_pools": s.Pools, "have_blocks": s.Blocks, "have_mappings": s.Mappings, "host_lists": s.HostLists,
		"trie_lists": s.TrieLists, "have_rules": s.Rules, "have_denied": s.Denied,
		"have_ranges": s.Ranges, "have_iface_listeners": s.IfaceListeners, "have_any": s.Any, "have_direct": s.Direct, "have_mac_keys": s.MACKeys, "have_edits": s.Edits,
		"have_cookies": s.Cookies, "have_resets": s.Resets, "have_forwards": s.Forwards, "local_port_last": s.LocalPortLast,
		"rule_count": s.RuleCount, "dry_run": dryRun, "tc_behind": s.Paired && !dryRun, "cache_hops": !t.RouteEvery, "hold_fragments": len(only) == 0,
		"lowest_ipv6_mtu": s.LowestIPv6MTU, "cross_by_egress": s.CrossByEgress, "errors_per_second": s.Errors, "summed_at": ipSummedOffset(), "observed": t.Observed, "straight_off": t.FullPath || len(only) > 0,
	} {
		if err := spec.Variables[name].Set(v); err != nil {
			return nil, fmt.Errorf("switch %s: %w", name, err)
		}
	}
	delete(spec.Programs, "read_clocks")
	if len(only) == 0 {
		for _, name := range []string{"map_open", "map_close", "flow_take", "sweep_end"} { // loaded separately when required
			delete(spec.Programs, name)
		}
		if !t.Observed {
			delete(spec.Programs, "sweep_all") // used by tests only
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

// UsePools creates the port maps of pool addresses before their first use.
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

// Reserve marks all ports of a pool address outside of a set as used, without counting them. Programs then find the
// ports of the set like any others. ICMP identifiers are the third class.
func (t *Tables) Reserve(number uint32, set config.PortSet) {
	var open [len(wire.PortMap{}.Words)]uint64
	for _, r := range set {
		for port := int(r.First); port <= int(r.Last); port++ {
			bit := port&1<<15 | port>>1 // bit_of of bpf/datapath/nat/port.h
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
