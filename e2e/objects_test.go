// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestObjectCommands creates a service with backends by commands alone, sends requests to it, changes and
// removes it.
func TestObjectCommands(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080")
		d := start(t, l.Node("gateway"), force+"services: []\n")
		sluice := func(want string, args ...string) string {
			t.Helper()
			out, err := d.Command(t.Context(), args...).CombinedOutput()
			if failed := err != nil; failed != (want == "refused") {
				t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
			}
			return string(out)
		}
		sluice("", "service", "add", "web", "listen=[{address: 192.0.2.10, ports: [80]}]", "protocol=tcp", "mode=dnat", "backends=[{name: a, address: 10.0.2.2, port: 8080}]")
		expect := func(servers string) {
			t.Helper()
			tally := mustAnswer(t, webLoad(l, "192.0.2.10:80", 40))
			if got := len(tally.Servers()); got != len(strings.Fields(servers)) {
				t.Errorf("%s, want %s", tally.Spread(), servers)
			}
		}
		expect("a")
		sluice("", "backend", "add", "web", "b", "address=10.0.2.3", "port=8080")
		expect("a b")
		sluice("", "backend", "rm", "web", "a")
		expect("b")
		if out := sluice("refused", "backend", "add", "web", "c", "address=10.0.2.4", "wieght=3"); !strings.Contains(out, `unknown key "wieght"; write weight`) {
			t.Errorf("a misspelt key is answered by %s", out)
		}
		if out := sluice("", "backend", "list", "web"); out != "{address: 10.0.2.3, name: b, port: 8080, priority: 1, weight: 1}\n" {
			t.Errorf("list: %s", out)
		}
		if out := sluice("", "service", "rm", "web", "--dry-run"); !strings.Contains(out, "web") {
			t.Errorf("dry run: %s", out)
		}
		expect("b")
		sluice("", "set", "add", "banned", "10.64.0.0/16")
		sluice("", "service", "set", "web", "deny=[banned]")
		denied := webLoad(l, "192.0.2.10:80", 3)
		denied.Timeout = 4 * time.Second // three SYNs per connection
		if denied.Run(t.Context()).Good() != 0 {
			t.Error("a denied client is answered")
		}
		sluice("", "set", "rm", "banned", "10.64.0.0/16")
		expect("b")
		if out := sluice("refused", "set", "rm", "banned"); !strings.Contains(out, "banned") {
			t.Errorf("a set in use is removed: %s", out)
		}
		sluice("", "service", "rm", "web")
		if out := sluice("", "config", "history"); !strings.Contains(out, "add services/web/backends ") || !strings.Contains(out, "remove services/web ") {
			t.Errorf("history: %s", out)
		}
	})
}
