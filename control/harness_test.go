// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/store"
)

// fake is a datapath that stores the last snapshot.
type fake struct {
	refuse error
	last   *datapath.Snapshot
	flows  []flow.Flow
}

func (*fake) Name() string                           { return "fake" }
func (*fake) CarriesService(*config.Service) error   { return nil }
func (*fake) CarriesNAT(*config.NATRule) error       { return nil }
func (*fake) CarriesRule(*config.FirewallRule) error { return nil }
func (*fake) Remove(context.Context) error           { return nil }
func (*fake) Close() error                           { return nil }
func (*fake) Counters(context.Context) (*datapath.Counters, error) {
	return &datapath.Counters{}, nil
}
func (*fake) Plan(context.Context, *datapath.Snapshot) (*datapath.Change, error) {
	return &datapath.Change{}, nil
}
func (f *fake) Apply(_ context.Context, s *datapath.Snapshot) (*datapath.Change, error) {
	if f.refuse != nil {
		return nil, f.refuse
	}
	f.last = s
	return &datapath.Change{}, nil
}
func (f *fake) Flows(_ context.Context, yield func(flow.Flow) bool) error {
	for _, one := range f.flows {
		if !yield(one) {
			break
		}
	}
	return nil
}

// state returns "address:port state" of each backend of the datapath.
func (f *fake) state() string {
	var words []string
	for _, s := range f.last.Services {
		for i, b := range s.Backends {
			words = append(words, b.Address.String()+" "+s.State[i].String())
		}
	}
	return strings.Join(words, ", ")
}

type gateway struct {
	*Control
	path     *fake
	file, at string // the operator's file, and the directory of the store
}

const one = "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.0.1}]}\n"

var two = strings.Replace(one, "10.0.0.1}", "10.0.0.1}, {name: b, address: 10.0.0.2}", 1)

func decode(t *testing.T, text string) *config.Config {
	t.Helper()
	c, err := config.Decode("f.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// begin starts control, as after a restart if the directories have the content of an earlier one.
func begin(t *testing.T, file, at string) *gateway {
	t.Helper()
	f := &fake{}
	g := beginOn(t, f, file, at)
	g.path = f
	return g
}

// beginOn is begin on a datapath.
func beginOn(t *testing.T, path datapath.Datapath, file, at string) *gateway {
	t.Helper()
	s, err := store.Open(at, file)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	g := &gateway{New(file, s, engine.New(engine.Options{Datapaths: []datapath.Datapath{path}, Log: log, Node: firstNode}), log), nil, file, at}
	g.Events = event.New(100)
	cfg, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Start(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	return g
}

// firstNode makes this host the first node of each configuration.
func firstNode(c *config.Config) (string, error) {
	for _, n := range c.Nodes() {
		return n.Name, nil
	}
	return "", nil
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o640); err != nil {
		t.Fatal(err)
	}
}

var me = Author{"tester", "test"}

func (g *gateway) want(t *testing.T, want string) {
	t.Helper()
	if got := g.path.state(); got != want {
		t.Errorf("in force: %s, want %s", got, want)
	}
}
