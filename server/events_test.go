// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// streamed returns the response to a request for events, one message per line.
func streamed(t *testing.T, s *httptest.Server, query string, header ...string) string {
	t.Helper()
	status, text := call(t, s, "GET", "/api/v1/events?follow=false"+query, "", header...)
	if status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	var lines []string
	for line := range strings.Lines(text) {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			_, text, _ := strings.Cut(data, `"text":"`)
			text, _, _ = strings.Cut(text, `"`)
			lines = append(lines, text)
		}
	}
	return strings.Join(lines, "; ")
}

// TestEvents: a client gets the events after the last one that it has, and a notice about events that are gone.
func TestEvents(t *testing.T) {
	events := event.New(4)
	s := httptest.NewServer(New(Options{Engine: engine.New(engine.Options{}), Events: events}))
	t.Cleanup(s.Close)
	first := events.Last()
	for i := range 6 {
		events.Add(event.Event{Kind: []event.Kind{event.Apply, event.Backend}[i%2], Text: fmt.Sprint("event ", i)})
	}
	id := func(n uint64) string { return fmt.Sprint(first + n) }
	const begin = "events from here on; "
	for _, c := range []struct {
		query, last, want string
	}{
		{"", "", begin + "event 2; event 3; event 4; event 5"},
		{"&since=0", "", begin + "event 2; event 3; event 4; event 5"},
		{"&kind=backend", "", begin + "event 3; event 5"},
		{"&kind=apply,backend&since=" + id(4), "", begin + "event 4; event 5"},
		{"", id(5), begin + "event 5"},
		{"&since=" + id(3), id(5), begin + "event 5"},
		{"", id(1), begin + "1 events were missed; event 2; event 3; event 4; event 5"},
		{"", "17", begin + "the daemon has begun anew: events between may be missing; event 2; event 3; event 4; event 5"},
	} {
		var header []string
		if c.last != "" {
			header = []string{"Last-Event-ID", c.last}
		}
		if got := streamed(t, s, c.query, header...); got != c.want {
			t.Errorf("%q, last %q:\n got %s\nwant %s", c.query, c.last, got, c.want)
		}
	}
	for _, query := range []string{"kind=nosuch", "since=x", "follow=perhaps"} {
		if status, text := call(t, s, "GET", "/api/v1/events?"+query, ""); status != http.StatusUnprocessableEntity || !strings.Contains(text, "query.") {
			t.Errorf("%s: %d %s", query, status, text)
		}
	}
}

// serveEvents serves the events at a socket and returns the socket's path.
func serveEvents(t *testing.T, events *event.Log) (string, *logged) {
	t.Helper()
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	said := &logged{}
	local := NewLocal(l, slog.New(slog.NewTextHandler(said, nil)))
	local.listener.each = maxConnections // all clients are of this process
	e := engine.New(engine.Options{Datapaths: []datapath.Datapath{&still{}}})
	go func() { _ = local.Serve(context.Background(), New(Options{Engine: e, Events: events})) }()
	t.Cleanup(func() { local.http.Close() })
	return at, said
}

// TestEventsOfManyClients: of 100 clients, 10 never read. The others get every event in order. The ten are
// disconnected, and one of the ten reconnects and gets the remaining events.
func TestEventsOfManyClients(t *testing.T) {
	const clients, dumb, n, bytes = 100, 10, 600, 1000
	events := event.New(n)
	at, said := serveEvents(t, events)
	for range dumb {
		if answer := ask(t, dialLocal(t, at), "/api/v1/events"); answer.StatusCode != http.StatusOK {
			t.Fatal(answer.Status)
		}
	}
	var mu sync.Mutex
	var late []time.Duration
	ready, done := make(chan uint64, clients), make(chan error, clients)
	for range clients - dumb {
		go func() {
			var last uint64
			got := 0
			err := api.NewClient(at).Events(t.Context(), url.Values{}, func(e *event.Event) error {
				switch {
				case e.Kind == event.Begin:
					ready <- e.ID
				case e.ID != last+1:
					return fmt.Errorf("event %d follows %d: %s", e.ID, last, e.Text)
				default:
					got++
				}
				last = e.ID
				if e.Kind != event.Begin {
					mu.Lock()
					late = append(late, time.Since(e.At))
					mu.Unlock()
				}
				if got == n {
					return errEnough
				}
				return nil
			})
			done <- err
		}()
	}
	var first uint64
	for range clients - dumb {
		first = <-ready
	}
	for range n {
		events.Add(event.Event{Kind: event.Apply, Text: strings.Repeat("x", bytes)})
		time.Sleep(5 * time.Millisecond)
	}
	for range clients - dumb {
		if err := <-done; !errors.Is(err, errEnough) {
			t.Error(err)
		}
	}
	slices.Sort(late)
	t.Logf("%d events for %d clients: half within %v, 99 %% within %v, all within %v", n, clients-dumb, late[len(late)/2], late[len(late)*99/100], late[len(late)-1])
	labtest.Eventually(t, 30*time.Second, "who does not read is cut off", func() error {
		if !strings.Contains(said.take(), "it does not read its answer") {
			return errors.New("nobody is")
		}
		return nil
	})
	rest := 0
	query := url.Values{"since": {fmt.Sprint(first + 10)}, "follow": {"false"}}
	err := api.NewClient(at).Events(t.Context(), query, func(e *event.Event) error {
		if e.Kind == event.Apply {
			rest++
		}
		return nil
	})
	if err != nil || rest != n-10 {
		t.Errorf("who comes again gets %d events, %v", rest, err)
	}
}

// flowing is a datapath with changeable flows.
type flowing struct {
	still
	mu    sync.Mutex // protects flows
	flows []flow.Flow
}

func (d *flowing) set(ports ...uint16) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.flows = nil
	for _, port := range ports {
		t := flow.Tuple{Protocol: flow.TCP, Source: addrPort("198.51.100.7", port), Dest: addrPort("192.0.2.10", 80)}
		d.flows = append(d.flows, flow.Flow{Original: t, Reply: t.Reverse(), Owner: "web", Backend: "a", Datapath: "nftables"})
	}
}

func (d *flowing) Flows(_ context.Context, yield func(flow.Flow) bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range d.flows {
		if !yield(f) {
			break
		}
	}
	return nil
}

// TestFlowsOfInterest: a client gets the requested flows as they begin and end, and no other client does.
func TestFlowsOfInterest(t *testing.T) {
	d := &flowing{}
	d.set(1000, 1001)
	e := engine.New(engine.Options{Datapaths: []datapath.Datapath{d}})
	s := httptest.NewServer(New(Options{Engine: e, Events: event.New(4)}))
	t.Cleanup(s.Close)
	const begin = "events from here on; "
	sorted := func(query string) string {
		texts := strings.Split(streamed(t, s, query), "; ")
		slices.Sort(texts[1:])
		return strings.Join(texts, "; ")
	}
	const one, other = "flow tcp 198.51.100.7:1000 -> 192.0.2.10:80 by web/a", "flow tcp 198.51.100.7:1001 -> 192.0.2.10:80 by web/a"
	for query, want := range map[string]string{
		"&kind=flow&client=198.51.100.7":  begin + one + "; " + other,
		"&kind=flow&client=198.51.100.8":  "events from here on",
		"&client=198.51.100.7":            "events from here on",
		"&kind=apply&client=198.51.100.7": "events from here on",
	} {
		if got := sorted(query); got != want {
			t.Errorf("%s: %s, want %s", query, got, want)
		}
	}
	for query, want := range map[string]string{"kind=flow": "say which", "kind=flow&client=x": "client: "} {
		if status, text := call(t, s, "GET", "/api/v1/events?"+query, ""); status != http.StatusUnprocessableEntity || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s", query, status, text)
		}
	}

	w := &flowWatch{match: func(*flow.Flow) bool { return true }}
	look := func(want ...string) {
		t.Helper()
		events, _, err := w.scanFlows(t.Context(), e)
		var got []string
		for _, e := range events {
			got = append(got, fmt.Sprintf("%t %s", e.Ended, e.Text))
		}
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
	}
	look("false "+one, "false "+other)
	look()
	d.set(1001)
	look("true " + one)
	var many []uint16
	for i := range maxFlowsOfInterest + 5 {
		many = append(many, uint16(2000+i))
	}
	d.set(many...)
	if events, _, _ := w.scanFlows(t.Context(), e); len(events) != maxFlowsOfInterest+1 || !strings.HasPrefix(events[0].Text, "more than 1000 flows match") {
		t.Errorf("%d events of too many flows", len(events))
	}
	look()
}

var errEnough = errors.New("enough")

// TestEventStreamsAreBounded: surplus streams are refused with the reason.
func TestEventStreamsAreBounded(t *testing.T) {
	at, _ := serveEvents(t, event.New(1))
	for range maxEventStreams {
		if answer := ask(t, dialLocal(t, at), "/api/v1/events"); answer.StatusCode != http.StatusOK {
			t.Fatal(answer.Status)
		}
	}
	err := api.NewClient(at).Events(t.Context(), url.Values{}, func(*event.Event) error { return nil })
	if want := "128 clients follow the events: try again in a moment"; err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
}
