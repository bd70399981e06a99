// SPDX-License-Identifier: Apache-2.0

// Package discovery finds backends at run time: in the DNS, among Docker containers and in directories of files. If a
// source does not answer, the last result remains in force, even after a restart.
package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/batch"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/pause"
)

// Bounds of the frequency of queries and of configuration changes.
const (
	rate     = time.Second // Between two changes of one service.
	firstTry = time.Second // After a failure; doubled each time.
	lastTry  = 30 * time.Second
	most     = 4096 // backends per service
)

// Options of a finder.
type Options struct {
	// Put applies the backends of services.
	Put func(ctx context.Context, found map[string][]config.Backend) error
	// Path is the file that stores the results across restarts; "" disables it.
	Path string
	// Namespace identifies the network namespace; "" for the host's. Found backends of another one are not taken over.
	Namespace string
	Log       *slog.Logger
}

// Finder follows the sources of all services.
type Finder struct {
	opt    Options
	wanted chan *config.Config // the latest unprocessed configuration

	waiting *batch.Queue[*pendingResult]

	mu      sync.Mutex // protects the following fields
	last    map[string]savedResult
	watches map[string]*watch // by service
	unsaved string            // Why the file does not have the results; "" if it has.
}

// New returns a finder with the results that an earlier process saved.
func New(opt Options) *Finder {
	f := &Finder{opt: opt, wanted: make(chan *config.Config, 1), watches: map[string]*watch{}, waiting: batch.New[*pendingResult]()}
	last, err := loadResults(opt.Path)
	if f.last = last; err != nil {
		f.unsaved = err.Error() + "; the sources are asked again"
		f.opt.Log.Warn("backends-from", "trouble", f.unsaved)
	}
	maps.DeleteFunc(f.last, func(_ string, s savedResult) bool { return s.Namespace != opt.Namespace })
	return f
}

// Last returns the stored results of the previous run.
func (f *Finder) Last() map[string][]config.Backend {
	f.mu.Lock()
	defer f.mu.Unlock()
	found := map[string][]config.Backend{}
	for service, was := range f.last {
		found[service] = was.Backends
	}
	return found
}

// Follow replaces the followed sources by the sources of a configuration. It never blocks.
func (f *Finder) Follow(cfg *config.Config) {
	for {
		select {
		case f.wanted <- cfg:
			return
		case <-f.wanted: // a newer configuration has replaced the unread one
		}
	}
}

// Run follows the sources until the context ends.
func (f *Finder) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case cfg := <-f.wanted:
			f.configure(ctx, &running, cfg)
		}
	}
}

// sourceSpec is the input of a watch.
type sourceSpec struct {
	service string
	from    config.BackendsFrom
	v4, v6  bool // families usable by the service
}

func sourceSpecOf(s *config.Service) sourceSpec {
	w := sourceSpec{service: s.Name, from: *s.BackendsFrom, v4: true, v6: true}
	if s.Mode == config.ModeDNAT || s.Mode == config.ModeDSR || s.Mode == config.ModeStateless { // these modes cannot change the address family
		w.v4, w.v6 = false, false
		for _, l := range s.Listen {
			w.v4 = w.v4 || l.Follows() || l.Address.Is4()
			w.v6 = w.v6 || l.Follows() || l.Address.Is6()
		}
	}
	if s.Mode.OneWay() {
		w.from.Port = 0 // these do not change the port
	}
	return w
}

func (f *Finder) configure(ctx context.Context, running *sync.WaitGroup, cfg *config.Config) {
	f.mu.Lock()
	defer f.mu.Unlock()
	wanted := map[string]sourceSpec{}
	for i := range cfg.Services {
		if s := &cfg.Services[i]; s.BackendsFrom != nil {
			wanted[s.Name] = sourceSpecOf(s)
		}
	}
	ended := map[string][]config.Backend{}
	for name, w := range f.watches {
		if next, ok := wanted[name]; !ok || !reflect.DeepEqual(next, w.spec) {
			w.end()
			delete(f.watches, name)
			if !ok {
				ended[name] = []config.Backend{}
				delete(f.last, name)
			}
		}
	}
	if len(ended) > 0 {
		_ = f.opt.Put(ctx, ended) // no service uses them any more
		f.save()
	}
	for name, spec := range wanted {
		if f.watches[name] != nil {
			continue
		}
		w := &watch{spec: spec, finder: f, source: sourceOf(spec)}
		if was, ok := f.last[name]; ok && was.Origin == spec.from.Origin() {
			w.before = was.Backends
		}
		var own context.Context
		own, w.end = context.WithCancel(ctx)
		f.watches[name] = w
		running.Go(func() { w.run(own) })
	}
}

// source is a source of backends.
type source interface {
	// find returns all backends, and the maximum time until the next look.
	find(ctx context.Context) (found []config.Backend, again time.Duration, err error)
	// awaitChange returns when there may be new results. It may return early, and returns at the end of the context.
	awaitChange(ctx context.Context)
}

// partlyError accompanies an incomplete result.
type partlyError struct{ error }

func sourceOf(s sourceSpec) source {
	switch {
	case s.from.DNS != "":
		return newDNS(s)
	case s.from.Docker != "":
		return newDocker(s)
	}
	return &directory{path: s.from.Directory, files: map[string]*file{}}
}

// watch follows the source of one service.
type watch struct {
	spec   sourceSpec
	finder *Finder
	source source
	before []config.Backend // results of an earlier run
	end    context.CancelFunc

	mu      sync.Mutex // Protects the following fields.
	trouble string     // Why the backends in force may be outdated; "" if they are not.
	since   time.Time  // Time of the last change.
}

func (w *watch) run(ctx context.Context) {
	k := newRetention(w.spec.from.Hold.D(), w.spec.from.Least)
	list, _, next := k.update(w.before, time.Now())
	inForce, failures := list, 0
	first := true
	news := make(chan struct{}, 1)
	go func() {
		for ctx.Err() == nil {
			w.source.awaitChange(ctx)
			select {
			case news <- struct{}{}:
			default:
			}
		}
	}()
	for {
		found, again, err := w.source.find(ctx)
		if ctx.Err() != nil {
			return
		}
		kept := 0
		partly := (*partlyError)(nil)
		if errors.As(err, &partly) {
			err = nil
		}
		if err != nil {
			again = min(firstTry<<min(failures, 8), lastTry)
			failures++
			w.setTrouble(fmt.Sprintf("%v: the last result remains in force", err))
		} else {
			failures = 0
			usable, refused := w.usableBackends(found)
			list, kept, next = k.update(usable, time.Now())
			trouble := cmp.Or(refused, keptText(kept, len(list)))
			if partly != nil {
				trouble = partly.Error()
			}
			w.setTrouble(trouble)
		}
		if !slices.Equal(list, inForce) || first && err == nil {
			if w.apply(ctx, list) {
				inForce, first = list, false
			} else {
				again = min(again, firstTry)
			}
			if pause.For(ctx, rate) != nil {
				return
			}
		}
		if err == nil && !next.IsZero() {
			again = min(again, max(time.Until(next), rate))
		}
		select {
		case <-ctx.Done():
			return
		case <-news:
		case <-time.After(again):
		}
	}
}

func keptText(kept, all int) string {
	if kept == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d backends are not found any more, and stay because of least", kept, all)
}

// usableBackends returns the backends that the service supports, with defaults for missing values. refused
// names the first backend with an address that no server can have, or "".
func (w *watch) usableBackends(found []config.Backend) (list []config.Backend, refused string) {
	names := map[string]bool{}
	for _, b := range found {
		if b.Address = b.Address.Unmap(); b.Address.Is4() && !w.spec.v4 || b.Address.Is6() && !w.spec.v6 {
			continue
		}
		if !config.HostAddress(b.Address) {
			refused = cmp.Or(refused, fmt.Sprintf("%s is not the address of a server, and is left out", b.Address))
			continue
		}
		if b.Port == 0 {
			b.Port = w.spec.from.Port
		}
		if b.Name == "" {
			b.Name = b.Address.String()
		}
		if names[b.Name] {
			b.Name = fmt.Sprintf("%s-%d", b.Name, b.Port)
		}
		names[b.Name] = true
		b.Weight, b.Priority = max(b.Weight, 1), max(b.Priority, 1)
		if list = append(list, b); len(list) == most {
			break
		}
	}
	return list, refused
}

// apply reports whether the backends are in force.
func (w *watch) apply(ctx context.Context, list []config.Backend) bool {
	f, name := w.finder, w.spec.service
	if list == nil {
		list = []config.Backend{}
	}
	if err := f.applyWaiting(ctx, name, list); err != nil {
		if ctx.Err() == nil {
			w.setTrouble(fmt.Sprintf("%v: the last result remains in force", err))
		}
		return false
	}
	f.opt.Log.Info("backends found", "service", name, "from", w.spec.from.Origin(), "backends", len(list))
	w.mu.Lock()
	w.since = time.Now()
	w.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last[name] = savedResult{Origin: w.spec.from.Origin(), Namespace: f.opt.Namespace, Backends: list}
	f.save()
	return true
}

// setTrouble records the reason why the backends in force may be outdated, and logs it once.
func (w *watch) setTrouble(trouble string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if trouble != "" && trouble != w.trouble {
		w.finder.opt.Log.Warn("backends-from", "service", w.spec.service, "from", w.spec.from.Origin(), "trouble", trouble)
	}
	w.trouble = trouble
}

// Status is the result of discovery for a service.
type Status struct {
	Service string
	Origin  string
	Trouble string    // setTrouble records the reason why the backends in force may be outdated, and logs it once.
	Since   time.Time // of the last change; zero: before the start
}

// Statuses returns the status of each service with a source, sorted by name.
func (f *Finder) Statuses() []Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []Status
	for _, name := range slices.Sorted(maps.Keys(f.watches)) {
		w := f.watches[name]
		w.mu.Lock()
		list = append(list, Status{name, w.spec.from.Origin(), w.trouble, w.since})
		w.mu.Unlock()
	}
	return list
}

// Warnings returns which sources do not answer, so that their last results stay in force, and whether
// the file of the results could not be read or written.
func (f *Finder) Warnings() []string {
	var list []string
	f.mu.Lock()
	if f.unsaved != "" {
		list = append(list, f.unsaved)
	}
	f.mu.Unlock()
	for _, s := range f.Statuses() {
		if s.Trouble != "" {
			list = append(list, fmt.Sprintf("service %s: backends from %s: %s", s.Service, s.Origin, strings.ReplaceAll(s.Trouble, "\n", "; ")))
		}
	}
	return list
}

// save writes the results to the file. The caller holds the lock.
func (f *Finder) save() {
	before := f.unsaved
	f.unsaved = ""
	if err := saveResults(f.opt.Path, f.last); err != nil {
		f.unsaved = fmt.Sprintf("the backends found will not be known after a restart: %v", err)
	}
	if f.unsaved != "" && f.unsaved != before {
		f.opt.Log.Warn("backends-from", "trouble", f.unsaved)
	}
}
