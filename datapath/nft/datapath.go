// SPDX-License-Identifier: Apache-2.0

// Package nft is the nftables datapath: it compiles snapshots to nf_tables
// rulesets (package compile), works out what differs from what is in force
// (package ruleset) and changes that in one netlink transaction (package nfnl),
// which it reads back before it reports success. It needs no nft binary, touches
// only tables named "sluice", and adopts what an earlier process left there.
package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/nft/compile"
	"github.com/sluice-lb/sluice/datapath/nft/nfnl"
	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
	"github.com/sluice-lb/sluice/flow"
)

// Datapath carries services and rules by nf_tables in one network namespace.
type Datapath struct {
	conn *nfnl.Conn
	host *host

	// tracking asks nothing itself: each request has a sibling of its own, because a
	// request that was given up leaves a socket that can only be closed.
	tracking *conntrack.Conn

	// background ends with the datapath.
	background context.Context
	leave      context.CancelFunc

	// mu serialises Plan, Apply and Remove, and protects what follows.
	mu     sync.Mutex
	closed bool
	// inForce is the ruleset in the kernel; nil when it must be read.
	inForce *ruleset.Ruleset
	// interfaces are those that the last ruleset was compiled for.
	interfaces []compile.Interface
	// networks are those that the host was connected to then.
	networks []netip.Prefix
	// uplinks are those that the host had when the snapshot was applied.
	uplinks uplinks
	// compiled is what inForce was compiled from; nil when it was read.
	compiled *compile.Result
	snapshot *datapath.Snapshot
	// generation is the kernel's count when inForce was last known to be true.
	generation uint32
	// retired counts what objects had counted that are no more.
	retired retired
	// mismatch is why the snapshot no longer matches the host, as it did when its configuration was
	// applied; nil when it does.
	mismatch error
	// endError is why the last Apply, which succeeded, could not end connections that the new rules
	// treat differently; nil when it could.
	endError error
	// flowtables and timeouts tell whether the kernel has flowtables, and timeouts
	// of single connections.
	flowtables, timeouts bool
	// defragments tells whether it puts fragments together without connection tracking.
	defragments bool
	// fib tells whether rules can ask what an address is to the host.
	fib bool
}

var (
	_ datapath.Datapath       = (*Datapath)(nil)
	_ datapath.Warner         = (*Datapath)(nil)
	_ datapath.Adopter        = (*Datapath)(nil)
	_ datapath.ChangeDetector = (*Datapath)(nil)
)

// Open opens the datapath of the network namespace of the calling thread.
func Open() (*Datapath, error) {
	conn, err := nfnl.Open()
	if err != nil {
		return nil, err
	}
	flowtables, err := conn.Makes(&ruleset.Object{ID: ruleset.ID{Table: ruleset.Inet, Name: "probe"}, Kind: ruleset.ObjectFlowtable})
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	timeouts, err := conn.Makes(ruleset.NewTimeout(ruleset.ID{Table: ruleset.IP, Name: "probe"}, uint8(flow.TCP)))
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	var takes [2]bool
	for i, rule := range []ruleset.Rule{ruleset.Defragment(ruleset.IP), ruleset.NewRule().ToLocal().Rule("")} {
		takes[i], err = conn.Takes(&ruleset.Chain{
			ID:   ruleset.ID{Table: ruleset.IP, Name: "probe"},
			Hook: &ruleset.Hook{Type: "filter", Point: "prerouting"}, Rules: []ruleset.Rule{rule},
		})
		if err != nil {
			return nil, errors.Join(err, conn.Close())
		}
	}
	h, err := openHost()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	tracking, err := conntrack.Open()
	if err != nil {
		return nil, errors.Join(err, conn.Close(), h.close())
	}
	background, leave := context.WithCancel(context.Background())
	return &Datapath{background: background, leave: leave, conn: conn, host: h, tracking: tracking, flowtables: flowtables, timeouts: timeouts, defragments: takes[0], fib: takes[1]}, nil
}

// Name returns "nftables".
func (d *Datapath) Name() string { return "nftables" }

// CarriesService returns nil when nftables can carry all of the service.
func (d *Datapath) CarriesService(s *config.Service) error { return compile.Carries(s) }

// CarriesNAT returns nil when nftables can carry all of the rule.
func (d *Datapath) CarriesNAT(n *config.NATRule) error { return compile.CarriesNAT(n) }

// CarriesRule returns nil when nftables can carry all of the firewall rule.
func (d *Datapath) CarriesRule(r *config.FirewallRule) error { return compile.CarriesRule(r) }

// Close lets go of the kernel; rules stay and traffic goes on.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed { // the numbers of its files may be others' by now
		return nil
	}
	d.closed = true
	d.leave()
	return errors.Join(d.conn.Close(), d.tracking.Close(), d.host.close())
}

// Plan returns what Apply would change, and changes nothing.
func (d *Datapath) Plan(ctx context.Context, s *datapath.Snapshot) (*datapath.Change, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	result, delta, _, err := d.prepare(ctx, s)
	if err != nil {
		return nil, err
	}
	change := d.describe(result, delta)
	change.Ended, err = d.count(ctx, d.staleAfter(d.snapshot, s, d.uplinks))
	return change, err
}

// prepare brings the model up to date, compiles and compares. A configuration that is in
// force stays so when a network goes away that it needs, for the other services have
// backends that come and go: then mismatch says why it would be refused if it were new.
func (d *Datapath) prepare(ctx context.Context, s *datapath.Snapshot) (result *compile.Result, delta *ruleset.Delta, mismatch, err error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, nil, err
	}
	env, err := d.host.env()
	if err != nil {
		return nil, nil, nil, err
	}
	if !slices.Equal(env.Interfaces, d.interfaces) {
		// The kernel takes what hangs on an interface away with it, and does not
		// count that as a generation.
		d.interfaces, d.generation = env.Interfaces, 0
	}
	d.networks = env.Networks
	if err := d.refresh(); err != nil {
		return nil, nil, nil, err
	}
	env.Flowtable, env.Timeouts, env.Defragments = d.wantsFlowtable(s), d.timeouts, d.defragments
	env.FIB = d.fib
	result, err = compile.Compile(s, env, d.compiled)
	if (err != nil || len(result.Unreached()) > 0) && d.snapshot != nil && s.Config == d.snapshot.Config {
		env.Route = d.host.lastNeighbour
		as, asErr := compile.Compile(s, env, d.compiled)
		switch {
		case err != nil:
			if asErr != nil || len(as.Unreached()) == 0 { // else these are told
				mismatch = err
			}
			result, err = as, asErr
		case asErr == nil && len(as.Unreached()) < len(result.Unreached()):
			result, mismatch = as, errors.New(result.Unreached()[0])
		}
	}
	if err != nil {
		return nil, nil, nil, err
	}
	return result, ruleset.Diff(d.inForce, result.Ruleset), mismatch, nil
}

// refresh makes sure that inForce is what the kernel holds: it reads our tables
// when nothing is known yet, or when another transaction than ours was made
// since, for that one may have touched them.
func (d *Datapath) refresh() error {
	generation, err := d.conn.Generation()
	if err != nil {
		return err
	}
	if d.inForce != nil && generation == d.generation {
		return nil
	}
	read, generation, err := d.conn.Read()
	if err != nil {
		return err
	}
	held := &ruleset.Ruleset{Fragments: []*ruleset.Fragment{read}}
	if d.inForce != nil {
		left, err := d.difference(read, d.inForce)
		if err != nil {
			return err
		}
		if left.Empty() {
			d.generation = generation // the other transaction did not change our tables
			return nil
		}
	}
	d.inForce, d.generation = held, generation
	return nil
}

// Touched reports whether another program's transaction went through since the rules
// in force were last known to be there: it may have been "nft flush ruleset".
func (d *Datapath) Touched() (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	generation, err := d.conn.Generation()
	return err == nil && d.snapshot != nil && generation != d.generation, err
}

// slotsMoved compares who owns the scheduler's slots.
func slotsMoved(before, after *compile.Result) (moved, total int) {
	for i, s := range after.Services {
		total += s.SlotCount
		if before == nil || i < len(before.Services) && before.Services[i] == s {
			continue
		}
		was := before.Service(s.Name)
		if was == nil || was == s {
			continue
		}
		for f, owners := range s.Slots {
			moved += movedSlots(was.Slots[f], owners)
		}
	}
	return moved, total
}

// Left reports whether the kernel holds tables of Sluice.
func (d *Datapath) Left() (bool, error) {
	tables, err := d.conn.Tables()
	return len(tables) > 0, err
}

// Remove takes the tables of Sluice out of the kernel.
func (d *Datapath) Remove(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	tables, err := d.conn.Tables()
	if err != nil {
		return err
	}
	err = d.conn.Apply(&ruleset.Delta{DelTables: tables})
	if err != nil {
		return err
	}
	d.inForce, d.compiled, d.snapshot = nil, nil, nil
	left, err := d.conn.Tables()
	if err == nil && len(left) > 0 {
		return fmt.Errorf("table %s %s: still there after it was deleted: is another Sluice running?", left[0], ruleset.TableName)
	}
	return err
}
