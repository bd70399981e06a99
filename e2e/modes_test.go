// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/netdev"
)

// modeCase is a service and the clients that its servers must see.
type modeCase struct {
	mode     string
	protocol string
	extra    string // more lines of the service
	clients  map[string][]string
}

// modeCases by family. A nil list means the clients' own addresses.
var modeCases = []modeCase{
	{mode: "dnat", protocol: "tcp"},
	{mode: "dnat", protocol: "udp"},
	{mode: "fullnat", protocol: "tcp", extra: `source-pool: [10.0.2.100-10.0.2.103, "fd00:2::100"]`,
		clients: map[string][]string{"IPv4": {"10.0.2.100", "10.0.2.101", "10.0.2.102", "10.0.2.103"}, "IPv6": {"fd00:2::100"}}},
	// Without a pool the kernel selects an address of lan0.
	{mode: "fullnat", protocol: "udp", clients: map[string][]string{"IPv4": {"10.0.2.1"}, "IPv6": {"fd00:2::1", "fd00:2::100"}}},
	{mode: "dsr", protocol: "tcp"},
	{mode: "dsr", protocol: "udp"},
	{mode: "stateless", protocol: "tcp"},
	{mode: "stateless", protocol: "udp"},
}

// TestModes sends real traffic through every mode, protocol and family, on every datapath.
func TestModes(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		for _, s := range []string{"s1 a", "s2 b"} {
			// One port on every address, including the virtual ones on lo.
			serveWeb(t, l, s+" [::]:80")
			node, name, _ := strings.Cut(s, " ")
			serveDatagrams(t, l, node+" "+name+" 192.0.2.30:80", node+" "+name+" [2001:db8::30]:80")
			own := map[string]string{"s1": "2", "s2": "3"}[node]
			serveDatagrams(t, l, node+" "+name+" 10.0.2."+own+":80", node+" "+name+" [fd00:2::"+own+"]:80")
		}
		for _, c := range modeCases {
			for _, family := range []string{"IPv4", "IPv6"} {
				t.Run(c.mode+" "+c.protocol+" "+family, func(t *testing.T) {
					// A new daemon, because connections of the previous mode would keep it.
					d := start(t, l.Node("gateway"), force)
					config := force + c.config(family)
					_, err := d.Apply(t.Context(), "test.yaml", []byte(config))
					if err != nil && strings.Contains(err.Error(), "no datapath carries it") {
						t.Skipf("%v", err) // refused with a reason
					}
					if err != nil {
						t.Fatalf("%v\n%s", err, config)
					}
					c.check(t, l, family)
					if err := d.Stop(); err != nil {
						t.Error(err)
					}
					forget(t, l.Node("gateway"))
				})
			}
		}
	})
}

// forget empties the node's connection table. Otherwise a client that reuses the ports of an earlier connection
// would keep its translation.
func forget(t *testing.T, n *lab.Node) {
	t.Helper()
	ns, err := netdev.NamespaceAt(n.Path())
	if err != nil {
		t.Fatal(err)
	}
	c, err := conntrack.OpenIn(ns)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.DeleteIf(t.Context(), nil, func(*conntrack.Entry) bool { return true }); err != nil {
		t.Fatal(err)
	}
}

func (c modeCase) config(family string) string {
	vip, a, b := "192.0.2.30", "10.0.2.2", "10.0.2.3"
	if family == "IPv6" {
		vip, a, b = `"2001:db8::30"`, `"fd00:2::2"`, `"fd00:2::3"`
	}
	text := fmt.Sprintf(`
services:
  - name: web
    listen: [{address: %s, ports: [80]}]
    protocol: %s
    mode: %s
    scheduler: source-hash
    backends: [{name: a, address: %s}, {name: b, address: %s}]
`, vip, c.protocol, c.mode, a, b)
	if c.extra != "" {
		text += "    " + c.extra + "\n"
	}
	return text
}

func (c modeCase) check(t *testing.T, l *lab.Lab, family string) {
	t.Helper()
	target := "192.0.2.30:80"
	if family == "IPv6" {
		target = "[2001:db8::30]:80"
	}
	load := webLoad(l, target, 300)
	if c.protocol == "udp" {
		load.Ask = host.AskDatagram
	}
	tally := mustAnswer(t, load)
	if n := tally.Servers(); n["a"] < 50 || n["b"] < 50 {
		t.Errorf("spread %v of 300: one server gets almost nothing", n)
	}
	want := make(map[netip.Addr]bool)
	for _, a := range c.clients[family] {
		want[netip.MustParseAddr(a)] = true
	}
	wrong := 0
	for seen, n := range tally.Answers {
		client, err := netip.ParseAddr(seen.Client)
		if err != nil || (len(want) == 0 && client.Unmap() != seen.Source) || (len(want) > 0 && !want[client.Unmap()]) {
			wrong += n
			if wrong == n {
				t.Errorf("the server saw %s for the client %s", seen.Client, seen.Source)
			}
		}
	}
	if wrong > 0 {
		t.Errorf("%d of %d requests came from a wrong address", wrong, tally.Good())
	}
	// Only the source address decides: the same clients reach the same servers again.
	again := mustAnswer(t, load)
	moved := 0
	before := serverOf(tally)
	for source, server := range serverOf(again) {
		if before[source] != server {
			moved++
		}
	}
	if moved > 0 {
		t.Errorf("%d of %d clients got another server the second time", moved, len(before))
	}
}

func serverOf(t host.Tally) map[netip.Addr]string {
	m := make(map[netip.Addr]string)
	for seen := range t.Answers {
		m[seen.Source] = seen.Server
	}
	return m
}
