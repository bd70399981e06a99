// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// announcedWeb is a service with two backends behind a pool rule, both announced.
const announcedWeb = `
interfaces: [wan0, lan0]
cluster: {announce: {}}
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: maglev
    backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]
    check: {type: http, path: /, interval: 1s, timeout: 900ms, rise: 1, fall: 1}
nat:
  - {name: out, type: snat, source: [10.0.2.0/24], out: wan0, to: [198.51.100.0-198.51.100.3]}
`

// announcedRoutes returns the routes of table 5100 in a node.
func announcedRoutes(t *testing.T, n *lab.Node) string {
	t.Helper()
	out, err := n.Command(t.Context(), "ip", "route", "show", "table", "5100").CombinedOutput()
	if err != nil && !strings.Contains(string(out), "does not exist") {
		t.Fatalf("%v: %s", err, out)
	}
	var list []string
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "unreachable") {
			list = append(list, strings.Join(strings.Fields(line), " "))
		}
	}
	return strings.Join(list, "; ")
}

// output runs a command of Sluice and returns its output.
func output(t *testing.T, d *daemon.Daemon, command string) string {
	t.Helper()
	out, err := d.Command(t.Context(), strings.Fields(command)...).CombinedOutput()
	if err != nil {
		t.Fatalf("sluice %s: %v: %s", command, err, out)
	}
	return string(out)
}

const (
	webRoute  = "unreachable 192.0.2.10 proto 76 metric 10"
	poolRoute = "unreachable 198.51.100.0/30 proto 76 metric 10"
)

// TestAnnouncements follows the routes of a gateway through failures of backends and interfaces, a
// crash, a restart and the end.
func TestAnnouncements(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		servers := serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080")
		gateway := l.Node("gateway")
		d := start(t, gateway, force+announcedWeb)
		becomes := func(what, want string) {
			t.Helper()
			labtest.Eventually(t, patience, what, func() error {
				if got := announcedRoutes(t, gateway); got != want {
					return fmt.Errorf("routes %q, want %q", got, want)
				}
				return nil
			})
		}
		becomes("the start", webRoute+"; "+poolRoute)
		const table = "ADDRESS          STATE      TABLE  METRIC  OF\n" +
			"192.0.2.10       announced   5100      10  service web\n" +
			"198.51.100.0/30  announced   5100      10  nat out\n"
		if got := output(t, d, "show announcements"); got != table {
			t.Errorf("show announcements:\n%s", got)
		}
		if got := output(t, d, "show"); !strings.Contains(got, "table 5100, but no BGP speaker") {
			t.Errorf("no warning without a speaker:\n%s", got)
		}
		for _, w := range servers {
			if err := w.Stop(); err != nil {
				t.Fatal(err)
			}
		}
		becomes("no backend", poolRoute)
		if got := output(t, d, "show announcements"); !strings.HasSuffix(got, "\n192.0.2.10: no backend of service web is usable\n") {
			t.Errorf("show announcements:\n%s", got)
		}
		if err := servers["b"].Start(); err != nil {
			t.Fatal(err)
		}
		becomes("one backend", webRoute+"; "+poolRoute)
		ip(t, gateway, "link set wan0 down")
		becomes("an interface is down", "")
		ip(t, gateway, "link set wan0 up")
		ip(t, gateway, "addr replace fd00:1::1/64 dev wan0") // the kernel has removed it
		becomes("the interface is up", webRoute+"; "+poolRoute)
		events := output(t, d, "events --kind announcement")
		for _, want := range []string{
			"address 192.0.2.10 is announced: service web\n", "address 192.0.2.10 is withdrawn: no backend of service web is usable\n",
			"address 192.0.2.10 is withdrawn: interface wan0 is down\n", "address 198.51.100.0/30 is withdrawn: interface wan0 is down\n",
		} {
			if !strings.Contains(events, want) {
				t.Errorf("no event %q in\n%s", want, events)
			}
		}
		output(t, d, "drain --deadline 1h")
		becomes("the gateway drains", poolRoute)
		output(t, d, "drain --cancel")
		becomes("the gateway drains no more", webRoute+"; "+poolRoute)

		output(t, d, "node drain")
		if got := announcedRoutes(t, gateway); got != poolRoute {
			t.Errorf("the node drains: %s", got)
		}
		if got := output(t, d, "show announcements"); !strings.HasSuffix(got, "\n192.0.2.10: the node drains\n") {
			t.Errorf("show announcements:\n%s", got)
		}
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := announcedRoutes(t, gateway); got != poolRoute {
			t.Errorf("the node drains after a restart: %s", got)
		}
		output(t, d, "node auto")
		becomes("the node drains no more", webRoute+"; "+poolRoute)

		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		if got := announcedRoutes(t, gateway); got != webRoute+"; "+poolRoute {
			t.Errorf("after kill -9: %s", got)
		}
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := output(t, d, "events --kind announcement"); got != "" {
			t.Errorf("the restart changes announcements:\n%s", got)
		}
		output(t, d, "stop --keep")
		if got := announcedRoutes(t, gateway); got != webRoute+"; "+poolRoute {
			t.Errorf("after stop --keep: %s", got)
		}
		output(t, d, "stop --force")
		if got := announcedRoutes(t, gateway); got != "" {
			t.Errorf("after stop --force: %s", got)
		}
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		becomes("another start", webRoute+"; "+poolRoute)
		output(t, d, "stop")
		if got := announcedRoutes(t, gateway); got != "" {
			t.Errorf("after stop: %s", got)
		}
	})
}
