// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// generator makes requests with few names, so that they collide.
type generator struct{ *rand.Rand }

func (g *generator) of(list ...string) string { return list[g.IntN(len(list))] }

// values are possible values of keys; some are invalid. Rates have their unit: without one, nftlb 1.0.7 reads
// uninitialised memory.
var values = map[string][]string{
	"mode":          {"snat", "dnat", "dsr", "stlsdnat", "local", "nonsense"},
	"family":        {"ipv4", "ipv4", "ipv6"},
	"virtual-addr":  {"192.0.2.10", "10.0.1.1", "127.0.0.1", "", "fd00:1::1"},
	"virtual-ports": {"80", "80,443", "1000-1010", "", "0"}, "ports": {"80", "81-90", "", "0"},
	"protocol": {"tcp", "udp", "sctp", "all", "nonsense"}, "scheduler": {"rr", "weight", "hash", "symhash", "nonsense"},
	"sched-param": {"srcip", "srcip srcport", "none", "dstmac dstip", "nonsense"}, "persistence": {"srcip", "srcip srcport", "none", "nonsense"},
	"persist-ttl": {"60", "0", "-1", "x"}, "helper": {"none", "ftp", "sip", "tftp", "nonsense"}, "log": {"none", "input", "output input", "forward", "nonsense"},
	"log-prefix": {"TYPE-FNAME ", "hello ", ""}, "log-rtlimit": {"0/second", "10/hour", "10/minute"}, "mark": {"0x10", "0x80000001", "zz", "0x0", "77"},
	"state": {"up", "down", "off", "config_error", "up", "nonsense"}, "limits-ttl": {"120", "1", "-4"}, "new-rtlimit": {"10/second", "20/minute", "1/week"},
	"new-rtlimit-burst": {"5", "0"}, "rst-rtlimit": {"10/second", "5/hour", "0/second"}, "rst-rtlimit-burst": {"5"}, "est-connlimit": {"10", "0", "-2"},
	"tcp-strict": {"on", "off", "nonsense"}, "queue": {"-1", "3", "-2"}, "verdict": {"log", "drop", "log drop accept", "accept"}, "source-addr": {"10.0.2.100", ""},
	"intra-connect": {"on", "off"}, "ip-addr": {"10.0.2.2", "10.0.2.3", "10.0.2.4", "10.0.2.9", "10.0.2.77"}, "port": {"8080", "81", ""},
	"weight": {"1", "5", "0", "-3", "7x"}, "priority": {"1", "2", "3", "0"}, "type": {"blacklist", "whitelist", "nonsense"}, "timeout": {"0", "-1"},
	"est-connlimit-log-prefix": {"KNAME ", ""}, "responsettl": {"60", "10"},
}

var keysOf = map[string][]string{
	"farms": {"mode", "family", "virtual-addr", "virtual-ports", "protocol", "scheduler", "sched-param", "persistence", "persist-ttl", "helper", "log", "log-prefix",
		"log-rtlimit", "mark", "state", "limits-ttl", "new-rtlimit", "new-rtlimit-burst", "rst-rtlimit", "est-connlimit", "tcp-strict", "queue", "verdict", "source-addr",
		"intra-connect", "priority", "weight", "responsettl"},
	"backends":  {"ip-addr", "port", "weight", "priority", "mark", "state", "source-addr", "est-connlimit", "est-connlimit-log-prefix", "state", "mode"},
	"addresses": {"family", "ip-addr", "ports", "protocol", "verdict", "log-prefix", "log-rtlimit", "mode"},
	"policies":  {"type", "timeout", "log-prefix"},
}

// object returns the text of an object with some of its keys.
func (g *generator) object(kind, name string, more ...string) string {
	members := []string{fmt.Sprintf(`"name": %q`, name)}
	for range g.IntN(4) {
		k := g.of(keysOf[kind]...)
		members = append(members, fmt.Sprintf("%q: %q", k, g.of(values[k]...)))
	}
	if kind == "backends" && g.IntN(2) == 0 {
		members = append(members, fmt.Sprintf(`"ip-addr": %q, "state": "up"`, g.of("10.0.2.2", "10.0.2.3", "10.0.2.4")))
	}
	if g.IntN(40) == 0 {
		members = append(members, g.of(`"nonsense": "x"`, `"fqdn": "x"`, `"weight": 5`, `"elements": []`, `"farms": []`, `"time": "5"`))
	}
	return "{" + strings.Join(append(members, more...), ", ") + "}"
}

func (g *generator) farm() string    { return g.of("f1", "f2", "f3") }
func (g *generator) backend() string { return g.of("b1", "b2", "b3") }
func (g *generator) address() string { return g.of("a1", "a2") }
func (g *generator) policy() string  { return g.of("p1", "p2") }
func (g *generator) client() string  { return g.of("10.64.0.1", "10.64.0.2", "10.64.0.3") }
func (g *generator) element() string {
	return g.of("10.64.0.1", "10.64.1.0/24", "10.64.0.2", "10.65.0.1-10.65.0.9")
}

func (g *generator) request() (method, path, body string) {
	switch g.IntN(10) {
	case 0, 1, 2, 3:
		var more []string
		if g.IntN(2) == 0 {
			more = append(more, `"backends": [`+g.object("backends", g.backend())+", "+g.object("backends", g.backend())+`]`)
		}
		if g.IntN(5) == 0 {
			more = append(more, fmt.Sprintf(`"policies": [{"name": %q}]`, g.policy()))
		}
		if g.IntN(5) == 0 {
			more = append(more, `"addresses": [`+g.object("addresses", g.address())+`]`)
		}
		if g.IntN(6) == 0 {
			more = append(more, fmt.Sprintf(`"sessions": [{"client": %q, "backend": %q}]`, g.client(), g.backend()))
		}
		return g.of("POST", "PUT"), "/farms", `{"farms": [` + g.object("farms", g.farm(), more...) + `]}`
	case 4:
		var more []string
		if g.IntN(2) == 0 {
			more = append(more, fmt.Sprintf(`"elements": [{"data": %q}, {"data": %q}]`, g.element(), g.element()))
		}
		return "POST", "/policies", `{"policies": [` + g.object("policies", g.policy(), more...) + `]}`
	case 5:
		var more []string
		if g.IntN(4) == 0 {
			more = append(more, fmt.Sprintf(`"policies": [{"name": %q}]`, g.policy()))
		}
		return "POST", "/addresses", `{"addresses": [` + g.object("addresses", g.address(), more...) + `]}`
	case 6:
		return "GET", g.of("/farms/"+g.farm(), "/farms/"+g.farm()+"/sessions", "/policies/"+g.policy(), "/addresses/"+g.address(), "/nonsense", "/farms/f1/backends", "/", "/farms/"), ""
	case 7:
		return "POST", g.of("/farms", "/nonsense", "/farms/"), g.of("", "{", `{"farms": {"name": "x"}}`, `[]`, `{"backends": []}`, `{"name": "x"}`, `{"farms": ["x"]}`)
	}
	return "DELETE", g.of("/farms/"+g.farm(), "/farms/"+g.farm()+"/backends/"+g.backend(), "/farms/"+g.farm()+"/backends/"+g.backend()+"/sessions",
		"/farms/"+g.farm()+"/sessions/"+g.client(), "/farms/"+g.farm()+"/sessions", "/farms/"+g.farm()+"/policies/"+g.policy(), "/farms/"+g.farm()+"/policies",
		"/farms/"+g.farm()+"/addresses/"+g.address(), "/policies/"+g.policy(), "/policies/"+g.policy()+"/elements/"+g.element(), "/policies/"+g.policy()+"/elements",
		"/addresses/"+g.address(), "/nonsense", "/farms/"+g.farm()+"/nonsense", "/farms//backends", "/farms/"+g.farm()+"/backends"), ""
}
