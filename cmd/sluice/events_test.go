// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/server"
)

// answering serves the API at a socket, whose name it returns.
func answering(t *testing.T, opt server.Options) string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	if opt.Engine == nil {
		opt.Engine = engine.New(engine.Options{})
	}
	s := &http.Server{Handler: server.New(opt)}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	return at
}

// TestEventsCommand: events are printed as lines, those that are asked for.
func TestEventsCommand(t *testing.T) {
	log := event.New(10)
	log.Add(event.Event{Kind: event.Apply, Text: "revision 2: apply new.yaml, by me"})
	log.Add(event.Event{Kind: event.Backend, Object: "web/a", State: "down", Text: "backend web/a is down: refused"})
	log.Add(event.Event{Kind: event.Warning, Text: "no wan0", Ended: true})
	at := answering(t, server.Options{Events: log})
	for args, want := range map[string]string{
		"events":                                      "apply    revision 2: apply new.yaml, by me|backend  backend web/a is down: refused|warning  ended: no wan0",
		"events --kind backend,apply":                 "apply    revision 2: apply new.yaml, by me|backend  backend web/a is down: refused",
		"events --since 1h --kind warning":            "warning  ended: no wan0",
		"events --since " + id(log.Last()-1):          "warning  ended: no wan0",
		"events --since 1ns":                          "",
		"events --kind backend --kind warning --json": "",
	} {
		code, out, stderr := sluiceCommand("", append(strings.Fields(args), "--socket", at)...)
		if code != exitOK || stderr != "" {
			t.Errorf("sluice %s: exit %d, %s", args, code, stderr)
		}
		if strings.HasSuffix(args, "--json") {
			var kinds []string
			for line := range strings.Lines(out) {
				var e event.Event
				if err := json.Unmarshal([]byte(line), &e); err != nil {
					t.Errorf("%s: %v", line, err)
				}
				kinds = append(kinds, string(e.Kind)+" "+e.Object)
			}
			if got := strings.Join(kinds, ","); got != "backend web/a,warning " {
				t.Errorf("as JSON: %s", got)
			}
			continue
		}
		var lines []string
		for line := range strings.Lines(out) {
			lines = append(lines, strings.TrimSpace(line[len("2006-01-02 15:04:05 "):]))
		}
		if got := strings.Join(lines, "|"); got != want {
			t.Errorf("sluice %s:\n got %s\nwant %s", args, got, want)
		}
	}
	for args, want := range map[string]string{
		"events --kind nosuch": "sluice: kind \"nosuch\": not one of apply, backend,",
		"events --since never": "sluice: --since \"never\": write the ID of an event, or a time such as 10m",
	} {
		if code, _, stderr := sluiceCommand("", append(strings.Fields(args), "--socket", at)...); code != exitUsage || !strings.HasPrefix(stderr, want) {
			t.Errorf("sluice %s: exit %d, %s", args, code, stderr)
		}
	}
}

func id(n uint64) string { return strconv.FormatUint(n, 10) }
