// SPDX-License-Identifier: Apache-2.0

// Package uplink follows the uplinks of the host: their addresses, next hops and probes. Each uplink has a routing
// table with its default route. Rules select the table by the mark of a packet, which the nftables datapath sets, or by
// the packet's source address. The rules and tables stay if this process is killed; the next one adopts them.
package uplink

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/health"
	"github.com/sluice-lb/sluice/kernel"
	"github.com/sluice-lb/sluice/netdev"
)

const (
	retryInterval = time.Second
	// checkInterval bounds the time until rules and routes that another program removed are written again.
	checkInterval = 10 * time.Second
)

// State of an uplink.
type State string

// States.
const (
	Carrying State = "carrying" // It gets new connections.
	Standby  State = "standby"  // It is usable, and an uplink of a better class gets the new connections.
	Down     State = "down"     // Its connections have ended.
)

// Status is the state of an uplink.
type Status struct {
	Name      string
	Interface string
	State     State
	Priority  int
	Weight    int
	Table     int
	Mark      uint32
	Addresses []netip.Addr
	Gateways  []netip.Addr
	Share     [2]float64 // part of the new connections, by family
	Why       string     // why it is down, or one family is, while another uplink has that family
	Since     time.Time  // Time of the last change; zero if it was made by an earlier process.
}

// Options of a tracker.
type Options struct {
	Log      *slog.Logger // nil: slog.Default().
	Events   *event.Log   // May be nil.
	OnChange func()       // The result of States has changed; must not block.
}

// Tracker follows the uplinks. Its methods must be called in the network namespace of the host. They are safe for
// concurrent use.
type Tracker struct {
	opt     Options
	kicked  chan struct{}
	mu      sync.Mutex      // Protects the following fields.
	probes  *health.Monitor // nil before the first uplink with a probe.
	list    []config.Uplink
	views   []view
	since   map[string]time.Time
	changes map[string]uint64 // by uplink: state changes since the start
	written bool              // Rules and routes may exist.
	ended   bool
}

// New returns a Tracker that changes nothing before the first Set, which adopts or removes the rules and routes of an
// earlier process.
func New(opt Options) *Tracker {
	opt.Log = cmp.Or(opt.Log, slog.Default())
	return &Tracker{opt: opt, kicked: make(chan struct{}, 1), since: map[string]time.Time{}, changes: map[string]uint64{}, written: true}
}

// configureProbes replaces the probes. The first ones start the monitor. t.mu must be locked.
func (t *Tracker) configureProbes(list []config.Uplink) {
	c := probed(list)
	if t.probes == nil && len(c.Services) == 0 {
		return
	}
	if t.probes == nil {
		t.probes = health.New(health.Options{
			OnChange: func(health.Transition) { t.Kick() },
			OnLack: func(lack string) {
				t.opt.Log.Warn("probes of uplinks cannot run; keeping the last known states", "cause", lack)
			},
		})
	}
	t.probes.Configure(c)
}

// Kick makes the tracker read the host again. It never blocks.
func (t *Tracker) Kick() {
	select {
	case t.kicked <- struct{}{}:
	default:
	}
}

// Writes reports whether a route with this table and protocol is one of the tracker's.
func (t *Tracker) Writes(table uint32, protocol uint8) bool {
	return protocol == Number && table >= FirstTable && table < FirstTable+maxUplinks
}

// view is an uplink with the part of the host that concerns it.
type view struct {
	config.Uplink
	link
	mark     uint32
	table    int
	next     [2]*hop // by family
	prefixes []netip.Prefix
	why      [2]string // why the host cannot use it, by family
	failed   [2]string // why its probes fail, by family
	usable   [2]bool
	carries  [2]bool
	used     [2]bool // some uplink can carry the family
}

// Plan returns the changes that Set would make, without making them.
func (t *Tracker) Plan(list []config.Uplink) (*datapath.Change, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, d, err := t.decide(list)
	if err != nil {
		return nil, err
	}
	return d.change(), nil
}

// Set replaces the uplinks, their rules and routes, and returns the changes.
func (t *Tracker) Set(list []config.Uplink) (*datapath.Change, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended || len(list) == 0 && len(t.list) == 0 && !t.written {
		return &datapath.Change{Datapath: "uplinks"}, nil
	}
	t.list = list
	d, err := t.reconcile()
	t.configureProbes(list) // after their routes
	return d.change(), err
}

// States returns the states of uplinks. If list is not the list of the last Set, the unknown ones count as not probed.
func (t *Tracker) States(list []config.Uplink) (out []datapath.Uplink) {
	t.mu.Lock()
	defer t.mu.Unlock()
	views := t.views
	if !slices.EqualFunc(list, t.list, func(a, b config.Uplink) bool { return a.Name == b.Name && a.Interface == b.Interface }) {
		var err error
		if views, _, err = t.decide(list); err != nil {
			return nil
		}
	}
	for i := range views {
		v := &views[i]
		out = append(out, datapath.Uplink{Name: v.Name, Interface: v.Interface, Mark: v.mark, Weight: v.Weight, Prefixes: v.prefixes, Usable: v.usable, Carries: v.carries})
	}
	return out
}

// Known reports whether every target of every usable interface has been probed once.
func (t *Tracker) Known() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.views {
		v := &t.views[i]
		if v.Probe == nil || v.down != "" {
			continue
		}
		for _, target := range v.Probe.Targets {
			if s, ok := t.probes.State(v.Name, target.String()); ok && !s.Known {
				return false
			}
		}
	}
	return true
}

// Statuses returns the states of the uplinks in the order of the configuration.
func (t *Tracker) Statuses() (list []Status) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.views {
		list = append(list, t.views[i].status(t.since))
	}
	for f := range families {
		total := 0
		for i := range t.views {
			if t.views[i].carries[f] {
				total += t.views[i].Weight
			}
		}
		for i := range t.views {
			if t.views[i].carries[f] {
				list[i].Share[f] = float64(t.views[i].Weight) / float64(total)
			}
		}
	}
	return list
}

// Changes returns the number of state changes of each uplink since the start.
func (t *Tracker) Changes() map[string]uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[string]uint64{}
	for i := range t.views {
		out[t.views[i].Name] = t.changes[t.views[i].Name]
	}
	return out
}

// Warnings returns the settings of the host that make the kernel drop packets of uplinks.
func (t *Tracker) Warnings() (list []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	filter := func(name string) string {
		return kernel.Sysctl("net.ipv4.conf." + netdev.SysctlName(name) + ".rp_filter")
	}
	for i := range t.views {
		v := &t.views[i]
		// The kernel uses the greater of both settings.
		if len(t.views) > 1 && max(filter(v.Interface), filter("all")) == "1" {
			list = append(list, fmt.Sprintf("uplink %s: the kernel drops replies on %s while another uplink has the default route: write \"sysctl -w net.ipv4.conf.%s.rp_filter=2\"", v.Name, v.Interface, netdev.SysctlName(v.Interface)))
		}
		for j := range i {
			for _, a := range v.addresses {
				if slices.ContainsFunc(t.views[j].addresses, func(b addressed) bool { return a.address == b.address }) {
					list = append(list, fmt.Sprintf("uplinks %s and %s both have address %s: change the network of one provider's router, because connections are assigned to uplinks by their address", t.views[j].Name, v.Name, a.address))
				}
			}
		}
	}
	return list
}

// Run follows the host and the probes until the context ends. The rules and routes stay; Release removes them.
func (t *Tracker) Run(ctx context.Context) {
	said := ""
	for {
		err := t.follow()
		again, text := checkInterval, ""
		if err != nil {
			again, text = retryInterval, err.Error()
			if text != said {
				t.opt.Log.Error("the routes of uplinks are incomplete; trying again", "every", retryInterval, "error", err)
			}
		}
		said = text
		select {
		case <-ctx.Done():
			return
		case <-t.kicked:
		case <-time.After(again):
		}
	}
}

func (t *Tracker) follow() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended || len(t.list) == 0 {
		return nil
	}
	_, err := t.reconcile()
	return err
}

// Release ends the tracker. It removes the rules and routes unless keep is set.
func (t *Tracker) Release(keep bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ended = true
	var err error
	if t.probes != nil {
		err = t.probes.Close()
	}
	if keep || err != nil || len(t.list) == 0 && !t.written {
		return err
	}
	t.views = nil
	return Remove()
}

// reconcile reads the host and the probes, and makes rules and routes equal to the uplinks. t.mu must be locked.
func (t *Tracker) reconcile() (d difference, err error) {
	views, d, err := t.decide(t.list)
	if err != nil {
		return d, err
	}
	if err = d.write(); err != nil {
		return d, err
	}
	before := t.views
	t.views, t.written = views, len(views) > 0
	t.report(before)
	return d, nil
}

// report logs and counts the changes since the earlier views.
func (t *Tracker) report(before []view) {
	changed := len(before) != len(t.views)
	for i := range t.views {
		v := &t.views[i]
		j := slices.IndexFunc(before, func(b view) bool { return b.Name == v.Name })
		if j < 0 {
			changed = true
			continue
		}
		was := &before[j]
		changed = changed || was.usable != v.usable || was.carries != v.carries || was.mark != v.mark || !slices.Equal(was.prefixes, v.prefixes)
		now := v.status(t.since)
		if was.status(t.since).State != now.State {
			t.since[v.Name] = time.Now()
			t.changes[v.Name]++
		} else if was.works(0) == v.works(0) && was.works(1) == v.works(1) {
			continue
		}
		text := fmt.Sprintf("uplink %s is %s", v.Name, now.State)
		if now.Why != "" {
			text += ": " + now.Why
		}
		t.opt.Log.Info(text)
		t.opt.Events.Add(event.Event{Kind: event.Uplink, Object: v.Name, State: string(now.State), Why: now.Why, Text: text})
	}
	if changed && t.opt.OnChange != nil {
		t.opt.OnChange()
	}
}

// status returns the state of an uplink for people.
func (v *view) status(since map[string]time.Time) Status {
	s := Status{Name: v.Name, Interface: v.Interface, State: Down, Priority: v.Priority, Weight: v.Weight, Table: v.table, Mark: v.mark, Since: since[v.Name]}
	for _, a := range v.addresses {
		s.Addresses = append(s.Addresses, a.address)
	}
	for f := range families {
		if n := v.next[f]; n != nil && n.gateway.IsValid() {
			s.Gateways = append(s.Gateways, n.gateway)
		}
	}
	switch {
	case v.works(0) && v.carries[0] || v.works(1) && v.carries[1]:
		s.State = Carrying
	case v.works(0) || v.works(1):
		s.State = Standby
	default:
		s.Why = v.reason()
		return s
	}
	for f := range families {
		if !v.works(f) && v.used[f] {
			s.Why = fmt.Sprintf("not for %s: %s", familyName(f), cmp.Or(v.failed[f], v.why[f]))
		}
	}
	return s
}

// works reports whether the uplink can carry new connections of a family.
func (v *view) works(f int) bool { return v.usable[f] && v.failed[f] == "" }

// reason returns why an uplink is down. Without an address in any family, the first family decides.
func (v *view) reason() string {
	for f := range families {
		if why := v.failed[f]; why != "" {
			if v.carries[f] {
				why += "; it still gets new connections, because no other uplink works"
			}
			return why
		}
	}
	if v.hasFamily(1) && !v.hasFamily(0) {
		return v.why[1]
	}
	return v.why[0]
}

// change describes a difference for people.
func (d *difference) change() *datapath.Change {
	c := &datapath.Change{Datapath: "uplinks"}
	c.Objects.Added, c.Objects.Removed = len(d.addRoutes)+len(d.addRules), len(d.delRoutes)+len(d.delRules)
	for _, r := range d.addRoutes {
		c.Lines = append(c.Lines, "add route "+r.String())
	}
	for _, r := range d.addRules {
		c.Lines = append(c.Lines, "add "+r.String())
	}
	for _, r := range d.delRules {
		c.Lines = append(c.Lines, "remove "+r.String())
	}
	for _, r := range d.delRoutes {
		c.Lines = append(c.Lines, "remove route "+r.String())
	}
	return c
}

// probed returns the probes of uplinks as checks of backends, one service for each uplink.
func probed(list []config.Uplink) *config.Config {
	c := &config.Config{}
	for i, u := range list {
		if u.Probe == nil {
			continue
		}
		check := &config.Check{Type: u.Probe.Type, Port: u.Probe.Port, Interval: u.Probe.Interval, Timeout: u.Probe.Timeout,
			Rise: u.Probe.Rise, Fall: u.Probe.Fall, Initial: "up", Via: "direct", Mark: u.Mark(i)}
		s := config.Service{Name: u.Name, Check: check}
		for _, a := range u.Probe.Targets {
			s.Backends = append(s.Backends, config.Backend{Name: a.String(), Address: a})
		}
		c.Services = append(c.Services, s)
	}
	return c
}
