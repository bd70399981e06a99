// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/server"
)

// TestClientHasEveryOperation calls the whole client and compares its requests with the document.
func TestClientHasEveryOperation(t *testing.T) {
	text, err := server.OpenAPI("v1")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Paths map[string]map[string]any
	}
	if err := yaml.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	open := map[string]*regexp.Regexp{} // operations without a request so far
	for path, item := range doc.Paths {
		for method := range item {
			pattern := regexp.MustCompile(`\\\{[a-z]+\\\}`).ReplaceAllString(regexp.QuoteMeta(path), "[^/]+")
			open[strings.ToUpper(method)+" "+path] = regexp.MustCompile("^" + strings.ToUpper(method) + " " + pattern + "$")
		}
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked, known := r.Method+" "+r.URL.EscapedPath(), false
		for operation, pattern := range open {
			// The operation with the longest literal path.
			if pattern.MatchString(asked) && (!strings.Contains(operation, "{") || !exact(doc.Paths, r)) {
				delete(open, operation)
				known = true
			}
		}
		if !known && !covered(doc.Paths, asked) {
			t.Errorf("the client asks %s, which is no operation", asked)
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	defer s.Close()
	c, err := api.NewRemote(api.Remote{Server: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	callAll(t.Context(), c)
	for operation := range open {
		t.Errorf("no method of the client asks %s", operation)
	}
}

// exact reports whether a request names an operation without parameters in its path.
func exact(paths map[string]map[string]any, r *http.Request) bool {
	_, ok := paths[r.URL.EscapedPath()]
	return ok
}

func covered(paths map[string]map[string]any, asked string) bool {
	method, at, _ := strings.Cut(asked, " ")
	for path, item := range paths {
		pattern := regexp.MustCompile(`\\\{[a-z]+\\\}`).ReplaceAllString(regexp.QuoteMeta(path), "[^/]+")
		if _, ok := item[strings.ToLower(method)]; ok && regexp.MustCompile("^"+pattern+"$").MatchString(at) {
			return true
		}
	}
	return false
}

// callAll makes every request of the client; the responses are empty.
func callAll(ctx context.Context, c *api.Client) {
	opt := api.ChangeOptions{}
	_, _ = c.Status(ctx)
	_, _ = c.Services(ctx)
	_, _ = c.Service(ctx, "web")
	_, _ = c.Backends(ctx)
	_, _ = c.NAT(ctx)
	_, _ = c.Interfaces(ctx)
	_, _ = c.Addresses(ctx)
	_, _ = c.Announcements(ctx)
	_, _ = c.Uplinks(ctx)
	_, _ = c.Nodes(ctx)
	_, _ = c.Mappings(ctx)
	_, _ = c.Flows(ctx, nil)
	_ = c.EachFlow(ctx, nil, func(*api.Flow) error { return nil })
	_ = c.Events(ctx, nil, func(*event.Event) error { return nil })
	_, _ = c.Audit(ctx, 1)
	_, _ = c.Drain(ctx, api.StartDrain{})
	_, _ = c.DrainState(ctx)
	_, _ = c.CancelDrain(ctx)
	_, _ = c.SetNode(ctx, api.SetNode{State: "drain"})
	_, _ = c.DrainNode(ctx, "n", api.SetNode{State: "drain"})
	_, _ = c.ApplyCluster(ctx, "f", nil, -1)
	_ = c.Ready(ctx)
	_, _ = c.Explain(ctx, url.Values{})
	_, _ = c.Config(ctx)
	_, _ = c.Apply(ctx, "f", nil)
	_, _ = c.ApplyTrial(ctx, "f", nil, 9)
	_ = c.Confirm(ctx)
	_, _ = c.Plan(ctx, "f", nil)
	_, _ = c.Reload(ctx)
	_, _ = c.Changes(ctx)
	_, _ = c.Revert(ctx, api.Revert{All: true})
	_ = c.Save(ctx)
	_, _ = c.Change(ctx, nil, false)
	_ = c.Stop(ctx, api.Stop{})
	_ = c.SetBackend(ctx, "web", "a", api.BackendState{State: "up"})
	for _, list := range []string{"services", "services/web/backends", "nat"} {
		_, _ = c.Object(ctx, list)
		_, _ = c.AddObject(ctx, list, struct{}{}, opt)
	}
	_, _ = c.Object(ctx, "firewall/sets")
	for _, path := range []string{"services/web", "services/web/backends/a", "nat/out", "firewall/sets/banned"} {
		_, _, _ = c.TaggedObject(ctx, path)
		_, _ = c.PutObject(ctx, path, struct{}{}, opt)
		if !strings.HasPrefix(path, "firewall") {
			_, _ = c.PatchObject(ctx, path, struct{}{}, opt)
		}
		_, _ = c.RemoveObject(ctx, path, opt)
	}
	_, _ = c.AddElements(ctx, "banned", []string{"192.0.2.1"}, opt)
	_, _ = c.RemoveElement(ctx, "banned", "192.0.2.0/24", opt)
}

// TestObjectsOfTheClient: names are escaped, and options are sent.
func TestObjectsOfTheClient(t *testing.T) {
	var asked []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, fmt.Sprintf("%s %s If-Match=%s", r.Method, r.URL.RequestURI(), r.Header.Get("If-Match")))
		w.Header().Set("ETag", `"tag"`)
		_, _ = w.Write([]byte(`{"revision": 3}`))
	}))
	defer s.Close()
	c, err := api.NewRemote(api.Remote{Server: s.URL})
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.PatchObject(t.Context(), "firewall/sets/a~1b", map[string]int{"weight": 3}, api.ChangeOptions{DryRun: true, IfMatch: `"x"`})
	if err != nil || out.Revision != 3 {
		t.Fatal(out, err)
	}
	if want := `PATCH /api/v1/firewall/sets/a%2Fb?dry-run=true If-Match="x"`; asked[0] != want {
		t.Errorf("asked %s, want %s", asked[0], want)
	}
	if _, tag, err := c.TaggedObject(t.Context(), "nat/out"); err != nil || tag != `"tag"` {
		t.Errorf("the tag is %s: %v", tag, err)
	}
}
