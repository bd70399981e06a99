// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/http/httptest"
	"strings"
	"testing"
)

// asker returns a function that sends a request, and compares the code and a part of the answer.
func asker(t *testing.T, s *httptest.Server) func(method, path, body string, code int, want string) {
	return func(method, path, body string, code int, want string) {
		t.Helper()
		got, text := call(t, s, method, "/api/v1"+path, body)
		if got != code || !strings.Contains(text, want) {
			t.Errorf("%s %s %s: %d %s\nwant %d %s", method, path, body, got, text, code, want)
		}
	}
}

// TestDrainRequests drains a backend and the whole gateway. It checks the events, the views and the refused
// requests.
func TestDrainRequests(t *testing.T) {
	s, _ := start(t)
	ask := asker(t, s)
	ask("GET", "/ready", "", 503, "no configuration is in force yet")
	if code, text := call(t, s, "PUT", "/api/v1/config", web, yaml...); code != 200 {
		t.Fatalf("%d: %s", code, text)
	}
	ask("GET", "/ready", "", 204, "")
	const state = "/services/web/backends/a/state"
	ask("PUT", state, `{"state":"drain","deadline":300,"then":"reset"}`, 204, "")
	ask("GET", "/services/web", "", 200, `"then":"reset","left":-1}`)
	ask("GET", "/services/web", "", 200, `"why":"set by the operator until `)
	ask("GET", "/config/changes", "", 200, `"text":"drain until `)
	ask("GET", "/config/changes", "", 200, `"what":"backend web a drain --deadline 5m0s --then reset"`)
	ask("PUT", state, `{"state":"drain","then":"reset"}`, 422, "without a deadline a drain never ends")
	ask("PUT", state, `{"state":"down","deadline":3}`, 422, "only drain has a deadline")
	ask("PUT", state, `{"state":"drain","deadline":3,"then":"explode"}`, 422, "body.then")
	ask("PUT", state, `{"state":"drain","deadline":-3}`, 422, "body.deadline")

	ask("GET", "/drain", "", 200, `{"draining":false,"backends":1}`)
	ask("PUT", "/drain", `{"deadline":60}`, 200, `"draining":true`)
	ask("GET", "/drain", "", 200, `"then":"keep"`)
	ask("GET", "/drain", "", 200, `"backends":2`)
	ask("GET", "/ready", "", 503, "it takes no new connections")
	ask("GET", "/status", "", 200, `"drain":{"until":`)
	ask("PUT", "/drain", `{"then":"reset"}`, 422, "without a deadline")
	ask("DELETE", "/drain", "", 200, `{"draining":false,"backends":1}`)
	ask("GET", "/ready", "", 204, "")
}

// TestNodeRequests drains the node. A configuration that announces nothing refuses the drain.
func TestNodeRequests(t *testing.T) {
	s, _ := start(t)
	ask := asker(t, s)
	apply := func(config string) {
		t.Helper()
		if code, text := call(t, s, "PUT", "/api/v1/config", config, yaml...); code != 200 {
			t.Fatalf("%d: %s", code, text)
		}
	}
	apply(web)
	ask("PUT", "/node/state", `{"state":"drain"}`, 409, "no cluster.announce")
	ask("PUT", "/node/state", `{"state":"auto"}`, 200, `{"state":"auto","announced":0,"withdrawn":0}`)
	apply(web + "cluster: {announce: {}}\n")
	ask("PUT", "/node/state", `{"state":"down"}`, 422, "body.state")
	ask("PUT", "/node/state", `{"state":"drain"}`, 200, `"state":"drain"`)
	ask("GET", "/status", "", 200, `"node_drains":true`)
	ask("GET", "/ready", "", 503, "the node drains")
	ask("GET", "/drain", "", 200, `{"draining":false,"backends":0}`)
	ask("GET", "/config/changes", "", 200, `"states":[{"service":"","backend":"","node":true,"state":"drain","text":"drain"}]`)
	ask("GET", "/config/changes", "", 200, `"what":"node drain"`)
	ask("PUT", "/drain", "{}", 200, `"draining":true`)
	ask("DELETE", "/drain", "", 200, `"draining":false`)
	ask("GET", "/status", "", 200, `"node_drains":true`) // the end of the gateway's drain keeps it
	ask("PUT", "/node/state", `{"state":"auto"}`, 200, `"state":"auto"`)
	ask("GET", "/ready", "", 204, "")
}
