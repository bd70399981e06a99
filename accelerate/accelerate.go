// SPDX-License-Identifier: Apache-2.0

// Package accelerate forwards established connections that the kernel translates, faster than the kernel. The host's
// own rules and connection tracking decide about each connection. The programs in bpf/accelerate learn the decision
// from the kernel's own packets at TC egress, and repeat it for later packets in XDP or at TC ingress.
//
// The programs depend on this process: they leave all packets to the kernel 5 seconds after its last sign of life, and
// the kernel removes them when the process ends, for whatever reason.
package accelerate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
)

// Options of an Accelerator.
type Options struct {
	// Interfaces are the names of the interfaces to accelerate; empty means all suitable ones. The bridge of a selected
	// interface is included.
	Interfaces []string
	// Flows is the maximum number of learned flows; a connection has two. 0 means DefaultFlows.
	Flows uint32
	// Log receives one line for each change of the state; nil discards them.
	Log func(format string, args ...any)
}

// DefaultFlows is the usual maximum number of learned flows. Their table takes about 25 MB.
const DefaultFlows = 131072

// Intervals of the checks for changes. A change of nftables is effective after ruleCheck, a change of iptables-legacy
// after slowCheck. Changes of interfaces, routes and bridge entries are events.
const (
	ruleCheck  = 100 * time.Millisecond
	slowCheck  = time.Second
	sweepEvery = 10 * time.Second
	idleMost   = time.Minute // after which an entry without packets is removed
)

// Accelerator is the running acceleration of one network namespace.
type Accelerator struct {
	o       Options
	objects programsObjects
	watcher *netdev.Watcher
	// requests are the TCP connections for which the programs request liberal window checks.
	requests *ringbuf.Reader
	table    *conntrack.Conn
	started  time.Time

	// Only the goroutine of Run uses generation and legacy, and only the one of watchStations uses stations.
	generation uint32            // of nftables
	legacy     map[string]string // tables of iptables-legacy
	stations   map[station]int   // ports of hardware addresses

	mu         sync.Mutex // protects the following fields
	epoch      uint32     // of the learned flows; it also counts the invalidations
	attached   map[int]*attachment
	interfaces []Interface
	judgement  *judgement
	lastRule   uint32            // the last identification of an exclusion
	changes    map[string]uint64 // invalidations by cause
	surveyed   bool              // false: interfaces have changed since the survey
	judged     bool              // false: nothing is accelerated until the rules or policies are judged again
}

// RefusedError lists the reasons that exclude every flow.
type RefusedError struct{ Reasons []string }

func (e *RefusedError) Error() string {
	s := "nothing can be accelerated:"
	for _, r := range e.Reasons {
		s += "\n  " + r
	}
	return s
}

// Open loads the programs and attaches them in the network namespace of the process. Close removes them.
func Open(ctx context.Context, o Options) (*Accelerator, error) {
	if o.Log == nil {
		o.Log = func(string, ...any) {}
	}
	a := &Accelerator{o: o, attached: map[int]*attachment{}, changes: map[string]uint64{}, stations: map[station]int{}, started: time.Now(), judged: true, judgement: &judgement{}}
	if err := a.open(ctx); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

func (a *Accelerator) open(ctx context.Context) (err error) {
	if err := load(&a.objects, a.o.Flows); err != nil {
		return err
	}
	if a.watcher, err = netdev.Open(); err != nil {
		return err
	}
	if a.requests, err = ringbuf.NewReader(a.objects.Requests); err != nil {
		return fmt.Errorf("requests of the programs: %w", err)
	}
	if a.table, err = conntrack.Open(); err != nil {
		return err
	}
	if a.generation, err = firewall.Generation(); err != nil {
		return err
	}
	if a.legacy, err = firewall.LegacyTables(); err != nil {
		return err
	}
	if err := a.readSettings(); err != nil {
		return err
	}
	j, err := examine(ctx)
	if err != nil {
		return err
	}
	if err := a.setJudgement(j); err != nil {
		return err
	}
	if len(j.all) > 0 {
		return &RefusedError{j.all}
	}
	for _, r := range j.rules() {
		a.o.Log("its flows are not accelerated: %s", r)
	}
	if err := a.survey(); err != nil {
		return err
	}
	if !anyAttached(a.interfaces) {
		return &RefusedError{unsuitable(a.interfaces)}
	}
	a.beat()
	return a.resume()
}

// load loads the programs. Kernel functions are not stable, so a missing one is named.
func load(into *programsObjects, flows uint32) error {
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("memory limit: %w", err)
	}
	spec, err := loadPrograms()
	if err != nil {
		return err
	}
	if flows > 0 {
		spec.Maps[programsMapFlows].MaxEntries = flows
	}
	if err := spec.Variables[programsVarHz].Set(kernel.TicksPerSecond()); err != nil {
		return err
	}
	if err := spec.LoadAndAssign(into, nil); err != nil {
		return fmt.Errorf("load the programs: %w (they need Linux 6.6 with BTF, TCX and the conntrack functions bpf_skb_ct_lookup, "+
			"bpf_xdp_ct_lookup and bpf_ct_change_timeout)", err)
	}
	return nil
}

// Close detaches the programs and frees their maps. The kernel forwards all packets.
func (a *Accelerator) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var err error
	for index := range a.attached {
		err = errors.Join(err, a.detach(index))
	}
	if a.requests != nil {
		err = errors.Join(err, a.requests.Close())
	}
	if a.table != nil {
		err = errors.Join(err, a.table.Close())
	}
	return errors.Join(err, a.objects.Close())
}

// now returns the clock of the programs.
func now() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // Linux 2.6
	return uint64(t.Nano())
}

func (a *Accelerator) beat() { _ = a.objects.Heartbeat.Set(now()) }

// pause makes the kernel forward all packets. The caller holds the lock, except while opening.
func (a *Accelerator) pause() error { return a.objects.Epoch.Set(uint32(0)) }

// resume invalidates every learned flow, and lets the programs learn again if the rules are judged.
func (a *Accelerator) resume() error {
	if !a.judged {
		return a.pause()
	}
	if a.epoch++; a.epoch == 0 {
		a.epoch = 1
	}
	if err := a.objects.Changed.Set(now()); err != nil {
		return err
	}
	return a.objects.Epoch.Set(a.epoch)
}

// invalidate ends the validity of every learned flow after a change.
func (a *Accelerator) invalidate(cause string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.changes[cause]++
	if len(a.judgement.all) == 0 {
		_ = a.resume() // memory of this process
	}
}

// Interfaces returns the interfaces of the namespace and their part in the acceleration.
func (a *Accelerator) Interfaces() []Interface {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.interfaces)
}

// Run watches the host until ctx ends.
func (a *Accelerator) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 3)
	go func() { ended <- a.watcher.Run(ctx, a.linkChanged) }()
	go func() { ended <- a.watchStations(ctx) }()
	go func() { ended <- a.setLiberal(ctx) }()
	go func() {
		<-ctx.Done()
		_ = a.requests.Close() // ends setLiberal
	}()
	running := 3
	rules, slow, sweep := time.NewTicker(ruleCheck), time.NewTicker(slowCheck), time.NewTicker(sweepEvery)
	defer rules.Stop()
	defer slow.Stop()
	defer sweep.Stop()
	var err error
	for err == nil && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case err = <-ended:
			if running--; err == nil && ctx.Err() == nil {
				err = errors.New("a watcher ended")
			}
		case <-rules.C:
			err = a.checkRules(ctx)
		case <-slow.C:
			a.beat()
			err = a.checkSlow(ctx)
		case <-sweep.C:
			a.sweep()
		}
	}
	if ctx.Err() != nil {
		err = nil // a check that was interrupted
	}
	cancel()
	for range running {
		err = errors.Join(err, <-ended)
	}
	return errors.Join(err, a.pause())
}

// setLiberal sets liberal window checks for the TCP connections that the programs are about to accelerate.
func (a *Accelerator) setLiberal(ctx context.Context) error {
	for {
		record, err := a.requests.Read()
		if errors.Is(err, ringbuf.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("requests of the programs: %w", err)
		}
		entries := make([]conntrack.Entry, 0, 64)
		for {
			if e, ok := entryOf(record.RawSample); ok {
				entries = append(entries, e)
			}
			if len(entries) == cap(entries) || a.requests.AvailableBytes() == 0 {
				break
			}
			if record, err = a.requests.Read(); err != nil {
				break
			}
		}
		if _, err := a.table.Liberal(ctx, entries); err != nil && ctx.Err() == nil {
			a.o.Log("liberal window checks: %v", err) // the flows stay slow; the programs request it again
		}
	}
}

// sweep removes entries without packets.
func (a *Accelerator) sweep() {
	var old []programsFlowKey
	var key programsFlowKey
	var entry programsFlowEntry
	at := now()
	for all := a.objects.Flows.Iterate(); all.Next(&key, &entry); {
		if at > entry.Renewed+uint64(idleMost) {
			old = append(old, key)
		}
	}
	for i := range old {
		_ = a.objects.Flows.Delete(&old[i]) // a program may have removed it
	}
}

// counters returns the sums of the programs' counters over the CPUs.
func (a *Accelerator) counters() (out [programsCounterCOUNTERS]uint64, err error) {
	for i := range out {
		var each []uint64
		if err := a.objects.Counters.Lookup(uint32(i), &each); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return out, err
		}
		for _, n := range each {
			out[i] += n
		}
	}
	return out, nil
}
