// SPDX-License-Identifier: Apache-2.0

package server

import (
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
)

func newRecord(t *testing.T) *audit.Log {
	t.Helper()
	record := audit.Open(t.TempDir(), slog.New(slog.DiscardHandler))
	t.Cleanup(func() { _ = record.Close() })
	return record
}

// recorded returns the entries of a record, one per line.
func recorded(t *testing.T, record *audit.Log) string {
	t.Helper()
	entries, err := record.Last(100)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, e := range entries {
		lines = append(lines, fmt.Sprintf("%s: %s: %s", e.Result, e.What, e.Error))
	}
	return strings.Join(lines, "\n")
}

// TestChangesAreRecorded: each change and each refusal is recorded once, independent of the layer that refuses.
func TestChangesAreRecorded(t *testing.T) {
	record := newRecord(t)
	e := engine.New(engine.Options{Datapaths: []datapath.Datapath{&still{}}})
	c := keeps(t, e)
	c.Audit = record
	s := httptest.NewServer(New(Options{Engine: e, Control: c, Daemon: &stops{}, Audit: record}))
	t.Cleanup(s.Close)
	for _, step := range []struct {
		method, path, body string
		header             []string
		code               int
		want               string // beginning of the entry; "": none
	}{
		{"PUT", "/config?name=a.yaml", web, nil, 200, "done: apply a.yaml: "},
		{"PUT", "/config", "services: [", nil, 422, "refused: PUT /api/v1/config: "},
		{"PUT", "/config?name=b.yaml", web, []string{"If-Match", `"x"`}, 412, "refused: apply b.yaml: another configuration"},
		{"PUT", "/services/web/backends/a/state", `{"state":"down"}`, nil, 204, "done: backend web a down: "},
		{"PUT", "/services/web/backends/nosuch/state", `{"state":"down"}`, nil, 404, "refused: backend web nosuch down: service web has no backend nosuch"},
		{"PUT", "/services/web/backends/a/state", `{"state":"sideways"}`, nil, 422, "refused: PUT /api/v1/services/web/backends/a/state: validation failed; "},
		{"DELETE", "/services/web/backends/b", "", nil, 200, "done: remove services/web/backends/b: "},
		{"DELETE", "/services/web/backends/b?dry-run=true", "", nil, 404, ""},
		{"DELETE", "/nosuch", "", nil, 404, "refused: DELETE /api/v1/nosuch: nothing is at"},
		{"POST", "/plan", "services: [", nil, 422, ""},
		{"GET", "/services/nosuch", "", nil, 404, ""},
		{"POST", "/stop", `{"keep":true}`, nil, 204, "done: stop --keep: "},
	} {
		before := recorded(t, record)
		if code, text := call(t, s, step.method, "/api/v1"+step.path, step.body, step.header...); code != step.code {
			t.Errorf("%s %s: %d %s", step.method, step.path, code, text)
		}
		got := strings.TrimPrefix(strings.TrimPrefix(recorded(t, record), before), "\n")
		if !strings.HasPrefix(got, step.want) || (got == "") != (step.want == "") || strings.Contains(got, "\n") {
			t.Errorf("%s %s is recorded as\n%s\nwant %s", step.method, step.path, got, step.want)
		}
	}
	if code, text := call(t, s, "GET", "/api/v1/audit?limit=2", ""); code != 200 || strings.Count(text, `"at"`) != 2 || !strings.Contains(text, `"what":"stop --keep","result":"done"`) {
		t.Errorf("the record: %d %s", code, text)
	}
}

// TestWhoAtTheSocket: the record names the requesting process, its program and its user.
func TestWhoAtTheSocket(t *testing.T) {
	record := newRecord(t)
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	local := NewLocal(l, slog.New(slog.DiscardHandler))
	go func() {
		_ = local.Serve(t.Context(), New(Options{Daemon: &stops{}, Audit: record, Engine: engine.New(engine.Options{})}))
	}()
	t.Cleanup(func() { local.http.Close() })
	if err := api.NewClient(at).Stop(t.Context(), api.Stop{}); err != nil {
		t.Fatal(err)
	}
	entries, err := api.NewClient(at).Audit(t.Context(), 10)
	if err != nil || len(entries) != 1 {
		t.Fatal(entries, err)
	}
	program, _ := os.ReadFile("/proc/self/comm")
	if want := fmt.Sprintf("process %d (%s) of user %d", os.Getpid(), strings.TrimSpace(string(program)), os.Getuid()); entries[0].Who != want {
		t.Errorf("%s, want %s", entries[0].Who, want)
	}
}

// TestWhoOverTCP: the record names certificate, token or address, also for a read-only listener.
func TestWhoOverTCP(t *testing.T) {
	for _, c := range []struct {
		name, files, token, want string
	}{
		{"named token", "tls tokens", secret, "token anna at "},
		{"second token", "tls tokens", second, "token 2 at "},
		{"both", "tls ca tokens", secret, "CN=one, token anna at "},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, changes := range []bool{true, false} {
				d, record := newTCPDaemon(t), newRecord(t)
				d.write("tokens", []byte("anna:"+secret+"\n"+second), 0o600)
				d.audit = record
				d.open(c.files, changes, New(Options{Daemon: &stops{}, Audit: record, Engine: engine.New(engine.Options{})}))
				_, text, err := d.ask(d.client(shows(d.clients.pair(x509.ExtKeyUsageClientAuth))), "DELETE", "/api/v1/nosuch", "Authorization", "Bearer "+c.token)
				entries, _ := record.Last(10)
				if err != nil || len(entries) != 1 || !strings.HasPrefix(entries[0].Who, c.want+"127.0.0.1:") || entries[0].Result != audit.Refused {
					t.Errorf("changes %t: %+v, %s, %v", changes, entries, text, err)
				}
			}
		})
	}
}

var _ http.ResponseWriter = (*auditWriter)(nil)
