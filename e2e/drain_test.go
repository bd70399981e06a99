// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestDrainWithAnEnd holds a connection while its backend drains. The connection continues after a kill of the
// daemon. At the deadline it continues or ends, as requested. New connections find no backend.
func TestDrainWithAnEnd(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		d := start(t, l.Node("gateway"), force+webAndLine)
		sluice := func(args ...string) string {
			t.Helper()
			out, err := d.Command(t.Context(), args...).CombinedOutput()
			if err != nil {
				t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
			}
			return string(out)
		}
		ended := func() bool {
			s, err := d.Service(t.Context(), "line")
			return err == nil && (s.Backends[0].Drain == nil || s.Backends[0].Drain.Until.IsZero())
		}
		wait := func(what string, is func() bool) {
			t.Helper()
			labtest.Eventually(t, patience, what, func() error {
				if !is() {
					return errors.New("not yet")
				}
				return nil
			})
		}
		line := dial()
		mustAsk(t, line, "before")
		if out := sluice("backend", "line", "a", "drain", "--deadline", "4s", "--then", "keep"); !strings.HasPrefix(out, "line/a: drain; 1 connection left") {
			t.Errorf("drain: %s", out)
		}
		mustAsk(t, line, "while it drains")
		if other, err := host.DialLine(t.Context(), l.Node("client"), netip.MustParseAddrPort("10.64.0.8:7000"), netip.MustParseAddrPort("192.0.2.10:7")); err == nil {
			other.Close()
			t.Error("a new connection is accepted")
		}
		wait("the drain ends", ended)
		mustAsk(t, line, "after a deadline that keeps it")

		sluice("backend", "line", "a", "drain", "--deadline", "10s", "--then", "reset")
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustAsk(t, line, "after a restart")
		wait("the drain ends", ended)
		wait("the connection ends", func() bool {
			_, err := line.Ask(time.Second)
			return err != nil
		})
		sluice("backend", "line", "a", "auto")

		line, err := host.DialLine(t.Context(), l.Node("client"), netip.MustParseAddrPort("10.64.0.9:7000"), netip.MustParseAddrPort("192.0.2.10:7"))
		if err != nil {
			t.Fatal(err)
		}
		defer line.Close()
		if out := sluice("drain"); !strings.HasPrefix(out, "the gateway drains: 3 backends; 1 connection left") {
			t.Errorf("drain: %s", out)
		}
		if _, err := line.Ask(patience); err != nil {
			t.Errorf("an open connection while the gateway drains: %v", err)
		}
		if tally := webLoad(l, "192.0.2.10:80", 3); tally.Run(t.Context()).Good() != 0 {
			t.Error("a gateway that drains accepts new connections")
		}
		if out := sluice("show"); !strings.Contains(out, "the gateway drains: ") {
			t.Errorf("show: %s", out)
		}
		sluice("drain", "--cancel")
		mustAnswer(t, webLoad(l, "192.0.2.10:80", 20))
	})
}
