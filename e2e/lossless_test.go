// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// number returns the value of an environment variable, or a default.
func number(t *testing.T, variable string, without int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return without
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}

// changing has two permanent web servers, a third one that is added and removed, and a service for connections
// that stay open.
const changing = `
services:
  - name: web
    listen: [{address: 192.0.2.10, ports: [80]}]
    protocol: tcp
    mode: dnat
    scheduler: wrr
    backends: [{name: a, address: 10.0.2.2, port: 8080}, {name: b, address: 10.0.2.3, port: 8080}]
  - name: line
    listen: [{address: 192.0.2.10, ports: [7]}]
    protocol: tcp
    mode: dnat
    backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]
`

// TestChangesLoseNothing changes backends, reloads the file, kills the daemon, starts another one in its
// place, and moves the services to the other datapath and back, while requests are made and
// connections are open. No request fails, and no connection breaks. SLUICE_CHANGES=1000 makes as many
// changes, a tenth as many reloads, and a thousand times as many requests.
func TestChangesLoseNothing(t *testing.T) {
	// Connections that have closed stay for this long. With the default of four minutes, 1,100 requests a second
	// fill a connection table of 262,144 entries, which then drops packets.
	const transitory = "30s"
	changes := number(t, "SLUICE_CHANGES", 40)
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080", "s1 c 10.0.2.2:8081")
		for _, at := range [][3]string{{"s1", "a", "10.0.2.2:7"}, {"s2", "b", "10.0.2.3:7"}} {
			lines, err := host.ServeLines(l.Node(at[0]), at[1], at[2])
			if err != nil {
				t.Fatal(err)
			}
			defer lines.Stop()
		}
		d := start(t, l.Node("gateway"), force+changing+"timeouts: {tcp-transitory: "+transitory+", force: true}\n")
		var held []*host.Line
		ask := func(when string) {
			t.Helper()
			for i, line := range held {
				if _, err := line.Ask(patience); err != nil {
					t.Fatalf("open connection %d, after %s: %v", i, when, err)
				}
			}
		}
		hold := func() {
			t.Helper()
			line, err := host.DialLine(t.Context(), l.Node("client"), netip.AddrPortFrom(netip.MustParseAddr("10.64.0.7"), uint16(7000+len(held))), netip.MustParseAddrPort("192.0.2.10:7"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = line.Close() })
			held = append(held, line)
		}
		for range 4 {
			hold()
		}
		ask("the start")
		load := webLoad(l, "192.0.2.10:80", changes*1000)
		if changes < 1000 {
			load.Count, load.Rate = 0, 300
		}
		requests := inBackground(t, load)
		var seen events
		mustDo := func(what string, do func() error) {
			t.Helper()
			if err := seen.note(what, do); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			ask(what)
		}
		for i := range changes {
			mustDo(fmt.Sprintf("change %d", i), func() error { return changeOne(t.Context(), d, i) })
			if i%10 == 9 {
				text := force + changing + fmt.Sprintf("timeouts: {udp: %ds, tcp-transitory: %s, force: true}\n", 300+i, transitory)
				mustDo("a reload", func() error { return errors.Join(os.WriteFile(d.File, []byte(text), 0o644), reload(t.Context(), d)) })
			}
			if i%(changes/4) == changes/4-1 {
				mustDo("kill -9", d.Kill)
				mustDo("the start after kill -9", func() error { return d.Restart(t.Context()) })
				mustDo("stop --keep", func() error { return errors.Join(d.Client.Stop(t.Context(), api.Stop{Keep: true}), d.AwaitEnd()) })
				mustDo("the start of another one", func() error { return d.Restart(t.Context()) })
				for _, move := range []any{other(force), nil} {
					for _, service := range []string{"web", "line"} {
						mustDo(fmt.Sprintf("the move of %s to datapath %v", service, move), func() error {
							_, err := d.PatchObject(t.Context(), "services/"+service, map[string]any{"datapath": move}, api.ChangeOptions{})
							return err
						})
						hold()
					}
				}
			}
		}
		tally := requests()
		for _, f := range tally.Failures {
			t.Errorf("one of %d requests failed: %s", tally.Sent(), seen.during(f))
		}
		ask("all of it")
		t.Logf("%d requests, %d failed; %d open connections, none broken", tally.Sent(), len(tally.Failures), len(held))
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// other returns the datapath that is not selected.
func other(force string) string {
	if strings.Contains(force, "ebpf") {
		return "nftables"
	}
	return "ebpf"
}

func reload(ctx context.Context, d *daemon.Daemon) error {
	_, err := d.Reload(ctx)
	return err
}

// changeOne makes one of several changes. Every request has a backend all the time.
func changeOne(ctx context.Context, d *daemon.Daemon, i int) error {
	var err error
	switch i % 6 {
	case 0:
		_, err = d.AddObject(ctx, "services/web/backends", map[string]any{"name": "c", "address": "10.0.2.2", "port": 8081}, api.ChangeOptions{})
	case 1:
		_, err = d.PatchObject(ctx, "services/web/backends/a", map[string]any{"weight": 1 + i%7}, api.ChangeOptions{})
	case 2:
		err = d.SetBackend(ctx, "web", "b", api.BackendState{State: "drain"})
	case 3:
		err = d.SetBackend(ctx, "web", "b", api.BackendState{State: "auto"})
	case 4:
		err = d.SetBackend(ctx, "web", "c", api.BackendState{State: "drain"})
	default:
		time.Sleep(50 * time.Millisecond) // its pending requests are answered
		_, err = d.RemoveObject(ctx, "services/web/backends/c", api.ChangeOptions{})
	}
	return err
}

// TestManyChangesASecond lets many clients change backends at once while requests are made. Every change is in
// force, also in the next daemon, and no request fails. SLUICE_CHANGE_SECONDS=60 makes 1,000 changes a second
// for this time, and prints the cost for the daemon.
func TestManyChangesASecond(t *testing.T) {
	seconds := number(t, "SLUICE_CHANGE_SECONDS", 0)
	rate := 1000
	if seconds == 0 {
		seconds, rate = 2, 100
	}
	const clients, services = 25, 1000
	onDatapaths(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		serveWeb(t, l, "s1 a 10.0.2.2:8080", "s2 b 10.0.2.3:8080")
		var text strings.Builder
		text.WriteString(force + changing)
		for i := range services {
			fmt.Fprintf(&text, "  - {name: s%d, listen: [{address: %s, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2, port: %d}, {name: b, address: 10.0.2.3, port: %[3]d}]}\n",
				i, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), 1024+i)
		}
		d := start(t, l.Node("gateway"), text.String())
		load := webLoad(l, "192.0.2.10:80", 0)
		load.Rate = 200
		requests := inBackground(t, load)
		var made, slowest atomic.Int64
		var weights [clients]map[string]int
		began, cpu := time.Now(), cpuOf(t, d.PID())
		var wg sync.WaitGroup
		for client := range clients {
			weights[client] = map[string]int{}
			wg.Go(func() {
				for n := 0; n < seconds*rate/clients; n++ {
					time.Sleep(time.Until(began.Add(time.Duration(n) * time.Second * clients / time.Duration(rate))))
					path := fmt.Sprintf("services/s%d/backends/%s", (client+n*clients)%services, []string{"a", "b"}[n%2])
					weight, asked := 1+n%200, time.Now()
					if _, err := d.PatchObject(t.Context(), path, map[string]any{"weight": weight}, api.ChangeOptions{}); err != nil {
						t.Errorf("%s: %v", path, err)
						return
					}
					weights[client][path] = weight
					made.Add(1)
					slowest.Store(max(slowest.Load(), int64(time.Since(asked))))
				}
			})
		}
		wg.Wait()
		took, used := time.Since(began), cpuOf(t, d.PID())-cpu
		tally := requests()
		t.Logf("%d changes in %.1f s, %.0f a second, the slowest %v; CPU of the daemon %.2f cores, resident %d MB; of %d requests %d failed", made.Load(), took.Seconds(),
			float64(made.Load())/took.Seconds(), time.Duration(slowest.Load()).Round(time.Millisecond), used.Seconds()/took.Seconds(), residentOf(t, d.PID())>>20, tally.Sent(), len(tally.Failures))
		if len(tally.Failures) > 0 {
			t.Errorf("of %d requests failed %v", tally.Sent(), tally.Causes())
		}
		if err := errors.Join(d.Kill(), d.Restart(t.Context())); err != nil {
			t.Fatal(err)
		}
		list, err := d.Backends(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		have := map[string]int{}
		for _, b := range list {
			have["services/"+b.Service+"/backends/"+b.Name] = b.Weight
		}
		for _, of := range weights {
			for path, want := range of {
				if have[path] != want {
					t.Fatalf("%s has the weight %d after kill -9, want %d", path, have[path], want)
				}
			}
		}
		if err := d.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// cpuOf returns the CPU time of a process.
func cpuOf(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	user, errUser := strconv.Atoi(fields[11])
	system, errSystem := strconv.Atoi(fields[12])
	if err := errors.Join(errUser, errSystem); err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+system) * time.Second / 100 // USER_HZ
}

// residentOf returns the memory of a process, without memory shared with the kernel's tables.
func residentOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kb, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return kb << 10
		}
	}
	t.Fatal("no RssAnon")
	return 0
}
