// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/api"
)

// TestEveryRefusalIsAProblemDocument: errors before any handler have the same form.
func TestEveryRefusalIsAProblemDocument(t *testing.T) {
	metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "metrics") })
	h := New(Options{Metrics: metrics})
	for _, c := range []struct {
		method, path string
		code         int
		allow, says  string
	}{
		{"GET", "/", 404, "", "nothing is at /: /openapi.json lists"},
		{"GET", "/api/v1/", 404, "", "nothing is at /api/v1/"},
		{"GET", "/api/v1/statuses", 404, "", "/api/v1/statuses"},
		{"GET", "/api/v1/%2e%2e/status", 404, "", ""},
		{"POST", "/nothing", 404, "", "nothing is at /nothing"},
		{"DELETE", "/metrics", 405, "GET, HEAD", "/metrics takes GET, HEAD, not DELETE"},
		{"POST", "/api/v1/status", 405, "GET, HEAD", "not POST"},
		{"GET", "/api/v1/stop", 405, "POST", "takes POST, not GET"},
		{"PATCH", "/api/v1/config", 405, "GET, HEAD, PUT", "not PATCH"},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(c.method, c.path, nil))
		var p api.Problem
		err := json.Unmarshal(w.Body.Bytes(), &p)
		if err != nil || w.Code != c.code || p.Status != c.code || p.Title != http.StatusText(c.code) || !strings.Contains(p.Detail, c.says) ||
			w.Header().Get("Content-Type") != "application/problem+json" || w.Header().Get("Allow") != c.allow {
			t.Errorf("%s %s: %d %v %s", c.method, c.path, w.Code, w.Header(), w.Body)
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Body.String() != "metrics" {
		t.Errorf("/metrics: %d %s", w.Code, w.Body)
	}
	w = httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "/api//v1/status", nil))
	if to := w.Header().Get("Location"); w.Code/100 != 3 || to != "/api/v1/status" {
		t.Errorf("a path to clean: %d to %q", w.Code, to)
	}
}

// TestOversizedBodies: a body that is too large for its operation is refused with a problem document.
func TestOversizedBodies(t *testing.T) {
	s, _ := start(t)
	if code, text := call(t, s, "PUT", "/api/v1/config", web, yaml...); code != 200 {
		t.Fatal(code, text)
	}
	large := strings.Repeat(" ", 2<<20) + `{"state": "drain"}`
	code, text := call(t, s, "PUT", "/api/v1/services/web/backends/a/state", large, "Content-Type", "application/json")
	if code != http.StatusRequestEntityTooLarge || !strings.Contains(text, `"status":413`) {
		t.Errorf("2 MiB: %d %.200s", code, text)
	}
	if code, text := call(t, s, "PUT", "/api/v1/config", strings.Repeat("#", maxConfig+1), yaml...); code != http.StatusRequestEntityTooLarge || !strings.Contains(text, `"status":413`) {
		t.Errorf("a configuration that is too large: %d %.200s", code, text)
	}
}
