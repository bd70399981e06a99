// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/disk/damage"
)

// slow returns a service with slow-start and one backend for each weight.
func slow(weights ...int) config.Service {
	s := service("web")
	s.Scheduler, s.SlowStart = config.SchedulerWRR, config.Duration(30*time.Second)
	for i, w := range weights {
		s.Backends = append(s.Backends, config.Backend{Name: string(rune('a' + i)), Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Weight: w, Priority: 1})
	}
	return s
}

// TestSlowStart: a new backend reaches its weight in ten steps. Existing backends keep their shares, and nothing
// is applied without a starting backend.
func TestSlowStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, h := &fake{name: "ebpf"}, all("a", "b", "c")
		e := New(Options{Datapaths: []datapath.Datapath{d}, Health: h})
		apply := func(s config.Service) {
			t.Helper()
			if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{s}}); err != nil {
				t.Fatal(err)
			}
		}
		apply(slow(1, 2))
		if w := d.last().Services[0].Weights; w != nil {
			t.Errorf("the first apply starts slowly: %v", w)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go e.Run(ctx)
		time.Sleep(time.Minute)
		if n := len(d.applied); n != 1 {
			t.Errorf("%d applies while nothing comes", n)
		}
		h.set("b", false)
		e.BackendChanged()
		time.Sleep(time.Second)
		h.set("b", true)
		e.BackendChanged()
		time.Sleep(31 * time.Second)
		synctest.Wait()
		var steps []string
		for _, s := range d.applied[2:] {
			steps = append(steps, fmt.Sprint(s.Services[0].Weights))
		}
		want := "[10 2] [10 4] [10 6] [10 8] [10 10] [10 12] [10 14] [10 16] [10 18] []"
		if got := strings.Join(steps, " "); got != want {
			t.Errorf("steps %s\nwant  %s", got, want)
		}

		h.set("c", true)
		apply(slow(1, 2, 1)) // c is added
		if w := d.last().Services[0].Weights; !slices.Equal(w, []int{10, 20, 1}) {
			t.Errorf("a new backend begins with %v", w)
		}
		if why := e.View().Services[0].Why[2]; why != "slow start: 10 % of its weight" {
			t.Errorf("why: %s", why)
		}
		time.Sleep(15 * time.Second)
		moved := slow(1, 2, 1)
		moved.Backends[0].Address = netip.MustParseAddr("10.0.0.9") // another server under the same name
		apply(moved)
		if w := d.last().Services[0].Weights; !slices.Equal(w, []int{1, 20, 6}) {
			t.Errorf("while one comes, another begins: %v", w)
		}
		moved.SlowStart = 0
		moved.Backends = slices.Clone(moved.Backends)
		apply(moved)
		time.Sleep(5 * time.Second)
		if w := d.last().Services[0].Weights; w != nil {
			t.Errorf("without slow-start: %v", w)
		}
	})
}

// TestSlowStartOverRestart: a backend in slow-start continues its start after a restart of the daemon. A backend
// with its full weight, or with another address, has its weight at once.
func TestSlowStartOverRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, opt := all("a", "b"), Options{Coming: filepath.Join(t.TempDir(), "state", "slow-start.json")}
		restart := func(s config.Service) (*Engine, *fake) {
			t.Helper()
			d := &fake{name: "ebpf"}
			opt.Datapaths, opt.Health = []datapath.Datapath{d}, h
			e := New(opt)
			if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{s}}); err != nil {
				t.Fatal(err)
			}
			return e, d
		}
		expect := func(d *fake, want ...int) {
			t.Helper()
			if w := d.last().Services[0].Weights; !slices.Equal(w, want) {
				t.Errorf("weights %v, want %v", w, want)
			}
		}
		e, d := restart(slow(1, 2))
		expect(d)
		if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{slow(1, 2, 1)}}); err != nil {
			t.Fatal(err)
		}
		h.set("c", true)
		if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{slow(1, 2, 1)}}); err != nil {
			t.Fatal(err)
		}
		expect(d, 10, 20, 1)
		time.Sleep(15 * time.Second)
		_, d = restart(slow(1, 2, 1))
		expect(d, 10, 20, 6)
		other := slow(1, 2, 1)
		other.Backends[2].Port = 81
		_, d = restart(other)
		expect(d)
		_, d = restart(slow(1, 2, 1)) // the previous daemon has not started any backend
		expect(d)
	})
}

// TestSlowStartOverRestartEnds: after a restart, a backend reaches its full weight.
func TestSlowStartOverRestartEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opt := Options{Coming: filepath.Join(t.TempDir(), "slow-start.json")}
		since, err := time.Now().Add(-20 * time.Second).UTC().MarshalText()
		if err == nil {
			err = os.WriteFile(opt.Coming, fmt.Appendf(nil, `[{"service":"web","backend":"a","to":"10.0.0.1:0","since":%q}]`, since), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		d := &fake{name: "ebpf"}
		opt.Datapaths, opt.Health = []datapath.Datapath{d}, all("a", "b")
		e := New(opt)
		if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{slow(1, 1)}}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go e.Run(ctx)
		time.Sleep(11 * time.Second)
		synctest.Wait()
		var steps []string
		for _, s := range d.applied {
			steps = append(steps, fmt.Sprint(s.Services[0].Weights))
		}
		if got, want := strings.Join(steps, " "), "[7 10] [8 10] [9 10] []"; got != want {
			t.Errorf("steps %s\nwant  %s", got, want)
		}
		if raw, err := os.ReadFile(opt.Coming); err != nil || string(raw) != "null" {
			t.Errorf("in the end the file says %s, %v", raw, err)
		}
	})
}

// TestSlowStartOfMany: a hundred backends that start one after the other cost at most one apply per second.
func TestSlowStartOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, h := &fake{name: "ebpf"}, all()
		e := New(Options{Datapaths: []datapath.Datapath{d}, Health: h, Settle: time.Millisecond})
		s := slow(slices.Repeat([]int{1}, 100)...)
		for i := range s.Backends {
			s.Backends[i].Name = fmt.Sprint("b", i)
			h.set(s.Backends[i].Name, false)
		}
		if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{s}}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go e.Run(ctx)
		for i := range s.Backends {
			h.set(s.Backends[i].Name, true)
			e.BackendChanged()
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(d.applied); n > 1+100+40 { // the first apply, one per new backend, and the steps
			t.Errorf("%d applies", n)
		}
		if w := d.last().Services[0].Weights; w != nil {
			t.Errorf("in the end %v", w)
		}
	})
}

// TestSlowScale: light backends get every step, and tables stay small with many heavy ones.
func TestSlowScale(t *testing.T) {
	for _, c := range []struct {
		weights []int
		want    int
	}{{[]int{1}, 10}, {[]int{1, 256}, 10}, {[]int{3, 4}, 4}, {[]int{10, 20}, 1}, {slices.Repeat([]int{256, 1}, 100), 2}, {slices.Repeat([]int{256}, 4096), 1}} {
		s := slow(c.weights...)
		if got := datapath.SlowScale(&s); got != c.want {
			t.Errorf("%d backends, the first of weight %d: %d, want %d", len(c.weights), c.weights[0], got, c.want)
		}
	}
}

// TestDamagedSlowStart: a damaged file of backends in slow-start is reported and written again.
func TestDamagedSlowStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slow-start.json")
	intact := fmt.Appendf(nil, `[{"service":"web","backend":"a","to":"10.0.0.1:0","since":%q}]`, time.Now().Format(time.RFC3339))
	damage.Each(t, path, damage.All(intact, 4096), func(d damage.Damage) error {
		e := New(Options{Coming: path, Log: slog.New(slog.DiscardHandler)})
		for _, c := range e.earlier {
			if c.Since.After(time.Now()) {
				return fmt.Errorf("%v began in the future", c)
			}
		}
		if d.Content == nil && (d.Name != "missing") != (len(e.warnings()) == 1) {
			return fmt.Errorf("warnings %v", e.warnings())
		}
		if e.unkept != "" {
			if e.saveStarting(nil); (len(e.warnings()) == 0) == (d.Name == "directory") {
				return fmt.Errorf("after writing: warnings %v", e.warnings())
			}
		}
		return nil
	})
}

// TestUnfitFoundBackends: invalid backends from an earlier process do not prevent the configuration from being
// in force.
func TestUnfitFoundBackends(t *testing.T) {
	p := &fake{name: "nftables"}
	e := New(Options{Datapaths: []datapath.Datapath{p}, Log: slog.New(slog.DiscardHandler)})
	_, _ = e.SetFound(t.Context(), map[string][]config.Backend{"web": {{Name: "bad name!", Address: netip.MustParseAddr("10.0.0.9"), Weight: -1}}})
	cfg, err := config.Decode("test", []byte(`{services: [{name: web, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.1, ports: [80]}], backends-from: {directory: /x}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Error(err)
	}
	if found := e.Found()["web"]; len(found) > 0 {
		t.Errorf("in force are %v", found)
	}
}
