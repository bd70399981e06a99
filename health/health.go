// SPDX-License-Identifier: Apache-2.0

// Package health checks the backends. A Monitor probes every backend of the services with a check and reports each
// change of a backend's state.
//
// One goroutine schedules all probes. A running probe has a goroutine of its own, and the number of running probes is
// bounded. So each of thousands of backends costs a timer in a heap. The package reads the time only through package
// time, which tests replace by testing/synctest.
package health

import (
	"cmp"
	"context"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// Options of a Monitor. The zero value probes over the network and reports to no one.
type Options struct {
	// OnChange is called when a backend changes its state, and after its first probe. Calls for one backend are in
	// order; calls for several may overlap.
	OnChange func(Transition)
	// OnLack is called at most once a minute if a probe failed because of this host, not the server. The argument is
	// the cause ("no local port free: cannot assign requested address").
	OnLack func(string)
	// TableDrops returns the number of packets that connection tracking dropped because its table was full, in the
	// namespace of the probes. It may wrap. Nil uses the kernel's counter.
	TableDrops func() (uint32, error)
	// Dial opens the connections of tcp, http, https, udp and dns probes. Nil uses the kernel.
	Dial Dial
	// Probers replace the probers of single check types.
	Probers map[config.CheckType]Prober
	// MaxInFlight bounds the concurrent probes. 0 means 16384, or half of the process's file limit if that is less.
	MaxInFlight int
}

// Transition reports a change of a backend's state.
type Transition struct {
	Service string
	Backend string
	Index   int // of the backend in its service
	Up      bool
	Reason  string // in words: "3 probes in a row failed: connection refused"
	Since   time.Time
}

// Status is the state of one backend.
type Status struct {
	Service string           `json:"service"`
	Backend string           `json:"backend"`
	Index   int              `json:"-"`
	Check   config.CheckType `json:"check"`
	Up      bool             `json:"up"`
	Known   bool             `json:"known"` // false until the first probe has ended
	Reason  string           `json:"reason"`
	Since   time.Time        `json:"since"` // time of the last change
	// LastProbe is the end of the last probe, Latency its duration, and Error the reason of a failure; empty after a
	// success.
	LastProbe time.Time     `json:"last_probe,omitzero"`
	Latency   time.Duration `json:"latency,omitempty"`
	Error     string        `json:"error,omitempty"`
	// Probes and Failures count since the configuration of the backend.
	Probes   uint64 `json:"probes"`
	Failures uint64 `json:"failures"`
	// Unknown counts the probes that failed because of this host.
	Unknown uint64 `json:"unknown"`
	// Late is the delay of the last probe's start caused by too many concurrent probes; normally 0.
	Late time.Duration `json:"late,omitempty"`
}

// Target is the object of a probe.
type Target struct {
	Service string
	Backend string
	// Address and Port of the backend, or of the service for "via: service"; Port is 0 if the check needs none.
	Address netip.Addr
	Port    uint16
	// Server is the backend's own address.
	Server netip.Addr
	// Protocol of the service.
	Protocol flow.Protocol
	Mark     uint32        // Firewall mark of the probe's packets; 0 for none.
	Check    *config.Check // Immutable.
}

// AddrPort returns the probed endpoint.
func (t *Target) AddrPort() netip.AddrPort { return netip.AddrPortFrom(t.Address, t.Port) }

// Prober sends one probe to a target. It returns nil for a good answer, otherwise the reason in words. The context
// ends at the check's timeout.
type Prober interface {
	Probe(context.Context, *Target) error
}

type backendKey struct{ service, backend string }

// Monitor probes the backends of a configuration.
type Monitor struct {
	opt     Options
	probers map[config.CheckType]Prober
	wake    chan struct{} // has one element after a change of the schedule
	paths   paths
	losses  conntrackDrops
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex // protects the following fields
	watches map[backendKey]*watch
	// generation counts the calls of Configure.
	generation uint64
	queue      dueHeap // watches that wait for their next probe
	inFlight   int
	lastLack   time.Time // time of the last probe that failed because of this host
}

// New returns a monitor without probes. Close ends it.
func New(opt Options) *Monitor {
	if opt.Dial == nil {
		opt.Dial = dial
	}
	if opt.MaxInFlight <= 0 {
		opt.MaxInFlight = defaultInFlight()
	}
	if opt.OnChange == nil {
		opt.OnChange = func(Transition) {}
	}
	if opt.OnLack == nil {
		opt.OnLack = func(string) {}
	}
	if opt.TableDrops == nil {
		opt.TableDrops = tableDrops
	}
	m := &Monitor{opt: opt, probers: newProbers(opt.Dial), wake: make(chan struct{}, 1), watches: map[backendKey]*watch{}}
	for t, p := range opt.Probers {
		m.probers[t] = p
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.running.Go(m.runScheduler)
	return m
}

func defaultInFlight() int {
	const most = 16384
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return most
	}
	return int(max(16, min(most, files.Cur/2)))
}

// Close ends all probes, waits for them and removes their routes. It also removes routes that a killed process has
// left.
func (m *Monitor) Close() error {
	m.cancel()
	m.running.Wait()
	_, err := RemovePaths()
	return err
}

// Configure replaces the set of probed backends; nil stops all probes. A backend with an unchanged address and check
// type keeps its state.
func (m *Monitor) Configure(cfg *config.Config) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.generation++
	var added []*watch
	if cfg != nil {
		for i := range cfg.Services {
			if s := &cfg.Services[i]; s.Check != nil {
				added = append(added, m.configure(s)...)
			}
		}
	}
	for k, w := range m.watches {
		if w.generation != m.generation {
			m.stopWatch(w)
			delete(m.watches, k)
		}
	}
	now := time.Now()
	spread := min(time.Duration(len(added))*200*time.Microsecond, time.Second)
	for _, w := range added {
		w.start(m.ctx, now)
		w.due = now.Add(randomPart(min(spread, w.period())))
		m.queue.push(w)
	}
	m.reschedule()
	// If the removal of a route fails, the next use of its mark removes it.
	_ = m.paths.removeUnused(func(k backendKey) bool { w := m.watches[k]; return w != nil && w.target.viaService() })
}

// configure updates the watches of one service and returns the new ones.
func (m *Monitor) configure(s *config.Service) (added []*watch) {
	var known *config.Check // an existing Check equal to s.Check
	for i := range s.Backends {
		t := target(s, i)
		w := m.watches[backendKey{t.Service, t.Backend}]
		if w == nil || !t.sameServer(w.target) {
			if w != nil {
				m.stopWatch(w)
			}
			w = &watch{target: &t}
			m.watches[backendKey{t.Service, t.Backend}] = w
			added = append(added, w)
		}
		w.index, w.generation = i, m.generation
		if w.target.Check != t.Check && (w.target.Check == known || reflect.DeepEqual(w.target.Check, t.Check)) {
			known = w.target.Check
			t.Check = known
		}
		if *w.target == t {
			continue
		}
		w.target, w.good, w.bad = &t, 0, 0
		if !w.probing {
			w.due = time.Now().Add(randomPart(w.period()))
			m.queue.updateWatch(w)
		}
	}
	return added
}

// target returns the probe target for backend number index of a service.
func target(s *config.Service, index int) Target {
	var first uint16
	if len(s.Listen) > 0 && len(s.Listen[0].Ports) > 0 {
		first = s.Listen[0].Ports[0].First
	}
	b := &s.Backends[index]
	t := Target{Service: s.Name, Backend: b.Name, Address: b.Address, Server: b.Address,
		Port: cmp.Or(s.Check.Port, b.Port, first), Mark: s.Check.Mark, Protocol: s.Protocol, Check: s.Check}
	if t.viaService() {
		t.Address = s.Listen[0].Address
	}
	return t
}

// sameServer reports whether t and o probe the same endpoint in the same way, so that their states are
// interchangeable.
func (t *Target) sameServer(o *Target) bool {
	return t.Address == o.Address && t.Server == o.Server && t.Port == o.Port && t.Check.Type == o.Check.Type
}

// viaService reports whether the probe is sent to the service's address.
func (t *Target) viaService() bool { return t.Check.Via == "service" }

// stopWatch stops the probes of w.
func (m *Monitor) stopWatch(w *watch) {
	w.cancel()
	if !w.probing {
		m.queue.remove(w)
	}
}

// Healthy returns the state of a backend. known is false until its first probe has ended, and for backends without a
// check.
func (m *Monitor) Healthy(service, backend string) (healthy, known bool) {
	s, ok := m.State(service, backend)
	return s.Up, ok && s.Known
}

// Why returns the reason for the backend's state in words; empty without a check.
func (m *Monitor) Why(service, backend string) string {
	s, _ := m.State(service, backend)
	return s.Reason
}

// State returns the state of a backend; false without a check.
func (m *Monitor) State(service, backend string) (Status, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[backendKey{service, backend}]
	if w == nil {
		return Status{Service: service, Backend: backend}, false
	}
	return w.status(), true
}

// Snapshot returns the states of all backends, sorted by service and position.
func (m *Monitor) Snapshot() []Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]Status, 0, len(m.watches))
	for _, w := range m.watches {
		out = append(out, w.status())
	}
	slices.SortFunc(out, func(a, b Status) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Index, b.Index))
	})
	return out
}

// status returns the API form of w.
func (w *watch) status() Status {
	s := w.seen
	s.Service, s.Backend, s.Index, s.Check = w.target.Service, w.target.Backend, w.index, w.target.Check.Type
	s.Up, s.Known, s.Since, s.Reason = w.up, w.known, w.since, w.reason()
	return s
}
