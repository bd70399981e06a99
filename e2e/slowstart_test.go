// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestSlowStart adds a backend to a service. It gets about an eleventh of the requests in the first step, and
// half after the last one.
func TestSlowStart(t *testing.T) {
	t.Parallel()
	onDatapaths(t, func(t *testing.T, force string) {
		for _, scheduler := range []string{"wrr", "maglev"} {
			t.Run(scheduler, func(t *testing.T) {
				t.Parallel() // most of the time is waiting
				l := labtest.New(t, lab.Balancer())
				serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080")
				web := force + "services:\n  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, scheduler: " + scheduler +
					", slow-start: 1h, backends: [{name: a, address: 10.0.2.2, port: 8080}]}\n"
				d := start(t, l.Node("gateway"), web)
				share := func() int {
					t.Helper()
					const requests = 220
					tally := mustAnswer(t, webLoad(l, "192.0.2.10:80", requests))
					return 100 * tally.Servers()["b"] / requests
				}
				if _, err := d.Apply(t.Context(), "two.yaml", []byte(strings.Replace(web, "port: 8080}]", "port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]", 1))); err != nil {
					t.Fatal(err)
				}
				if got := share(); got < 1 || got > 25 {
					t.Errorf("the new backend has %d %% of the requests in its first step, want 9", got)
				}
				s, err := d.Service(t.Context(), "web")
				if err != nil || len(s.Backends) != 2 || s.Backends[1].Why != "slow start: 10 % of its weight" {
					t.Errorf("%+v, %v", s, err)
				}
				if err := d.Kill(); err != nil {
					t.Fatal(err)
				}
				if err := d.Restart(t.Context()); err != nil {
					t.Fatal(err)
				}
				if s, err = d.Service(t.Context(), "web"); err != nil || s.Backends[1].Why != "slow start: 10 % of its weight" {
					t.Errorf("after a restart: %+v, %v", s, err)
				}
				if out, err := d.Command(t.Context(), "service", "set", "web", "slow-start=10s").CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				labtest.Eventually(t, patience, "the backend has all of its weight", func() error {
					s, err := d.Service(t.Context(), "web")
					if err == nil && s.Backends[1].Why != "" {
						err = errors.New(s.Backends[1].Why)
					}
					return err
				})
				if got := share(); got < 35 || got > 65 {
					t.Errorf("in the end it has %d %%, want 50", got)
				}
			})
		}
	})
}
