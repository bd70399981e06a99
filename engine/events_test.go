// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
)

// told returns the events since the last call.
func told(l *event.Log, last *uint64) string {
	events, _, _ := l.After(*last, 100)
	var lines []string
	for _, e := range events {
		lines = append(lines, e.Text)
		*last = e.ID
	}
	slices.Sort(lines)
	return strings.Join(lines, "; ")
}

// TestStatesAreTold: an event reports each change of a backend's state on any datapath. Added and removed
// backends cause none.
func TestStatesAreTold(t *testing.T) {
	fast, slow := pair()
	h, log := all("a", "b"), event.New(100)
	e := New(Options{Datapaths: []datapath.Datapath{fast, slow}, Health: h, Events: log})
	last := log.Last()
	apply := func(services ...config.Service) {
		t.Helper()
		if _, err := e.Apply(t.Context(), &config.Config{Services: services}); err != nil {
			t.Fatal(err)
		}
	}
	apply(service("web", "a", "b"), service("mail", "a"))
	if got := told(log, &last); got != "" {
		t.Errorf("the first apply tells %s", got)
	}
	h.set("a", false)
	if err := e.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := told(log, &last); got != "backend mail/a is down; backend web/a is down" {
		t.Errorf("a failed check tells %s", got)
	}
	if err := e.SetState(t.Context(), "web", "b", datapath.Drain); err != nil {
		t.Fatal(err)
	}
	if got := told(log, &last); got != "backend web/b is drain: set by the operator" {
		t.Errorf("an operator tells %s", got)
	}
	h.set("a", true)
	h.set("c", true)
	slow.refuse = func(string, string) error { return nil }
	fast.refuse = func(_, name string) error { return errRefused } // everything moves to the other datapath
	apply(service("mail", "c", "a"), service("new", "a"), service("web", "b"))
	if got := told(log, &last); got != "backend mail/a is up" {
		t.Errorf("a change tells %s", got)
	}
	slow.touched, slow.change = true, datapath.Change{Rules: datapath.Count{Added: 1}}
	if err := e.repair(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := told(log, &last); got != "nftables: another program changed the rules: they are put back" {
		t.Errorf("a repair tells %s", got)
	}
}

// gauged is a datapath with tables.
type gauged struct{ *fake }

func (gauged) Gauges(context.Context) (*datapath.Counters, error) {
	return &datapath.Counters{
		Reasons: []datapath.ReasonCounter{{Family: "ipv4", Action: "drop", Reason: "no-port", Packets: 3}, {Family: "ipv6", Action: "drop", Reason: "no-port", Packets: 4}, {Family: "ipv4", Action: "forward", Reason: "flow", Packets: 9}},
		Tables:  []datapath.TableUse{{Name: "flows4", Used: 1, Size: 2}, {Name: "ports", Used: 3, Size: 4}},
	}, nil
}

func TestReading(t *testing.T) {
	fast, slow := pair()
	r := New(Options{Datapaths: []datapath.Datapath{gauged{fast}, slow}}).Reading(t.Context())
	if !slices.Equal(r.Drops, []event.Dropped{{Object: "ebpf/no-port", Packets: 7}}) {
		t.Errorf("drops %v", r.Drops)
	}
	if want := []event.Gauge{{Kind: event.Table, Object: "ebpf/flows4", Used: 1, Size: 2}, {Kind: event.Ports, Object: "ebpf/ports", Used: 3, Size: 4}}; !slices.Equal(r.Gauges, want) {
		t.Errorf("gauges %v", r.Gauges)
	}
}
