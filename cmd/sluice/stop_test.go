// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

// TestBackendCompletes offers services, then the backends of the chosen one, then states.
func TestBackendCompletes(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`[{"service":"web","name":"a","address":"10.0.2.2:80"},{"service":"web","name":"b","address":"10.0.2.3:80"},{"service":"dns","name":"c","address":"10.0.2.4:53"}]`))
	})}
	go srv.Serve(l)
	defer srv.Close()
	for args, want := range map[string]string{"w": "web dns", "web ": "a b", "dns ": "c", "web a ": "up drain down auto", "web a up ": ""} {
		command := append([]string{"__complete", "--socket", socket, "backend"}, strings.Split(args, " ")...)
		code, out, stderr := sluiceCommand("", command...)
		offered, _, _ := strings.Cut(out, ":4")
		if got := strings.Join(strings.Fields(offered), " "); code != exitOK || got != want {
			t.Errorf("backend %s TAB: exit %d, %q, want %q\n%s", args, code, got, want, stderr)
		}
	}
}
