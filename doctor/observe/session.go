// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// Session reuses data that is expensive to read between examinations: the probe for drop events,
// unchanged rules, and connection tables. Examinations of a session run one after the other. The
// zero value is ready.
//
// Tables are read again as often as tableShare of the host's CPU time allows. Until then the last
// reading is used, with its age.
type Session struct {
	probe      *trace.Drops
	probeNetns uint64 // that the probe was made for
	tables     map[uint64]tableReading
	rules      map[uint64]rulesReading
	lists      map[uint64]*Sockets        // The last ones of each namespace, the next window's first.
	listed     map[uint64][]firewall.Rule // Those that drop, as the probe's watcher keeps them.
	growth     map[uint64]*conntrack.Growth
	credit     time.Duration // CPU time that may be spent on tables now; negative: debt
	credited   time.Time
	cpuTime    func() time.Duration // of this process; nil: the real one
}

// tableShare is the share of all CPUs' time that a session spends on reading
// tables: a million entries, which take 1.7 s, every six minutes on two CPUs.
const tableShare = 0.0025

// firstCredit is what the first examination may spend before tables wait.
const firstCredit = 500 * time.Millisecond

// errLater is the error for a table that was never read.
var errLater = errors.New("not read yet: tables before it used up the CPU time that watching may take")

type tableReading struct {
	at      time.Time
	summary *conntrack.Summary
	entries *Entries
	err     error
}

type rulesReading struct {
	generation uint32
	rules      *firewall.Ruleset
	silent     []hold.Silent
	err        error
}

// lightFill is the share of nf_conntrack_max below which a session does not read
// a table: even for few entries a dump walks all buckets of the host.
const lightFill = 0.02

// Close unloads the probe.
func (s *Session) Close() error {
	if s.probe == nil {
		return nil
	}
	return s.probe.Close()
}

// share gives a watcher the probe, and the rules that were listed before.
func (s *Session) share(w *trace.Watcher) (err error) {
	if s.listed == nil {
		s.listed = map[uint64][]firewall.Rule{}
	}
	w.Listed = s.listed
	w.Probe, err = s.drops(w.Options)
	return err
}

// sockets are those that the last examination ended with. nil: to be read.
func (s *Session) sockets(ns netdev.Namespace) *Sockets {
	if s == nil {
		return nil
	}
	return s.lists[ns.Inode]
}

// keepSockets keeps the second readings for the next examination.
func (s *Session) keepSockets(list []*Namespace) {
	if s == nil {
		return
	}
	s.lists = map[uint64]*Sockets{}
	for _, n := range list {
		s.lists[n.Inode] = &n.After.Sockets
	}
}

// drops returns a paused probe for the options.
func (s *Session) drops(o trace.DropOptions) (*trace.Drops, error) {
	if s.probe != nil && s.probeNetns == o.Netns {
		return s.probe, nil
	}
	if err := s.Close(); err != nil {
		return nil, err
	}
	s.probe = nil
	probe, err := trace.OpenDrops(o)
	if err != nil {
		return nil, err
	}
	if err := probe.Pause(); err != nil {
		return nil, errors.Join(err, probe.Close())
	}
	s.probe, s.probeNetns = probe, o.Netns
	return probe, nil
}

// inspect gives each namespace its table and rules.
func (s *Session) inspect(ctx context.Context, reader Reader, list []*Namespace, now time.Time) {
	if s.tables == nil {
		s.tables, s.rules, s.growth = map[uint64]tableReading{}, map[uint64]rulesReading{}, map[uint64]*conntrack.Growth{}
		s.credit, s.credited = firstCredit, now
		if s.cpuTime == nil {
			s.cpuTime = processTime
		}
	}
	s.forget(list)
	s.credit = min(s.credit+time.Duration(tableShare*float64(runtime.NumCPU())*float64(now.Sub(s.credited))), firstCredit)
	s.credited = now
	// The oldest reading first, so that every table has its turn.
	list = slices.SortedStableFunc(slices.Values(list), func(a, b *Namespace) int {
		return s.tables[a.Inode].at.Compare(s.tables[b.Inode].at)
	})
	for _, n := range list {
		s.readRules(ctx, reader, n)
		if s.growth[n.Inode] == nil {
			s.growth[n.Inode] = &conntrack.Growth{}
		}
		n.Growth, n.GrowthOver = s.growth[n.Inode].Add(n.Before.At, n.Before.Limits.Count)
		n.Entries = &Entries{}
		if n.TableSkipped = n.Before.Limits.Fill() < lightFill; n.TableSkipped {
			continue
		}
		last, known := s.tables[n.Inode]
		if !known {
			last = tableReading{at: now, err: errLater}
		}
		if s.credit > 0 {
			before := s.cpuTime()
			last = tableReading{at: now}
			last.summary, last.entries, last.err = reader.Table(ctx, n.Namespace, &n.Before)
			s.tables[n.Inode] = last
			s.credit -= s.cpuTime() - before
		}
		n.Table, n.Entries, n.TableErr, n.TableAge = last.summary, cmp.Or(last.entries, &Entries{}), last.err, now.Sub(last.at)
	}
}

// readRules reads rules that changed. Rules of iptables-legacy have no generation and are read each
// time.
func (s *Session) readRules(ctx context.Context, reader Reader, n *Namespace) {
	last, known := s.rules[n.Inode]
	generation := n.Before.Generation
	if !known || generation == 0 || generation != last.generation || len(n.Before.LegacyTables) > 0 || last.err != nil {
		last = rulesReading{generation: generation}
		last.rules, last.err = reader.Rules(ctx, n.Namespace)
		known = false
	}
	last.rules = cmp.Or(last.rules, &firewall.Ruleset{})
	if !known || len(last.silent) > 0 { // somebody may answer meanwhile
		last.silent = reader.Silent(ctx, n.Namespace, last.rules.Addresses())
	}
	s.rules[n.Inode] = last
	n.Rules, n.RulesErr, n.Silent = last.rules, last.err, last.silent
}

// forget removes the data of namespaces that no longer exist.
func (s *Session) forget(list []*Namespace) {
	here := map[uint64]bool{}
	for _, n := range list {
		here[n.Inode] = true
	}
	maps.DeleteFunc(s.listed, func(inode uint64, _ []firewall.Rule) bool { return !here[inode] })
	for inode := range s.rules {
		if !here[inode] {
			delete(s.rules, inode)
			delete(s.tables, inode)
			delete(s.growth, inode)
		}
	}
}

// processTime is the CPU time that this process has used, the kernel's part included.
func processTime() time.Duration {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) != nil {
		return 0
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}
