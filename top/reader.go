// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/doctor/observe"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/trace"
)

// Host reads a running host.
type Host struct {
	// Only limits the view to these namespaces; none means all.
	Only []netdev.Namespace
	// Sources are further flow tables besides the kernel's.
	Sources []conntrack.Source

	mu         sync.Mutex // protects the following fields: Counts and Table overlap
	namespaces []netdev.Namespace
	hidden     int
	held       map[string]uint32
	counts     int                     // Calls of Counts.
	last       map[uint64]readerResult // by inode, because a name may be reused
	lastSoft   []trace.CPUTime
	lastDrops  uint64
	lastAt     time.Time
	newRate    float64
	pools      map[uint64]poolReading // keyed by the inode of the namespace
}

type poolReading struct {
	at       time.Time
	smallest uint32
}

type readerResult struct {
	counters conntrack.Counters
	growth   *conntrack.Growth
}

// listEvery is the number of Counts calls that share one list of namespaces; building the list walks through /proc.
// newEvery is the interval of sampling new connections, newWindow the duration of a sample. Listening slows the
// packet path during the sample.
const (
	listEvery = 10
	newEvery  = 4
	newWindow = 60 * time.Millisecond
)

// list returns the namespaces and refreshes them periodically.
func (h *Host) list() []netdev.Namespace {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case len(h.Only) > 0:
		h.namespaces = h.Only
	case h.counts%listEvery == 0 || h.namespaces == nil:
		h.namespaces, h.hidden = netdev.Namespaces()
	}
	return h.namespaces
}

// Counts implements Reader.
func (h *Host) Counts(ctx context.Context) (*Counts, error) {
	namespaces := h.list()
	c := &Counts{Time: time.Now(), NewPerSecond: -1}
	seconds := c.Time.Sub(h.lastAt).Seconds()
	first := h.lastAt.IsZero()
	now := map[uint64]readerResult{}
	var failed error
	for _, ns := range namespaces {
		f, err := h.fill(ctx, ns, c.Time, now)
		if err != nil {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			failed = err // the namespace was removed, or has no connection tracking
			continue
		}
		c.Fills = append(c.Fills, f)
		refused := f.Counted.Refused(h.smallestPool(ctx, ns, f.Counted, c.Time), conntrack.Use{})
		c.DropsPerSecond += float64(f.Counted.Drop) / seconds
		c.FullPerSecond += float64(refused.Full) / seconds
		c.PortsPerSecond += float64(refused.Ports) / seconds
		c.RacesPerSecond += float64(refused.Race) / seconds
		c.ChainsPerSecond += float64(refused.Chain) / seconds
		c.EarlyPerSecond += float64(f.Counted.EarlyDrop) / seconds
	}
	h.softirq(c, first, seconds)
	c.Took = time.Since(c.Time)
	if len(c.Fills) == 0 {
		return nil, fmt.Errorf("no connection table could be read: %w", failed)
	}
	if h.hidden > 0 {
		c.Blind = append(c.Blind, netdev.HiddenText(h.hidden))
	}
	if h.counts%newEvery == 0 {
		h.newRate = h.sampleNew(ctx, c.Fills, namespaces)
	}
	c.NewPerSecond = h.newRate
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last, h.lastAt = now, c.Time
	h.counts++
	return c, nil
}

// poolsEvery is the validity of the port ranges read from rules.
const poolsEvery = time.Minute

// smallestPool returns the smallest port range of a rule in the namespace. It reads the rules only if the counters
// alone indicate a lost race.
func (h *Host) smallestPool(ctx context.Context, ns netdev.Namespace, counted conntrack.Counters, now time.Time) uint32 {
	if counted.Refused(0, conntrack.Use{}).Race == 0 {
		return 0
	}
	last := h.pools[ns.Inode]
	if last.at.IsZero() || now.Sub(last.at) > poolsEvery {
		last = poolReading{at: now}
		if rules, _ := observe.NewLive(nil).Rules(ctx, ns); rules != nil {
			last.smallest = rules.Pools.Smallest
		}
		if h.pools == nil {
			h.pools = map[uint64]poolReading{}
		}
		maps.DeleteFunc(h.pools, func(_ uint64, p poolReading) bool { return now.Sub(p.at) > poolsEvery })
		h.pools[ns.Inode] = last
	}
	return last.smallest
}

// fill reads one namespace and compares it with the last reading.
func (h *Host) fill(ctx context.Context, ns netdev.Namespace, at time.Time, now map[uint64]readerResult) (conntrack.Fill, error) {
	limits, counters, err := conntrack.ReadNumbers(ctx, ns)
	if err != nil {
		return conntrack.Fill{}, err
	}
	before, known := h.last[ns.Inode]
	r := readerResult{counters, before.growth}
	if !known {
		r.growth = &conntrack.Growth{}
	}
	now[ns.Inode] = r
	h.mu.Lock()
	f := conntrack.Fill{Namespace: ns.Name, Inode: ns.Inode, Limits: limits, Held: h.held[ns.Name], Since: r.counters}
	h.mu.Unlock()
	if known {
		f.Counted = r.counters.Sub(before.counters)
	}
	f.Growth, f.Over = r.growth.Add(at, limits.Count)
	return f, nil
}

// busiestNamespaces is the number of namespaces with samples of new connections.
const busiestNamespaces = 4

// sampleNew counts the kernel's events for new connections in the fullest namespaces. The result is an estimate from
// a sample of some hundredths of a second.
func (h *Host) sampleNew(ctx context.Context, fills []conntrack.Fill, namespaces []netdev.Namespace) float64 {
	fills = slices.DeleteFunc(slices.Clone(fills), func(f conntrack.Fill) bool { return f.Count == 0 })
	slices.SortFunc(fills, func(a, b conntrack.Fill) int { return cmp.Compare(b.Count, a.Count) })
	var (
		wg      sync.WaitGroup
		mu      sync.Mutex // protects total and sampled
		total   float64
		sampled = len(fills) == 0
	)
	for _, f := range fills[:min(len(fills), busiestNamespaces)] {
		i := slices.IndexFunc(namespaces, func(ns netdev.Namespace) bool { return ns.Name == f.Namespace })
		wg.Go(func() {
			rate, err := conntrack.NewRate(ctx, namespaces[i], newWindow, 0)
			mu.Lock()
			defer mu.Unlock()
			total += rate
			sampled = sampled || err == nil
		})
	}
	wg.Wait()
	if !sampled {
		return -1
	}
	return total
}

// Table implements Reader.
func (h *Host) Table(ctx context.Context) (*TableSummary, error) {
	namespaces := h.list()
	start, cpu := time.Now(), processTime()
	s, err := conntrack.Look(ctx, conntrack.Ask{Namespaces: namespaces, Sources: h.Sources, Window: time.Millisecond,
		Dimensions: conntrack.BySource | conntrack.ByDest | conntrack.ByService | conntrack.ByBackend | conntrack.BySNATPort})
	if err != nil {
		return nil, err
	}
	t := &TableSummary{Time: time.Now(), Took: time.Since(start), CPU: processTime() - cpu, Summary: s.Summary,
		Held: map[string]uint32{}, Blind: s.Blind}
	for _, f := range s.Fills {
		t.Held[f.Namespace] = f.Held
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held = t.Held
	return t, nil
}

// watchWindow is the duration of observing drops and CPUs for one picture.
const watchWindow = 3 * time.Second

// Drops implements Reader.
func (h *Host) Drops(ctx context.Context) (*trace.DropReport, error) {
	w := trace.Watcher{Namespaces: h.list(), Options: trace.DropOptions{SamplesPerSecond: 5, Stacks: true}}
	if len(h.Only) == 1 {
		w.Options.Netns = h.Only[0].Inode
	}
	if err := w.Start(ctx); err != nil {
		return nil, err
	}
	select {
	case <-time.After(watchWindow):
	case <-ctx.Done():
	}
	return w.Stop(context.WithoutCancel(ctx))
}

// Profile implements Reader.
func (h *Host) Profile(ctx context.Context) (*trace.Profile, error) {
	return trace.TakeProfile(ctx, watchWindow, h.list())
}

// errEnough ends a dump that has produced enough flows.
var errEnough = errors.New("enough")

// Flows implements Reader.
func (h *Host) Flows(ctx context.Context, f conntrack.Filter, namespace string, limit int) ([]Flow, error) {
	var list []Flow
	for _, ns := range h.list() {
		if namespace != "" && ns.Name != namespace {
			continue
		}
		c, err := conntrack.OpenIn(ns)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since the list was made
		}
		if err != nil {
			return nil, err
		}
		err = c.Dump(ctx, &f, func(e *conntrack.Entry) error {
			if len(list) == limit {
				return errEnough
			}
			list = append(list, Flow{ns.Name, *e, e.Flow()})
			return nil
		})
		c.Close()
		if err != nil && !errors.Is(err, errEnough) && !errors.Is(err, conntrack.ErrInterrupted) {
			return nil, err
		}
	}
	return h.otherFlows(ctx, f, namespace, limit, list)
}

// otherFlows adds the flows of further tables besides the kernel's.
func (h *Host) otherFlows(ctx context.Context, f conntrack.Filter, namespace string, limit int, list []Flow) ([]Flow, error) {
	var e conntrack.Entry
	for _, src := range h.Sources {
		if namespace != "" && namespace != src.Name() {
			continue
		}
		err := src.Flows(ctx, func(fl *flow.Flow) error {
			if e.SetFlow(fl); !f.Matches(&e) {
				return nil
			}
			if len(list) == limit {
				return errEnough
			}
			list = append(list, Flow{src.Name(), e, *fl})
			return nil
		})
		if err != nil && !errors.Is(err, errEnough) {
			return list, err
		}
	}
	return list, nil
}

// processTime returns the CPU time of this process.
func processTime() time.Duration {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) != nil {
		return 0
	}
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// softirq sets the hottest CPU and the backlog's drops.
func (h *Host) softirq(c *Counts, first bool, seconds float64) {
	text, err := os.ReadFile("/proc/stat")
	if err == nil {
		now := trace.ParseCPUs(string(text))
		c.HottestCPU, c.Softirq = trace.BusiestInSoftirq(trace.CPUsBetween(h.lastSoft, now))
		h.lastSoft = now
	}
	drops, err := trace.BacklogDrops()
	if err != nil {
		return
	}
	if !first && drops >= h.lastDrops {
		c.BacklogPerSecond = float64(drops-h.lastDrops) / seconds
	}
	h.lastDrops = drops
}
