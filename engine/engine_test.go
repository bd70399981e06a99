// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/flow"
)

// fake is a datapath that stores the last snapshot.
type fake struct {
	name    string
	refuse  func(kind, name string) error // result of Carries*
	passBy  error                         // result of Bypasses*
	fail    error                         // result of the next Apply
	applied []*datapath.Snapshot
	removed bool
	left    bool
	planned error
	touched bool // changed by another program, until the next Apply
	change  datapath.Change
	flows   []flow.Flow
	ends    int // number of flows that the next change ends
}

func (f *fake) BypassesService(*config.Service) error { return f.passBy }
func (f *fake) BypassesNAT(*config.NATRule) error     { return f.passBy }

func (f *fake) Touched() (bool, error) { return f.touched, nil }

func (f *fake) Left() (bool, error) { return f.left, nil }

func (f *fake) carries(kind, name string) error {
	if f.refuse == nil {
		return nil
	}
	return f.refuse(kind, name)
}

func (f *fake) Name() string                             { return f.name }
func (f *fake) CarriesService(s *config.Service) error   { return f.carries("service", s.Name) }
func (f *fake) CarriesNAT(n *config.NATRule) error       { return f.carries("nat", n.Name) }
func (f *fake) CarriesRule(r *config.FirewallRule) error { return f.carries("rule", r.Name) }
func (f *fake) Close() error                             { return nil }
func (f *fake) Remove(context.Context) error             { f.removed = true; return nil }
func (f *fake) Counters(context.Context) (*datapath.Counters, error) {
	return &datapath.Counters{}, nil
}
func (f *fake) Plan(context.Context, *datapath.Snapshot) (*datapath.Change, error) {
	return &datapath.Change{Datapath: f.name, Ended: f.ends}, f.planned
}

func (f *fake) Apply(_ context.Context, s *datapath.Snapshot) (*datapath.Change, error) {
	if err := f.fail; err != nil {
		f.fail = nil
		return nil, err
	}
	f.applied = append(f.applied, s)
	f.touched = false
	change := f.change
	change.Datapath = f.name
	return &change, nil
}

func (f *fake) Flows(_ context.Context, yield func(flow.Flow) bool) error {
	for _, fl := range f.flows {
		if !yield(fl) {
			break
		}
	}
	return nil
}

func (f *fake) last() *datapath.Snapshot { return f.applied[len(f.applied)-1] }

func names(s *datapath.Snapshot) (out []string) {
	for _, sv := range s.Services {
		out = append(out, sv.Name)
	}
	for _, n := range s.NAT {
		out = append(out, n.Name)
	}
	for _, r := range s.Rules {
		out = append(out, r.Name)
	}
	return out
}

// health is a Health with states that a test can change while an engine reads them.
type health struct{ words *sync.Map }

// all returns a Health with these backends up.
func all(up ...string) health {
	h := health{new(sync.Map)}
	for _, b := range up {
		h.set(b, true)
	}
	return h
}

func (h health) set(b string, up bool)    { h.words.Store(b, up) }
func (h health) Configure(*config.Config) {}
func (h health) Why(_, b string) string   { return "" }
func (h health) Healthy(_, b string) (healthy, known bool) {
	word, known := h.words.Load(b)
	return known && word.(bool), known
}

func service(name string, backends ...string) config.Service {
	s := config.Service{Name: name, Protocol: flow.TCP, Mode: config.ModeDNAT, Check: &config.Check{Type: config.CheckTCP},
		Listen: []config.Listen{{Address: netip.MustParseAddr("192.0.2.10"), Ports: []flow.Ports{{First: 80, Last: 80}}}}}
	for _, b := range backends {
		s.Backends = append(s.Backends, config.Backend{Name: b, Weight: 1, Priority: 1})
	}
	return s
}

var errRefused = errors.New("not available at XDP")

func pair() (fast, slow *fake) { return &fake{name: "ebpf"}, &fake{name: "nftables"} }

func TestARefusalLeavesEveryDatapathAsItWas(t *testing.T) {
	fast, slow := pair()
	told := ""
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}, Applied: func() { told += strings.Join(names(fast.last()), " ") + ";" }})
	before := &config.Config{Services: []config.Service{service("old", "a")}}
	if _, err := e.Apply(t.Context(), before); err != nil {
		t.Fatal(err)
	}
	slow.fail = errors.New("rule x: the kernel says no")
	_, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{service("new", "a")}})
	if err == nil || !strings.Contains(err.Error(), "nftables: rule x") {
		t.Fatalf("error %v does not name datapath and rule", err)
	}
	if got := names(fast.last()); !slices.Equal(got, []string{"old"}) {
		t.Errorf("ebpf carries %v after the refusal, want old", got)
	}
	if told != "old;old;" {
		t.Errorf("who follows the datapaths was told of %q, want old, and old again once it is back", told)
	}
	if got := e.View().Config; got != before {
		t.Error("the refused configuration is called in force")
	}
}

// TestARefusalIsTold: a refused configuration is reported as long as it is not in force. Changes of backends do
// not hide it.
func TestARefusalIsTold(t *testing.T) {
	fast, _ := pair()
	h := all("a")
	e := New(Options{Datapaths: []datapath.Datapath{fast}, Health: h})
	cfg := &config.Config{Services: []config.Service{service("web", "a")}}
	up := true
	told := func(want string) {
		t.Helper()
		up = !up
		h.set("a", up)
		if err := e.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if a := e.View().Applied; a.Revision == 0 || a.Err == nil && want != "" || a.Err != nil && !strings.Contains(a.Err.Error(), cmp.Or(want, "nothing")) {
			t.Errorf("revision %d, refused: %v, want %q", a.Revision, a.Err, want)
		}
	}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	e.RecordRefusal(errors.New("not YAML"))
	told("not YAML")
	fast.refuse = func(string, string) error { return errRefused }
	if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{service("new", "a")}}); err == nil {
		t.Fatal("no error")
	}
	told(errRefused.Error())
	fast.refuse, fast.fail = nil, errors.New("rule x")
	if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{service("new", "a")}}); err == nil {
		t.Fatal("no error")
	}
	told("rule x")
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	told("")
}

func TestARefusalOfTheFirstApplyLeavesNothing(t *testing.T) {
	fast, slow := pair()
	slow.fail = errors.New("no")
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
	if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{service("new", "a")}}); err == nil {
		t.Fatal("no error")
	}
	if !fast.removed || !slow.removed {
		t.Errorf("something stays: of ebpf %v, of nftables, which refused, %v", !fast.removed, !slow.removed)
	}
}

// TestARefusalLeavesWhatADaemonLeft: this daemon does not know the rules of an earlier one. A refused first
// configuration must not change them.
func TestARefusalLeavesWhatADaemonLeft(t *testing.T) {
	for name, refuse := range map[string]func(*fake){
		"by the plan":   func(f *fake) { f.planned = errors.New("no") },
		"by the kernel": func(f *fake) { f.fail = errors.New("no") },
	} {
		t.Run(name, func(t *testing.T) {
			fast, slow := pair()
			fast.left = true
			refuse(slow)
			e := New(Options{Datapaths: []datapath.Datapath{fast, slow}})
			if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{service("new", "a")}}); err == nil {
				t.Fatal("no error")
			}
			if len(fast.applied) != 0 || fast.removed {
				t.Errorf("ebpf was given %d snapshots; removed: %v", len(fast.applied), fast.removed)
			}
		})
	}
	fast, slow := pair()
	fast.left, slow.left = true, true
	fast.fail = errors.New("no")
	_, err := New(Options{Datapaths: []datapath.Datapath{fast, slow}}).Apply(t.Context(), &config.Config{Services: []config.Service{service("new", "a")}})
	if err == nil || !strings.Contains(err.Error(), "cannot be put back") || len(slow.applied) != 1 {
		t.Errorf("error %v, nftables was given %d snapshots; it must keep the new rules rather than none", err, len(slow.applied))
	}
}

// TestApplyIf: no other apply can run between the check of the condition and the apply.
func TestApplyIf(t *testing.T) {
	fast, _ := pair()
	e := New(Options{Datapaths: []datapath.Datapath{fast}})
	before := &config.Config{Services: []config.Service{service("old", "a")}}
	expects := func(want *config.Config) func(*config.Config) bool {
		return func(got *config.Config) bool { return got == want }
	}
	if _, err := e.ApplyIf(t.Context(), before, expects(nil)); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ApplyIf(t.Context(), &config.Config{}, expects(nil)); !errors.Is(err, ErrChanged) || len(fast.applied) != 1 {
		t.Errorf("error %v after %d applies", err, len(fast.applied))
	}
	if _, err := e.ApplyIf(t.Context(), &config.Config{}, expects(before)); err != nil {
		t.Error(err)
	}
}

// unprobed is a Health without any result.
type unprobed struct{ health }

func (unprobed) Healthy(string, string) (healthy, known bool) { return false, false }

// TestANewCheckCutsNobody: a backend in force keeps its state until its new check has a result. A new backend
// has the state in "initial".
func TestANewCheckCutsNobody(t *testing.T) {
	fast, _ := pair()
	e := New(Options{Datapaths: []datapath.Datapath{fast}, Health: unprobed{}, Settle: time.Nanosecond})
	before := service("web", "a", "b")
	before.Check = nil
	if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{before}}); err != nil {
		t.Fatal(err)
	}
	after := service("web", "a", "b", "c")
	after.Backends[1].Port = 8080 // another server
	if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{after}}); err != nil {
		t.Fatal(err)
	}
	if got := fast.last().Services[0].State; !slices.Equal(got, []datapath.State{datapath.Up, datapath.Unprobed, datapath.Unprobed}) {
		t.Errorf("states %v, want a up as it was, and the new ones without new flows until they are probed", got)
	}
	if err := e.refresh(t.Context()); err != nil || len(fast.applied) != 2 {
		t.Errorf("error %v, %d applies although nothing changed", err, len(fast.applied))
	}
}

func TestBackendsFollowTheirChecks(t *testing.T) {
	fast, _ := pair()
	h := all("a", "b")
	e := New(Options{Datapaths: []datapath.Datapath{fast}, Health: h})
	if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{service("web", "a", "b")}}); err != nil {
		t.Fatal(err)
	}
	if got := fast.last().Services[0].Active(); !slices.Equal(got, []int{0, 1}) {
		t.Fatalf("active %v", got)
	}
	h.set("a", false)
	fast.fail = errors.New("busy")
	if err := e.refresh(t.Context()); err == nil {
		t.Fatal("the datapath's error was swallowed")
	}
	if err := e.refresh(t.Context()); err != nil { // Run tries again
		t.Fatal(err)
	}
	if got := fast.last().Services[0].Active(); !slices.Equal(got, []int{1}) {
		t.Errorf("active %v after a went down", got)
	}
	n := len(fast.applied)
	if err := e.refresh(t.Context()); err != nil || len(fast.applied) != n {
		t.Error("nothing changed, and still it applied")
	}
	if err := e.SetState(t.Context(), "web", "b", datapath.Drain); err != nil {
		t.Fatal(err)
	}
	if got := fast.last().Services[0].State; !slices.Equal(got, []datapath.State{datapath.Down, datapath.Drain}) {
		t.Errorf("states %v", got)
	}
	if err := e.ClearState(t.Context(), "web", "b"); err != nil || fast.last().Services[0].State[1] != datapath.Up {
		t.Errorf("cleared override: %v, %v", err, fast.last().Services[0].State)
	}
	if err := e.SetState(t.Context(), "web", "nobody", datapath.Up); !errors.Is(err, ErrNotFound) {
		t.Errorf("unknown backend: %v", err)
	}
}

// TestTheLogTellsWhoeverAsked: a change by the API is logged like a change of the file.
func TestTheLogTellsWhoeverAsked(t *testing.T) {
	var log bytes.Buffer
	d := &fake{name: "nftables", change: datapath.Change{Rules: datapath.Count{Added: 2}, Lines: []string{"add service web"}}}
	e := New(Options{Datapaths: []datapath.Datapath{d}, Log: slog.New(slog.NewTextHandler(&log, nil)), Verbose: true})
	if _, err := e.ApplyIf(t.Context(), &config.Config{Services: []config.Service{service("web", "a")}}, nil); err != nil {
		t.Fatal(err)
	}
	if err := e.SetState(t.Context(), "web", "a", datapath.Drain); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`msg=applied datapath=nftables revision=1 rules="+2 -0 ~0"`, `msg="add service web"`,
		`msg="backend set by the operator" service=web backend=a state=drain`} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, &log)
		}
	}
}

func TestSparesServeOnlyWhileNothingBetterIsUp(t *testing.T) {
	s := service("web", "a", "spare")
	s.Backends[1].Priority = 2
	sv := datapath.Service{Service: &s, State: []datapath.State{datapath.Up, datapath.Up}}
	if got := sv.Active(); !slices.Equal(got, []int{0}) {
		t.Errorf("active %v, want the first class", got)
	}
	sv.State[0] = datapath.Down
	if got := sv.Active(); !slices.Equal(got, []int{1}) {
		t.Errorf("active %v, want the spare", got)
	}
}

func TestForecastCountsFlowsThatEnd(t *testing.T) {
	fast, _ := pair()
	fast.flows = []flow.Flow{{Owner: "web", Backend: "a", Datapath: "ebpf"}, {Owner: "web", Backend: "b", Datapath: "ebpf"}, {Datapath: "ebpf"}}
	fast.ends = 1
	e := New(Options{Datapaths: []datapath.Datapath{fast}})
	f, err := e.Forecast(t.Context(), &config.Config{Services: []config.Service{service("web", "a")}})
	if err != nil {
		t.Fatal(err)
	}
	if f.Flows != 1 || f.FlowsTotal != 3 {
		t.Errorf("%d of %d flows end, want 1 of 3", f.Flows, f.FlowsTotal)
	}
	if len(fast.applied) != 0 {
		t.Error("a forecast applied something")
	}
}

func TestStopRemovesUnlessToldToKeep(t *testing.T) {
	for _, keep := range []bool{true, false} {
		fast, _ := pair()
		if err := New(Options{Datapaths: []datapath.Datapath{fast}}).Stop(t.Context(), keep); err != nil {
			t.Fatal(err)
		}
		if fast.removed == keep {
			t.Errorf("keep %v: removed %v", keep, fast.removed)
		}
	}
}

// TestNothingIsPutBackAfterStop: after Stop, a pending request or a change of a backend or the network applies
// nothing.
func TestNothingIsPutBackAfterStop(t *testing.T) {
	fast, slow := pair()
	h := all("a")
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}, Health: h})
	cfg := &config.Config{Services: []config.Service{service("web", "a")}}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if err := e.Stop(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	h.set("a", false)
	_, applied := e.Apply(t.Context(), cfg)
	for what, err := range map[string]error{"apply": applied, "refresh": e.refresh(t.Context()), "reapply": e.applyAgain(t.Context()), "repair": e.repair(t.Context()),
		"set state": e.SetState(t.Context(), "web", "a", datapath.Drain)} {
		if !errors.Is(err, ErrStopped) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if len(fast.applied)+len(slow.applied) != 2 {
		t.Errorf("%d and %d applies, one each before the end", len(fast.applied), len(slow.applied))
	}
}

// TestTheNetworkChanges applies the same configuration again after a change of the network, or of the rules by
// another program: once for many changes, again after a failure, and without a new revision.
func TestTheNetworkChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &fake{name: "nftables"}
		e := New(Options{Datapaths: []datapath.Datapath{d}, Log: slog.New(slog.DiscardHandler)})
		if _, err := e.Apply(t.Context(), &config.Config{Services: []config.Service{service("web", "a")}}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go e.Run(ctx)
		applies := func(want int) {
			t.Helper()
			time.Sleep(10 * time.Second) // of the bubble's clock
			synctest.Wait()
			if len(d.applied) != want {
				t.Errorf("%d applies, want %d", len(d.applied), want)
			}
		}
		for range 50 {
			e.NetworkChanged()
		}
		applies(2)
		if d.applied[1] != d.applied[0] {
			t.Error("the network changed, but another snapshot was applied")
		}
		set := func(touched bool, fail error) {
			e.mu.Lock() // Run reads at any time
			defer e.mu.Unlock()
			d.touched, d.fail = touched, fail
		}
		set(false, errors.New("no route"))
		e.NetworkChanged()
		applies(3)
		set(true, nil) // "nft flush ruleset"
		applies(4)
		set(true, errors.New("busy"))
		applies(5)
	})
}
