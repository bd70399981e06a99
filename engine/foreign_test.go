// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
)

// TestForeignOwner: a program that changes the rules repeatedly is reported as long as it does so. A single
// change is not reported.
func TestForeignOwner(t *testing.T) {
	d := &fake{name: "nftables", change: datapath.Change{Rules: datapath.Count{Added: 2}}}
	e := New(Options{Datapaths: []datapath.Datapath{d}, Log: slog.New(slog.DiscardHandler)})
	cfg, err := config.Decode("test", []byte(`{services: [{name: web, protocol: tcp, mode: dnat, listen: [{address: 192.0.2.1, ports: [80]}], backends: [{address: 10.0.0.1}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	for n := range foreignTimes {
		if w := e.View().Warnings; len(w) > 0 {
			t.Errorf("after %d changes: warnings %q", n, w)
		}
		d.touched = true
		if err := e.repair(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if w := strings.Join(e.View().Warnings, "\n"); !strings.Contains(w, "another gateway") || !strings.Contains(w, "nftables") {
		t.Errorf("warnings %q", w)
	}
	if w := e.foreignWarnings(time.Now().Add(foreignPeriod)); len(w) > 0 {
		t.Errorf("a minute later: %q", w)
	}
}
