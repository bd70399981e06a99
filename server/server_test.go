// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/store"
	"github.com/sluice-lb/sluice/uplink"
)

// still is a datapath that accepts everything and does nothing.
type still struct{ counters datapath.Counters }

func (*still) Name() string                           { return "nftables" }
func (*still) CarriesService(*config.Service) error   { return nil }
func (*still) CarriesNAT(*config.NATRule) error       { return nil }
func (*still) CarriesRule(*config.FirewallRule) error { return nil }
func (*still) Remove(context.Context) error           { return nil }
func (*still) Close() error                           { return nil }
func (*still) Warnings() []string                     { return []string{"there is no interface wan0"} }
func (*still) Attachments() []datapath.Attachment {
	return []datapath.Attachment{{Interface: "eth0", Kind: "device", Hooks: []string{"xdp", "tc"}, Why: "docker0"}, {Interface: "eth1", Kind: "device"}}
}
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

// kept is a control whose store ends with the test, and that never reads its file again.
type kept struct{ *control.Control }

func (kept) Reload(context.Context, control.Author) (engine.Applied, error) {
	return engine.Applied{Revision: 7}, nil
}

func keeps(t testing.TB, e *engine.Engine) kept {
	t.Helper()
	s, err := store.Open(t.TempDir(), "/etc/sluice/sluice.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return kept{control.New("/etc/sluice/sluice.yaml", s, e, slog.New(slog.DiscardHandler))}
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
	s := httptest.NewServer(New(Options{Engine: e, Control: keeps(t, e), Daemon: d, Version: "test", File: "sluice.yaml", Datapaths: []string{"nftables"}}))
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
	if code, text := call(t, s, "PUT", "/api/v1/config?name=x.yaml", web, yaml...); code != 200 || !strings.Contains(text, `"name":"web"`) ||
		!strings.Contains(text, `"warnings":["there is no interface wan0"]`) {
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
	if _, text := call(t, s, "GET", "/api/v1/status", ""); !strings.Contains(text, `"backends_up":2`) {
		t.Errorf("status: %s", text)
	}
	if code, text := call(t, s, "GET", "/api/v1/flows?port=80&limit=1", ""); code != 200 || !strings.Contains(text, `"total":2`) || strings.Count(text, "ESTABLISHED") != 1 {
		t.Errorf("flows: %s", text)
	}
	for _, query := range []string{"flows?client=nonsense", "flows?state=nonsense", "explain?protocol=tcp&source=192.0.2.1:1&destination=192.0.2.2"} {
		if code, text := call(t, s, "GET", "/api/v1/"+query, ""); code != 422 {
			t.Errorf("%s answers %d %s", query, code, text)
		}
	}
	if code, _ := call(t, s, "GET", "/api/v1/services/none", ""); code != 404 {
		t.Errorf("an unknown service answers %d", code)
	}
}

// fixedUplinks has two uplinks, whatever the configuration says.
type fixedUplinks struct{ engine.Uplinks }

func (fixedUplinks) Set([]config.Uplink) (*datapath.Change, error) { return nil, nil }
func (fixedUplinks) States([]config.Uplink) []datapath.Uplink      { return nil }
func (fixedUplinks) Statuses() []uplink.Status {
	return []uplink.Status{{Name: "fiber", State: uplink.Down, Why: "no answer"}, {Name: "radio", State: uplink.Carrying, Share: [2]float64{1, 1}}}
}

// TestUplinksInStatus: the status of the gateway contains the list of uplinks, and no list without uplinks.
func TestUplinksInStatus(t *testing.T) {
	s, _ := start(t)
	if _, text := call(t, s, "GET", "/api/v1/status", ""); strings.Contains(text, "uplinks") {
		t.Errorf("without uplinks: %s", text)
	}
	e := engine.New(engine.Options{Datapaths: []datapath.Datapath{&still{}}, Uplinks: fixedUplinks{}})
	with := httptest.NewServer(New(Options{Engine: e, Control: keeps(t, e), Daemon: &stops{}}))
	defer with.Close()
	_, list := call(t, with, "GET", "/api/v1/uplinks", "")
	if _, text := call(t, with, "GET", "/api/v1/status", ""); !strings.Contains(list, `"name":"radio","interface":"","state":"carrying"`) || !strings.Contains(text, `"uplinks":`+strings.TrimSpace(list)) {
		t.Errorf("status %s\nuplinks %s", text, list)
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
	tag := resp.Header.Get("ETag")
	for header, want := range map[string]int{tag: 200, `"stale", ` + tag: 200, "*": 200, "W/" + tag: 412, `"stale", "older"`: 412} {
		if code, _ := call(t, s, "PUT", "/api/v1/config", web, append(yaml, "If-Match", header)...); code != want {
			t.Errorf("If-Match: %s answers %d, want %d", header, code, want)
		}
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
	for _, path := range []string{"/status", "/services", "/services/{service}", "/backends", "/nat", "/interfaces", "/addresses", "/mappings", "/flows", "/explain", "/config", "/config/changes", "/config/confirm", "/config/revert", "/config/save", "/plan", "/reload", "/stop"} {
		if !bytes.Contains([]byte(text), []byte(`"/api/v1`+path+`"`)) {
			t.Errorf("%s is not described", path)
		}
	}
	for _, scheme := range []string{`"token":{"description":"over TCP, with --token-file","scheme":"bearer","type":"http"}`, `"type":"mutualTLS"`, `"security":[{},{"token":[]},`} {
		if !strings.Contains(text, scheme) {
			t.Errorf("%s is not described", scheme)
		}
	}
}

func addrPort(a string, p uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr(a), p)
}

// many is a datapath with more flows than a list returns.
type many struct {
	still
	flows int
	fails error
}

func (*many) Name() string { return "ebpf" }
func (d *many) Flows(_ context.Context, yield func(flow.Flow) bool) error {
	for i := range d.flows {
		t := flow.Tuple{Protocol: flow.UDP, Source: addrPort("198.51.100.7", uint16(i)), Dest: addrPort("192.0.2.10", uint16(i>>16))}
		if !yield(flow.Flow{Original: t, Reply: t.Reverse(), Datapath: "ebpf"}) {
			break
		}
	}
	return d.fails
}

// TestStreamFlows reads more flows than a list returns, by the client of package api, and detects a truncated
// stream.
func TestStreamFlows(t *testing.T) {
	const flows = 100_100 // a list ends at 100,000
	d := &many{flows: flows}
	e := engine.New(engine.Options{Datapaths: []datapath.Datapath{&still{}, d}})
	socket := t.TempDir() + "/sock"
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(New(Options{Engine: e, Daemon: &stops{}}))
	s.Listener.Close()
	s.Listener = listener
	s.Start()
	t.Cleanup(s.Close)
	client := api.NewClient(socket)
	count := func(query url.Values) (n int, err error) {
		seen := map[netip.AddrPort]bool{}
		err = client.EachFlow(t.Context(), query, func(f *api.Flow) error {
			if f.Dest.Port() == 1 {
				seen[f.Client] = true
			}
			n++
			return nil
		})
		if n >= flows && len(seen) != flows-1<<16 {
			t.Errorf("%d different clients of port 1, want %d", len(seen), flows-1<<16)
		}
		return n, err
	}
	for query, want := range map[string]int{"datapath=ebpf": flows, "": flows + 3, "datapath=ebpf&port=1": flows - 1<<16, "datapath=nftables": 3} {
		values, _ := url.ParseQuery(query)
		if n, err := count(values); err != nil || n != want {
			t.Errorf("%q: %d flows, %v, want %d", query, n, err, want)
		}
	}
	if _, err := count(url.Values{"client": {"nobody"}}); err == nil {
		t.Error("a filter that is no address is taken")
	}
	d.fails = errors.New("the table is gone")
	if _, err := count(nil); err == nil || !strings.Contains(err.Error(), "the table is gone") {
		t.Errorf("an end with an error passes as the end: %v", err)
	}
	stop := errors.New("enough")
	if err := client.EachFlow(t.Context(), nil, func(*api.Flow) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the walk ends with %v", err)
	}
}

// BenchmarkStatus requests the status of a daemon with 10,000 services of four backends.
func BenchmarkStatus(b *testing.B) {
	var text strings.Builder
	text.WriteString("services:\n")
	for i := range 10000 {
		fmt.Fprintf(&text, "  - {name: s%d, listen: [{address: 192.0.%d.%d, ports: [80]}], protocol: tcp, mode: dnat, backends: [", i, i/250, i%250)
		for n := range 4 {
			fmt.Fprintf(&text, "{name: b%d, address: 10.%d.%d.%d, port: 80},", n, n, i/250, i%250)
		}
		text.WriteString("]}\n")
	}
	c, err := config.Decode("bench.yaml", []byte(text.String()))
	if err != nil {
		b.Fatal(err)
	}
	e := engine.New(engine.Options{Datapaths: []datapath.Datapath{&still{}}})
	if _, err := e.Apply(b.Context(), c); err != nil {
		b.Fatal(err)
	}
	h := New(Options{Engine: e, Daemon: &stops{}})
	for b.Loop() {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/api/v1/status", nil))
		if w.Code != 200 {
			b.Fatal(w.Body)
		}
	}
}

// TestInterfaces lists the hooks of interfaces; an interface without hooks has an empty list.
func TestInterfaces(t *testing.T) {
	s, _ := start(t)
	want := `[{"name":"eth0","kind":"device","hooks":["xdp","tc"],"why":"docker0"},{"name":"eth1","kind":"device","hooks":[]}]`
	if code, got := call(t, s, "GET", "/api/v1/interfaces", ""); code != 200 || strings.TrimSpace(got) != want {
		t.Errorf("%d: %s\nwant %s", code, got, want)
	}
}

// TestChanges: a change by the API is listed with its author, and can be reverted.
func TestChanges(t *testing.T) {
	s, _ := start(t)
	two := strings.Replace(web, "port: 8080}]", "port: 9090}]", 1)
	for _, text := range []string{web, two} {
		if code, got := call(t, s, "PUT", "/api/v1/config?name=web.yaml", text, yaml...); code != 200 {
			t.Fatalf("%d: %s", code, got)
		}
	}
	if code, got := call(t, s, "PUT", "/api/v1/services/web/backends/a/state", `{"state": "drain"}`); code != 204 {
		t.Fatalf("%d: %s", code, got)
	}
	changes := func() (v api.ConfigChanges) {
		code, got := call(t, s, "GET", "/api/v1/config/changes", "")
		if err := json.Unmarshal([]byte(got), &v); err != nil || code != 200 {
			t.Fatalf("%d, %v: %s", code, err, got)
		}
		return v
	}
	v := changes()
	if v.Revision != 3 || len(v.History) != 3 || v.History[1].What != "apply web.yaml" || v.History[2].What != "backend web a drain" {
		t.Errorf("%+v", v)
	}
	if e := v.History[1].Edits; len(e) != 1 || e[0] != (config.Edit{Path: "services/web/backends/b/port", Before: "8080", After: "9090"}) {
		t.Errorf("edits %v", e)
	}
	if len(v.States) != 1 || v.States[0] != (api.OperatorState{Service: "web", Backend: "a", State: "drain", Text: "drain"}) {
		t.Errorf("states %v", v.States)
	}
	if code, got := call(t, s, "POST", "/api/v1/config/revert", `{"revision": 1}`); code != 200 {
		t.Fatalf("%d: %s", code, got)
	}
	if _, got := call(t, s, "GET", "/api/v1/config", ""); strings.Contains(got, "9090") {
		t.Errorf("revision 1 is not in force:\n%s", got)
	}
	if v := changes(); v.Revision != 4 || len(v.States) != 0 {
		t.Errorf("after going back: %+v", v)
	}
	for body, want := range map[string]int{`{"revision": 99}`: 404, `{}`: 422, `{"revision": 1, "all": true}`: 422, `{"revision": -1}`: 422} {
		if code, got := call(t, s, "POST", "/api/v1/config/revert", body); code != want {
			t.Errorf("%s: %d, want %d: %s", body, code, want, got)
		}
	}
}
