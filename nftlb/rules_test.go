// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/config"
)

// TestInForce: the configuration of farms, as lines without default values, and the warnings about farms that
// are not in force.
func TestInForce(t *testing.T) {
	backends := `"backends": [{"name": "b1", "ip-addr": "10.0.0.1", "state": "up"}, {"name": "b2", "ip-addr": "10.0.0.2", "weight": "3", "state": "up"}]`
	farm := func(keys string) string {
		return `{"farms": [{"name": "web", "virtual-addr": "192.0.2.10", "virtual-ports": "80", ` + keys + backends + `}]}`
	}
	const service = "services/nftlb-web: {name: nftlb-web, "
	for _, c := range []struct {
		name     string
		requests []string // path, body, path, body, ...
		want     []string // parts of the lines of the configuration
		warnings []string
	}{
		{"snat", []string{"/farms", farm(`"mode": "snat", "scheduler": "weight", `)},
			[]string{service + "listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: fullnat, scheduler: random, backends: [{name: b1, address: 10.0.0.1, weight: 1, priority: 1}, {name: b2, address: 10.0.0.2, weight: 3, priority: 1}]"}, nil},
		{"source address", []string{"/farms", farm(`"mode": "dnat", "source-addr": "10.0.0.100", `)}, []string{"mode: fullnat, scheduler: wrr, source-pool: [10.0.0.100]"}, nil},
		{"ports", []string{"/farms", farm(`"mode": "dnat", "virtual-ports": "80,443,1000-1010", "scheduler": "symhash", `)}, []string{"ports: [80, 443, 1000-1010]}], protocol: tcp, mode: dnat, scheduler: symmetric-hash"}, nil},
		{"hash of the address", []string{"/farms", farm(`"mode": "dsr", "scheduler": "hash", `)}, []string{"mode: dsr, scheduler: source-hash"}, nil},
		{"hash of the ports", []string{"/farms", farm(`"mode": "dnat", "scheduler": "hash", "sched-param": "srcip srcport", `)}, []string{"scheduler: maglev"}, nil},
		{"stateless", []string{"/farms", farm(`"mode": "stlsdnat", "scheduler": "weight", "persistence": "srcip", `)}, []string{"mode: stateless, scheduler: source-hash"},
			[]string{"scheduler weight: a mode without state", "persistence is not in force"}},
		{"all protocols", []string{"/farms", farm(`"mode": "dnat", `), "/farms", `{"farms": [{"name": "web", "virtual-ports": ""}]}`}, []string{"listen: [{address: 192.0.2.10}], protocol: any"}, nil},
		{"ports of all protocols", []string{"/farms", farm(`"mode": "dnat", "protocol": "all", `)}, []string{"nftlb-web-tcp", "nftlb-web-udp", "nftlb-web-sctp"}, nil},
		{"limits", []string{"/farms", farm(`"mode": "dnat", "new-rtlimit": "10/minute", "new-rtlimit-burst": "4", "est-connlimit": "7", "tcp-strict": "on", "rst-rtlimit": "2/second", "queue": "1", `)},
			[]string{"limits: {new-connections-per-client: 10/minute, connections-per-client: 7, reset-rate: 2/second, strict-tcp: true}"},
			[]string{"queue 1 is not in force", "new-rtlimit-burst is not in force", "rst-rtlimit holds for all clients together"}},
		{"persistence", []string{"/farms", farm(`"mode": "dnat", "persistence": "srcip", "persist-ttl": "90", `), "/farms", `{"farms": [{"name": "web", "sessions": [{"client": "10.9.9.9", "backend": "b2"}]}]}`},
			[]string{"persistence: {key: [source-address], timeout: 1m30s, size: 65536}, sessions: [{client: 10.9.9.9/32, backend: b2}]"}, nil},
		{"log and mark", []string{"/farms", farm(`"mode": "dnat", "log": "forward", "mark": "0x10", "helper": "ftp", `), "/farms", `{"farms": [{"name": "web", "backends": [{"name": "b1", "mark": "0x200", "est-connlimit": "9"}]}]}`},
			[]string{"max-connections: 9, mark: 528}", "mark: 16, helper: ftp, log: {prefix: \"FWD-web \""}, nil},
		{"two families", []string{"/farms", farm(`"mode": "dnat", `), "/farms", `{"farms": [{"name": "web", "addresses": [{"name": "six", "family": "ipv6", "ip-addr": "2001:db8::10", "ports": "80"}], "backends": [{"name": "b6", "ip-addr": "2001:db8:1::1", "state": "up"}]}]}`},
			[]string{"nftlb-web-tcp, listen: [{address: 192.0.2.10", "nftlb-web-tcp-6, listen: [{address: \"2001:db8::10\"", "[{name: b6, address: \"2001:db8:1::1\""}, nil},
		{"blacklist", []string{"/policies", `{"policies": [{"name": "bad", "elements": [{"data": "198.51.100.0/24"}]}]}`, "/farms", farm(`"mode": "dnat", "policies": [{"name": "bad"}], `)},
			[]string{"deny: [nftlb-bad]", "firewall/sets/nftlb-bad: [198.51.100.0/24]"}, nil},
		{"whitelist before it", []string{"/policies", `{"policies": [{"name": "good", "type": "whitelist", "elements": [{"data": "198.51.100.128/25"}]}, {"name": "bad", "elements": [{"data": "198.51.100.0/24"}]}]}`,
			"/farms", farm(`"mode": "dnat", "policies": [{"name": "good"}, {"name": "bad"}], `)},
			[]string{"deny: [nftlb-web-deny]", "firewall/sets/nftlb-web-deny: [198.51.100.0/25]"}, nil},
		{"whitelist behind it", []string{"/policies", `{"policies": [{"name": "good", "type": "whitelist", "elements": [{"data": "198.51.100.128/25"}]}, {"name": "bad", "elements": [{"data": "198.51.100.0/24"}]}]}`,
			"/farms", farm(`"mode": "dnat", "policies": [{"name": "bad"}, {"name": "good"}], `)},
			[]string{"firewall/sets/nftlb-web-deny: [198.51.100.0/24]"}, nil},
		{"local", []string{"/policies", `{"policies": [{"name": "bad", "elements": [{"data": "198.51.100.0/24"}]}]}`, "/farms", farm(`"mode": "local", "new-rtlimit": "1/second", "policies": [{"name": "bad"}], `)},
			[]string{"action: drop, hook: ingress, protocol: tcp, source: \"@nftlb-bad\", destination: 192.0.2.10/32, ports: [80]"}, []string{"new-rtlimit is not in force in mode local"}},
		{"down", []string{"/farms", farm(`"mode": "dnat", "state": "down", `)}, nil, nil},
		{"a name that no service can have", []string{"/farms", strings.Replace(farm(`"mode": "dnat", `), `"web"`, `"my web"`, 1)}, nil, []string{"farm my web: it is not in force"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, g := newTestAPI(t, fakeNetwork{"10.0.0.1": "02:00:00:00:00:11", "10.0.0.2": "02:00:00:00:00:12"})
			for r := range slices.Chunk(c.requests, 2) {
				if code, got := ask(t, a, "POST", r[0], r[1]); code != 200 {
					t.Fatalf("%s: %d %s", r[1], code, got)
				}
			}
			lines := inForce(g.cfg)
			for _, want := range c.want {
				if !strings.Contains(lines, want) {
					t.Errorf("not in force: %s\nis:\n%s", want, lines)
				}
			}
			if len(c.want) == 0 && lines != "" {
				t.Errorf("in force is\n%s", lines)
			}
			told := a.Warnings()
			for _, want := range c.warnings {
				if !slices.ContainsFunc(told, func(w string) bool { return strings.Contains(w, want) }) {
					t.Errorf("not told: %s", want)
				}
			}
			if len(told) != len(c.warnings) {
				t.Errorf("told: %q", told)
			}
		})
	}
}

// inForce returns the parts of a configuration that an empty one does not have.
func inForce(c *config.Config) string {
	var lines []string
	for _, e := range config.Diff(newGateway().cfg, c) {
		lines = append(lines, e.Path+": "+e.After)
	}
	return strings.Join(lines, "\n")
}

func TestRanges(t *testing.T) {
	list := func(texts ...string) (r ranges) {
		for _, text := range texts {
			one, fits := rangeOf(text, "ipv4")
			if !fits {
				t.Fatalf("%s is no range", text)
			}
			r = r.add(one)
		}
		return r
	}
	show := func(r ranges) string {
		var texts []string
		for _, one := range r {
			texts = append(texts, one.String())
		}
		return strings.Join(texts, " ")
	}
	for _, c := range []struct{ got, want string }{
		{show(list("10.0.0.2", "10.0.0.0/31")), "10.0.0.0-10.0.0.2"},
		{show(list("10.0.0.0/24", "10.0.0.7", "10.0.2.0/24")), "10.0.0.0/24 10.0.2.0/24"},
		{show(list("10.0.0.0/24").remove(list("10.0.0.0/25", "10.0.0.255")...)), "10.0.0.128-10.0.0.254"},
		{show(list("255.255.255.254/31", "255.255.255.255")), "255.255.255.254/31"},
		{show(list("10.0.0.5").remove(list("10.0.0.0/8")...)), ""},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
	if _, fits := rangeOf("2001:db8::1", "ipv4"); fits {
		t.Error("an IPv6 address in a list of IPv4")
	}
	var texts []string
	for _, p := range prefixes(list("10.0.0.1-10.0.0.8")[0]) {
		texts = append(texts, p.String())
	}
	if got := strings.Join(texts, " "); got != "10.0.0.1/32 10.0.0.2/31 10.0.0.4/30 10.0.0.8/32" {
		t.Errorf("prefixes %s", got)
	}
}
