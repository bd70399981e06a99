// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-lb/sluice/config"
)

// servers is a Prober with servers that a test takes down and brings back.
type servers struct {
	mu     sync.Mutex
	down   map[string]error         // by backend
	silent map[string]bool          // answers nothing: the probe runs into its timeout
	times  map[string][]time.Time   // when probes began
	took   map[string]time.Duration // how long a good answer takes
}

func newServers() *servers {
	return &servers{down: map[string]error{}, silent: map[string]bool{}, times: map[string][]time.Time{}, took: map[string]time.Duration{}}
}

func (s *servers) Probe(ctx context.Context, t *Target) error {
	s.mu.Lock()
	s.times[t.Backend] = append(s.times[t.Backend], time.Now())
	silent, err, took := s.silent[t.Backend], s.down[t.Backend], s.took[t.Backend]
	s.mu.Unlock()
	if silent {
		<-ctx.Done()
		return ctx.Err()
	}
	if took > 0 {
		time.Sleep(took)
	}
	return err
}

func (s *servers) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *servers) count(backend string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.times[backend])
}

// farm is a configuration of one service with n backends b0, b1, ...
func farm(n int, check config.Check) *config.Config {
	s := config.Service{Name: "web", Mode: config.ModeDNAT, Protocol: 6, Check: &check,
		Listen: []config.Listen{{Address: netip.MustParseAddr("192.0.2.10")}}}
	for i := range n {
		s.Backends = append(s.Backends, config.Backend{Name: fmt.Sprintf("b%d", i), Port: 80,
			Address: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})})
	}
	c := &config.Config{Services: []config.Service{s}}
	c.SetDefaults()
	return c
}

func tcp(interval, timeout time.Duration, rise, fall int) config.Check {
	return config.Check{Type: config.CheckTCP, Interval: config.Duration(interval), Timeout: config.Duration(timeout), Rise: rise, Fall: fall}
}

// monitor starts a Monitor over s within a synctest bubble.
func monitor(t *testing.T, s Prober, opt Options) *Monitor {
	opt.Probers = map[config.CheckType]Prober{config.CheckTCP: s}
	if opt.TableDrops == nil {
		opt.TableDrops = func() (uint32, error) { return 0, nil }
	}
	m := New(opt)
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestDownAndUpAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServers()
		var events []Transition
		m := monitor(t, s, Options{OnChange: func(e Transition) { events = append(events, e) }})
		m.Configure(farm(1, tcp(time.Second, 500*time.Millisecond, 2, 3)))
		if _, known := m.Healthy("web", "b0"); known {
			t.Error("known before the first probe")
		}
		time.Sleep(5 * time.Second)
		s.set(func() { s.down["b0"] = errors.New("connection refused") })
		failed := time.Now()
		time.Sleep(5 * time.Second)
		s.set(func() { delete(s.down, "b0") })
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if len(events) != 3 || !events[0].Up || events[1].Up || !events[2].Up {
			t.Fatalf("events %+v", events)
		}
		if e := events[1]; e.Since.Sub(failed) > 3500*time.Millisecond || e.Service != "web" || e.Backend != "b0" ||
			e.Reason != "3 probes in a row failed: connection refused" {
			t.Errorf("down after %s: %+v", e.Since.Sub(failed), e)
		}
		if st, ok := m.State("web", "b0"); !ok || !st.Up || !st.Since.Equal(events[2].Since) || st.Failures < 3 || st.Error != "" {
			t.Errorf("status %+v", st)
		}
	})
}

// TestDetectionWindow: for every check and moment, a failing backend is reported within interval × fall + 0.5 s,
// after exactly fall failed probes. It fails by refusal or by silence.
func TestDetectionWindow(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 300 {
		interval := time.Duration(100+rng.IntN(5000)) * time.Millisecond
		timeout := time.Duration(1 + rng.Int64N(int64(interval)-1))
		check := tcp(interval, timeout, 1, 1+rng.IntN(5))
		jitter := rng.Float64() / 2
		check.Jitter = &jitter
		silent, life := rng.IntN(2) == 0, time.Duration(rng.Int64N(int64(5*interval)))+2*interval
		synctest.Test(t, func(t *testing.T) {
			s := newServers()
			s.took["b0"] = min(timeout/2, 10*time.Millisecond)
			var down []Transition
			m := monitor(t, s, Options{OnChange: func(e Transition) {
				if !e.Up {
					down = append(down, e)
				}
			}})
			m.Configure(farm(1, check))
			time.Sleep(life)
			var before int
			s.set(func() {
				before = len(s.times["b0"])
				s.silent["b0"] = silent
				s.down["b0"] = errors.New("refused")
			})
			died := time.Now()
			limit := interval*time.Duration(check.Fall) + 500*time.Millisecond
			time.Sleep(limit)
			synctest.Wait()
			if len(down) != 1 || down[0].Since.Sub(died) > limit {
				t.Fatalf("case %d: interval %s, timeout %s, fall %d, jitter %.2f, silent %v: events %v, %d probes since",
					i, interval, timeout, check.Fall, jitter, silent, down, s.count("b0")-before)
			}
			bad := 0
			for _, at := range s.times["b0"][before:] {
				if !at.After(down[0].Since) {
					bad++
				}
			}
			if bad < check.Fall || bad > check.Fall+1 {
				t.Errorf("case %d: reported after %d bad probes, want %d", i, bad, check.Fall)
			}
		})
	}
}

// TestReloadKeepsState: a reload of the same backends begins nothing anew.
func TestReloadKeepsState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServers()
		s.down["b1"] = errors.New("refused")
		m := monitor(t, s, Options{})
		check := tcp(time.Second, 100*time.Millisecond, 2, 3)
		m.Configure(farm(3, check))
		time.Sleep(10 * time.Second)
		before := m.Snapshot()
		for range 100 {
			m.Configure(farm(3, check))
		}
		if after := m.Snapshot(); fmt.Sprint(after) != fmt.Sprint(before) {
			t.Errorf("before %v\nafter  %v", before, after)
		}
		// A longer interval is no other server.
		check.Interval = config.Duration(2 * time.Second)
		m.Configure(farm(3, check))
		if up, known := m.Healthy("web", "b0"); !up || !known {
			t.Error("b0 forgotten by a change of the interval")
		}
		// Another address is.
		cfg := farm(3, check)
		cfg.Services[0].Backends[0].Address = netip.MustParseAddr("10.9.9.9")
		m.Configure(cfg)
		if _, known := m.Healthy("web", "b0"); known {
			t.Error("the state of the old address is told for the new one")
		}
		if up, known := m.Healthy("web", "b1"); up || !known {
			t.Error("b1 forgotten")
		}
		// A removed backend is probed no more.
		m.Configure(farm(2, check))
		if _, ok := m.State("web", "b2"); ok {
			t.Error("b2 still there")
		}
		n := s.count("b2")
		time.Sleep(10 * time.Second)
		if s.count("b2") != n {
			t.Error("b2 still probed")
		}
		m.Configure(nil)
		n = s.count("b0")
		time.Sleep(10 * time.Second)
		if s.count("b0") != n || len(m.Snapshot()) != 0 {
			t.Error("probes go on without a configuration")
		}
	})
}

func TestInitialUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServers()
		s.silent["b0"] = true
		m := monitor(t, s, Options{})
		check := tcp(time.Second, 100*time.Millisecond, 1, 2)
		check.Initial = "up"
		m.Configure(farm(1, check))
		if up, known := m.Healthy("web", "b0"); !up || known {
			t.Error("not up before the first probe")
		}
		time.Sleep(2*time.Second + 500*time.Millisecond)
		if up, known := m.Healthy("web", "b0"); up || !known {
			t.Error("up after its probes failed: " + m.Why("web", "b0"))
		}
	})
}

// TestManyBackends: probes are spread over the interval, no more than allowed
// run at once, and none is starved.
func TestManyBackends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n, most = 5000, 700
		var now, peak atomic.Int64
		p := proberFunc(func(ctx context.Context, _ *Target) error {
			peak.Store(max(peak.Load(), now.Add(1)))
			defer now.Add(-1)
			time.Sleep(200 * time.Millisecond)
			return nil
		})
		m := monitor(t, p, Options{MaxInFlight: most})
		m.Configure(farm(n, tcp(2*time.Second, 400*time.Millisecond, 1, 1)))
		time.Sleep(30 * time.Second)
		var least, total uint64 = 1 << 62, 0
		for _, s := range m.Snapshot() {
			least, total = min(least, s.Probes), total+s.Probes
			if !s.Up {
				t.Fatalf("%+v", s)
			}
		}
		if peak.Load() > most {
			t.Errorf("%d probes at once, want at most %d", peak.Load(), most)
		}
		if least < 13 || total > n*20 {
			t.Errorf("in 30 s every 2 s: one backend had %d probes, all had %d", least, total)
		}
	})
}

type proberFunc func(context.Context, *Target) error

func (f proberFunc) Probe(ctx context.Context, t *Target) error { return f(ctx, t) }

// TestLateIsTold: if too few probes may run, the status contains the delay.
func TestLateIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServers()
		for i := range 10 {
			s.silent[fmt.Sprintf("b%d", i)] = true
		}
		m := monitor(t, s, Options{MaxInFlight: 1})
		m.Configure(farm(10, tcp(time.Second, 500*time.Millisecond, 1, 1)))
		time.Sleep(20 * time.Second)
		if st, _ := m.State("web", "b3"); st.Late == 0 {
			t.Errorf("%+v", st)
		}
	})
}

func TestPanicIsAFailedProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := monitor(t, proberFunc(func(context.Context, *Target) error { panic("broken") }), Options{})
		m.Configure(farm(1, tcp(time.Second, 500*time.Millisecond, 1, 1)))
		time.Sleep(3 * time.Second)
		if up, known := m.Healthy("web", "b0"); up || !known {
			t.Error("a prober that panics counts as good")
		}
	})
}

// BenchmarkConfigure reloads 40,000 backends with one change.
func BenchmarkConfigure(b *testing.B) {
	cfgs := [2]*config.Config{}
	for i := range cfgs {
		c := &config.Config{}
		for s := range 10_000 {
			f := farm(4, tcp(2*time.Second, time.Second, 2, 3))
			f.Services[0].Name = fmt.Sprint("s", s)
			c.Services = append(c.Services, f.Services[0])
		}
		c.Services[0].Backends[0].Port = uint16(80 + i)
		cfgs[i] = c
	}
	m := New(Options{Probers: map[config.CheckType]Prober{config.CheckTCP: proberFunc(func(context.Context, *Target) error { return nil })}})
	defer m.Close()
	m.Configure(cfgs[1])
	for i := 0; b.Loop(); i++ {
		m.Configure(cfgs[i%2])
	}
}
