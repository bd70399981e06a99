// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"time"

	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/pause"
)

// Ask selects the scope of a Survey.
type Ask struct {
	// Namespaces to read; none means all of the host.
	Namespaces []netdev.Namespace
	// Dimensions by which entries are grouped.
	Dimensions Dimension
	// Filter selects the summarized entries. The fill always covers the whole table.
	Filter *Filter
	// Window is the time between the two readings of counts and counters; 0 means one second. The dump runs within
	// it.
	Window time.Duration
	// Sources are further tables besides the kernel's.
	Sources []Source
	// CountOnly omits the dump. Fill, growth and counters alone take microseconds for a table of any size.
	CountOnly bool
}

// Fill is the fill of one namespace's table and its change. The limit is host-wide, and each namespace is compared
// with it separately.
type Fill struct {
	Namespace string `json:"namespace"`
	Inode     uint64 `json:"inode,omitempty"`
	Limits
	// Held is the number of entries in the dump that the kernel would not evict.
	Held uint32 `json:"held"`
	// Growth in entries per second during Over.
	Growth float64       `json:"growth"`
	Over   time.Duration `json:"-"`
	// Counted is the change of the kernel's counters in the window, over all CPUs.
	Counted Counters `json:"counted"`
	// Since is the counters' absolute value at the end.
	Since Counters `json:"since_boot"`
}

// Effective returns the fill by entries that cannot be evicted, as a share of Max.
func (f Fill) Effective() float64 {
	if f.Max == 0 {
		return 0
	}
	return float64(f.Held) / float64(f.Max)
}

// TimeToFull returns the time until the table is full at its current growth; negative if it does not grow.
func (f Fill) TimeToFull() time.Duration {
	if f.Growth <= 0 || f.Max == 0 {
		return -1
	}
	if f.Count >= f.Max {
		return 0
	}
	left := float64(f.Max-f.Count) / f.Growth
	return time.Duration(min(left*float64(time.Second), math.MaxInt64/2))
}

// Foreseeable reports whether TimeToFull is meaningful. A nearly empty table grows for a moment whenever a client
// starts.
func (f Fill) Foreseeable() bool { return f.Over >= GrowthWindow || f.Fill() > foreseeableFill }

// foreseeableFill is the fill above which a momentary growth is meaningful.
const foreseeableFill = 0.1

// Survey is the state of a host's tables at one time.
type Survey struct {
	Fills   []Fill
	Summary *Summary // nil for CountOnly
	Window  time.Duration
	// Blind lists, in sentences, the parts that could not be read.
	Blind []string
}

// Look reads the scope of a.
func Look(ctx context.Context, a Ask) (*Survey, error) {
	s := &Survey{}
	namespaces, hidden := a.Namespaces, 0
	if len(namespaces) == 0 {
		namespaces, hidden = netdev.Namespaces()
	}
	if a.Window == 0 {
		a.Window = time.Second
	}
	start := time.Now()
	before := make([]namespaceReading, len(namespaces))
	for i, ns := range namespaces {
		before[i] = read(ctx, ns)
	}
	if !a.CountOnly {
		if err := s.dump(ctx, a, namespaces, before); err != nil {
			return nil, err
		}
	}
	if err := pause.For(ctx, a.Window-time.Since(start)); err != nil {
		return nil, err
	}
	var failed []error
	for i, ns := range namespaces {
		after := read(ctx, ns)
		if err := cmp.Or(before[i].err, after.err); err != nil {
			failed = append(failed, fmt.Errorf("namespace %s: %w", ns.Name, err))
			continue
		}
		s.fill(ns, before[i], after)
	}
	s.Blind = append(s.Blind, Unseen(hidden, failed)...)
	s.Window = time.Since(start)
	if len(s.Fills) == 0 {
		return nil, fmt.Errorf("no connection table could be read: %w", errors.Join(failed...))
	}
	return s, nil
}

// Unseen describes namespaces that could not be read. Hidden processes and missing rights get one sentence each;
// vanished namespaces get none.
func Unseen(hidden int, failed []error) (list []string) {
	if hidden > 0 {
		list = append(list, netdev.HiddenText(hidden))
	}
	denied := 0
	for _, err := range failed {
		switch {
		case errors.Is(err, fs.ErrPermission):
			denied++
		case errors.Is(err, fs.ErrNotExist):
		default:
			list = append(list, err.Error())
		}
	}
	switch {
	case denied == 1:
		list = append(list, "1 network namespace may not be entered: run as root of the host")
	case denied > 1:
		list = append(list, fmt.Sprintf("%d network namespaces may not be entered: run as root of the host", denied))
	}
	return list
}

// namespaceReading is one reading of a namespace's numbers.
type namespaceReading struct {
	at       time.Time
	limits   Limits
	counters Counters
	held     uint32 // number of entries that a dump returned
	err      error
}

func read(ctx context.Context, ns netdev.Namespace) (r namespaceReading) {
	r.at = time.Now()
	r.limits, r.counters, r.err = ReadNumbers(ctx, ns)
	return r
}

func (s *Survey) dump(ctx context.Context, a Ask, namespaces []netdev.Namespace, before []namespaceReading) error {
	m, err := a.Filter.compile()
	if err != nil {
		return err
	}
	s.Summary = NewSummary(a.Dimensions)
	for i, ns := range namespaces {
		if before[i].limits.Count == 0 {
			continue // a dump reads the whole host's table even for an empty namespace
		}
		all, err := s.Summary.addSifted(ctx, ns, before[i].limits.Count, m)
		before[i].held = all.Held()
		switch {
		case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
			return err
		case errors.Is(err, fs.ErrNotExist): // removed in the meantime
		case errors.Is(err, ErrInterrupted):
			s.Blind = append(s.Blind, fmt.Sprintf("namespace %s: %v: single entries may be missing or doubled", ns.Name, err))
		case err != nil:
			s.Blind = append(s.Blind, fmt.Sprintf("namespace %s: %v", ns.Name, err))
		}
	}
	for _, src := range a.Sources {
		s.Summary.Enter(src.Name(), 0)
		if err := s.Summary.AddSource(ctx, src, a.Filter); err != nil {
			s.Blind = append(s.Blind, fmt.Sprintf("flows of %s: %v", src.Name(), err))
		}
	}
	return nil
}

// fill adds the comparison of two readings of a namespace.
func (s *Survey) fill(ns netdev.Namespace, before, after namespaceReading) {
	f := Fill{Namespace: ns.Name, Inode: ns.Inode, Limits: after.limits,
		Counted: after.counters.Sub(before.counters), Since: after.counters,
		Held: before.held, Growth: (float64(after.limits.Count) - float64(before.limits.Count)) / after.at.Sub(before.at).Seconds(),
		Over: after.at.Sub(before.at)}
	s.Fills = append(s.Fills, f)
}

// addSifted adds the entries of ns that match m. all counts every entry, because the fill covers the whole table. A
// large table is read by Walk, which takes a fraction of the time of a dump.
func (s *Summary) addSifted(ctx context.Context, ns netdev.Namespace, entries uint32, m *matcher) (all Count, err error) {
	c, err := OpenIn(ns)
	if err != nil {
		return all, err
	}
	defer c.Close()
	established, _ := readSetting(ns, "tcp_timeout_established") // on error, idle times are omitted
	s.Enter(ns.Name, established)
	add := func(e *Entry) error {
		all.add(e)
		if m == nil || m.match(e) {
			s.Add(e)
		}
		return nil
	}
	if entries >= walkedEntries {
		if started, err := Walk(ctx, ns, add); err == nil || started {
			return all, err
		}
	}
	return all, c.Dump(ctx, nil, add)
}
