// SPDX-License-Identifier: Apache-2.0

package server

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/api"
)

// TestObjects changes one object after the other. Each line of the table depends on the previous ones.
func TestObjects(t *testing.T) {
	s, _ := start(t)
	if code, got := call(t, s, "PUT", "/api/v1/config", web, yaml...); code != 200 {
		t.Fatalf("%d: %s", code, got)
	}
	for _, c := range []struct {
		method, path, body string
		code               int
		want               string // contained in the response, or in the response to a GET below /config
	}{
		{"GET", "/config/services/web/backends/a", "", 200, `{"name":"a","address":"10.0.2.2","port":8080,"weight":1,"priority":1}`},
		{"GET", "/config/services", "", 200, `[{"name":"web",`},
		{"GET", "/config/firewall/sets", "", 200, `{}`},
		{"GET", "/config/nat/nosuch", "", 404, `nat/nosuch: not found`},
		{"POST", "/services/web/backends", `{"name": "c", "address": "10.0.2.4", "port": 80}`, 201, `"revision"`},
		{"POST", "/services/web/backends", `{"name": "c", "address": "10.0.2.5"}`, 409, `services/web/backends/c: exists already`},
		{"POST", "/services/nosuch/backends", `{"name": "c", "address": "10.0.2.5"}`, 404, `not found`},
		{"POST", "/services/web/backends", `{"name": "d", "address": "10.0.2.5", "wieght": 3}`, 422, `body.wieght`},
		{"POST", "/services/web/backends", `{"name": "d"}`, 422, `address is missing`},
		{"POST", "/services/web/backends", `{`, 422, `not YAML`},
		{"PATCH", "/services/web/backends/c", `{"weight": 5}`, 200, `"revision"`},
		{"GET", "/config/services/web/backends/c", "", 200, `"weight":5`},
		{"PATCH", "/services/web/backends/c", `{"weight": 500}`, 422, `weight 500 is out of range`},
		{"PUT", "/services/web/backends/c", `{"address": "10.0.2.9"}`, 200, `"revision"`},
		{"GET", "/config/services/web/backends/c", "", 200, `{"name":"c","address":"10.0.2.9","weight":1,"priority":1}`},
		{"DELETE", "/services/web/backends/c", "", 200, `"revision"`},
		{"DELETE", "/services/web/backends/c", "", 404, `not found`},
		{"PUT", "/firewall/sets/bad~guys", `["198.51.100.0/24", "203.0.113.7"]`, 422, `bad-guys`},
		{"PUT", "/firewall/sets/banned", `["198.51.100.0/24", "203.0.113.7"]`, 201, `"revision"`},
		{"POST", "/firewall/sets/banned/elements", `["2001:db8::/32"]`, 200, `"revision"`},
		{"DELETE", "/firewall/sets/banned/elements/198.51.100.0%2F24", "", 200, `"revision"`},
		{"DELETE", "/firewall/sets/banned/elements/198.51.100.0%2F24", "", 404, `not found`},
		{"GET", "/config/firewall/sets/banned", "", 200, `["203.0.113.7/32","2001:db8::/32"]`},
		{"POST", "/nat", `{"name": "more", "type": "masquerade", "source": ["172.16.0.0/12"], "out": "wan1"}`, 201, `"revision"`},
		{"PATCH", "/nat/more", `{"source": ["172.20.0.0/16"]}`, 200, `"revision"`},
		{"GET", "/config/nat/more", "", 200, `"source":["172.20.0.0/16"]`},
		{"POST", "/services", `{"name": "dns", "listen": [{"address": "192.0.2.10", "ports": ["80"]}], "protocol": "tcp", "mode": "dnat", "backends": []}`, 422, `192.0.2.10`},
		{"PUT", "/services/dns", `{"listen": [{"address": "192.0.2.11", "ports": ["53"]}], "protocol": "udp", "mode": "dnat", "backends": [{"address": "10.0.2.2"}]}`, 201, `"revision"`},
		{"PATCH", "/services/dns?dry-run=true", `{"scheduler": "lc"}`, 200, `"changes"`},
		{"GET", "/config/services/dns", "", 200, `"scheduler":"rr"`},
		{"POST", "/changes", `[{"op": "patch", "path": "services/dns", "value": {"scheduler": "lc"}}, {"op": "remove", "path": "nat/nosuch"}]`, 404, `change 2: nat/nosuch: not found`},
		{"GET", "/config/services/dns", "", 200, `"scheduler":"rr"`},
		{"POST", "/changes", `[{"op": "patch", "path": "services/dns", "value": {"scheduler": "lc"}}, {"op": "remove", "path": "nat/more"}, {"op": "add", "path": "services/dns/backends", "value": {"name": "z", "address": "10.0.2.7"}}, {"op": "put", "path": "timeouts/udp", "value": "3m"}]`, 200, `"revision"`},
		{"GET", "/config/services/dns", "", 200, `"scheduler":"lc"`},
		{"GET", "/config/services/dns/backends/z", "", 200, `"10.0.2.7"`},
		{"GET", "/config/nat/more", "", 404, `not found`},
		{"DELETE", "/services/dns", "", 200, `"revision"`},
	} {
		code, got := call(t, s, c.method, "/api/v1"+c.path, c.body, "Content-Type", "application/json")
		if code != c.code || !strings.Contains(got, c.want) {
			t.Errorf("%s %s %s: %d, want %d with %s\n%s", c.method, c.path, c.body, code, c.code, c.want, got)
		}
		if code >= 400 {
			var problem struct{ Status int }
			if err := json.Unmarshal([]byte(got), &problem); err != nil || problem.Status != code {
				t.Errorf("%s %s: not a problem document: %s", c.method, c.path, got)
			}
		}
	}
}

// TestObjectTags: two editors of one object conflict, and editors of other objects do not.
func TestObjectTags(t *testing.T) {
	s, _ := start(t)
	if code, got := call(t, s, "PUT", "/api/v1/config", web, yaml...); code != 200 {
		t.Fatalf("%d: %s", code, got)
	}
	tag := func(path string) string {
		resp, err := http.Get(s.URL + "/api/v1/config" + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.Header.Get("ETag")
	}
	patch := func(path, body, match string) int {
		code, _ := call(t, s, "PATCH", "/api/v1"+path, body, "If-Match", match)
		return code
	}
	a, b := tag("/services/web/backends/a"), tag("/services/web/backends/b")
	if a == "" || a == b {
		t.Fatalf("tags %q and %q", a, b)
	}
	if code := patch("/services/web/backends/a", `{"weight": 2}`, a); code != 200 {
		t.Errorf("with the tag in force: %d", code)
	}
	if code := patch("/services/web/backends/a", `{"weight": 3}`, a); code != 412 {
		t.Errorf("with an old tag: %d", code)
	}
	if code := patch("/services/web/backends/b", `{"weight": 3}`, b); code != 200 {
		t.Errorf("another object: %d", code)
	}
	if code := patch("/services/web/backends/nosuch", `{"weight": 3}`, "*"); code != 412 {
		t.Errorf("* for what does not exist: %d", code)
	}
}

// TestCreated: the response to a created object has its location.
func TestCreated(t *testing.T) {
	s, _ := start(t)
	if code, got := call(t, s, "PUT", "/api/v1/config", web, yaml...); code != 200 {
		t.Fatalf("%d: %s", code, got)
	}
	resp, err := http.Post(s.URL+"/api/v1/services/web/backends", "application/json", strings.NewReader(`{"address": "2001:db8::7", "port": 80}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var out api.Outcome
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil || resp.StatusCode != 422 {
		t.Fatalf("a backend of the other family in mode dnat: %d %v", resp.StatusCode, err)
	}
	resp, err = http.Post(s.URL+"/api/v1/services/web/backends", "application/yaml", strings.NewReader("{address: 10.0.2.77, port: 80}"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if got := resp.Header.Get("Location"); resp.StatusCode != 201 || got != "/api/v1/services/web/backends/10.0.2.77" {
		t.Errorf("%d, location %q", resp.StatusCode, got)
	}
}
