// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/pause"
)

// webWindow is the maximum time until a dead backend of lb-dnat is removed: interval × fall + 0.5 s.
const webWindow = 2*time.Second + 500*time.Millisecond

// web is the act of lb-dnat: balance, stop a server, reload, kill the daemon.
type web struct {
	*stage
	gw     *daemon.Daemon
	victim *host.Web // the server of backend b
	load   host.Load
}

func playWeb(ctx context.Context, s *stage) error {
	var all servers
	defer func() { all.stop() }()
	w := &web{stage: s, load: host.Load{
		From: s.lab.Node("client"), Target: netip.MustParseAddrPort("192.0.2.10:80"),
		Ask: host.AskWeb, Sources: manyClients,
	}}
	for _, b := range []struct{ node, name, addr string }{
		{"s1", "a", "10.0.2.2:8080"}, {"s2", "b", "10.0.2.3:8080"},
		{"s3", "c", "10.0.2.4:8080"}, {"s9", "d", "10.0.2.9:8080"},
	} {
		server, err := host.ServeWeb(s.lab.Node(b.node), b.name, b.addr)
		if err != nil {
			return err
		}
		all = append(all, server)
		if b.name == "b" {
			w.victim = server
		}
	}
	var err error
	if w.gw, err = s.start(ctx, "gateway", "lb-dnat.yaml", nil); err != nil || w.gw == nil {
		return err
	}
	for _, scene := range []func(context.Context) error{w.balance, w.loseServer, w.reload, w.loseDaemon} {
		if err := scene(ctx); err != nil {
			return fmt.Errorf("%w\nthe daemon's log:\n%s", err, w.gw.Log())
		}
	}
	return w.gw.Stop()
}

func (w *web) balance(ctx context.Context) error {
	load := w.load
	load.Count = 5000
	t := w.run(ctx, load)
	w.recordPromise(len(t.Failures) == 0, "every request is answered", "%d of %d%s, %.0f per second",
		t.Good(), t.Sent(), causes(t.Failures), float64(t.Good())/t.Elapsed.Seconds())
	w.recordPromise(isClose(share(t, "a"), 0.25, 0.04) && isClose(share(t, "b"), 0.25, 0.04) && isClose(share(t, "c"), 0.5, 0.04),
		"the spread follows the weights 1:1:2", "%s", t.Spread())
	foreign := 0
	for client, n := range t.Clients() {
		if a, err := netip.ParseAddr(client); err != nil || !manyClients.Contains(a) {
			foreign += n
		}
	}
	w.recordPromise(foreign == 0 && t.Good() > 0, "servers see the clients' own addresses", "%d clients, %d requests from elsewhere", len(t.Clients()), foreign)
	return ctx.Err()
}

// measureDelays measures the delays of this program's scheduling, during which the gateway cannot keep its promises
// either. end stops the measurement and returns the total.
func measureDelays() (end func() time.Duration) {
	const tick, usual = 10 * time.Millisecond, 50 * time.Millisecond
	stop, told := make(chan struct{}), make(chan time.Duration)
	go func() {
		var sum time.Duration
		for last := time.Now(); ; {
			select {
			case <-stop:
				told <- sum
				return
			case <-time.After(tick):
			}
			now := time.Now()
			if gap := now.Sub(last); gap > usual {
				sum += gap
			}
			last = now
		}
	}()
	return func() time.Duration {
		close(stop)
		return <-told
	}
}

// loseServer stops a server under load and restarts it.
func (w *web) loseServer(ctx context.Context) error {
	load := w.load
	load.Rate = 400
	end := w.background(ctx, load)
	_ = pause.For(ctx, 500*time.Millisecond)
	w.printText("killing the server of backend b under load")
	late := measureDelays()
	died := time.Now()
	if err := w.victim.Stop(); err != nil {
		end()
		return err
	}
	out, err := w.gw.AwaitUse(ctx, "web", "b", false)
	stood := late()
	if err != nil {
		end()
		return err
	}
	_ = pause.For(ctx, time.Second)
	w.printText("bringing it back")
	if err := w.victim.Start(); err != nil {
		end()
		return err
	}
	if _, err := w.gw.AwaitUse(ctx, "web", "b", true); err != nil {
		end()
		return err
	}
	_ = pause.For(ctx, 500*time.Millisecond)
	t := end()
	outside := t.FailuresOutside(died, out)
	took := fmt.Sprintf("%.2f s", out.Sub(died).Seconds())
	if out.Sub(died) > webWindow && stood > 0 {
		took += fmt.Sprintf(", for %.2f s of which this machine had no time for the demo", stood.Seconds())
	}
	w.recordPromise(out.Sub(died) <= webWindow+stood, "a dead backend is out within 2.5 s", "%s", took)
	w.recordPromise(len(outside) == 0, "no request fails once it is out, or when it is back", "%d of %d%s; %d failed before it was out",
		len(outside), t.Sent(), causes(outside), len(t.Failures)-len(outside))
	load.Count, load.Rate = 2000, 0
	t = w.run(ctx, load)
	w.recordPromise(isClose(share(t, "b"), 0.25, 0.06), "the backend gets its share again", "%s", t.Spread())
	return ctx.Err()
}

// reloads is the number of configuration changes under load.
const reloads = 20

// reload adds and removes a backend under load, many times.
func (w *web) reload(ctx context.Context) error {
	cfg, err := config.Load(w.gw.File)
	if err != nil {
		return err
	}
	without, err := config.Marshal(cfg)
	if err != nil {
		return err
	}
	more := cfg.Services[0].Backends[0]
	more.Name, more.Address = "d", netip.MustParseAddr("10.0.2.9")
	cfg.Services[0].Backends = append(cfg.Services[0].Backends, more)
	with, err := config.Marshal(cfg)
	if err != nil {
		return err
	}
	load := w.load
	load.Rate = 1000
	end := w.background(ctx, load)
	start := time.Now()
	for i := range reloads {
		text := with
		if i%2 == 1 {
			text = without
		}
		if _, err := w.gw.Apply(ctx, w.example, text); err != nil {
			end()
			return err
		}
		_ = pause.For(ctx, 50*time.Millisecond)
	}
	took := time.Since(start)
	t := end()
	w.recordPromise(len(t.Failures) == 0, fmt.Sprintf("%d reloads under load lose nothing", reloads),
		"%d of %d requests failed%s in %.1f s", len(t.Failures), t.Sent(), causes(t.Failures), took.Seconds())
	return ctx.Err()
}

// loseDaemon kills the daemon with SIGKILL under load and restarts it.
func (w *web) loseDaemon(ctx context.Context) error {
	load := w.load
	load.Rate = 400
	end := w.background(ctx, load)
	_ = pause.For(ctx, 300*time.Millisecond)
	w.printText("kill -9 of the daemon under load")
	if err := w.gw.Kill(); err != nil {
		end()
		return err
	}
	_ = pause.For(ctx, 700*time.Millisecond)
	w.printText("starting it again")
	if err := w.gw.Restart(ctx); err != nil {
		end()
		return err
	}
	_ = pause.For(ctx, 500*time.Millisecond)
	t := end()
	w.recordPromise(len(t.Failures) == 0, "kill -9 of the daemon and its restart lose nothing",
		"%d of %d requests failed%s", len(t.Failures), t.Sent(), causes(t.Failures))
	if log := w.gw.Log(); strings.Contains(log, "level=ERROR") {
		w.printText("the daemon complains: %s", log)
	}
	return ctx.Err()
}
