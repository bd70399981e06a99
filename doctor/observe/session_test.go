// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/netdev"
)

// counting is a reader that uses CPU time for each table.
type counting struct {
	Reader
	tables, rules map[uint64]int
	used          time.Duration
}

func (c *counting) Table(_ context.Context, ns netdev.Namespace, _ *NamespaceReading) (*conntrack.Summary, *Entries, error) {
	c.tables[ns.Inode]++
	c.used += firstCredit
	return conntrack.NewSummary(0), nil, nil
}

func (c *counting) Rules(_ context.Context, ns netdev.Namespace) (*firewall.Ruleset, error) {
	c.rules[ns.Inode]++
	return &firewall.Ruleset{}, nil
}

func full(inode uint64, generation uint32) *Namespace {
	n := &Namespace{Namespace: netdev.Namespace{Inode: inode}}
	n.Before.Limits = conntrack.Limits{Count: 500, Max: 1000}
	n.Before.Generation = generation
	return n
}

// TestSession wants dear tables to be read in turn, as CPU time allows, and rules
// only when they change.
func TestSession(t *testing.T) {
	c := &counting{tables: map[uint64]int{}, rules: map[uint64]int{}}
	s := &Session{cpuTime: func() time.Duration { return c.used }}
	now := time.Now()
	round := func(list ...*Namespace) []*Namespace {
		s.inspect(t.Context(), c, list, now)
		return list
	}
	first := round(full(1, 7), full(2, 7))
	if first[0].Table == nil || first[1].Table != nil || !errors.Is(first[1].TableErr, errLater) {
		t.Errorf("the first round read %v: one table uses up the credit", c.tables)
	}
	now = now.Add(15 * time.Second) // some credit again: the table that was never read has its turn
	if list := round(full(1, 7), full(2, 7)); list[0].TableAge != 15*time.Second || list[0].Table != first[0].Table || list[1].Table == nil {
		t.Errorf("the first table is %s old, want 15s and the same; the second is %v", list[0].TableAge, list[1].Table)
	}
	now = now.Add(time.Second) // still in debt
	round(full(1, 7), full(2, 7))
	if c.tables[1] != 1 || c.tables[2] != 1 {
		t.Errorf("tables were read %v times, without credit", c.tables)
	}
	now = now.Add(time.Hour)
	if list := round(full(1, 8), full(2, 7)); list[0].TableAge != 0 || c.tables[1] != 2 || c.tables[2] != 1 {
		t.Errorf("tables were read %v times: the oldest comes first", c.tables)
	}
	if c.rules[1] != 2 || c.rules[2] != 1 {
		t.Errorf("rules were read %v times: once for each generation", c.rules)
	}
	now = now.Add(time.Hour)
	round(full(2, 7))
	if len(s.tables) != 1 || len(s.rules) != 1 {
		t.Errorf("%d tables and %d rules are kept of one namespace", len(s.tables), len(s.rules))
	}
	few := full(3, 1)
	few.Before.Limits.Count = 1
	if round(few); !few.TableSkipped || c.tables[3] != 0 {
		t.Error("a table that is hardly in use was read")
	}
}

// TestSessionGrowth wants the growth of a table over a minute of examinations.
func TestSessionGrowth(t *testing.T) {
	c := &counting{tables: map[uint64]int{}, rules: map[uint64]int{}}
	s := &Session{cpuTime: func() time.Duration { return c.used }}
	now := time.Now()
	var n *Namespace
	for _, count := range []uint32{100, 400, 100, 400, 700} { // a tooth of the saw, then growth
		n = full(1, 7)
		n.Before.At, n.Before.Limits.Count = now, count
		s.inspect(t.Context(), c, []*Namespace{n}, now)
		now = now.Add(20 * time.Second)
	}
	if n.Growth != 5 || n.GrowthOver != time.Minute {
		t.Errorf("growth of %g/s over %s, want that from 400 to 700 over a minute", n.Growth, n.GrowthOver)
	}
	s.inspect(t.Context(), c, []*Namespace{full(2, 7)}, now)
	if len(s.growth) != 1 {
		t.Errorf("%d namespaces are kept of one", len(s.growth))
	}
}

// simultaneousReader is a reader that samples new connections. No sample ends before all samples have begun.
type simultaneousReader struct {
	Reader
	begun sync.WaitGroup
}

func (r *simultaneousReader) NewRate(ctx context.Context, _ netdev.Namespace) (float64, error) {
	r.begun.Done()
	all := make(chan struct{})
	go func() { r.begun.Wait(); close(all) }()
	select {
	case <-all:
		return 7, nil
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// TestSampleNew wants new connections to be sampled in all namespaces at once.
func TestSampleNew(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	idle := full(4, 1)
	idle.Before.Limits.Count = 0
	s := &Sample{Namespaces: []*Namespace{full(1, 1), full(2, 1), full(3, 1), idle}}
	r := &simultaneousReader{}
	r.begun.Add(3)
	s.sampleNew(ctx, r)
	for _, n := range s.Namespaces[:3] {
		if n.NewPerSecond != 7 || n.NewErr != nil {
			t.Errorf("namespace %d: %g/s, %v: the samples wait for each other", n.Inode, n.NewPerSecond, n.NewErr)
		}
	}
	if !errors.Is(idle.NewErr, errIdle) {
		t.Errorf("a namespace without connections was sampled: %v", idle.NewErr)
	}
}

// lists is a reader that counts its reads of socket lists. Every list is marked as truncated.
type lists struct {
	Reader
	read int
}

func (r *lists) Namespaces() ([]netdev.Namespace, int) {
	return []netdev.Namespace{{Name: "one", Inode: 1}}, 0
}
func (r *lists) Partial() bool                             { return true }
func (r *lists) Host(context.Context) (h HostReading)      { return h }
func (r *lists) Counters(context.Context) (c HostCounters) { return c }
func (r *lists) Rules(context.Context, netdev.Namespace) (*firewall.Ruleset, error) {
	return nil, nil
}

func (r *lists) Namespace(_ context.Context, _ netdev.Namespace, known *Sockets) (n NamespaceReading, err error) {
	if n.At = time.Now(); known == nil {
		r.read++
		known = &Sockets{Listeners: make([]Listener, r.read), Cut: true}
	}
	n.Sockets = *known
	return n, nil
}

// TestSocketsOnce: the first examination of a session reads the lists of sockets twice, each later one once. The sample
// reports that a list was truncated.
func TestSocketsOnce(t *testing.T) {
	r, session := &lists{}, &Session{}
	for i := range 3 {
		s, err := Take(t.Context(), r, Options{Window: time.Millisecond, NoDrops: true, Session: session})
		if err != nil {
			t.Fatal(err)
		}
		n := s.Namespaces[0]
		if len(n.Before.Listeners) != i+1 || len(n.After.Listeners) != i+2 || r.read != i+2 {
			t.Errorf("examination %d: readings %d and %d of %d", i, len(n.Before.Listeners), len(n.After.Listeners), r.read)
		}
		if len(s.Limits) != 1 || !strings.Contains(s.Limits[0], ErrSocketsCut.Error()) {
			t.Errorf("limits %v", s.Limits)
		}
	}
}

func (*counting) FollowUp(*Namespace) {}

func (*counting) Silent(context.Context, netdev.Namespace, []netip.Addr) []hold.Silent {
	return nil
}

func (*lists) FollowUp(*Namespace) {}

func (*lists) Silent(context.Context, netdev.Namespace, []netip.Addr) []hold.Silent {
	return nil
}
