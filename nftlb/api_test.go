// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/disk"
	"github.com/sluice-lb/sluice/disk/damage"
)

// fakeNetwork has the addresses of one interface and some neighbours.
type fakeNetwork map[string]string

func (fakeNetwork) Holder(a netip.Addr) (string, int, string, bool) {
	return "eth0", 2, "02:00:00:00:00:01", a.String() == "192.0.2.10"
}

func (fakeNetwork) Towards(netip.Addr) (string, int, string, bool) {
	return "eth0", 2, "02:00:00:00:00:01", true
}

func (n fakeNetwork) Neighbour(a netip.Addr) (string, bool) {
	mac, is := n[a.String()]
	return mac, is
}

const web = `{"farms": [{"name": "web", "virtual-addr": "192.0.2.10", "virtual-ports": "80", "mode": "snat",
	"backends": [{"name": "b1", "ip-addr": "10.0.0.1", "port": "8080", "state": "up"}, {"name": "b2", "ip-addr": "10.0.0.2", "port": "8080", "state": "up"}]}]}`

// TestReplies checks the sentences and statuses of nftlb 1.0.7.
func TestReplies(t *testing.T) {
	a, _ := newTestAPI(t, fakeNetwork{})
	for _, c := range []struct {
		method, path, body string
		code               int
		want               string
	}{
		{"POST", "/farms", web, 200, "success"},
		{"PUT", "/farms", `{"farms": [{"name": "web", "priority": "3"}]}`, 200, "success"},
		{"POST", "/farms/", web, 404, "invalid request"},
		{"POST", "/nonsense", web, 404, "invalid request"},
		{"POST", "/farms", "", 400, "the structure is invalid"},
		{"POST", "/farms", `{"farms": `, 400, "the structure is invalid"},
		{"POST", "/farms", `{"farms": []} x`, 400, "the structure is invalid"},
		{"POST", "/farms", `{"name": "web"}`, 400, "the structure is invalid"},
		{"POST", "/farms", `{"farms": [{"nme": "web"}]}`, 500, "error parsing buffer. Unknown key 'nme'"},
		{"POST", "/farms", `{"farms": ["web"]}`, 404, "the object to modify is unknown. Unknown parsed key with index '0'"},
		{"POST", "/farms", `{"farms": [{"name": "web", "fqdn": "x"}]}`, 404, "the object to modify is unknown. Unknown parsed key with index '3'"},
		{"POST", "/farms", `{"backends": []}`, 500, "error parsing buffer"},
		{"POST", "/farms", `{"farms": [{"name": ""}]}`, 400, "error parsing buffer. Key 'name' cannot be empty"},
		{"POST", "/farms", `{"farms": [{"name": "web", "mode": "x"}]}`, 200, "success. Parsing unknown value 'x' in 'mode', using default 'snat'"},
		{"POST", "/farms", `{"farms": [{"name": "web", "verdict": "x"}]}`, 500, "error parsing buffer. Parsing unknown value 'x' in 'verdict'"},
		{"POST", "/farms", `{"farms": [{"name": "web", "queue": "-2"}]}`, 400, "error parsing buffer. Invalid value of key 'queue' must be >=-1"},
		{"POST", "/farms", `{"farms": [{"name": "web", "new-rtlimit": "5/fortnight"}]}`, 400, "error parsing buffer. Parsing unknown value '5/fortnight' in 'new-rtlimit'"},
		{"POST", "/farms", `{"farms": [{"name": "web", "helper": "tftp"}]}`, 400, "error parsing buffer"},
		{"POST", "/farms", `{"farms": [{"name": "web", "policies": [{"name": "p"}]}]}`, 404, "the object to modify is unknown. Unknown policy 'p'"},
		{"POST", "/farms", `{"farms": [{"name": "web", "backends": [{"name": "b1", "weight": "0"}]}]}`, 400, "error parsing buffer. Invalid value of key 'weight' must be >=1"},
		{"POST", "/farms", `{"farms": [{"name": "web", "sessions": [{"client": "10.9.9.9", "backend": "b9"}]}]}`, 404, "the object to modify is unknown"},
		{"POST", "/policies", `{"policies": [{"name": "p", "elements": [{"data": "198.51.100.0/24"}]}]}`, 200, "success"},
		{"PATCH", "/policies/p", `{"policies": [{"name": "p", "elements": [{"data": "198.51.100.7"}]}]}`, 200, "success"},
		{"PATCH", "/policies/q", `{}`, 404, "the object to modify is unknown. Unknown policy 'q'"},
		{"PATCH", "/farms/web/policies", `{"farms": [{"name": "web", "policies": [{"name": "p"}]}]}`, 200, "success"},
		{"PATCH", "/farms/none/policies", `{}`, 404, "the object to modify is unknown. Unknown farm 'none'"},
		{"PATCH", "/farms/web", `{}`, 404, "invalid request"},
		{"DELETE", "/policies/p/elements/198.51.100.8", "", 404, "error deleting policy element. Unknown element '198.51.100.8' in policy 'p'"},
		{"DELETE", "/policies/p/elements/198.51.100.7", "", 200, "success"},
		{"DELETE", "/policies/q/elements", "", 404, "could not get the policy elements. Unknown policy 'q'"},
		{"DELETE", "/policies/q", "", 404, "error stopping policy. Unknown policy 'q'"},
		{"DELETE", "/farms/none", "", 404, "error deleting farm. Unknown farm 'none'"},
		{"DELETE", "/farms/web/backends/b9", "", 404, "error deleting backend. Unknown backend 'b9' in farm 'web'"},
		{"DELETE", "/farms/web/backends/b1/sessions", "", 400, "error deleting sessions from backend. Farm 'web' without session persistence"},
		{"DELETE", "/farms/none/addresses/a", "", 404, "error deleting farm address. Unknown farm 'none'. Unknown farm 'none'"},
		{"DELETE", "/farms/web/policies/q", "", 404, "error deleting farm policy. Unknown farm policy 'q' in farm 'web'"},
		{"DELETE", "/farms/web/policies", "", 200, "success"},
		{"DELETE", "/farms/web/sessions/10.9.9.9", "", 200, "success"},
		{"DELETE", "/farms/web/nonsense", "", 400, "invalid request"},
		{"DELETE", "/nonsense", "", 404, "invalid request"},
		{"DELETE", "/addresses/a", "", 404, "error stopping address. Unknown address 'a'"},
		{"DELETE", "/farms/web/backends/b1", "", 200, "success"},
		{"GET", "/farms/none", "", 500, "invalid request"},
		{"GET", "/farms/none/sessions", "", 404, "invalid request"},
		{"GET", "/farms/web/nonsense", "", 400, "invalid request"},
		{"GET", "/", "", 400, "invalid request"},
		{"DELETE", "/farms", "", 200, "success"},
	} {
		code, got := ask(t, a, c.method, c.path, c.body)
		if want := fmt.Sprintf(`{"response": %q}`, c.want); code != c.code || got != want {
			t.Errorf("%s %s %s\ngot  %d %s\nwant %d %s", c.method, c.path, c.body, code, got, c.code, want)
		}
	}
}

// TestObjects: the objects of a farm as nftlb 1.0.7 prints them, with all defaults.
func TestObjects(t *testing.T) {
	a, _ := newTestAPI(t, fakeNetwork{})
	ask(t, a, "POST", "/policies", `{"policies": [{"name": "p", "elements": [{"data": "198.51.100.3"}, {"data": "198.51.100.0/31"}, {"data": "198.51.100.2"}]}]}`)
	ask(t, a, "POST", "/farms", strings.Replace(web, `"mode": "snat"`, `"mode": "snat", "persistence": "srcip", "new-rtlimit": "10/minute", "rst-rtlimit": "5/hour", "log": "input output"`, 1))
	ask(t, a, "POST", "/farms", `{"farms": [{"name": "web", "policies": [{"name": "p"}], "sessions": [{"client": "10.9.9.9", "backend": "b2"}]}]}`)
	for _, c := range []struct{ path, file string }{{"/farms", "farms"}, {"/policies", "policies"}, {"/addresses", "addresses"}, {"/farms/web/sessions", "sessions"}} {
		_, got := ask(t, a, "GET", c.path, "")
		file := filepath.Join("testdata", c.file+".json")
		want, err := os.ReadFile(file)
		if err != nil {
			t.Error(err)
		}
		if got+"\n" != string(want) {
			t.Errorf("%s:\n%s\nwant %s:\n%s", c.path, got, file, want)
		}
	}
}

// state returns the state of a backend.
func state(t *testing.T, a *API, farm, backend string) string {
	t.Helper()
	b := a.store.farmNamed(farm).backend(backend)
	if b == nil {
		t.Fatalf("farm %s has no backend %s", farm, backend)
	}
	return b.State
}

// TestPriorities: the second class is used while a backend of the first is down.
func TestPriorities(t *testing.T) {
	a, g := newTestAPI(t, fakeNetwork{})
	ask(t, a, "POST", "/farms", web)
	ask(t, a, "POST", "/farms", `{"farms": [{"name": "web", "backends": [{"name": "b2", "priority": "2"}]}]}`)
	if got := state(t, a, "web", "b2"); got != available {
		t.Errorf("b2 is %s while b1 is up", got)
	}
	if n := len(g.cfg.Services[0].Backends); n != 1 {
		t.Errorf("%d backends are in force", n)
	}
	ask(t, a, "POST", "/farms", `{"farms": [{"name": "web", "backends": [{"name": "b1", "state": "down"}]}]}`)
	if got := state(t, a, "web", "b2"); got != up {
		t.Errorf("b2 is %s while b1 is down", got)
	}
	if b := g.cfg.Services[0].Backends; len(b) != 1 || b[0].Name != "b2" {
		t.Errorf("in force are %+v", b)
	}
	ask(t, a, "POST", "/farms", `{"farms": [{"name": "web", "backends": [{"name": "b1", "state": "off"}]}]}`)
	if b := g.cfg.Services[0].Backends; len(b) != 2 || !b[0].Drain || b[1].Drain {
		t.Errorf("with b1 off are in force %+v", b)
	}
}

// TestNeighbours: a backend of mode dsr waits until its hardware address is known.
func TestNeighbours(t *testing.T) {
	n := fakeNetwork{}
	a, g := newTestAPI(t, n)
	ask(t, a, "POST", "/farms", strings.Replace(strings.ReplaceAll(web, `"port": "8080", `, ""), "snat", "dsr", 1))
	if got := state(t, a, "web", "b1"); got != configError {
		t.Errorf("b1 is %s", got)
	}
	n["10.0.0.1"] = "02:00:00:00:00:11"
	if _, got := ask(t, a, "GET", "/farms", ""); !strings.Contains(got, `"state": "up"`) || state(t, a, "web", "b1") != up || state(t, a, "web", "b2") != configError {
		t.Errorf("b1 is known now:\n%s", got)
	}
	a.Start(context.Background())
	if b := g.cfg.Services[0].Backends; len(b) != 1 || b[0].Name != "b1" || g.cfg.Services[0].Mode != config.ModeDSR {
		t.Errorf("in force is %+v", g.cfg.Services[0])
	}
}

// TestRestart: a new API has the objects of the previous one and puts the same configuration in force.
func TestRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nftlb.json")
	open := func() (*API, *gateway) {
		g := newGateway()
		a := New(Options{Network: fakeNetwork{}, Key: func() string { return testKey }, InForce: g.inForce, Change: g.change, Path: path, Log: slog.New(slog.DiscardHandler)})
		a.Start(context.Background())
		return a, g
	}
	a, g := open()
	ask(t, a, "POST", "/policies", `{"policies": [{"name": "p", "elements": [{"data": "198.51.100.0/24"}]}]}`)
	ask(t, a, "POST", "/addresses", `{"addresses": [{"name": "extra", "ip-addr": "192.0.2.11", "ports": "443"}]}`)
	ask(t, a, "POST", "/farms", strings.Replace(web, `"snat"`, `"snat", "persistence": "srcip"`, 1))
	ask(t, a, "POST", "/farms", `{"farms": [{"name": "web", "policies": [{"name": "p"}], "addresses": [{"name": "extra"}], "sessions": [{"client": "10.9.9.9", "backend": "b2"}]}]}`)
	b, h := open()
	for _, kind := range []string{"/farms", "/addresses", "/policies"} {
		_, before := ask(t, a, "GET", kind, "")
		if _, after := ask(t, b, "GET", kind, ""); after != before {
			t.Errorf("%s after the restart:\n%s\nbefore:\n%s", kind, after, before)
		}
	}
	if len(config.Diff(g.cfg, h.cfg)) > 0 || len(h.cfg.Services) != 1 {
		t.Errorf("in force after the restart: %+v", h.cfg.Services)
	}
	ask(t, b, "DELETE", "/farms", "")
	if len(h.cfg.Services) != 0 {
		t.Errorf("in force after the deletion: %+v", h.cfg.Services)
	}
}

// TestDamagedObjects: with a damaged file the API starts without objects and with a warning, leaves the
// services in force, and does not delete the file.
func TestDamagedObjects(t *testing.T) {
	path := filepath.Join(t.TempDir(), "nftlb.json")
	g := newGateway()
	open := func() *API {
		return New(Options{Network: fakeNetwork{}, Key: func() string { return testKey }, InForce: g.inForce, Change: g.change, Path: path, Log: slog.New(slog.DiscardHandler)})
	}
	a := open()
	a.Start(t.Context())
	ask(t, a, "POST", "/farms", web)
	ask(t, a, "POST", "/policies", `{"policies": [{"name": "p", "elements": [{"data": "198.51.100.0/24"}]}]}`)
	_, want := ask(t, a, "GET", "/farms", "")
	intact, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	unsealed, _, err := disk.Unseal(intact)
	if err != nil {
		t.Fatal(err)
	}
	before := g.cfg
	damage.Each(t, path, slices.Concat(damage.All(intact, 50), damage.Few(unsealed), []damage.Damage{{Name: "earlier version", Content: unsealed}}), func(d damage.Damage) error {
		os.RemoveAll(path + ".damaged")
		g.cfg = before
		a := open()
		a.Start(t.Context())
		_, got := ask(t, a, "GET", "/farms", "")
		lost, earlier := len(a.Warnings()) > 0, !bytes.Contains(d.Content, []byte("checksum"))
		switch {
		case d.Name == "missing":
			return nil
		case d.Name == "earlier version" && lost:
			return errors.New(a.Warnings()[0])
		case !lost && got != want && !earlier:
			return fmt.Errorf("the objects are %s", got)
		case lost && len(g.cfg.Services) != 1:
			return errors.New("the service is not in force any more")
		}
		if !lost {
			return nil
		}
		if _, err := os.Lstat(path + ".damaged"); err != nil {
			return err
		}
		if ask(t, a, "POST", "/farms", strings.Replace(web, `"web"`, `"second"`, 1)); len(a.Warnings()) > 0 || g.cfg.Services[0].Name != "nftlb-second" {
			return fmt.Errorf("after a change: %v, %+v", a.Warnings(), g.cfg.Services)
		}
		return nil
	})
}

// TestRefused: a farm that cannot be in force is reported and does not affect other farms.
func TestRefused(t *testing.T) {
	a, g := newTestAPI(t, fakeNetwork{})
	g.cfg.Services = []config.Service{}
	ask(t, a, "POST", "/farms", web)
	code, got := ask(t, a, "POST", "/farms", strings.Replace(web, `"web"`, `"second"`, 1)) // the same address and port
	if code != 200 || len(g.cfg.Services) != 1 || g.cfg.Services[0].Name != "nftlb-web" {
		t.Errorf("%d %s: in force are %+v", code, got, g.cfg.Services)
	}
	if w := strings.Join(a.Warnings(), "\n"); !strings.Contains(w, "farm second: it is not in force") {
		t.Errorf("warnings: %s", w)
	}
	a.opt.Change = func(context.Context, string, string, func(*config.Config) (*config.Config, error)) error {
		return errors.New("the kernel refuses it")
	}
	if code, got = ask(t, a, "DELETE", "/farms/web", ""); code != 500 || got != `{"response": "error generating rules. the kernel refuses it"}` {
		t.Errorf("%d %s", code, got)
	}
	a.opt.Change = g.change
	a.applyObjects(context.Background(), "again")
	if len(g.cfg.Services) != 1 || g.cfg.Services[0].Name != "nftlb-second" || len(a.Warnings()) != 0 {
		t.Errorf("in force are %+v, warnings %v", g.cfg.Services, a.Warnings())
	}
}

// TestUnauthorized: without the key, no request gets an answer or unbounded reading.
func TestUnauthorized(t *testing.T) {
	a, _ := newTestAPI(t, fakeNetwork{})
	var refused []string
	a.opt.Refused = func(client, _ string) { refused = append(refused, client) }
	for _, key := range []string{"", "wrong", testKey + "x"} {
		r := httptest.NewRequest("GET", "/farms", nil)
		r.Header.Set("Key", key)
		w := httptest.NewRecorder()
		if a.ServeHTTP(w, r); w.Code != 401 || w.Body.Len() > 0 {
			t.Errorf("key %q: %d %s", key, w.Code, w.Body)
		}
	}
	if len(refused) != 3 { // the listener logs only few
		t.Errorf("refused: %v", refused)
	}
	if code, _ := ask(t, a, "POST", "/farms", strings.Repeat(" ", maxBody+1)); code != 413 {
		t.Errorf("a body without end: %d", code)
	}
	if code, _ := ask(t, a, "POST", "/farms", strings.Repeat("[", 100000)); code != 400 {
		t.Errorf("a deep body: %d", code)
	}
	if code, _ := ask(t, a, "TRACE", "/farms", ""); code != 400 {
		t.Errorf("an unknown method: %d", code)
	}
}
