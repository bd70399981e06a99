// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// gateway is a configuration that an API changes.
type gateway struct{ cfg *config.Config }

func (g *gateway) change(_ context.Context, _, _ string, make func(*config.Config) (*config.Config, error)) error {
	next, err := make(g.cfg)
	if err != nil {
		return err
	}
	if err := next.Validate(); err != nil {
		return err
	}
	g.cfg = next
	return nil
}

func (g *gateway) inForce() *config.Config { return g.cfg }

func newGateway() *gateway {
	g := &gateway{cfg: &config.Config{}}
	g.cfg.SetDefaults()
	return g
}

const testKey = "correct horse"

func newTestAPI(t *testing.T, n Network) (*API, *gateway) {
	t.Helper()
	g := newGateway()
	a := New(Options{Network: n, Key: func() string { return testKey }, InForce: g.inForce, Change: g.change, Log: slog.New(slog.DiscardHandler)})
	return a, g
}

// ask sends a request to a handler.
func ask(t *testing.T, h http.Handler, method, path, body string) (int, string) {
	t.Helper()
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Key", testKey)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	raw, err := io.ReadAll(w.Result().Body)
	if err != nil {
		t.Fatal(err)
	}
	return w.Code, string(raw)
}

var assignment = regexp.MustCompile(`(?m)^(\w+)="?([^"\n]*)"?`)

// request is one of the suite's.
type request struct{ name, dir, method, path, body string }

// suite reads the requests of the suite.
func suite(t *testing.T, root string) []request {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, "*", "req.api"))
	if err == nil && len(files) == 0 {
		files, err = filepath.Glob(filepath.Join(root, "*", "*", "req.api"))
	}
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: no test cases: %v", root, err)
	}
	var all []request
	vars := map[string]string{} // of the shell that runs the cases: they stay
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range assignment.FindAllStringSubmatch(string(raw), -1) {
			vars[m[1]] = m[2]
		}
		r := request{name: filepath.Base(filepath.Dir(file)), dir: filepath.Dir(file), method: vars["VERB"], path: vars["URI"]}
		if raw, err := os.ReadFile(filepath.Join(r.dir, vars["FILE"])); err == nil && r.method != "GET" {
			r.body = strings.NewReplacer("\n", "", "\r", "").Replace(string(raw)) // as curl -d does
		}
		all = append(all, r)
	}
	return all
}

// TestSuite runs the test suite of nftlb, tests/api of its source, where SLUICE_NFTLB_SUITE names
// it: the replies, and the objects after each request. Both depend on the host's interfaces.
func TestSuite(t *testing.T) {
	root := os.Getenv("SLUICE_NFTLB_SUITE")
	if root == "" {
		t.Skip("SLUICE_NFTLB_SUITE names no directory with the test suite of nftlb")
	}
	cases := suite(t, root)
	a, _ := newTestAPI(t, Host{})
	good, all := 0, 0
	check := func(name, file, got string) {
		want, err := os.ReadFile(file)
		if err != nil {
			return
		}
		if all++; got == string(want) {
			good++
			return
		}
		t.Errorf("%s\ngot:\n%s\nwant:\n%s", name, difference(got, string(want)), difference(string(want), got))
	}
	for _, c := range cases {
		_, got := ask(t, a, c.method, "/"+c.path, c.body)
		check(c.name+": reply", filepath.Join(c.dir, "req.out"), got)
		kind, _, _ := strings.Cut(c.path, "/")
		_, got = ask(t, a, "GET", "/"+kind, "")
		check(c.name+": objects", filepath.Join(c.dir, "obj.out"), got)
	}
	t.Logf("%d of %d checks passed", good, all)
}

// difference returns the lines of a that b does not have at the same place.
func difference(a, b string) string {
	var out []string
	other := strings.Split(b, "\n")
	for i, line := range strings.Split(a, "\n") {
		if i >= len(other) || other[i] != line {
			out = append(out, line)
		}
	}
	return strings.Join(out[:min(len(out), 12)], "\n")
}
