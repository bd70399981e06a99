// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/flow"
)

// gatewayWith returns a gateway with a service of two backends.
func gatewayWith(t *testing.T, text string) *gateway {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "sluice.yaml")
	write(t, file, text)
	return begin(t, file, filepath.Join(dir, "store"))
}

func (g *gateway) set(t *testing.T, service, backend string, to Override) {
	t.Helper()
	if err := g.SetState(t.Context(), me, service, backend, to, nil); err != nil {
		t.Fatal(err)
	}
}

// TestDrainEnds: at the deadline connections continue or end, as configured, also after a restart of the daemon.
func TestDrainEnds(t *testing.T) {
	for then, want := range map[string]string{"": "10.0.0.1 drain, 10.0.0.2 up", Keep: "10.0.0.1 drain, 10.0.0.2 up", Reset: "10.0.0.1 down, 10.0.0.2 up"} {
		t.Run("then "+then, func(t *testing.T) {
			g := gatewayWith(t, two)
			g.set(t, "web", "a", Override{State: "drain", Deadline: time.Hour, Then: then})
			g.want(t, "10.0.0.1 drain, 10.0.0.2 up")
			begun := time.Now()
			g.endDrains(t.Context(), begun.Add(59*time.Minute))
			g = begin(t, g.file, g.at)
			g.want(t, "10.0.0.1 drain, 10.0.0.2 up")
			if d := g.Drains()[engine.Backend{Service: "web", Name: "a"}]; d.Until.Sub(begun).Round(time.Minute) != time.Hour {
				t.Errorf("after a restart: %+v", d)
			}
			g.endDrains(t.Context(), begun.Add(61*time.Minute))
			g.want(t, want)
			revision := g.Changes().Revision
			g.endDrains(t.Context(), begun.Add(62*time.Minute))
			if g.Changes().Revision != revision {
				t.Error("a drain ends twice")
			}
			g = begin(t, g.file, g.at)
			g.want(t, want)
			if _, err := g.Revert(t.Context(), me, 2); err != nil { // the drain, with its deadline
				t.Fatal(err)
			}
			if s := g.Changes().States; len(s) != 1 || s[0].State != "drain" || s[0].Until.IsZero() {
				t.Errorf("reverted to %v", s)
			}
			g.set(t, "web", "a", Override{State: "auto"})
			g.want(t, "10.0.0.1 up, 10.0.0.2 up")
		})
	}
}

// TestDrainOfTheGateway: no backend gets new connections, whatever its override, until the drain is cancelled.
// At the deadline the connections end.
func TestDrainOfTheGateway(t *testing.T) {
	g := gatewayWith(t, two)
	g.set(t, "web", "b", Override{State: "up"})
	g.set(t, "", "", Override{State: "drain", Deadline: time.Minute, Then: Reset})
	g.want(t, "10.0.0.1 drain, 10.0.0.2 drain")
	g = begin(t, g.file, g.at)
	g.want(t, "10.0.0.1 drain, 10.0.0.2 drain")
	if whole, ok := g.Drains()[engine.Backend{}]; !ok || whole.Then != Reset {
		t.Errorf("%+v", whole)
	}
	if why := g.engine.View().Services[0].Why[0]; !strings.HasPrefix(why, "the gateway drains until ") || !strings.HasSuffix(why, ", then its connections are ended") {
		t.Errorf("why: %s", why)
	}
	g.endDrains(t.Context(), time.Now().Add(2*time.Minute))
	g.want(t, "10.0.0.1 down, 10.0.0.2 down")
	g.set(t, "", "", Override{State: "auto"})
	g.want(t, "10.0.0.1 up, 10.0.0.2 up")
	if len(g.Drains()) != 0 {
		t.Errorf("drains %v", g.Drains())
	}
}

// TestDrainWaitsForATrial: the end of a drain is a change, which waits while another one is on trial. A refused
// one is tried again.
func TestDrainWaitsForATrial(t *testing.T) {
	g := gatewayWith(t, two)
	g.set(t, "web", "a", Override{State: "drain", Deadline: time.Minute, Then: Reset})
	if _, err := g.Apply(t.Context(), me, decode(t, strings.Replace(two, "10.0.0.2", "10.0.0.3", 1)), nil, time.Hour); err != nil {
		t.Fatal(err)
	}
	late := time.Now().Add(2 * time.Minute)
	g.endDrains(t.Context(), late)
	g.want(t, "10.0.0.1 drain, 10.0.0.3 up")
	if err := g.Confirm(t.Context(), me); err != nil {
		t.Fatal(err)
	}
	g.path.refuse = errors.New("no room")
	g.endDrains(t.Context(), late)
	g.path.refuse = nil
	g.endDrains(t.Context(), late.Add(time.Second))
	g.want(t, "10.0.0.1 drain, 10.0.0.3 up")
	g.endDrains(t.Context(), late.Add(retryBack))
	g.want(t, "10.0.0.1 down, 10.0.0.3 up")
}

// TestConnectionsLeft counts the connections of draining backends, and estimates when none is left.
func TestConnectionsLeft(t *testing.T) {
	g := gatewayWith(t, two)
	a := engine.Backend{Service: "web", Name: "a"}
	g.flows(100, "a")
	g.set(t, "web", "a", Override{State: "drain"})
	if d := g.Drains()[a]; d.Left != -1 || !d.Counted.IsZero() {
		t.Errorf("before the first count: %+v", d)
	}
	start := time.Now()
	g.countDrains(t.Context(), start)
	g.flows(75, "a")
	g.countDrains(t.Context(), start.Add(50*time.Second))
	if d := g.Drains()[a]; d.Left != 75 || d.Estimate != 150*time.Second {
		t.Errorf("%+v, want 75 left and 2.5 minutes", d)
	}
	g.set(t, "", "", Override{State: "drain"})
	g.countDrains(t.Context(), start.Add(60*time.Second))
	if whole := g.Drains()[engine.Backend{}]; whole.Left != 75 {
		t.Errorf("the whole gateway: %+v", whole)
	}
	g.flows(0, "a")
	g.countDrains(t.Context(), start.Add(70*time.Second))
	g.countDrains(t.Context(), start.Add(80*time.Second))
	told := 0
	events, _, _ := g.Events.After(0, 100)
	for _, e := range events {
		if e.Text == "backend web/a is drained: no connection is left" {
			told++
		}
	}
	if told != 1 {
		t.Errorf("told %d times that none is left", told)
	}
}

// flows gives the datapath n connections to a backend of web, one to another backend, and an ended one.
func (g *gateway) flows(n int, backend string) {
	of := func(backend, state string) flow.Flow {
		return flow.Flow{Original: flow.Tuple{Protocol: flow.TCP, Source: netip.MustParseAddrPort("198.51.100.1:1000")}, Owner: "web", Backend: backend, State: state}
	}
	g.path.flows = []flow.Flow{of("other", "ESTABLISHED"), of(backend, "TIME_WAIT")}
	for range n {
		g.path.flows = append(g.path.flows, of(backend, "ESTABLISHED"))
	}
}

// slowCounts is a datapath that takes ten seconds to read its flows.
type slowCounts struct {
	fake
	ended []time.Time // times of applies that set backend a down
}

func (f *slowCounts) Flows(context.Context, func(flow.Flow) bool) error {
	time.Sleep(10 * time.Second)
	return nil
}

func (f *slowCounts) Apply(ctx context.Context, s *datapath.Snapshot) (*datapath.Change, error) {
	change, err := f.fake.Apply(ctx, s)
	if strings.Contains(f.state(), "10.0.0.1 down") {
		f.ended = append(f.ended, time.Now())
	}
	return change, err
}

// TestDrainEndsAtItsDeadline: a drain ends to the millisecond, also while connections are being counted. The
// bubble's clock advances only while all goroutines wait.
func TestDrainEndsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		file := filepath.Join(dir, "sluice.yaml")
		write(t, file, two)
		f := &slowCounts{}
		g := beginOn(t, f, file, filepath.Join(dir, "store"))
		ctx, cancel := context.WithCancel(t.Context())
		go g.Run(ctx)
		time.Sleep(7300*time.Microsecond + 4*time.Second)
		for _, deadline := range []time.Duration{time.Second, 2700 * time.Millisecond, time.Hour + 499*time.Millisecond} {
			g.set(t, "web", "a", Override{State: "drain", Deadline: deadline, Then: Reset})
			due := time.Now().Add(deadline).Truncate(time.Millisecond)
			time.Sleep(deadline + 5*time.Second)
			if len(f.ended) != 1 || !f.ended[0].Equal(due) {
				t.Errorf("deadline %v: ended at %v, due at %v", deadline, f.ended, due)
			}
			g.set(t, "web", "a", Override{State: "auto"})
			f.ended = nil
		}
		cancel()
		time.Sleep(time.Minute) // until the last count has ended
	})
}

// TestStatesThatAreNone: invalid states are refused, and nothing changes.
func TestStatesThatAreNone(t *testing.T) {
	g := gatewayWith(t, two)
	for want, to := range map[string]Override{
		`state "sideways": not one of`:           {State: "sideways"},
		"only drain has a deadline":              {State: "down", Deadline: time.Minute},
		"only drain has":                         {State: "auto", Then: Keep},
		`then "drop": not one of keep, reset`:    {State: "drain", Deadline: time.Minute, Then: "drop"},
		"then reset: without a deadline a drain": {State: "drain", Then: Reset},
		"deadline 1ms: not between 1s and 720h":  {State: "drain", Deadline: time.Millisecond},
		"deadline 800h0m0s: not between 1s and ": {State: "drain", Deadline: 800 * time.Hour},
	} {
		if err := g.SetState(t.Context(), me, "web", "a", to, nil); !errors.Is(err, ErrState) || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", to, err, want)
		}
	}
	if err := g.SetState(t.Context(), me, "", "", Override{State: "down"}, nil); !errors.Is(err, ErrState) {
		t.Errorf("the whole gateway down: %v", err)
	}
	if c := g.Changes(); c.Revision != 1 {
		t.Errorf("revision %d", c.Revision)
	}
}
