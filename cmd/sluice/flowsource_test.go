// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestDaemonFlows sums the flows of a daemon. The daemon is a plain HTTP server with the same responses.
func TestDaemonFlows(t *testing.T) {
	a := &app{paths: daemon.Paths{Socket: filepath.Join(t.TempDir(), "sock")}}
	if a.flowSources() != nil {
		t.Error("a source without a daemon")
	}
	ln, err := net.Listen("unix", a.paths.Socket)
	if err != nil {
		t.Fatal(err)
	}
	ap := netip.MustParseAddrPort
	flows := []api.Flow{
		{Protocol: "tcp", Client: ap("10.0.0.1:1000"), Dest: ap("192.0.2.1:80"), Replier: ap("10.9.0.2:8080"), ReplyTo: ap("10.0.0.1:1000"), State: "ESTABLISHED", Datapath: "ebpf"},
		{Protocol: "udp", Client: ap("10.0.0.1:1000"), Dest: ap("198.51.100.1:53"), Replier: ap("198.51.100.1:53"), ReplyTo: ap("203.0.113.1:1000"), Datapath: "ebpf"},
	}
	end := api.FlowEnd{Total: 2}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/flows/stream" || r.URL.Query().Get("datapath") != "ebpf" {
			http.Error(w, "wrong query", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/x-ndjson")
		for i := range flows {
			_ = json.NewEncoder(w).Encode(api.FlowLine{Flow: &flows[i]})
		}
		_ = json.NewEncoder(w).Encode(api.FlowLine{End: &end})
	})}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { srv.Close() })

	s := conntrack.NewSummary(conntrack.BySNATPort | conntrack.ByBackend)
	if err := s.AddSource(context.Background(), a.flowSources()[0], nil); err != nil {
		t.Fatal(err)
	}
	if s.Total.Held() != 2 || s.Translated != [4]uint32{0, 1, 1, 0} {
		t.Errorf("held %d, translated %v", s.Total.Held(), s.Translated)
	}
	if o := s.Occupancies(0, 0); len(o) != 1 || o[0].Public != netip.MustParseAddr("203.0.113.1") {
		t.Errorf("occupancy %+v", o)
	}
	t.Run("list", func(t *testing.T) {
		labtest.Require(t, labtest.Conntrack)
		for flag, want := range map[string]int{"--proto=udp": 1, "--proto=any": 2} {
			var out strings.Builder
			if execute(t.Context(), []string{"conns", "--list", "--socket", a.paths.Socket, flag}, strings.NewReader(""), &out, io.Discard); strings.Count(out.String(), "ebpf ") != want {
				t.Errorf("conns --list %s shows not %d flows of the datapath:\n%s", flag, want, &out)
			}
		}
	})
	end.Error = "the table was replaced"
	if err := s.AddSource(context.Background(), a.flowSources()[0], nil); err == nil || !strings.Contains(err.Error(), end.Error) {
		t.Errorf("a list that was cut passes as whole: %v", err)
	}
}
