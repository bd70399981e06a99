// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestStorm mixes reloads, signals and crashes with lost links and interfaces, while requests, an open
// connection and numbered datagrams pass. Datagrams may be lost while a link is down. No event may end a
// connection, move a flow, or prevent a later event.
func TestStorm(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		labtest.KeepHostSettings(t)
		l := labtest.New(t, lab.Balancer())
		gw := l.Node("gateway")
		dial := serveWebAndLine(t, l)
		serveWeb(t, l, "s9 d 10.0.2.9:8080")
		collectors := []*host.Collector{collect(t, l.Node("s1"), "10.0.2.2:9"), collect(t, l.Node("s2"), "10.0.2.3:9")}
		calm := force + webAndLine + strings.TrimPrefix(numbers, "\nservices:\n")
		for line := range strings.Lines(calm) {
			if strings.Contains(line, "check:") { // servers must not fail their checks while a link is down
				calm = strings.Replace(calm, line, "", 1)
			}
		}
		d := start(t, gw, calm)
		line := dial()
		load := webLoad(l, "192.0.2.10:80", 0)
		load.Rate = 100
		requests := inBackground(t, load)
		stream := &host.Stream{From: l.Node("client"), Target: netip.MustParseAddrPort("192.0.2.10:9"), Rate: 500}
		if err := stream.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		over := make(chan struct{})
		var seen events
		var wg sync.WaitGroup
		for _, events := range []map[string]func() error{configurations(t, d, calm), networks(t, gw)} {
			wg.Go(func() {
				for {
					for name, event := range events { // in random order
						select {
						case <-over:
							return
						default:
						}
						if err := seen.note(name, event); err != nil {
							t.Errorf("%s: %v", name, err)
							return
						}
					}
				}
			})
		}
		for end := time.Now().Add(12 * time.Second); time.Now().Before(end) && !t.Failed(); time.Sleep(20 * time.Millisecond) {
			mustAsk(t, line, "in the storm")
		}
		close(over)
		wg.Wait()
		if err := os.WriteFile(d.File, []byte(calm), 0o644); err != nil {
			t.Fatal(err)
		}
		labtest.Eventually(t, patience, "the last configuration", func() error {
			_, err := d.Apply(t.Context(), "test.yaml", []byte(calm))
			return err
		})
		sent := stream.Sent()[0]
		labtest.Eventually(t, patience, "datagrams after the storm", func() error {
			for _, c := range collectors {
				if slices.ContainsFunc(c.Arrivals(), func(a host.Arrival) bool { return a.Flow == 0 && a.Number > sent }) {
					return nil
				}
			}
			return errors.New("none")
		})
		mustAsk(t, line, "after the storm")
		tally := requests()
		for _, f := range tally.Failures {
			during := seen.during(f)
			switch {
			case f.Cause == syscall.ENETUNREACH.Error(), f.Cause == syscall.EHOSTUNREACH.Error(): // while a link was down
			case f.Cause == syscall.ECONNRESET.Error() && strings.Contains(during, " cable from "):
				// A server without its link cannot retransmit its SYN-ACK, and forgets the connection.
			default:
				t.Errorf("one of %d requests failed: %s", tally.Sent(), during)
			}
		}
		if err := stream.Stop(); err != nil {
			t.Error(err)
		}
		arrivals := append(collectors[0].Arrivals(), collectors[1].Arrivals()...)
		if _, twice := host.Missing(stream.Sent(), arrivals); twice > 0 {
			t.Errorf("%d datagrams arrived twice", twice)
		}
		met := map[uint32]host.Arrival{}
		for _, a := range arrivals {
			if was, ok := met[a.Flow]; ok && (was.Server != a.Server || was.From != a.From) {
				t.Fatalf("flow %d was led to %s from %s, then to %s from %s", a.Flow, was.Server, was.From, a.Server, a.From)
			}
			met[a.Flow] = a
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// configurations are events of the daemon: actions of operators and programs, and crashes.
func configurations(t *testing.T, d *daemon.Daemon, calm string) map[string]func() error {
	more := strings.Replace(calm, "      - {name: b, address: 10.0.2.3, port: 8080}\n", oneMore, 1)
	both := "  - {name: far, datapath: nftables, listen: [{address: 192.0.2.10, ports: [98]}], protocol: udp, mode: stateless, scheduler: source-hash, backends: [{name: x, address: 203.0.113.99, port: 9}]}\n" +
		"  - {name: near, datapath: nftables, listen: [{address: 192.0.2.10, ports: [99]}], protocol: udp, mode: dnat, backends: [{name: x, address: 203.0.113.99, port: 9}]}\n"
	apply := func(text string) func() error {
		return func() error { _, err := d.Apply(t.Context(), "test.yaml", []byte(text)); return err }
	}
	refused := func(text, why string) func() error {
		return func() error {
			if err := apply(text)(); err == nil || !strings.Contains(err.Error(), why) {
				return fmt.Errorf("not refused because of %q, but %w", why, err)
			}
			return nil
		}
	}
	write := func(text string) func() error {
		return func() error {
			return errors.Join(os.WriteFile(d.File+".new", []byte(text), 0o644), os.Rename(d.File+".new", d.File))
		}
	}
	return map[string]func() error{
		"more":               apply(more),
		"calm":               apply(calm),
		"deny":               apply(calm + "firewall: {sets: {bad: [198.51.100.0/24]}, rules: [{action: drop, source: '@bad'}]}\n"),
		"nonsense":           refused("services: [nonsense]\n", "nonsense"),
		"one server for two": refused(calm+both, "service far: answers of 203.0.113.99 port 9 also belong"),
		"file":               write(more),
		"bad file":           write("services: ["),
		"hang up":            func() error { return d.Signal(syscall.SIGHUP) },
		"crash":              func() error { return errors.Join(d.Kill(), write(calm)(), d.Restart(t.Context())) },
		"frozen": func() error {
			err := d.Signal(syscall.SIGSTOP)
			time.Sleep(100 * time.Millisecond)
			return errors.Join(err, d.Signal(syscall.SIGCONT))
		},
	}
}

// networks are events of the host's interfaces.
func networks(t *testing.T, n *lab.Node) map[string]func() error {
	events := map[string]func() error{}
	for name, script := range map[string]string{
		"bridge":        "ip link add br7 type bridge; ip link set br7 up; sleep 0.1; ip link del br7",
		"interfaces":    "for i in 1 2 3 4 5 6 7 8; do ip link add d$i type veth peer name p$i; ip link set d$i up; done; for i in 1 2 3 4 5 6 7 8; do ip link del d$i; done",
		"other name":    "ip link add d9 type veth peer name p9; ip link set d9 name e9; ip link set e9 up; ip link set e9 name d9; ip link del d9",
		"packet size":   "ip link set lan0 mtu 1400; sleep 0.1; ip link set lan0 mtu 1500",
		"neighbours":    "ip neigh flush all",
		"outside cable": "ip link set wan0 down; sleep 0.1; ip link set wan0 up; ip route replace 10.64.0.0/16 via 10.0.1.2",
		"inside cable":  "ip link set lan0 down; sleep 0.1; ip link set lan0 up",
		"calm":          "sleep 0.5",
	} {
		events[name] = func() error {
			if out, err := n.Command(t.Context(), "sh", "-ec", script).CombinedOutput(); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}
	}
	return events
}
