// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/sluice-lb/sluice/config"
)

func TestPlan(t *testing.T) {
	text, stderr, code := sluice(t, "plan", "--class", "browsing=170x20", "--class", "30x400",
		"--bandwidth", "90Mbit", "--memory", "512MiB", "--cores", "1", "--subscribers", "200", "--public-addresses", "1")
	if code != 0 {
		t.Fatal(stderr)
	}
	for _, want := range []string{"15400", "32768", "nf_conntrack_max = 32768", "port block", "flows: 32768"} {
		if !strings.Contains(text, want) {
			t.Errorf("output lacks %q:\n%s", want, text)
		}
	}
	for line := range strings.Lines(text) {
		if len([]rune(strings.TrimRight(line, "\n"))) > 80 {
			t.Errorf("line of more than 80 columns: %q", line)
		}
	}
}

func TestPlanFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load.yaml")
	const load = `
classes:
  - {name: browsing, clients: 170, connections: 20}
requests:
  - {name: api, rate: 800, lifetime: 2s}
  - {name: dns, protocol: udp, rate: 100, linger: 30s}
bandwidth: 1Gbit
host: {memory: 4GiB, cores: 2}
`
	if err := os.WriteFile(path, []byte(load), 0o600); err != nil {
		t.Fatal(err)
	}
	text, stderr, code := sluice(t, "plan", "--for", path, "--cores", "4", "--json")
	if code != 0 {
		t.Fatal(stderr)
	}
	var r planReport
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatal(err)
	}
	if want := uint64(170*20 + 800*122 + 100*30); r.Peak != want || r.Load.Host.Cores != 4 || r.Entries != 262144 {
		t.Errorf("peak %d, want %d; cores %d; entries %d", r.Peak, want, r.Load.Host.Cores, r.Entries)
	}
	fragment, _, _ := sluice(t, "plan", "--for", path, "--output", "sluice")
	var c config.Config
	if err := yaml.UnmarshalWithOptions([]byte(fragment), &c, yaml.Strict()); err != nil {
		t.Fatalf("the configuration is not one: %v\n%s", err, fragment)
	}
	if c.Tables.Flows != 524288 || c.Timeouts.TCPTransitory.D().Minutes() != 4 {
		t.Errorf("configuration reads %+v %+v", c.Tables, c.Timeouts)
	}
	var plain config.Config // plans use the timeouts of a configuration without timeouts
	plain.SetDefaults()
	if got, want := c.Timeouts, plain.Timeouts; got.TCPEstablished != want.TCPEstablished || got.TCPTransitory != want.TCPTransitory || got.UDP != want.UDP {
		t.Errorf("timeouts %+v, want %+v", got, want)
	}
	if err := os.WriteFile(path, []byte("clients: 5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := sluice(t, "plan", "--for", path); code == 0 || !strings.Contains(stderr, "clients") {
		t.Errorf("an unknown key: code %d, %s", code, stderr)
	}
}

func TestPlanReverse(t *testing.T) {
	text, stderr, code := sluice(t, "plan", "--reverse", "--memory", "4GiB", "--cores", "2", "--connections", "100")
	if code != 0 || !strings.Contains(text, "1048576") || !strings.Contains(text, "5242") {
		t.Errorf("code %d, %s\n%s", code, stderr, text)
	}
}

func TestPlanUsage(t *testing.T) {
	for _, args := range [][]string{{"--class", "30-400"}, {"--requests", "800"}, {"--bandwidth", "fast"}, {"--reverse"}, {"--class", "1x1", "--output", "xml"}, {}, {"--class", "1x1", "--output", "sysctl", "--json"},
		{"--requests", "nan/s"}, {"--requests", "inf/s"}, {"--class", "1x1", "--headroom", "nan"}, {"--class", "4000000000x60000"}} {
		if _, stderr, code := sluice(t, append([]string{"plan"}, args...)...); code != exitUsage {
			t.Errorf("%v: code %d, %s", args, code, stderr)
		}
	}
}
