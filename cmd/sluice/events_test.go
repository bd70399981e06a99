// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/server"
)

// answering serves the API at a socket and returns the socket's path.
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

// TestEventsCommand: the requested events are printed as lines.
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
		"events --kind flow":   "sluice: --kind flow: say which flows, as by --client",
		"events --port 80":     "sluice: --client, --port and the like go with --kind flow",
		"events --since never": "sluice: --since \"never\": write the ID of an event, or a time such as 10m",
	} {
		if code, _, stderr := sluiceCommand("", append(strings.Fields(args), "--socket", at)...); code != exitUsage || !strings.HasPrefix(stderr, want) {
			t.Errorf("sluice %s: exit %d, %s", args, code, stderr)
		}
	}
}

// TestEventsOverARestart: a follower gets the events of the next daemon after a restart, each once.
func TestEventsOverARestart(t *testing.T) {
	at := filepath.Join(t.TempDir(), "s")
	log := event.New(10)
	serve := func() (end func()) {
		t.Helper()
		l, err := net.Listen("unix", at)
		if err != nil {
			t.Fatal(err)
		}
		s := &http.Server{Handler: server.New(server.Options{Engine: engine.New(engine.Options{}), Events: log})}
		go func() { _ = s.Serve(l) }()
		return func() { s.Close() }
	}
	end := serve()
	ctx, cancel := context.WithCancel(t.Context())
	read, write := io.Pipe()
	done := make(chan int)
	go func() {
		done <- execute(ctx, []string{"events", "--follow", "--since", "0", "--socket", at}, strings.NewReader(""), write, io.Discard)
	}()
	lines := bufio.NewScanner(read)
	expect := func(want string) {
		t.Helper()
		if !lines.Scan() || !strings.HasSuffix(lines.Text(), want) {
			t.Errorf("%q, want %s", lines.Text(), want)
		}
	}
	log.Add(event.Event{Kind: event.Apply, Text: "one"})
	expect("one")
	end()
	log.Add(event.Event{Kind: event.Apply, Text: "two"})
	end = serve()
	defer end()
	expect("two")
	log.Add(event.Event{Kind: event.Apply, Text: "three"})
	expect("three")
	cancel()
	if code := <-done; code != exitOK {
		t.Errorf("exit %d", code)
	}
}

// TestAuditCommand reads the record from the daemon, or from the file without a daemon.
func TestAuditCommand(t *testing.T) {
	state := t.TempDir()
	record := audit.Open(filepath.Join(state, "changes"), slog.New(slog.DiscardHandler))
	defer record.Close()
	record.Add(audit.Entry{Who: "process 7 (sluice) of user 0", What: "backend web a drain", Result: audit.Done, Revision: 12})
	record.Add(audit.Entry{Who: "CN=admin at 192.0.2.7:4711", What: "PUT /api/v1/config", Result: audit.Refused, Error: "not YAML"})
	at := answering(t, server.Options{Audit: record})
	for _, where := range [][]string{{"--socket", at}, {"--state-dir", state}} {
		code, out, stderr := sluiceCommand("", append([]string{"audit"}, where...)...)
		want := "  revision 12: backend web a drain\n    by process 7 (sluice) of user 0\n"
		if code != exitOK || stderr != "" || !strings.Contains(out, want) || !strings.HasSuffix(out, "  refused: PUT /api/v1/config\n    by CN=admin at 192.0.2.7:4711\n    not YAML\n") {
			t.Errorf("%v: exit %d, %s%s", where, code, out, stderr)
		}
		code, out, _ = sluiceCommand("", append([]string{"audit", "--json", "--limit", "1"}, where...)...)
		var entries []audit.Entry
		if err := json.Unmarshal([]byte(out), &entries); code != exitOK || err != nil || len(entries) != 1 || entries[0].Error != "not YAML" {
			t.Errorf("%v: exit %d, %s", where, code, out)
		}
	}
	if code, out, stderr := sluiceCommand("", "audit", "--state-dir", t.TempDir()); code != exitOK || out != "nobody has asked for a change\n" {
		t.Errorf("without a record: exit %d, %s%s", code, out, stderr)
	}
	if code, _, stderr := sluiceCommand("", "audit", "--limit", "0"); code != exitUsage {
		t.Errorf("exit %d, %s", code, stderr)
	}
}

func id(n uint64) string { return strconv.FormatUint(n, 10) }
