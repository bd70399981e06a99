// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// requests is the number of requests of TestReloadsLoseNothing; go test ./e2e -requests 100000 gives the
// documented figure.
var requests = flag.Int("requests", 10_000, "requests to send while the configuration is reloaded")

// oneMore is a backend that is added to webAndLine's web service and removed again.
const oneMore = "      - {name: b, address: 10.0.2.3, port: 8080}\n      - {name: d, address: 10.0.2.9, port: 8080}\n"

// TestReloadsLoseNothing reloads the file a hundred times under load. Each time the file has one backend more or
// less.
func TestReloadsLoseNothing(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		serveWeb(t, l, "s9 d 10.0.2.9:8080")
		less := force + webAndLine
		more := strings.Replace(less, "      - {name: b, address: 10.0.2.3, port: 8080}\n", oneMore, 1)
		if more == less {
			t.Fatal("the configuration with one backend more is the same")
		}
		d := start(t, l.Node("gateway"), less)
		line := dial()
		const reloads = 100
		done := make(chan error, 1)
		load := webLoad(l, "192.0.2.10:80", *requests)
		load.Parallel = 32
		stop := make(chan struct{})
		applied := 0
		go func() {
			for i := 0; ; i++ {
				applied = i
				select {
				case <-stop:
					if i >= reloads {
						done <- nil
						return
					}
				default:
				}
				text := less
				if i%2 == 0 {
					text = more
				}
				if _, err := d.Apply(t.Context(), "test.yaml", []byte(text)); err != nil {
					done <- err
					return
				}
				if i%20 == 0 { // sometimes long enough for its first probe
					if _, err := d.AwaitUse(t.Context(), "web", "d", true); err != nil {
						done <- err
						return
					}
				}
				if i < reloads {
					continue
				}
				select { // the first hundred at full speed, then slowly until the load ends
				case <-stop:
				case <-time.After(50 * time.Millisecond):
				}
			}
		}()
		tally := load.Run(t.Context())
		close(stop)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if len(tally.Failures) > 0 {
			t.Errorf("%d of %d requests failed during reloads: %v", len(tally.Failures), tally.Sent(), tally.Causes())
		}
		if tally.Servers()["d"] == 0 {
			t.Error("the backend that comes and goes never answered: the reloads did nothing")
		}
		mustAsk(t, line, "after the reloads")
		t.Logf("%d requests, %d reloads, spread %s", tally.Sent(), applied, tally.Spread())
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// TestBackendComesBack removes a backend and adds it again at once. Its connections continue, although it was
// not probed yet.
func TestBackendComesBack(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		dial := serveWebAndLine(t, l)
		const server, other = "      - {name: a, address: 10.0.2.2}\n", "      - {name: b, address: 10.0.2.3}\n"
		with := force + strings.Replace(webAndLine, server, server+other+"    check: {type: tcp, interval: 1s, timeout: 900ms, rise: 1}\n", 1)
		without := strings.Replace(with, server, "", 1)
		d := start(t, l.Node("gateway"), with)
		if _, err := d.AwaitUse(t.Context(), "line", "a", true); err != nil {
			t.Fatal(err)
		}
		line := dial()
		mustAsk(t, line, "before")
		for _, c := range []struct{ text, when string }{{without, "while its backend is away"}, {with, "when its backend is back"}} {
			if _, err := d.Apply(t.Context(), "test.yaml", []byte(c.text)); err != nil {
				t.Fatal(err)
			}
			mustAsk(t, line, c.when)
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// TestFileAndSignalReload changes the file in three common ways: in place, by renaming a new file over it, and
// with SIGHUP.
func TestFileAndSignalReload(t *testing.T) {
	labtest.Require(t, labtest.Root)
	l := labtest.New(t, lab.Balancer())
	serveWebAndLine(t, l)
	less := webAndLine
	more := strings.Replace(less, "      - {name: b, address: 10.0.2.3, port: 8080}\n", oneMore, 1)
	d := start(t, l.Node("gateway"), less)
	awaitBackends := func(want int, how string) {
		t.Helper()
		labtest.Eventually(t, patience, how, func() error {
			all, err := d.Backends(t.Context())
			if err == nil && len(all) != want {
				err = os.ErrInvalid
			}
			return err
		})
	}
	awaitBackends(3, "the first configuration")
	if err := os.WriteFile(d.File, []byte(more), 0o644); err != nil {
		t.Fatal(err)
	}
	awaitBackends(4, "the file written in place")
	if err := os.WriteFile(d.File+".tmp", []byte(less), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(d.File+".tmp", d.File); err != nil {
		t.Fatal(err)
	}
	awaitBackends(3, "the file replaced by renaming")
	if _, err := d.Apply(t.Context(), "test.yaml", []byte(more)); err != nil {
		t.Fatal(err)
	}
	awaitBackends(4, "a configuration applied")
	if err := d.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	awaitBackends(4, "SIGHUP, which leaves what was applied on top of the file")
	if _, err := d.Revert(t.Context(), api.Revert{All: true}); err != nil {
		t.Fatal(err)
	}
	awaitBackends(3, "going back to the file")
	if err := os.WriteFile(d.File, []byte("services: [nonsense]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, patience, "the daemon to refuse a bad file", func() error {
		if !strings.Contains(d.Log(), "reload refused") {
			return os.ErrInvalid
		}
		return nil
	})
	awaitBackends(3, "a bad file, which changes nothing")
	if st, err := d.Status(t.Context()); err != nil || !strings.Contains(st.Error, "nonsense") {
		t.Errorf("the status tells nothing of a bad file: %+v, %v", st, err)
	}
	if err := d.Stop(); err != nil {
		t.Error(err)
	}
}

// TestHangupWhileItStarts sends SIGHUP to a daemon that still waits for its first probes.
func TestHangupWhileItStarts(t *testing.T) {
	gw := labtest.New(t, lab.Balancer()).Node("gateway")
	file := filepath.Join(t.TempDir(), "test.yaml")
	if err := os.WriteFile(file, []byte("datapath: nftables\nservices:\n  - name: web\n    listen: [{address: 192.0.2.10, ports: [80]}]\n"+
		"    protocol: tcp\n    mode: dnat\n    check: {type: tcp, interval: 4s, timeout: 3s}\n    backends: [{name: a, address: 10.0.2.250}]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	cmd := gw.Command(t.Context(), binary, "run", "-c", file)
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, patience, "the daemon's lock", func() error { _, err := os.Stat(filepath.Join(gw.StateDir(), "lock")); return err })
	if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	client := api.NewClient(filepath.Join(gw.StateDir(), "sluice.sock"))
	labtest.Eventually(t, patience, "the daemon", func() error { _, err := client.Status(t.Context()); return err })
	labtest.Eventually(t, patience, "the reload", func() error {
		s, err := client.Status(t.Context())
		if err == nil && s.Revision < 2 {
			err = fmt.Errorf("revision %d", s.Revision)
		}
		return err
	})
	if err := errors.Join(client.Stop(t.Context(), api.Stop{}), cmd.Wait()); err != nil {
		t.Errorf("%v\n%s", err, log.String())
	}
}
