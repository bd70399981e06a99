// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// The office of lab.Office and examples/router.yaml.
const (
	officePublic = "211.155.226.121"
	outsideWeb   = "203.0.113.10:80"
)

// plainRouter is the office without objects that only nftables supports.
const plainRouter = `
interfaces: [wan0, lan0]
nat:
  - {name: office, type: snat, source: [10.1.10.0/24], out: wan0, to: [211.155.226.121]}
  - name: http
    type: port-forward
    listen: {address: 211.155.226.121, ports: [80]}
    protocol: tcp
    to: {address: 10.1.10.2, port: 80}
  - name: names
    type: port-forward
    listen: {address: 211.155.226.121, ports: [5353]}
    protocol: udp
    to: {address: 10.1.10.3, port: 53}
firewall:
  sets:
    banned: [198.51.100.0/24, "2001:db8:bad::/48"]
  rules:
    - {action: drop, source: "@banned"}
`

func TestOfficeRouter(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Office())
		serveWeb(t, l, "web web 10.1.10.2:80 [2001:db8:10::2]:80", "outside internet "+outsideWeb)
		serveDatagrams(t, l, "outside internet 203.0.113.10:53")
		names, err := host.ServeDNS(l.Node("ftp"), "names", "10.1.10.3:53")
		if err != nil {
			t.Fatal(err)
		}
		defer names.Stop()
		d := start(t, l.Node("gateway"), force+plainRouter)
		for _, tc := range []struct {
			name, from, target string
			ask                host.Ask
			sources            string
			server             string
			client             string // "" for the client's own address
		}{
			{"out by tcp", "pc", outsideWeb, host.AskWeb, "", "internet", officePublic},
			{"out by udp", "pc", "203.0.113.10:53", host.AskDatagram, "", "internet", officePublic},
			{"in by tcp", "outside", officePublic + ":80", host.AskWeb, "203.0.113.0/24", "web", ""},
			{"in by udp", "outside", officePublic + ":5353", host.AskDNS, "203.0.113.0/24", "names", ""},
			{"hairpin by tcp", "pc", officePublic + ":80", host.AskWeb, "", "web", "-"},
			{"hairpin by udp", "pc", officePublic + ":5353", host.AskDNS, "", "names", "-"},
			{"hairpin of the server itself", "web", officePublic + ":80", host.AskWeb, "", "web", "-"},
		} {
			t.Run(tc.name, func(t *testing.T) {
				load := host.Load{From: l.Node(tc.from), Target: netip.MustParseAddrPort(tc.target), Ask: tc.ask, Count: 100, Timeout: patience}
				if tc.sources != "" {
					load.Sources = netip.MustParsePrefix(tc.sources)
				}
				tally := mustAnswer(t, load)
				for seen, n := range tally.Answers {
					if seen.Server != tc.server {
						t.Errorf("%d answers by %s, want %s", n, seen.Server, tc.server)
					}
					want := tc.client
					switch want {
					case "":
						want = seen.Source.String()
					case "-": // any address of the gateway serves a hairpin
						want = seen.Client
					}
					if seen.Client != want {
						t.Errorf("the server saw %s, want %s", seen.Client, want)
					}
				}
			})
		}
		t.Run("banned", func(t *testing.T) {
			load := host.Load{
				From: l.Node("outside"), Target: netip.MustParseAddrPort(officePublic + ":80"), Ask: host.AskWeb,
				Sources: netip.MustParsePrefix("198.51.100.0/24"), Count: 20, Parallel: 20, Timeout: 300 * time.Millisecond,
			}
			if tally := load.Run(t.Context()); tally.Good() != 0 || tally.Causes()["timeout"] != 20 {
				t.Errorf("%d of 20 banned clients were answered, failures %v: want silence", tally.Good(), tally.Causes())
			}
			load.Target = netip.MustParseAddrPort("[2001:db8:10::2]:80")
			load.Sources = netip.MustParsePrefix("2001:db8:bad::/48")
			if tally := load.Run(t.Context()); tally.Good() != 0 || tally.Causes()["timeout"] != 20 {
				t.Errorf("%d of 20 banned IPv6 clients were answered, failures %v: want silence", tally.Good(), tally.Causes())
			}
			load.Sources = netip.MustParsePrefix("2001:db8:f::/64")
			load.Timeout = patience
			mustAnswer(t, load)
		})
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// TestRoutedByRules: "ip rule" routes a packet by its properties before translation, as in the kernel. With
// another source, or without protocol or ports, the route to the server is a black hole.
func TestRoutedByRules(t *testing.T) {
	t.Parallel()
	for name, rule := range map[string][]string{
		"source":      {"from", "10.1.10.0/24"},
		"port":        {"ipproto", "tcp", "dport", "80"},
		"source port": {"ipproto", "tcp", "sport", "1024-65534"},
	} {
		t.Run(name, func(t *testing.T) {
			onDatapathsAtOnce(t, func(t *testing.T, force string) { routedByRule(t, force, rule) })
		})
	}
}

func routedByRule(t *testing.T, force string, rule []string) {
	l := labtest.New(t, lab.Office())
	serveWeb(t, l, "outside internet "+outsideWeb)
	g := l.Node("gateway")
	route, err := g.Command(t.Context(), "ip", "-4", "route", "get", "203.0.113.10").Output()
	if err != nil {
		t.Fatal(err)
	}
	way := strings.Fields(string(route)) // 203.0.113.10 [via ...] dev wan0 src ...
	way = append([]string{"route", "add", "203.0.113.10", "table", "100"}, way[1:slices.Index(way, "src")]...)
	for _, args := range [][]string{
		way,
		append(append([]string{"rule", "add"}, rule...), "lookup", "100"),
		{"route", "add", "blackhole", "203.0.113.10"},
	} {
		if out, err := g.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	d := start(t, g, force+plainRouter)
	mustAnswer(t, host.Load{From: l.Node("pc"), Target: netip.MustParseAddrPort(outsideWeb), Ask: host.AskWeb, Count: 100, Timeout: patience})
	out, err := d.Command(t.Context(), "explain", "tcp", "10.1.10.20:4000", outsideWeb, "--in", "lan0").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "wan0") {
		t.Errorf("explain: %v: %s", err, out)
	}
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
}

func TestFTPThroughTheHelper(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Nftables, labtest.Conntrack)
	l := labtest.New(t, lab.Office())
	server, err := host.ServeFTP(l.Node("ftp"), "ftp", "10.1.10.3:21")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	d := start(t, l.Node("gateway"), example(t, "router.yaml"))
	public := netip.MustParseAddrPort(officePublic + ":21")
	source := netip.MustParseAddrPort("203.0.113.10:0")
	for _, mode := range []host.FTPMode{host.Passive, host.ExtendedPassive, host.Active, host.ExtendedActive} {
		t.Run(string(mode), func(t *testing.T) {
			r, err := host.FetchFTP(t.Context(), l.Node("outside"), source, public, mode)
			if err != nil {
				t.Fatal(err)
			}
			if mode == host.Passive && r.Announced.Addr() != public.Addr() {
				t.Errorf("the server's own address %s got through to the client, want %s", r.Announced.Addr(), public.Addr())
			}
		})
	}
	if got := server.Transfers(); got != 4 {
		t.Errorf("%d transfers, want 4", got)
	}
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
}
