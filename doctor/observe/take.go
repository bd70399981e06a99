// SPDX-License-Identifier: Apache-2.0

package observe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/firewall"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/pause"
	"github.com/sluice-lb/sluice/trace"
)

// errNoEvents is why a namespace has no drops when they could not be watched.
var errNoEvents = errors.New("drop events could not be read")

// errGone is returned if all namespaces ended before they could be examined.
var errGone = errors.New("all of them went away while the host was watched")

// errIdle is why new connections were not counted in an empty table.
var errIdle = errors.New("the connection table was empty")

// DefaultWindow is how long a host is watched when nothing else is asked for.
const DefaultWindow = 3 * time.Second

// Options says how to examine.
type Options struct {
	Window time.Duration // 0: DefaultWindow
	// NoDrops leaves out the drop events, which need the right to load BPF.
	NoDrops bool
	// Session, if set, is shared by successive examinations and bounds their cost.
	Session *Session
	// Progress, if set, receives a line for each step.
	Progress func(format string, args ...any)
	// Probed, if set, returns the addresses of the backends of a daemon in the namespace, which
	// checks their health.
	Probed func(context.Context, netdev.Namespace) []netip.Addr
	// During, if set, runs within the window. The window ends when it returns.
	During func(ctx context.Context) error
}

// Take reads a host at both ends of a window.
func Take(ctx context.Context, reader Reader, o Options) (*Sample, error) {
	if o.Window == 0 {
		o.Window = DefaultWindow
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	list, hidden := reader.Namespaces()
	s := &Sample{Partial: reader.Partial()}
	if hidden > 0 {
		s.Limits = append(s.Limits, netdev.HiddenText(hidden))
	}
	o.Progress("reading network namespaces: %d", len(list))
	watcher := s.watchDrops(ctx, list, o)
	var traffic *traffic
	fail := func(err error) (*Sample, error) {
		s.collectDrops(context.WithoutCancel(ctx), watcher) // ends it
		traffic.end()
		return nil, err
	}
	start := time.Now()
	s.Before = reader.Counters(ctx)
	gone, failed := 0, error(nil)
	for _, ns := range list {
		n := &Namespace{Namespace: ns, IsHost: ns.Inode == netdev.HostNamespace().Inode}
		var err error
		if n.Before, err = reader.Namespace(ctx, n.Namespace, o.Session.sockets(ns)); goneAway(err) {
			gone, failed = gone+1, err
			continue
		} else if err != nil {
			s.Limits, failed = append(s.Limits, fmt.Sprintf("namespace %s: %v", ns.Name, err)), err
			continue
		}
		s.Namespaces = append(s.Namespaces, n)
	}
	traffic = s.watchTraffic(ctx, o)
	o.Progress("watching for %s", o.Window)
	if o.During != nil {
		if err := o.During(ctx); err != nil {
			return fail(err)
		}
	}
	s.inspect(ctx, reader, o.Session)
	for _, n := range s.Namespaces {
		if strange := n.Rules.NotUnderstood; len(strange) > 0 {
			s.Limits = append(s.Limits, fmt.Sprintf("namespace %s: %d firewall rules are not understood in full; the first is %s", n.Name, len(strange), strange[0]))
		}
	}
	s.sampleNew(ctx, reader)
	if err := pause.For(ctx, max(o.Window-time.Since(start), traffic.left(o))); err != nil {
		return fail(err)
	}
	traffic.end()
	gone += s.readAgain(ctx, reader)
	s.collectTraffic(traffic)
	traffic = nil
	if o.Session == nil {
		s.tablesAgain(ctx, reader)
	}
	if len(s.Namespaces) == 0 {
		return fail(fmt.Errorf("no network namespace could be examined: %w", cmp.Or(failed, errGone)))
	}
	if gone > 0 {
		s.Limits = append(s.Limits, fmt.Sprintf("%d network namespaces went away while the host was watched", gone))
	}
	o.Session.keepSockets(s.Namespaces)
	s.After = reader.Host(ctx)
	s.Window = time.Since(start)
	s.collectDrops(ctx, watcher)
	for _, n := range s.Namespaces {
		reader.FollowUp(n)
	}
	return s, nil
}

// sampleNew samples the new connections of all namespaces at once: one after the other
// would make the window longer with each.
func (s *Sample) sampleNew(ctx context.Context, reader Reader) {
	var samples sync.WaitGroup
	for _, n := range s.Namespaces {
		if n.NewErr = errIdle; n.Before.Limits.Count > 0 {
			samples.Go(func() { n.NewPerSecond, n.NewErr = reader.NewRate(ctx, n.Namespace) })
		}
	}
	samples.Wait()
}

// readAgain takes the second readings. It leaves out namespaces that no longer exist, because they
// cannot be judged.
func (s *Sample) readAgain(ctx context.Context, reader Reader) (gone int) {
	var stayed []*Namespace
	for _, n := range s.Namespaces {
		var err error
		n.After, err = reader.Namespace(ctx, n.Namespace, nil)
		switch {
		case goneAway(err):
			gone++
			continue
		case err != nil:
			n.After = n.Before
			s.Limits = append(s.Limits, fmt.Sprintf("namespace %s: second reading: %v", n.Name, err))
		}
		if n.After.Cut {
			s.Limits = append(s.Limits, fmt.Sprintf("namespace %s: %v, so PT06 and PT07 may see too little", n.Name, ErrSocketsCut))
		}
		n.Delta = n.After.Counters.Sub(n.Before.Counters)
		stayed = append(stayed, n)
	}
	s.Namespaces = stayed
	return gone
}

// tablesAgain reads the tables of namespaces again if new connections were refused for their tuple.
// At that time the table shows whether ports are short.
func (s *Sample) tablesAgain(ctx context.Context, reader Reader) {
	for _, n := range s.Namespaces {
		if n.Delta["conntrack.drop"] == 0 || n.Delta["conntrack.insert_failed"] == 0 {
			continue
		}
		if table, entries, err := reader.Table(ctx, n.Namespace, &n.After); err == nil && table != nil {
			n.Table, n.Entries = table, entries
		}
	}
}

// goneAway reports whether a namespace could not be entered because it, or the mount of its name,
// no longer exists.
func goneAway(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EINVAL)
}

// inspect reads what needs to be read once: tables and rules.
func (s *Sample) inspect(ctx context.Context, reader Reader, session *Session) {
	if session != nil {
		session.inspect(ctx, reader, s.Namespaces, time.Now())
		return
	}
	for _, n := range s.Namespaces {
		n.Rules, n.RulesErr = reader.Rules(ctx, n.Namespace)
		n.Rules = cmp.Or(n.Rules, &firewall.Ruleset{})
		n.Silent = reader.Silent(ctx, n.Namespace, n.Rules.Addresses())
		n.Table, n.Entries, n.TableErr = reader.Table(ctx, n.Namespace, &n.Before)
		n.Entries = cmp.Or(n.Entries, &Entries{})
	}
}

// watchDrops starts to count drop events; without the right to, it notes why.
func (s *Sample) watchDrops(ctx context.Context, list []netdev.Namespace, o Options) *trace.Watcher {
	if o.NoDrops {
		return nil
	}
	w := &trace.Watcher{Namespaces: list, Options: trace.DropOptions{SamplesPerSecond: 5, Stacks: true}}
	if len(list) == 1 {
		w.Options.Netns = list[0].Inode
	}
	var err error
	if o.Session != nil {
		err = o.Session.share(w)
	}
	if err == nil {
		err = w.Start(ctx)
	}
	if err != nil {
		s.Limits = append(s.Limits, fmt.Sprintf("drop events are not seen, causes come from counters alone: %v", err))
		s.dropsErr = fmt.Errorf("%w: %w", errNoEvents, err)
		return nil
	}
	return w
}

// collectDrops gives each namespace its causes.
func (s *Sample) collectDrops(ctx context.Context, w *trace.Watcher) {
	if w == nil {
		for _, n := range s.Namespaces {
			n.DropsErr = cmp.Or(s.dropsErr, errNoEvents)
		}
		return
	}
	report, err := w.Stop(ctx)
	if err != nil {
		s.Limits = append(s.Limits, err.Error())
		return
	}
	s.Limits = append(s.Limits, report.Limits...)
	if report.Hidden > 0 {
		s.Limits = append(s.Limits, report.HiddenText())
	}
	for _, g := range report.Groups {
		for _, n := range s.Namespaces {
			if n.Inode == g.Netns {
				n.Drops = append(n.Drops, g)
			}
		}
	}
}
