// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// webAndLine is a web service with checks, and one for long-lived connections.
const webAndLine = `
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: maglev
    backends:
      - {name: a, address: 10.0.2.2, port: 8080}
      - {name: b, address: 10.0.2.3, port: 8080}
    check: {type: http, path: /, interval: 1s, timeout: 900ms, rise: 1, fall: 2}
  - name: line
    listen: [{address: 192.0.2.10, ports: [7]}]
    protocol: tcp
    mode: dnat
    scheduler: maglev
    backends:
      - {name: a, address: 10.0.2.2}
`

// serveWebAndLine starts the servers of webAndLine and opens a long-lived connection through the
// gateway as soon as dial is called.
func serveWebAndLine(t *testing.T, l *lab.Lab) (dial func() *host.Line) {
	t.Helper()
	serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080")
	lines, err := host.ServeLines(l.Node("s1"), "a", "10.0.2.2:7")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lines.Stop() })
	return func() *host.Line {
		line, err := host.DialLine(t.Context(), l.Node("client"), netip.MustParseAddrPort("10.64.0.7:7000"), netip.MustParseAddrPort("192.0.2.10:7"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = line.Close() })
		return line
	}
}

func mustAsk(t *testing.T, line *host.Line, when string) {
	t.Helper()
	a, err := line.Ask(patience)
	if err != nil {
		t.Fatalf("the open connection, %s: %v", when, err)
	}
	if a.Client != "10.64.0.7:7000" {
		t.Fatalf("the open connection, %s: the server sees %s, want 10.64.0.7:7000", when, a.Client)
	}
}

func TestKillLosesNothing(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		d := start(t, l.Node("gateway"), force+webAndLine)
		line := dial()
		mustAsk(t, line, "before")
		load := webLoad(l, "192.0.2.10:80", 0)
		load.Rate = 300
		end := inBackground(t, load)
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		mustAsk(t, line, "after kill -9")
		mustAnswer(t, webLoad(l, "192.0.2.10:80", 100))
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustAsk(t, line, "after the restart")
		mustAnswer(t, webLoad(l, "192.0.2.10:80", 100))
		if tally := end(); len(tally.Failures) > 0 {
			t.Errorf("%d of %d requests failed around kill -9 and restart: %v", len(tally.Failures), tally.Sent(), tally.Causes())
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

func TestStopWithKeepLeavesTheRules(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		d := start(t, l.Node("gateway"), force+webAndLine)
		line := dial()
		if err := d.Client.Stop(t.Context(), api.Stop{Keep: true}); err != nil {
			t.Fatal(err)
		}
		if err := d.AwaitEnd(); err != nil {
			t.Fatal(err)
		}
		mustAsk(t, line, "after stop --keep")
		mustAnswer(t, webLoad(l, "192.0.2.10:80", 100))
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustAsk(t, line, "after the restart")
		if err := d.Stop(); err != nil {
			t.Fatal(err)
		}
		gone := webLoad(l, "192.0.2.10:80", 3)
		gone.Timeout = 500 * time.Millisecond
		if tally := gone.Run(t.Context()); tally.Good() != 0 {
			t.Errorf("%d of 3 requests were answered after a stop without keep", tally.Good())
		}
	})
}

// TestADaemonWithoutASocketTouchesNothing: a daemon that cannot open its socket leaves the rules of an earlier
// one in force.
func TestADaemonWithoutASocketTouchesNothing(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		d := start(t, l.Node("gateway"), force+webAndLine)
		line := dial()
		if err := d.Kill(); err != nil {
			t.Fatal(err)
		}
		socket := filepath.Join(l.Node("gateway").StateDir(), "sluice.sock")
		if err := errors.Join(os.Remove(socket), os.MkdirAll(filepath.Join(socket, "full"), 0o755)); err != nil {
			t.Fatal(err)
		}
		if out, err := d.Command(t.Context(), "run", "-c", d.File).CombinedOutput(); err == nil || !strings.Contains(string(out), "sluice.sock") {
			t.Errorf("a daemon without a socket: %v\n%s", err, out)
		}
		mustAsk(t, line, "after the daemon that did not start")
		if err := os.RemoveAll(socket); err != nil {
			t.Fatal(err)
		}
		if err := d.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// TestToldToEndWhileStarting: SIGTERM during the start is no failure, which a supervisor would answer with
// another start. A backend that does not answer keeps the daemon waiting.
func TestToldToEndWhileStarting(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		d := start(t, l.Node("gateway"), force+strings.Replace(webAndLine, "10.0.2.3", "10.0.2.77", 1))
		if err := d.Stop(); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		cmd := d.Command(t.Context(), "run", "-c", d.File)
		cmd.Stderr = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		labtest.Eventually(t, patience, "the socket", func() error {
			_, err := os.Stat(filepath.Join(l.Node("gateway").StateDir(), "sluice.sock"))
			return err
		})
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
			t.Errorf("%v\n%s", err, &out)
		}
	})
}

func TestSecondDaemonRefuses(t *testing.T) {
	l := labtest.New(t, lab.TwoGateways())
	config := example(t, "lb-dnat.yaml")
	first := start(t, l.Node("gw1"), config)
	var out strings.Builder
	cmd := first.Command(t.Context(), "run", "-c", first.File)
	cmd.Stderr = &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stop := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	if err == nil || !stop.Stop() {
		t.Fatalf("a second daemon in the same namespace did not end with an error: %v", err)
	}
	if want := fmt.Sprintf("held by process %d", first.PID()); !strings.Contains(out.String(), want) {
		t.Errorf("the second daemon says %q, want %q in it", out.String(), want)
	}
	if _, err := first.Status(t.Context()); err != nil {
		t.Errorf("the first daemon does not answer any more: %v", err)
	}
	second, err := daemon.Start(t.Context(), l.Node("gw2"), binary, "test.yaml", []byte(config))
	if err != nil {
		t.Fatalf("a daemon in another namespace: %v", err)
	}
	for _, d := range []*daemon.Daemon{first, second} {
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestDiffOfTheSame: the configuration in force has no difference from itself, on either datapath.
func TestDiffOfTheSame(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		d := start(t, l.Node("gateway"), force+webAndLine)
		file := filepath.Join(t.TempDir(), "same.yaml")
		if err := os.WriteFile(file, []byte(force+webAndLine), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := d.Command(t.Context(), "diff", "--exit-code", file).CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
}
