// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// TestFound: discovered backends are in force in addition to the configuration, which does not contain them.
func TestFound(t *testing.T) {
	ctx := context.Background()
	d := &fake{name: "nftables"}
	e := New(Options{Datapaths: []datapath.Datapath{d}})
	backend := func(address string) config.Backend {
		return config.Backend{Name: address, Address: netip.MustParseAddr(address), Port: 80, Weight: 1, Priority: 1}
	}
	s := service("web")
	s.BackendsFrom = &config.BackendsFrom{DNS: "app.test", Least: 1}
	s.Backends = []config.Backend{backend("10.0.0.1")}
	plain := service("plain")
	plain.Listen[0].Address = netip.MustParseAddr("192.0.2.11")
	plain.Backends = []config.Backend{backend("10.0.0.9")}
	cfg := &config.Config{Services: []config.Service{s, plain}}
	cfg.SetDefaults()
	inForce := func(want ...string) {
		t.Helper()
		var got []string
		for _, b := range d.last().Services[0].Backends {
			got = append(got, b.Name)
		}
		if !slices.Equal(got, want) {
			t.Errorf("in force are %q, want %q", got, want)
		}
		if e.Config() != cfg || len(cfg.Services[0].Backends) != 1 || e.View().Config != cfg {
			t.Errorf("the configuration became %+v", e.Config())
		}
	}
	found := func(list ...config.Backend) error {
		_, err := e.SetFound(ctx, map[string][]config.Backend{"web": list, "plain": list})
		return err
	}
	if err := found(backend("10.0.0.2")); err != nil || len(d.applied) != 0 {
		t.Fatalf("before the first apply: %v, %d applies", err, len(d.applied))
	}
	if _, err := e.Apply(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	inForce("10.0.0.1", "10.0.0.2")
	if n := len(d.last().Services[1].Backends); n != 1 {
		t.Errorf("a service that finds nothing has %d backends", n)
	}
	if err := found(backend("10.0.0.1"), backend("10.0.0.3")); err != nil { // backends of the configuration count too
		t.Fatal(err)
	}
	inForce("10.0.0.1", "10.0.0.3")
	if got := e.Found()["web"]; len(got) != 1 || got[0].Name != "10.0.0.3" {
		t.Errorf("found are %+v", got)
	}
	if !e.Has("web", "10.0.0.3") || e.Has("web", "10.0.0.2") {
		t.Error("what the service has")
	}
	if err := found(backend("2001:db8::1")); err == nil {
		t.Error("a backend of another family is taken")
	}
	inForce("10.0.0.1", "10.0.0.3")
	d.fail = errors.New("the kernel refuses")
	if err := found(backend("10.0.0.4")); err == nil {
		t.Error("a refusal is not told")
	}
	if _, err := e.Apply(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	inForce("10.0.0.1", "10.0.0.3")
	d.fail = errors.New("the kernel refuses")
	if _, err := e.Apply(ctx, &config.Config{}); err == nil || e.Config() != cfg {
		t.Errorf("a refused configuration: %v, in force %+v", err, e.Config())
	}
	if err := found(); err != nil {
		t.Fatal(err)
	}
	inForce("10.0.0.1")
}
