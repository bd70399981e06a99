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
)

// Ask says what a Survey looks at.
type Ask struct {
	// Namespaces to read; none means all of the host.
	Namespaces []Namespace
	// Dimensions to group by.
	Dimensions Dimension
	// Filter sifts the entries that are summed up; the fill is always that of
	// the whole table.
	Filter *Filter
	// Window is how far the two looks at counts and counters are apart; 0 means
	// one second. The dump runs within it.
	Window time.Duration
	// Sources are tables beside the kernel's.
	Sources []Source
	// CountOnly leaves out the dump: fill, growth and counters only, which costs
	// microseconds whatever the table holds.
	CountOnly bool
}

// Fill is how full the table of one namespace is, and how that changes. The limit
// is the host's and each namespace is held against it alone.
type Fill struct {
	Namespace string `json:"namespace"`
	Inode     uint64 `json:"inode,omitempty"`
	Limits
	// Held is how many entries, when the table was dumped, the kernel would not evict to make room.
	Held uint32 `json:"held"`
	// Growth in entries a second over the time of Over.
	Growth float64       `json:"growth"`
	Over   time.Duration `json:"-"`
	// Counted is what the kernel's counters did in the window, on all CPUs.
	Counted Counters `json:"counted"`
	// Since is the counters' absolute value at the end.
	Since Counters `json:"since_boot"`
}

// Effective is the fill by entries that cannot be evicted, as a share of Max.
func (f Fill) Effective() float64 {
	if f.Max == 0 {
		return 0
	}
	return float64(f.Held) / float64(f.Max)
}

// TimeToFull is when the table is full if it grows on as it did; it is
// negative when it does not grow.
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

// Foreseeable tells whether TimeToFull says something: a table that is hardly in use grows for
// a moment whenever a client begins.
func (f Fill) Foreseeable() bool { return f.Over >= GrowthWindow || f.Fill() > foreseeableFill }

// foreseeableFill is from which fill on the growth of a moment counts.
const foreseeableFill = 0.1

// Survey is one look at the tables of a host.
type Survey struct {
	Fills   []Fill
	Summary *Summary // nil when CountOnly was asked for
	Window  time.Duration
	// Blind says in sentences what could not be seen.
	Blind []string
}

// Look reads what a asks for.
func Look(ctx context.Context, a Ask) (*Survey, error) {
	s := &Survey{}
	namespaces, hidden := a.Namespaces, 0
	if len(namespaces) == 0 {
		namespaces, hidden = Namespaces()
	}
	if a.Window == 0 {
		a.Window = time.Second
	}
	start := time.Now()
	before := make([]reading, len(namespaces))
	for i, ns := range namespaces {
		before[i] = read(ctx, ns)
	}
	if !a.CountOnly {
		if err := s.dump(ctx, a, namespaces, before); err != nil {
			return nil, err
		}
	}
	if err := wait(ctx, a.Window-time.Since(start)); err != nil {
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

// Unseen says which namespaces could not be read: those of so many processes that are
// hidden, and those that need more rights, in one sentence each, those that are gone in
// none.
func Unseen(hidden int, failed []error) (list []string) {
	if hidden > 0 {
		list = append(list, HiddenText(hidden))
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

// reading is one look at a namespace's numbers.
type reading struct {
	at       time.Time
	limits   Limits
	counters Counters
	held     uint32 // found by a dump
	err      error
}

func read(ctx context.Context, ns Namespace) (r reading) {
	r.at = time.Now()
	r.limits, r.counters, r.err = ReadNumbers(ctx, ns)
	return r
}

func (s *Survey) dump(ctx context.Context, a Ask, namespaces []Namespace, before []reading) error {
	m, err := a.Filter.compile()
	if err != nil {
		return err
	}
	s.Summary = NewSummary(a.Dimensions)
	for i, ns := range namespaces {
		if before[i].limits.Count == 0 {
			continue // a dump walks the whole host's table even for an empty namespace
		}
		all, err := s.Summary.addSifted(ctx, ns, m)
		before[i].held = all.Held()
		switch {
		case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
			return err
		case errors.Is(err, fs.ErrNotExist): // ended meanwhile
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

// fill adds what two looks at a namespace tell.
func (s *Survey) fill(ns Namespace, before, after reading) {
	f := Fill{Namespace: ns.Name, Inode: ns.Inode, Limits: after.limits,
		Counted: after.counters.Sub(before.counters), Since: after.counters,
		Held: before.held, Growth: (float64(after.limits.Count) - float64(before.limits.Count)) / after.at.Sub(before.at).Seconds(),
		Over: after.at.Sub(before.at)}
	s.Fills = append(s.Fills, f)
}

// addSifted adds the entries of ns that m lets through, and counts all of them:
// the fill is that of the whole table.
func (s *Summary) addSifted(ctx context.Context, ns Namespace, m *matcher) (all Count, err error) {
	c, err := OpenIn(ns)
	if err != nil {
		return all, err
	}
	defer c.Close()
	established, _ := readSetting(ns, "tcp_timeout_established") // absent: idle times are left out
	s.Enter(ns.Name, established)
	err = c.Dump(ctx, nil, func(e *Entry) error {
		all.add(e)
		if m == nil || m.match(e) {
			s.Add(e)
		}
		return nil
	})
	return all, err
}

// wait sleeps for d or until ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
