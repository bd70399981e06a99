// SPDX-License-Identifier: Apache-2.0

// Package announce writes the addresses that this gateway serves as routes into a routing table that forwards nothing.
// A BGP speaker on the host exports the routes, so that routers send packets for the addresses here. A route is removed
// while the gateway cannot serve its address. The routes stay if this process is killed; the next one adopts them.
package announce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
)

// WithdrawTime is the time between the withdrawal of addresses and the end of their service. BGP updates reach the
// routers of a site within some milliseconds.
const WithdrawTime = 300 * time.Millisecond

const (
	// retryInterval is the time until the next attempt to write routes after an error.
	retryInterval = time.Second
	// maxAlike bounds the events of one instant: more changes with one reason become one event.
	maxAlike = 16
)

// Request is the wanted state.
type Request struct {
	Table    uint32
	Protocol uint8 // marks the routes; the announcer removes all others with the mark from the table
	Metric   uint32
	// Interfaces must be up with a carrier. While one is not, no address is announced.
	Interfaces []string
	Addresses  []Address // sorted by prefix, without duplicates
}

// Address is a prefix of addresses that this gateway serves.
type Address struct {
	Prefix netip.Prefix
	Owners []string // "service NAME", "nat NAME".
	Why    string   // The reason not to announce it, or "".
	Metric uint32   // Of the route; 0 means the metric of the request.
	// Unknown marks a Why that may be wrong: the route stays as it is.
	Unknown bool
	// Settle is the time between the end of the reason for a withdrawal and the announcement. Other backends recover in
	// that time, so that this gateway chooses the same ones as the others.
	Settle time.Duration
}

// State of an address.
type State string

// States.
const (
	Announced State = "announced" // Its route is in the table.
	Withdrawn State = "withdrawn" // Its route is not in the table.
)

// Status is the state of an address.
type Status struct {
	Prefix netip.Prefix
	Owners []string
	State  State
	Table  uint32
	Metric uint32
	Why    string    // of Withdrawn
	Since  time.Time // Time of the last change of the route; zero if an earlier process made it.
}

// Options of an announcer.
type Options struct {
	StateDir string       // for the record of the table
	Log      *slog.Logger // nil: slog.Default().
	Events   *event.Log   // May be nil.
}

// Announcer writes routes. Its methods must be called in the network namespace of the host. They are safe for
// concurrent use.
type Announcer struct {
	opt    Options
	kicked chan struct{}
	lost   string // damage of the record at the start; "" for none

	mu      sync.Mutex    // Protects the following fields.
	place   routeLocation // of routes that may exist
	request *Request      // nil: announce nothing.
	set     bool          // Set was called.
	failed  bool          // The last attempt returned an error.
	ended   bool
	list    []Status
	usable  map[netip.Prefix]time.Time // Withdrawn addresses without a reason, and the time since then.
	next    time.Duration              // Until the first address with Settle is announced; 0 without any.
	changes map[State]uint64           // of routes, since the start
	looked  time.Time                  // Time of the last look for a BGP speaker.
	speaker bool                       // Its result.
}

// New returns an Announcer that changes nothing before the first Set, which adopts or removes the routes of an earlier
// process.
func New(opt Options) *Announcer {
	opt.Log = cmp.Or(opt.Log, slog.Default())
	p, lost := readRecord(opt.StateDir)
	if lost != "" {
		opt.Log.Warn(lost)
	}
	return &Announcer{opt: opt, lost: lost, kicked: make(chan struct{}, 1), place: p, changes: map[State]uint64{}}
}

// Kick makes the announcer read interfaces and routes again. It never blocks.
func (a *Announcer) Kick() {
	select {
	case a.kicked <- struct{}{}:
	default:
	}
}

// Writes reports whether a route with this table and protocol is one of the announcer's.
func (a *Announcer) Writes(table uint32, protocol uint8) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.place != routeLocation{} && a.place == routeLocation{table, protocol}
}

// Set replaces the wanted state and returns the changes. After an error, Run tries again.
func (a *Announcer) Set(r *Request) (*datapath.Change, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended || a.set && !a.failed && reflect.DeepEqual(r, a.request) {
		return &datapath.Change{Datapath: "announcements"}, nil
	}
	a.request, a.set = r, true
	change, err := a.reconcile(time.Now())
	if err != nil || a.next > 0 {
		a.Kick() // Run sets the timer
	}
	return change, err
}

// Plan returns the changes that Set would make, without making them.
func (a *Announcer) Plan(r *Request) (*datapath.Change, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	d, err := a.decide(r, time.Now())
	if err != nil {
		return nil, err
	}
	return d.change(), nil
}

// Statuses returns the states of the addresses, sorted. The caller must not modify the result.
func (a *Announcer) Statuses() []Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.list
}

// Counts returns the number of addresses by state, and the number of changes to each state since the start.
func (a *Announcer) Counts() (now map[State]int, changes map[State]uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.request == nil {
		return nil, nil
	}
	now, changes = map[State]int{Announced: 0, Withdrawn: 0}, map[State]uint64{}
	for _, s := range a.list {
		now[s.State]++
	}
	for s := range now {
		changes[s] = a.changes[s]
	}
	return now, changes
}

// Run follows interfaces and other programs' changes of the routes until the context ends. The routes stay; Release
// removes them.
func (a *Announcer) Run(ctx context.Context) {
	said := ""
	for {
		next, err := a.reconcileRoutes()
		var again <-chan time.Time
		if next > 0 {
			again = time.After(next)
		}
		text := ""
		if err != nil {
			if text = err.Error(); text != said {
				a.opt.Log.Error("announcements are incomplete; trying again", "after", retryInterval, "error", err)
			}
			again = time.After(retryInterval)
		}
		said = text
		select {
		case <-ctx.Done():
			return
		case <-a.kicked:
		case <-again:
		}
	}
}

// reconcileRoutes makes the routes equal to the request, and returns the time until the next call, or 0 if none is due.
func (a *Announcer) reconcileRoutes() (next time.Duration, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended || !a.set || a.request == nil && a.place == (routeLocation{}) {
		return 0, nil
	}
	_, err = a.reconcile(time.Now())
	return a.next, err
}

// Release ends the announcer. It withdraws all addresses unless keep is set, and then waits until the routers know.
func (a *Announcer) Release(keep bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	if keep || a.place == (routeLocation{}) {
		return nil
	}
	routes, err := a.place.routes()
	if err == nil {
		err = a.place.removeRoutes()
	}
	if err != nil {
		return err
	}
	if len(routes) > 0 {
		time.Sleep(WithdrawTime)
	}
	a.list = nil
	return writeRecord(a.opt.StateDir, routeLocation{})
}

// routeChanges is the difference between the wanted and the present routes.
type routeChanges struct {
	at     routeLocation
	add    []route
	remove []route // from at
	left   []route // at the previous place
	list   []Status
	usable map[netip.Prefix]time.Time // next value of Announcer.usable
	next   time.Duration
}

// decide compares a request with the routes of the kernel. a.mu must be locked.
func (a *Announcer) decide(r *Request, now time.Time) (d routeChanges, err error) {
	d.usable = map[netip.Prefix]time.Time{}
	var old map[route]bool
	if r != nil {
		d.at = routeLocation{r.Table, r.Protocol}
	}
	if a.place != (routeLocation{}) && a.place != d.at {
		if old, err = a.place.routes(); err != nil {
			return d, err
		}
		for at := range old {
			d.left = append(d.left, at)
		}
	}
	if r == nil {
		return d, nil
	}
	present, err := d.at.routes()
	if err != nil {
		return d, err
	}
	down, err := interfaceDown(r.Interfaces)
	if err != nil {
		return d, err
	}
	exists := map[netip.Prefix]bool{} // with any metric, or at the previous place
	for _, routes := range []map[route]bool{present, old} {
		for at := range routes {
			exists[at.to] = true
		}
	}
	withdrawn := map[netip.Prefix]bool{}
	for _, s := range a.list {
		withdrawn[s.Prefix] = s.State == Withdrawn
	}
	wanted := map[route]bool{}
	for _, w := range r.Addresses {
		s := Status{Prefix: w.Prefix, Owners: w.Owners, State: Announced, Table: r.Table, Metric: cmp.Or(w.Metric, r.Metric), Why: w.Why}
		if down != "" {
			s.Why = down
		}
		if s.Why != "" && (down != "" || !w.Unknown || !exists[w.Prefix]) {
			s.State = Withdrawn
		} else {
			s.Why = ""
		}
		if s.State == Announced && withdrawn[w.Prefix] && a.awaitsAnnouncement(w, now, &d) {
			s.State, s.Why = Withdrawn, "usable again; it is announced when the other backends have been probed too"
		}
		at := route{w.Prefix, s.Metric}
		if s.State == Announced {
			wanted[at] = true
			if !present[at] {
				d.add = append(d.add, at)
			}
		}
		d.list = append(d.list, s)
	}
	for at := range present {
		if !wanted[at] {
			d.remove = append(d.remove, at)
		}
	}
	order := func(x, y route) int {
		return cmp.Or(x.to.Addr().Compare(y.to.Addr()), cmp.Compare(x.to.Bits(), y.to.Bits()))
	}
	slices.SortFunc(d.remove, order)
	slices.SortFunc(d.left, order)
	return d, nil
}

// awaitsAnnouncement reports whether a withdrawn address waits for its announcement, and records its wait in a decision.
func (a *Announcer) awaitsAnnouncement(w Address, now time.Time, d *routeChanges) bool {
	since, known := a.usable[w.Prefix]
	if !known {
		since = now
	}
	left := w.Settle - now.Sub(since)
	if left <= 0 {
		return false
	}
	d.usable[w.Prefix] = since
	if d.next == 0 || left < d.next {
		d.next = left
	}
	return true
}

// change describes a decision for people.
func (d *routeChanges) change() *datapath.Change {
	c := &datapath.Change{Datapath: "announcements"}
	c.Objects.Added, c.Objects.Removed = len(d.add), len(d.remove)+len(d.left)
	for _, r := range d.add {
		c.Lines = append(c.Lines, fmt.Sprintf("announce %s", r.to))
	}
	for _, r := range slices.Concat(d.remove, d.left) {
		c.Lines = append(c.Lines, fmt.Sprintf("withdraw %s", r.to))
	}
	const most = 200
	if n := len(c.Lines) - most; n > 0 {
		c.Lines, c.Truncated = c.Lines[:most], n
	}
	return c
}

// reconcile makes the routes equal to the request. New routes are written first, so that a change of the metric or of
// the table leaves no gap. a.mu must be locked.
func (a *Announcer) reconcile(now time.Time) (*datapath.Change, error) {
	a.failed = true
	d, err := a.decide(a.request, now)
	if err != nil {
		return nil, err
	}
	if d.at != a.place && d.at != (routeLocation{}) && len(d.left) == 0 {
		if err := writeRecord(a.opt.StateDir, d.at); err != nil {
			return nil, err
		}
		a.place = d.at
	}
	var errs []error
	added, failed := map[netip.Prefix]bool{}, map[netip.Prefix]error{}
	for _, r := range d.add {
		if err := d.at.add(r); err != nil {
			errs, failed[r.to] = append(errs, err), err
			continue
		}
		added[r.to] = true
	}
	removed := map[netip.Prefix]bool{}
	for _, r := range d.remove {
		errs, removed[r.to] = append(errs, d.at.remove(r)), true
	}
	for _, r := range d.left {
		errs, removed[r.to] = append(errs, a.place.remove(r)), true
	}
	err = errors.Join(errs...)
	if err == nil && d.at != a.place {
		if err = writeRecord(a.opt.StateDir, d.at); err == nil {
			a.place = d.at
		}
	}
	a.failed = err != nil
	a.usable, a.next = d.usable, d.next
	a.publish(d, added, removed, failed, now)
	return d.change(), err
}

// publish stores the statuses and reports the changes. a.mu must be locked.
func (a *Announcer) publish(d routeChanges, added, removed map[netip.Prefix]bool, failed map[netip.Prefix]error, now time.Time) {
	since := map[netip.Prefix]time.Time{}
	for _, s := range a.list {
		since[s.Prefix] = s.Since
	}
	var changed []Status
	for i := range d.list {
		s := &d.list[i]
		s.Since = since[s.Prefix]
		if err := failed[s.Prefix]; err != nil {
			s.State, s.Why = Withdrawn, err.Error()
		}
		// A route with a new metric, or in another table, is no change of the address.
		if added[s.Prefix] != removed[s.Prefix] && (s.State == Announced) == added[s.Prefix] {
			s.Since = now
			changed = append(changed, *s)
		}
		delete(removed, s.Prefix)
	}
	why := "no service or rule of the configuration has it"
	if d.at == (routeLocation{}) {
		why = "the configuration has no cluster.announce"
	}
	for p := range removed {
		changed = append(changed, Status{Prefix: p, State: Withdrawn, Why: why})
	}
	slices.SortStableFunc(changed, func(x, y Status) int {
		return cmp.Or(cmp.Compare(x.State, y.State), cmp.Compare(x.Why, y.Why), x.Prefix.Addr().Compare(y.Prefix.Addr()))
	})
	a.list = d.list
	for len(changed) > 0 {
		n := 1
		for n < len(changed) && changed[n].State == changed[0].State && changed[n].Why == changed[0].Why {
			n++
		}
		a.report(changed[:n])
		changed = changed[n:]
	}
}

// report logs changes of one kind with one reason.
func (a *Announcer) report(alike []Status) {
	first := alike[0]
	a.changes[first.State] += uint64(len(alike))
	if len(alike) > maxAlike {
		text := fmt.Sprintf("%d addresses are %s", len(alike), first.State)
		if first.Why != "" {
			text += ": " + first.Why
		}
		a.opt.Log.Info(text)
		a.opt.Events.Add(event.Event{Kind: event.Announcement, State: string(first.State), Why: first.Why, Text: text})
		return
	}
	for _, s := range alike {
		text := fmt.Sprintf("address %s is %s: %s", Short(s.Prefix), s.State, cmp.Or(s.Why, strings.Join(s.Owners, ", ")))
		a.opt.Log.Info(text)
		a.opt.Events.Add(event.Event{Kind: event.Announcement, Object: Short(s.Prefix), State: string(s.State), Why: s.Why, Text: text})
	}
}

// Short formats a prefix; one address has no length.
func Short(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}
