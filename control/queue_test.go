// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
)

// gate is a datapath that counts snapshots, blocks them while it is closed, and refuses snapshots with a backend
// of weight 13.
type gate struct {
	fake
	applies int
	reached chan struct{} // receives an element for each snapshot
	open    chan struct{}
}

func (g *gate) Apply(ctx context.Context, s *datapath.Snapshot) (*datapath.Change, error) {
	g.applies++
	g.reached <- struct{}{}
	<-g.open
	for _, sv := range s.Services {
		if slices.ContainsFunc(sv.Backends, func(b config.Backend) bool { return b.Weight == 13 }) {
			return nil, errors.New("the kernel refuses 13")
		}
	}
	return g.fake.Apply(ctx, s)
}

// beginGated starts control with a gate and n services.
func beginGated(t *testing.T, n int) (*gateway, *gate) {
	t.Helper()
	var text strings.Builder
	text.WriteString("services:\n")
	for i := range n {
		fmt.Fprintf(&text, "  - {name: s%d, listen: [{address: 192.0.2.10, ports: [%d]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.0.1}]}\n", i, 80+i)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file, text.String())
	p := &gate{reached: make(chan struct{}, 1000), open: make(chan struct{})}
	close(p.open)
	g := beginOn(t, p, file, filepath.Join(dir, "store"))
	<-p.reached
	p.applies, p.open = 0, make(chan struct{})
	return g, p
}

// TestChangesAreMadeTogether: changes that arrive during an apply share the next one. Each has its own result,
// and changes that the configuration or the kernel refuses are refused separately.
func TestChangesAreMadeTogether(t *testing.T) {
	const n = 20
	g, path := beginGated(t, n)
	weight := func(i, w int) error {
		_, err := g.Change(t.Context(), Author{fmt.Sprintf("client %d", i), fmt.Sprintf("weight %d", i)}, func(c *config.Config) (*config.Config, error) {
			return c.Put(fmt.Sprintf("services/s%d/backends/a/weight", i), fmt.Append(nil, w))
		})
		return err
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	wg.Go(func() { errs[0] = weight(0, 5) })
	<-path.reached // the first change is being applied
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for i := 1; i < n; i++ {
		wg.Go(func() {
			switch i {
			case 1:
				errs[i] = weight(i, 700)
			case 2:
				errs[i] = g.SetState(t.Context(), me, "s2", "nobody", Override{State: "down"}, nil)
			case 3:
				errs[i] = g.SetState(t.Context(), me, "s3", "a", Override{State: "drain"}, nil)
			case 4:
				errs[i] = g.SetState(gone, me, "s4", "a", Override{State: "drain"}, nil)
			default:
				errs[i] = weight(i, 5)
			}
		})
	}
	for waits := 0; waits < n-1; { // until all wait
		waits = g.waiting.Len()
	}
	close(path.open)
	wg.Wait()
	for i, want := range map[int]string{1: "700 is out of range", 2: "no backend nobody", 4: "context canceled"} {
		if errs[i] == nil || !strings.Contains(errs[i].Error(), want) {
			t.Errorf("change %d: %v, want %q", i, errs[i], want)
		}
		errs[i] = nil
	}
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
	if path.applies != 2 {
		t.Errorf("%d changes took %d applies, want 2", n, path.applies)
	}
	for i, s := range path.last.Services {
		want := map[bool]int{true: 1, false: 5}[i >= 1 && i <= 4]
		if s.Backends[0].Weight != want || (s.State[0] == datapath.Drain) != (i == 3) {
			t.Errorf("service %s: weight %d, %s", s.Name, s.Backends[0].Weight, s.State[0])
		}
	}
	last := g.Changes().History
	if by := last[len(last)-1]; !strings.Contains(by.What, "weight 9") && !strings.Contains(by.What, "more") || !strings.Contains(by.Who, "client") {
		t.Errorf("the history says %q by %q", by.What, by.Who)
	}
}

// TestOneOfSeveralIsRefused: a change that the kernel refuses does not affect the changes of the same batch.
func TestOneOfSeveralIsRefused(t *testing.T) {
	g, path := beginGated(t, 4)
	errs := make([]error, 4)
	var wg sync.WaitGroup
	change := func(i, weight int) {
		_, errs[i] = g.Change(t.Context(), me, func(c *config.Config) (*config.Config, error) {
			return c.Put(fmt.Sprintf("services/s%d/backends/a/weight", i), fmt.Append(nil, weight))
		})
	}
	wg.Go(func() { change(0, 2) })
	<-path.reached
	for i, w := range map[int]int{1: 2, 2: 13, 3: 2} {
		wg.Go(func() { change(i, w) })
	}
	for waits := 0; waits < 3; {
		waits = g.waiting.Len()
	}
	close(path.open)
	wg.Wait()
	for i, err := range errs {
		if refused := err != nil; refused != (i == 2) {
			t.Errorf("change %d: %v", i, err)
		}
	}
	for i := range 4 {
		if w, want := path.last.Services[i].Backends[0].Weight, map[bool]int{true: 1, false: 2}[i == 2]; w != want {
			t.Errorf("service s%d has weight %d, want %d", i, w, want)
		}
	}
	if err := g.SetState(t.Context(), me, "s0", "nobody", Override{State: "up"}, nil); !errors.Is(err, engine.ErrNotFound) {
		t.Errorf("a backend that is not there: %v", err)
	}
}

// TestAnswersDoNotWaitForWhatFollows: a change has its result while the next ones are being applied. The result
// describes the configuration at its time.
func TestAnswersDoNotWaitForWhatFollows(t *testing.T) {
	g, path := beginGated(t, 4)
	applied := make([]engine.Applied, 4)
	answered := make([]chan struct{}, 4)
	change := func(i int) {
		answered[i] = make(chan struct{})
		go func() {
			defer close(answered[i])
			applied[i], _ = g.Change(t.Context(), me, func(c *config.Config) (*config.Config, error) {
				return c.Put(fmt.Sprintf("services/s%d/backends/a/weight", i), fmt.Append(nil, 20+i))
			})
		}()
	}
	waiting := func(want int) {
		for waits := -1; waits != want; {
			waits = g.waiting.Len()
		}
	}
	change(0)
	<-path.reached
	change(1)
	change(2)
	waiting(2)
	path.open <- struct{}{} // for the first
	<-path.reached          // two changes are being applied
	change(3)
	waiting(1)
	path.open <- struct{}{}
	<-path.reached // the last change is being applied
	for i := range 3 {
		<-answered[i]
		v := applied[i].ViewOf(map[string]bool{"s1": true})
		if len(v.Services) != 1 || v.Services[0].Place.Datapaths[0] != path.Name() {
			t.Errorf("change %d: the service is at %+v", i, v.Services)
		}
		if has := v.Config.Services[0].Backends[0].Weight == 21; has != (i > 0) || applied[i].Given.Services[3].Backends[0].Weight != 1 {
			t.Errorf("change %d tells of %+v", i, v.Config.Services[0].Backends)
		}
	}
	close(path.open)
	<-answered[3]
}
