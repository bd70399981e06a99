// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

const objects = `
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    backends: [{name: a, address: 10.0.0.1, port: 8080, weight: 3}, {address: 10.0.0.2}]
nat:
  - {name: out, type: masquerade, source: [10.0.0.0/8], out: wan0}
firewall:
  sets: {banned: [198.51.100.0/24]}
`

// TestObjects adds, replaces, patches and removes objects; each line shows the object afterwards.
func TestObjects(t *testing.T) {
	for _, c := range []struct{ name, call, path, value, want string }{
		{"add a backend", "add", "services/web/backends", "{name: c, address: 10.0.0.3}", "services/web/backends/c: {name: c, address: 10.0.0.3, weight: 1, priority: 1}"},
		{"add a backend without a name", "add", "services/web/backends", `{"address": "10.0.0.3", "port": 80}`, `services/web/backends/10.0.0.3: {name: "10.0.0.3", address: 10.0.0.3, port: 80, weight: 1, priority: 1}`},
		{"add a backend that is there", "add", "services/web/backends", "{name: a, address: 10.0.0.3}", "services/web/backends/a: exists already"},
		{"add to a service that is not there", "add", "services/nosuch/backends", "{name: a, address: 10.0.0.3}", "services/nosuch/backends/a: not found"},
		{"add a rule", "add", "nat", "{name: more, type: masquerade, source: [172.16.0.0/12], out: wan1}", "nat/more: {name: more, type: masquerade, source: [172.16.0.0/12]"},
		{"add a set", "put", "firewall/sets/staff", "[10.0.0.0/8]", "firewall/sets/staff: [10.0.0.0/8]"},
		{"add what has no name", "add", "nat", "{type: masquerade, source: [172.16.0.0/12]}", "nat: name is missing"},
		{"replace", "put", "services/web/backends/a", "{address: 10.0.0.9}", "services/web/backends/a: {name: a, address: 10.0.0.9, weight: 1, priority: 1}"},
		{"replace by another name", "put", "services/web/backends/a", "{name: b, address: 10.0.0.9}", `services/web/backends/a: the name is "b"`},
		{"patch", "patch", "services/web/backends/a", "{weight: 7, port: null}", "services/web/backends/a: {name: a, address: 10.0.0.1, weight: 7, priority: 1}"},
		{"patch one value", "put", "services/web/backends/a/weight", "9", "services/web/backends/a/weight: 9"},
		{"patch by a list", "patch", "services/web/backends/a", "[1]", "services/web/backends/a: not a mapping"},
		{"patch with an unknown key", "patch", "services/web/backends/a", "{wieght: 7}", `services/web/backends/a: unknown key "wieght"; write weight`},
		{"patch out of range", "patch", "services/web/backends/a", "{weight: 700}", "weight 700 is out of range"},
		{"remove a backend", "remove", "services/web/backends/a", "", "services/web/backends/a: not found"},
		{"remove what is not there", "remove", "nat/nosuch", "", "nat/nosuch: not found"},
		{"remove a service", "remove", "services/web", "", "services/web: not found"},
		{"what is no path", "put", "services/web/backends/a/weight/x", "1", "no parts"},
		{"what is no YAML", "put", "services/web", "{", "not YAML"},
		{"a timeout", "put", "timeouts/udp", "3m", "timeouts/udp: 3m"},
		{"a check", "put", "services/web/check", "{type: tcp}", "services/web/check: {type: tcp,"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg, err := config.Decode("f.yaml", []byte(objects))
			if err != nil {
				t.Fatal(err)
			}
			before := marshal(t, cfg)
			var next *config.Config
			path := c.path
			switch c.call {
			case "add":
				next, path, err = cfg.Add(c.path, "", []byte(c.value))
			case "put":
				next, err = cfg.Put(c.path, []byte(c.value))
			case "patch":
				next, err = cfg.Patch(c.path, []byte(c.value))
			case "remove":
				next, err = cfg.Remove(c.path)
			}
			got := ""
			if err == nil {
				var text string
				if _, text, err = next.Object(path); err == nil {
					got = path + ": " + text
				}
			}
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, c.want) {
				t.Errorf("got %s\nwant %s", got, c.want)
			}
			if marshal(t, cfg) != before {
				t.Error("the configuration itself was changed")
			}
		})
	}
}

// TestElements adds to a set and removes from it.
func TestElements(t *testing.T) {
	cfg, err := config.Decode("f.yaml", []byte(objects))
	if err != nil {
		t.Fatal(err)
	}
	next, err := cfg.Elements("banned", []string{"203.0.113.7", "2001:db8::/32", "198.51.100.0/24"}, nil)
	if err == nil {
		next, err = next.Elements("banned", nil, []string{"198.51.100.0/24"})
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, got, _ := next.Object("firewall/sets/banned"); got != `[203.0.113.7/32, "2001:db8::/32"]` {
		t.Errorf("elements %s", got)
	}
	if next, err = next.Elements("banned", nil, []string{"203.0.113.7", "2001:db8::/32"}); err != nil {
		t.Fatal(err)
	}
	if _, got, _ := next.Object("firewall/sets/banned"); got != "[]" {
		t.Errorf("elements %s", got)
	}
	if _, err := next.Elements("banned", nil, []string{"203.0.113.7"}); !errors.Is(err, config.ErrNoObject) {
		t.Errorf("an element that is not there: %v", err)
	}
	if _, err := next.Elements("banned", []string{"somewhere"}, nil); err == nil || !strings.Contains(err.Error(), "set banned: somewhere: neither a prefix nor an address") {
		t.Errorf("what is no address: %v", err)
	}
	if _, err := next.Elements("nosuch", nil, nil); !errors.Is(err, config.ErrNoObject) {
		t.Errorf("a set that is not there: %v", err)
	}
}
