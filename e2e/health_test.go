// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// checkWindow is interval × fall + 0.5 s of webOf. Its timeout is long enough that a busy machine does not fail
// a healthy server twice in a row.
const checkWindow = 2*time.Second + 500*time.Millisecond

// webOf returns a checked web service of one family, its address and its servers.
func webOf(family string) (config, target string, servers []string) {
	if family == "IPv6" {
		return `
services:
  - name: web
    listen: [{address: "2001:db8::10", ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: maglev
    backends:
      - {name: a, address: "fd00:2::2", port: 8080}
      - {name: b, address: "fd00:2::3", port: 8080}
      - {name: spare, address: "fd00:2::9", port: 8080, priority: 2}
    check: {type: http, path: /, interval: 1s, timeout: 900ms, rise: 1, fall: 2}
`, "[2001:db8::10]:80", []string{"s1 a [fd00:2::2]:8080", "s2 b [fd00:2::3]:8080", "s9 spare [fd00:2::9]:8080"}
	}
	return `
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: maglev
    backends:
      - {name: a, address: 10.0.2.2, port: 8080}
      - {name: b, address: 10.0.2.3, port: 8080}
      - {name: spare, address: 10.0.2.9, port: 8080, priority: 2}
    check: {type: http, path: /, interval: 1s, timeout: 900ms, rise: 1, fall: 2}
`, "192.0.2.10:80", []string{"s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080", "s9 spare 10.0.2.9:8080"}
}

func onFamilies(t *testing.T, test func(t *testing.T, family string)) {
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) { test(t, family) })
	}
}

// TestDeadBackendLeaves kills one of two servers under load in two ways: its process ends, or its machine stops
// answering.
func TestDeadBackendLeaves(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		onFamilies(t, func(t *testing.T, family string) {
			l := labtest.New(t, lab.Balancer())
			config, target, specs := webOf(family)
			servers := serveWeb(t, l, specs...)
			d := start(t, l.Node("gateway"), force+config)
			t.Run("process", func(t *testing.T) {
				loseBackend(t, l, target, func() (back func() error, err error) {
					return servers["b"].Start, servers["b"].Stop()
				}, func(inUse bool) (time.Time, error) { return d.AwaitUse(t.Context(), "web", "b", inUse) })
			})
			t.Run("silence", func(t *testing.T) {
				loseBackend(t, l, target, func() (back func() error, err error) {
					port := l.Node("lan")
					return func() error { return setLink(port, "s2", true) }, setLink(port, "s2", false)
				}, func(inUse bool) (time.Time, error) { return d.AwaitUse(t.Context(), "web", "b", inUse) })
			})
			if err := d.Stop(); err != nil {
				t.Error(err)
			}
		})
	})
}

// setLink sets a switch port up or down: the machine behind it stops answering, without a reset.
func setLink(n *lab.Node, iface string, up bool) error {
	h, err := n.Handle()
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := h.LinkByName(iface)
	if err != nil {
		return err
	}
	if up {
		return h.LinkSetUp(link)
	}
	return h.LinkSetDown(link)
}

// loseBackend removes backend b under load and restores it. Requests may fail only until b is out of use.
func loseBackend(t *testing.T, l *lab.Lab, target string, lose func() (back func() error, err error), await func(inUse bool) (time.Time, error)) {
	t.Helper()
	load := webLoad(l, target, 0)
	load.Rate, load.Parallel = 100, 1024 // requests to the silent server must not delay the others
	end := inBackground(t, load)
	// These requests time out before their repeated SYN finds another server, so that the loss is visible.
	load.Rate, load.Timeout = 50, 1500*time.Millisecond
	endHasty := inBackground(t, load)
	mustAnswer(t, webLoad(l, target, 100))
	lost := time.Now()
	back, err := lose()
	if err != nil {
		t.Fatal(err)
	}
	out, err := await(false)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("out of use after %v; the promise is %v", out.Sub(lost).Round(time.Millisecond), checkWindow)
	if tally := mustAnswer(t, webLoad(l, target, 100)); tally.Servers()["a"] != 100 {
		t.Errorf("answers by %v, want only a", tally.Servers())
	}
	if err := back(); err != nil {
		t.Fatal(err)
	}
	if _, err := await(true); err != nil {
		t.Fatal(err)
	}
	labtest.Eventually(t, patience, "the backend to answer again", func() error {
		tally := webLoad(l, target, 50).Run(t.Context())
		if tally.Servers()["b"] == 0 {
			return fmt.Errorf("answers by %v, failures %v", tally.Servers(), tally.Causes())
		}
		return nil
	})
	tally := end()
	if outside := tally.FailuresOutside(lost, out); len(outside) > 0 {
		t.Errorf("%d of %d requests failed outside the time of detection: %v", len(outside), tally.Sent(), host.Tally{Failures: outside}.Causes())
	}
	if hasty := endHasty(); len(hasty.Failures) == 0 {
		t.Error("no request failed at all: the load did not notice the loss")
	}
}

func TestSpareTakesOver(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		config, target, specs := webOf("IPv4")
		servers := serveWeb(t, l, specs...)
		d := start(t, l.Node("gateway"), force+config)
		if tally := mustAnswer(t, webLoad(l, target, 200)); tally.Servers()["spare"] != 0 {
			t.Errorf("answers by %v: the spare must not be used", tally.Servers())
		}
		for _, name := range []string{"a", "b"} {
			if err := servers[name].Stop(); err != nil {
				t.Fatal(err)
			}
			if _, err := d.AwaitUse(t.Context(), "web", name, false); err != nil {
				t.Fatal(err)
			}
		}
		if tally := mustAnswer(t, webLoad(l, target, 100)); tally.Servers()["spare"] != 100 {
			t.Errorf("answers by %v, want only the spare", tally.Servers())
		}
		if err := servers["spare"].Stop(); err != nil {
			t.Fatal(err)
		}
		if _, err := d.AwaitUse(t.Context(), "web", "spare", false); err != nil {
			t.Fatal(err)
		}
		tally := webLoad(l, target, 20).Run(t.Context())
		if tally.Causes()["connection refused"] != 20 {
			t.Errorf("with no backend: %v, want 20 × connection refused", tally.Causes())
		}
		if err := servers["a"].Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := d.AwaitUse(t.Context(), "web", "a", true); err != nil {
			t.Fatal(err)
		}
		if tally := mustAnswer(t, webLoad(l, target, 100)); tally.Servers()["a"] != 100 {
			t.Errorf("answers by %v, want only a", tally.Servers())
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}
