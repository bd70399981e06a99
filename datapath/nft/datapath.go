// SPDX-License-Identifier: Apache-2.0

// Package nft is the nftables datapath. It compiles snapshots to nf_tables rulesets (package
// compile) and computes the difference to the active ruleset (package ruleset). One netlink
// transaction applies the difference (package nfnl), and is read back before success is reported.
// The package needs no nft binary, uses only tables named "sluice", and adopts the tables of an
// earlier process.
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

// Datapath implements services and rules by nf_tables in one network namespace.
type Datapath struct {
	conn *nfnl.Conn
	host *host

	// tracking is only the parent of siblings, one for each request: the socket of a cancelled
	// request cannot be reused.
	tracking *conntrack.Conn

	// background is cancelled by Close.
	background context.Context
	leave      context.CancelFunc

	// mu serialises Plan, Apply and Remove, and protects the fields below.
	mu     sync.Mutex
	closed bool
	// inForce is the ruleset in the kernel, or nil if it must be read.
	inForce *ruleset.Ruleset
	// interfaces are the interfaces for which the last ruleset was compiled.
	interfaces []compile.Interface
	// networks are the networks of the host for which the last ruleset was compiled.
	networks []netip.Prefix
	// uplinks are the uplinks of the host when the snapshot was applied.
	uplinks uplinks
	// compiled is the result that inForce was compiled from, or nil if inForce was read.
	compiled *compile.Result
	snapshot *datapath.Snapshot
	// generation is the kernel's generation number of the ruleset when inForce was last verified.
	generation uint32
	// retired has the counts of removed objects.
	retired retiredCounts
	// mismatch describes how the host has changed since the configuration was applied; nil if the
	// snapshot still matches.
	mismatch error
	// endError is the error of the last successful Apply while it ended connections that the new
	// rules treat differently.
	endError error
	// flowtables and timeouts report whether the kernel supports flowtables, and timeouts per
	// connection.
	flowtables, timeouts bool
	// defragments reports whether the kernel reassembles fragments without connection tracking.
	defragments bool
	// fib reports whether rules can look up the type of an address on this host.
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

// CarriesService returns nil if nftables supports all settings of the service.
func (d *Datapath) CarriesService(s *config.Service) error { return compile.Carries(s) }

// CarriesNAT returns nil if nftables supports all settings of the rule.
func (d *Datapath) CarriesNAT(n *config.NATRule) error { return compile.CarriesNAT(n) }

// CarriesRule returns nil if nftables supports the firewall rule.
func (d *Datapath) CarriesRule(r *config.FirewallRule) error { return compile.CarriesRule(r) }

// Close closes the sockets. The rules remain, and traffic continues.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed { // its file descriptors may be in use by others
		return nil
	}
	d.closed = true
	d.leave()
	return errors.Join(d.conn.Close(), d.tracking.Close(), d.host.close())
}

// Plan returns the change that Apply would make, without making it.
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

// prepare reads the host and the active ruleset, compiles the snapshot and compares. An active
// configuration remains active even if a network that it needs is removed, because backends of its
// other services still change. mismatch then has the error that a new configuration would get.
func (d *Datapath) prepare(ctx context.Context, s *datapath.Snapshot) (result *compile.Result, delta *ruleset.Delta, mismatch, err error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, nil, err
	}
	env, err := d.host.env()
	if err != nil {
		return nil, nil, nil, err
	}
	if !slices.Equal(env.Interfaces, d.interfaces) {
		// The kernel removes objects bound to an interface with the interface, without a new
		// generation number.
		d.interfaces, d.generation = env.Interfaces, 0
	}
	d.networks = env.Networks
	if err := d.refresh(); err != nil {
		return nil, nil, nil, err
	}
	env.Flowtable, env.Timeouts, env.Defragments = d.useFlowtable(s), d.timeouts, d.defragments
	env.FIB = d.fib
	result, err = compile.Compile(s, env, d.compiled)
	if (err != nil || len(result.Unreached()) > 0) && d.snapshot != nil && s.Config == d.snapshot.Config {
		env.Route = d.host.lastNeighbour
		as, asErr := compile.Compile(s, env, d.compiled)
		switch {
		case err != nil:
			if asErr != nil || len(as.Unreached()) == 0 { // else Warnings lists the unreached backends
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

// refresh makes inForce equal to the kernel's tables. It reads them if they are unknown, or if
// another program has made a transaction, which may have changed them.
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
		left, err := d.diffFromKernel(read, d.inForce)
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

// Touched reports whether another program has made a transaction since the ruleset was last
// verified. It may have been "nft flush ruleset".
func (d *Datapath) Touched() (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	generation, err := d.conn.Generation()
	return err == nil && d.snapshot != nil && generation != d.generation, err
}

// slotsMoved counts the scheduler's slots that have another backend than before.
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

// Remove deletes the tables of Sluice from the kernel.
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
