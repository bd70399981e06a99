// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// oneBackend returns a configuration with one service and one backend at this address.
func oneBackend(addr string) string {
	return `
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    backends: [{name: a, address: ` + addr + `, port: 8080}]
`
}

// TestChangesSurvive: changes by apply and backend are in force again after kill -9 and after a stop, until they
// are reverted. The history names their author.
func TestChangesSurvive(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080")
		d := start(t, l.Node("gateway"), force+oneBackend("10.0.2.2"))
		if _, err := d.Apply(t.Context(), "b.yaml", []byte(force+oneBackend("10.0.2.3"))); err != nil {
			t.Fatal(err)
		}
		answers := func(want string) {
			t.Helper()
			tally := mustAnswer(t, webLoad(l, "192.0.2.10:80", 20))
			if tally.Servers()[want] != 20 {
				t.Errorf("%s, want all of %s", tally.Spread(), want)
			}
		}
		answers("b")
		for _, end := range []func() error{d.Kill, d.Stop} {
			if err := end(); err != nil {
				t.Fatal(err)
			}
			if err := d.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			answers("b")
		}
		if err := d.SetBackend(t.Context(), "web", "a", api.BackendState{State: "down"}); err != nil {
			t.Fatal(err)
		}
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if b, err := d.Backend(t.Context(), "web", "a"); err != nil || b.State != "down" {
			t.Errorf("backend a is %q after a restart, want down (%v)", b.State, err)
		}
		changes, err := d.Changes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		last := changes.History[len(changes.History)-1]
		if last.What != "backend web a down" || !strings.Contains(last.Who, "of user 0") {
			t.Errorf("the last change is %q by %q", last.What, last.Who)
		}
		if _, err := d.Revert(t.Context(), api.Revert{All: true}); err != nil {
			t.Fatal(err)
		}
		answers("a")
		out, err := d.Command(t.Context(), "config", "show", "--origin").CombinedOutput()
		if want := "everything comes from " + d.File + "\n"; err != nil || string(out) != want {
			t.Errorf("%v: %q, want %q", err, out, want)
		}
	})
}

// TestKillWhileApplying kills the daemon at random moments while it applies one configuration after the other.
// The next daemon has the old configuration or the new one, both in the kernel and in its reports.
// SLUICE_KILLS=200 sets the number of kills.
func TestKillWhileApplying(t *testing.T) {
	kills, err := strconv.Atoi(os.Getenv("SLUICE_KILLS"))
	if err != nil {
		kills = 4
	}
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080")
		d := start(t, l.Node("gateway"), force+oneBackend("10.0.2.2"))
		server := map[string]string{"10.0.2.2:8080": "a", "10.0.2.3:8080": "b"}
		for range kills {
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan int)
			go func() {
				n := 0
				for ; ctx.Err() == nil; n++ {
					addr := []string{"10.0.2.2", "10.0.2.3"}[n%2]
					if _, err := d.Apply(ctx, addr, []byte(force+oneBackend(addr))); err != nil {
						break
					}
				}
				done <- n
			}()
			time.Sleep(time.Duration(rand.IntN(500)) * time.Millisecond) // the random moment
			if err := d.Kill(); err != nil {
				t.Fatal(err)
			}
			stop()
			<-done
			if err := d.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			b, err := d.Backend(t.Context(), "web", "a")
			if err != nil {
				t.Fatal(err)
			}
			tally := mustAnswer(t, webLoad(l, "192.0.2.10:80", 20))
			if want := server[b.Address.String()]; tally.Servers()[want] != 20 {
				t.Fatalf("the daemon says %s, but %s", b.Address, tally.Spread())
			}
		}
	})
}
