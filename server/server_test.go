// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/flow"
)

// still is a datapath that accepts everything and does nothing.
type still struct{ counters datapath.Counters }

func (*still) Name() string                                           { return "nftables" }
func (*still) CarriesService(*config.Service) error                   { return nil }
func (*still) CarriesNAT(*config.NATRule) error                       { return nil }
func (*still) CarriesRule(*config.FirewallRule) error                 { return nil }
func (*still) Remove(context.Context) error                           { return nil }
func (*still) Close() error                                           { return nil }
func (d *still) Counters(context.Context) (*datapath.Counters, error) { return &d.counters, nil }
func (*still) Plan(context.Context, *datapath.Snapshot) (*datapath.Change, error) {
	return &datapath.Change{Datapath: "nftables", Elements: datapath.Count{Added: 3}}, nil
}
func (*still) Apply(context.Context, *datapath.Snapshot) (*datapath.Change, error) {
	return &datapath.Change{Datapath: "nftables"}, nil
}
func (*still) Flows(_ context.Context, yield func(flow.Flow) bool) error {
	for _, port := range []uint16{80, 443, 80} {
		t := flow.Tuple{Protocol: flow.TCP, Source: addrPort("198.51.100.7", 40000), Dest: addrPort("192.0.2.10", port)}
		if !yield(flow.Flow{Original: t, Reply: t.Reverse(), State: "ESTABLISHED", Owner: "web", Datapath: "nftables"}) {
			break
		}
	}
	return nil
}

type stops struct{ kept []bool }

func (s *stops) Stop(keep bool) { s.kept = append(s.kept, keep) }
func (s *stops) Reload(context.Context) (engine.Applied, error) {
	return engine.Applied{Revision: 7}, nil
}

const web = `
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]
nat:
  - {name: out, type: masquerade, source: [10.0.2.0/24], out: wan0}
`

func start(t *testing.T) (*httptest.Server, *stops) {
	t.Helper()
	e := engine.New(engine.Options{Datapaths: []datapath.Datapath{&still{datapath.Counters{
		Services: []datapath.ServiceCounters{{Name: "web", Connections: 12, Backends: []datapath.BackendCounters{{Name: "b", Connections: 5}}}},
	}}}})
	d := &stops{}
	s := httptest.NewServer(New(Options{Engine: e, Daemon: d, Version: "test", File: "sluice.yaml", Datapaths: []string{"nftables"}}))
	t.Cleanup(s.Close)
	return s, d
}

func call(t *testing.T, s *httptest.Server, method, path, body string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

var yaml = []string{"Content-Type", "application/yaml"}

func TestApplyShowsInEveryList(t *testing.T) {
	s, _ := start(t)
	if code, text := call(t, s, "PUT", "/api/v1/config?name=x.yaml", web, yaml...); code != 200 || !strings.Contains(text, `"name":"web"`) {
		t.Fatalf("apply: %d %s", code, text)
	}
	_, text := call(t, s, "GET", "/api/v1/services", "")
	var services []api.Service
	if err := json.Unmarshal([]byte(text), &services); err != nil || len(services) != 1 {
		t.Fatalf("services %s: %v", text, err)
	}
	got := services[0]
	if got.Connections != 12 || got.Backends[1].Connections != 5 || !got.Backends[0].InUse || got.Datapath != "nftables" || got.Listen[0] != "192.0.2.10:80" {
		t.Errorf("service %+v", got)
	}
	if _, text := call(t, s, "GET", "/api/v1/nat", ""); !strings.Contains(text, `"10.0.2.0/24 out wan0"`) {
		t.Errorf("nat: %s", text)
	}
	if _, text := call(t, s, "GET", "/api/v1/status", ""); !strings.Contains(text, `"backends-up":2`) {
		t.Errorf("status: %s", text)
	}
	if code, text := call(t, s, "GET", "/api/v1/flows?port=80&limit=1", ""); code != 200 || !strings.Contains(text, `"total":2`) || strings.Count(text, "ESTABLISHED") != 1 {
		t.Errorf("flows: %s", text)
	}
	if code, _ := call(t, s, "GET", "/api/v1/flows?client=nonsense", ""); code != 422 {
		t.Errorf("a wrong filter answers %d", code)
	}
	if code, _ := call(t, s, "GET", "/api/v1/services/none", ""); code != 404 {
		t.Errorf("an unknown service answers %d", code)
	}
}

func TestErrorsOfAConfigurationReachTheCaller(t *testing.T) {
	s, _ := start(t)
	code, text := call(t, s, "PUT", "/api/v1/config?name=x.yaml", strings.Replace(web, "mode: dnat", "mode: dnatt", 1), yaml...)
	if code != 422 || !strings.Contains(text, "x.yaml:6") {
		t.Errorf("%d %s: want 422 with file and line", code, text)
	}
	if _, text := call(t, s, "GET", "/api/v1/services", ""); strings.TrimSpace(text) != "[]" {
		t.Errorf("a refused configuration left services: %s", text)
	}
}

func TestIfMatchRefusesAStaleEdit(t *testing.T) {
	s, _ := start(t)
	if code, _ := call(t, s, "PUT", "/api/v1/config", web, yaml...); code != 200 {
		t.Fatal("apply")
	}
	if code, _ := call(t, s, "PUT", "/api/v1/config", web, append(yaml, "If-Match", `"stale"`)...); code != 412 {
		t.Errorf("a stale ETag answers %d, want 412", code)
	}
	req, _ := http.NewRequestWithContext(t.Context(), "GET", s.URL+"/api/v1/config", nil)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, _ := io.ReadAll(resp.Body)
	if _, err := config.Decode("answer", raw); err != nil {
		t.Errorf("GET /config does not decode: %v\n%s", err, raw)
	}
	if code, _ := call(t, s, "PUT", "/api/v1/config", web, append(yaml, "If-Match", resp.Header.Get("ETag"))...); code != 200 {
		t.Errorf("the current ETag answers %d, want 200", code)
	}
}

func TestStateOfABackendByHand(t *testing.T) {
	s, _ := start(t)
	call(t, s, "PUT", "/api/v1/config", web, yaml...)
	jsonType := []string{"Content-Type", "application/json"}
	if code, text := call(t, s, "PUT", "/api/v1/services/web/backends/a/state", `{"state":"drain"}`, jsonType...); code != 204 {
		t.Fatalf("drain: %d %s", code, text)
	}
	if _, text := call(t, s, "GET", "/api/v1/backends", ""); !strings.Contains(text, `"state":"drain"`) || !strings.Contains(text, "set by the operator") {
		t.Errorf("backends: %s", text)
	}
	if code, _ := call(t, s, "PUT", "/api/v1/services/web/backends/zzz/state", `{"state":"drain"}`, jsonType...); code != 404 {
		t.Errorf("an unknown backend answers %d", code)
	}
	if code, _ := call(t, s, "PUT", "/api/v1/services/web/backends/a/state", `{"state":"sideways"}`, jsonType...); code != 422 {
		t.Errorf("an unknown state answers %d", code)
	}
}

func TestStopReachesTheDaemon(t *testing.T) {
	s, d := start(t)
	if code, text := call(t, s, "POST", "/api/v1/stop", `{"keep":true}`, "Content-Type", "application/json"); code != 204 {
		t.Fatalf("%d %s", code, text)
	}
	if len(d.kept) != 1 || !d.kept[0] {
		t.Errorf("stops %v", d.kept)
	}
}

func TestOpenAPIDescribesEveryHandler(t *testing.T) {
	s, _ := start(t)
	code, text := call(t, s, "GET", "/openapi.json", "")
	if code != 200 || !strings.Contains(text, `"openapi":"3.1`) {
		t.Fatalf("%d %.200s", code, text)
	}
	for _, path := range []string{"/status", "/services", "/services/{service}", "/backends", "/nat", "/flows", "/explain", "/config", "/plan", "/reload", "/stop"} {
		if !bytes.Contains([]byte(text), []byte(`"/api/v1`+path+`"`)) {
			t.Errorf("%s is not described", path)
		}
	}
}

func addrPort(a string, p uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(a), p)
}
