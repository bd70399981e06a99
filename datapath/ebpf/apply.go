// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf/compile"
	"github.com/sluice-lb/sluice/datapath/ebpf/ids"
	"github.com/sluice-lb/sluice/datapath/ebpf/table"
	"github.com/sluice-lb/sluice/datapath/ebpf/wire"
)

// Plan returns what Apply would change.
func (d *Datapath) Plan(_ context.Context, s *datapath.Snapshot) (change *datapath.Change, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	err = d.inNamespace(func() error {
		if d.t == nil && d.hasNothing(s) {
			change = &datapath.Change{Datapath: d.Name()}
			return nil
		}
		h, err := readHost()
		if err != nil {
			return err
		}
		st := emptyState(d.hz, s)
		if d.t != nil {
			st = stateOf(d.t, s)
		}
		want, err := compile.Compile(s, st, h)
		if err != nil {
			return err
		}
		change = d.compare(want)
		change.Ended = d.staleAfter(want, s).countIn(d.t)
		return nil
	})
	return change, err
}

// hasNothing reports whether the snapshot is empty and no earlier process has left tables.
func (d *Datapath) hasNothing(s *datapath.Snapshot) bool {
	if len(s.Services)+len(s.NAT)+len(s.Rules) > 0 {
		return false
	}
	return d.noPins || !d.pinnedBefore()
}

// Apply makes the kernel's state equal to the snapshot, in four steps: open the tables, compile, write, and end the
// flows that the snapshot makes stale. If only backends change, it writes an amendment instead.
func (d *Datapath) Apply(_ context.Context, s *datapath.Snapshot) (change *datapath.Change, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	start := time.Now()
	err = d.inNamespace(func() error {
		if d.t == nil && d.hasNothing(s) {
			change = &datapath.Change{Datapath: d.Name()}
			return nil
		}
		if err := d.learnTunnelMTUs(carriersOf(s)); err != nil {
			d.opt.Log.Warn("packets to tunnel backends behind a link with a smaller MTU are lost", "error", err)
		}
		h, err := d.openTables(s)
		if err != nil {
			return err
		}
		if a := d.amendment(s, h); a != nil {
			change = a.Describe(d.inForce)
			change.Datapath = d.Name()
			if change.Ended, err = d.putAmendment(a, s); err != nil {
				return errors.Join(err, d.restore(h))
			}
			return nil
		}
		c, err := d.compile(s, h)
		if err != nil {
			return err
		}
		change = d.compare(c.want)
		stale := d.staleAfter(c.want, s, d.lostAddresses(c.want, h)...) // before the write changes the ids in force
		if err := d.putOrRestore(c.want, s, h); err != nil {
			return err
		}
		if change.Ended, err = d.end(stale); err != nil {
			return err
		}
		d.appliedHost, d.mismatch = c.host, c.mismatch
		return nil
	})
	if change != nil {
		change.Duration = time.Since(start)
	}
	return change, err
}

// openTables reads the state of the host, and opens the tables if this is the first Apply.
func (d *Datapath) openTables(s *datapath.Snapshot) (*compile.Host, error) {
	h, err := readHost()
	if err == nil && d.t == nil {
		err = d.open(s, h)
	}
	return h, err
}

// compiledState is a desired state and the state of the host for which it was compiled.
type compiledState struct {
	want     *compile.Desired
	host     *compile.Host
	mismatch error // why the present host does not suffice, or nil
}

// compile compiles a snapshot. If a needed interface, address or route has disappeared, it adds the host of the last
// Apply: the configuration stays in force, because changes of backends must still be applied.
func (d *Datapath) compile(s *datapath.Snapshot, h *compile.Host) (compiledState, error) {
	st := stateOf(d.t, s)
	want, err := compile.Compile(s, st, h)
	c := compiledState{want, h, err}
	if err == nil && want.Waiting == 0 || d.appliedHost == nil || d.snapshot == nil || s.Config != d.snapshot.Config {
		return c, err
	}
	all := h.With(d.appliedHost)
	earlier, earlierErr := compile.Compile(s, st, all)
	if err == nil && (earlierErr != nil || earlier.Waiting >= want.Waiting) {
		return c, nil
	}
	if err == nil && len(want.Unreached) > len(earlier.Unreached) {
		c.mismatch = errors.New(want.Unreached[0])
	}
	c.want, c.host = earlier, all
	return c, earlierErr
}

// putOrRestore writes a desired state. If that fails, it writes the previous state again.
func (d *Datapath) putOrRestore(want *compile.Desired, s *datapath.Snapshot, h *compile.Host) error {
	if err := d.put(want, s, h); err != nil {
		return errors.Join(err, d.restore(h))
	}
	return nil
}

// pinnedBefore reports whether an earlier process left tables.
func (d *Datapath) pinnedBefore() bool {
	dir, err := d.pinDir(false)
	if err != nil || dir == "" {
		return false
	}
	m, err := ebpf.LoadPinnedMap(dir+"/ids", nil)
	if err != nil {
		d.noPins = errors.Is(err, fs.ErrNotExist)
		return false
	}
	m.Close()
	return true
}

// open adopts the tables of an earlier process or creates them.
func (d *Datapath) open(s *datapath.Snapshot, h *compile.Host) (err error) {
	d.noPins = false // reset even if open fails
	if d.dir, err = d.pinDir(true); err != nil {
		return err
	}
	slots, pool, hosts := 0, 0, 0
	for i := range s.Services {
		slots += len(s.Services[i].Slots(s.Services[i].Active()))
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
	sizes := table.SizesFor(s.Config.Tables, slots, pool, hosts)
	sizes.Whole = d.opt.NoAttach // without attached programs, no goroutine grows the tables
	if d.t, err = table.Open(d.dir, sizes, d.hz); err != nil {
		return err
	}
	d.t.Observed, d.t.FullPath = d.opt.NoAttach, d.opt.FullPath
	for id, v := range d.t.Services.Values {
		if v.Active != 0 {
			d.regions[uint32(id)] = table.RegionOf(v.Slots)
			d.noteProxy(v.Flags)
		}
	}
	return nil
}

func poolSize(ranges []config.AddressRange) (n int) {
	for _, r := range ranges {
		for a := r.First; n <= wire.MaxPool; a = a.Next() {
			if n++; a == r.Last {
				break
			}
		}
	}
	return n
}

// restore writes the previous state in force again.
func (d *Datapath) restore(h *compile.Host) error {
	if d.inForce == nil {
		return nil
	}
	if err := d.put(d.inForce, d.snapshot, h); err != nil {
		return fmt.Errorf("going back: %w", err)
	}
	return nil
}

// put writes a desired state and makes it active. It loads the programs first. Loading takes up to
// seconds, and the programs in force must not run on map content for other programs.
func (d *Datapath) put(want *compile.Desired, s *datapath.Snapshot, h *compile.Host) error {
	t := d.t
	if first := d.denyFirst(want); first != nil {
		if err := d.put(first, s, h); err != nil {
			return err
		}
	}
	d.verified, d.uses = false, compile.Uses{}
	oldHeld := d.held
	programs, held, err := d.load(want.Switches)
	if err != nil {
		return err
	}
	if err := d.write(want, s, h, programs, held); err != nil {
		d.runHeldBy(oldHeld)
		if programs != d.programs {
			programs.Close()
			held.close()
		}
		return err
	}
	d.putLists(want)
	if programs != d.programs {
		d.growMu.Lock()
		if d.programs != nil {
			d.programs.Close()
		}
		d.programs, d.switches = programs, want.Switches
		d.growMu.Unlock()
		oldHeld.close()
		d.forgetOnDemand()
	}
	if want.Switches.Mappings {
		if err := d.loadOnDemand(want.Switches, "map_open", "map_close"); err != nil {
			return fmt.Errorf("pcp: %w", err)
		}
	}
	if err := d.retireMappings(want); err != nil {
		return err
	}
	d.deactivateRemoved(want)
	if err := d.retirePools(want, h); err != nil {
		return err
	}
	d.invalidateHops()
	d.inForce, d.snapshot, d.lastHost = want, s, h
	t.IDs.InForce = want.Draft.Want
	d.logs.Store(&want.Names.Log)
	d.sourceNames.Store(&want.Names.Source)
	if d.stop == nil && !d.opt.NoAttach {
		d.watch()
	}
	d.resolveBackends(want.Backends)
	err = d.readBack(want)
	d.verified = err == nil
	return err
}

// write writes a desired state in order of reference: referenced entries, services, listeners. Then
// it attaches the programs. Last, it enables the refusal of packets without a listener. A listener
// that moves to another map is added there before its old entry is removed.
func (d *Datapath) write(want *compile.Desired, s *datapath.Snapshot, h *compile.Host, programs *ebpf.Collection, held *heldPrograms) error {
	t := d.t
	if err := t.ForgetOthers(want.Draft); err != nil {
		return err
	}
	if err := want.Draft.Keep(); err != nil {
		return err
	}
	if err := d.putPools(want); err != nil {
		return err
	}
	d.putRuns(want)
	if err := table.Equalise(t.Maps["interfaces"], want.Ifaces, nil); err != nil { // rules refer to interface lists
		return err
	}
	for n, b := range want.Backends {
		t.Backends.Values[n] = b
	}
	d.noteFamilies(want.Switches)
	if err := d.putServices(want); err != nil {
		return err
	}
	d.putRules(want)
	d.putOrder(want)
	directs := compile.PlaceDirects(want.Directs)
	prefixes, err := d.countedPrefixes(want)
	if err != nil {
		return err
	}
	had := d.inForce
	if had == nil {
		had = &compile.Desired{}
	}
	hosts, ownedHosts := withoutNewlyOwned(want.Hosts, had.Hosts, hostList)
	members, ownedMembers := withoutNewlyOwned(want.Members, had.Members, memberList)
	d.putInitialRoutes()
	err = errors.Join(
		t.PutDenied(deniedDuring(want, had)),
		table.Equalise(t.Maps["hosts"], hosts, nil), table.Equalise(t.Maps["members"], members, nil),
		putFirewall(t.Maps["firewall_rules"], want.Firewall), table.Equalise(t.Maps["sessions"], want.Sessions, nil),
		table.Equalise(t.Maps["reverses"], want.Reverses, nil), table.Equalise(t.Maps["prefixes"], prefixes, keepPrefixCounts),
		putStations(t, h), table.Equalise(t.Maps["pool_numbers"], compile.PoolNumbers(want), nil),
		table.Equalise(t.Maps["iface_listeners"], want.IfaceListeners, nil), table.Add(t.Maps["listeners"], want.Listeners, had.Listeners),
		table.Equalise(t.Maps["listener_ranges"], want.Ranges, nil), table.Equalise(t.Maps["listeners"], want.Listeners, nil))
	if err == nil {
		d.putDirects(directs)
		d.runHeldBy(held)
		err = d.attach(s.Config, want.Switches.Paired, h, programs)
	}
	if err == nil {
		err = t.PutDenied(want.Denied)
	}
	if err == nil {
		err = errors.Join(table.PutChanges(t.Maps["hosts"], ownedHosts), table.PutChanges(t.Maps["members"], ownedMembers))
	}
	if err == nil && programs != d.programs {
		err = startSweeper(programs)
	}
	return err
}

// withoutNewlyOwned returns the entries for a list before newly owned addresses are refused, and
// the entries that enable the refusal later. Until then, another datapath may have listeners there.
func withoutNewlyOwned[K comparable](want, had map[K]uint64, list func(K) uint32) (before, owned map[K]uint64) {
	before = want
	for k, bits := range want {
		if list(k)&0xff != wire.ListServed || bits&wire.ServedOwned == 0 || had[k]&wire.ServedOwned != 0 {
			continue
		}
		if owned == nil {
			before, owned = maps.Clone(want), map[K]uint64{}
		}
		before[k], owned[k] = bits&^wire.ServedOwned, bits
	}
	return before, owned
}

// invalidateHops makes every flow look up its next hop again.
func (d *Datapath) invalidateHops() { atomic.AddUint32(&d.t.Control.Values[0].Generation, 1) }

// load returns the programs in force and their copy for held packets, or loads new ones if a switch
// has changed.
func (d *Datapath) load(s wire.Switches) (*ebpf.Collection, *heldPrograms, error) {
	if d.programs != nil && d.switches == s {
		return d.programs, d.held, nil
	}
	d.t.RouteEvery = d.opt.RouteEveryPacket
	if d.opt.NoAttach {
		c, err := d.t.Program(s, false)
		return c, nil, err
	}
	prepared, err := d.t.Prepare(s, false)
	if err != nil {
		return nil, nil, err
	}
	preparedHeld, err := d.t.Prepare(s, false, "sluice_tc")
	if err != nil {
		prepared.Close()
		return nil, nil, err
	}
	held := &heldPrograms{switches: s}
	var heldErr error
	var both sync.WaitGroup
	both.Go(func() { held.Collection, heldErr = preparedHeld.Load() })
	c, err := prepared.Load()
	both.Wait()
	if err == nil && heldErr == nil {
		return c, held, nil
	}
	for _, loaded := range []*ebpf.Collection{c, held.Collection} {
		if loaded != nil {
			loaded.Close()
		}
	}
	return nil, nil, errors.Join(err, heldErr)
}

func startSweeper(c *ebpf.Collection) error {
	for tries := 100; ; tries-- {
		ret, err := c.Programs["sweep_start"].Run(&ebpf.RunOptions{Context: make([]byte, 8)})
		if err == nil && ret != 0 {
			err = unix.Errno(-int32(ret))
		}
		if err == nil {
			return nil
		}
		// The kernel allocates a timer without waiting for memory, so the allocation fails now and
		// then.
		if !errors.Is(err, unix.ENOMEM) || tries == 0 {
			return fmt.Errorf("sweeper: %w", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// deactivateRemoved deactivates services, backends and rules that are no longer configured. The sweeper ends
// flows of removed services and rules.
func (d *Datapath) deactivateRemoved(want *compile.Desired) {
	for id := range d.t.Services.Values {
		v := &d.t.Services.Values[id]
		if _, ok := want.Services[uint32(id)]; !ok && v.Active != 0 {
			v.Active = 0
			atomic.StoreUint64(&v.Slots, 0)
			delete(d.regions, uint32(id))
		}
	}
	// A removed backend keeps its flows and handshakes in progress. Flows of a removed service end.
	if d.inForce != nil {
		for n := range d.inForce.Backends {
			if _, ok := want.Backends[n]; !ok {
				d.drainBackend(n)
			}
		}
	} else {
		for k, n := range d.t.IDs.Known {
			if _, ok := want.Backends[n]; k.Kind == ids.Backend && !ok {
				d.drainBackend(n)
			}
		}
	}
	for id := range d.t.Rules.Values {
		v := &d.t.Rules.Values[id]
		if _, ok := want.Rules[uint32(id)]; !ok {
			v.Active = 0
		}
		if v.Group != 0 && want.Rules[uint32(v.Group)-1].Active == 0 { // its masquerade rule is removed, too; added again, the rule counts from zero
			v.Group = 0
		}
	}
}

// drainBackend lets a backend keep its flows but get no new ones. It then needs no source
// addresses, so its pool addresses can be reused.
func (d *Datapath) drainBackend(n uint32) {
	b := &d.t.Backends.Values[n]
	b.State, b.PoolLen = wire.BackendDrain, 0
}

// readBack compares the map content with the desired state.
func (d *Datapath) readBack(want *compile.Desired) error {
	return errors.Join(d.readBackWords(want),
		table.Verify(d.t.Maps["iface_listeners"], want.IfaceListeners), table.Verify(d.t.Maps["listeners"], want.Listeners), table.Verify(d.t.Maps["listener_ranges"], want.Ranges),
		table.Verify(d.t.Maps["hosts"], want.Hosts), table.Verify(d.t.Maps["members"], want.Members), table.Verify(d.t.Maps["reverses"], want.Reverses), table.Verify(d.t.Maps["sessions"], want.Sessions))
}

// readBackWords compares services and backends only.
func (d *Datapath) readBackWords(want *compile.Desired) error {
	for id, w := range want.Services {
		v := d.t.Services.Values[id]
		v.Slots = 0
		if v != w {
			return fmt.Errorf("service %s: the map in the kernel differs from the written values", want.Names.Service[id])
		}
	}
	for n, w := range want.Backends {
		if d.t.Backends.Values[n] != w {
			return fmt.Errorf("backend %s: the map in the kernel differs from the written values", want.Names.Backend[n])
		}
	}
	return nil
}
