// SPDX-License-Identifier: Apache-2.0

// Package daemon runs the gateway: it owns the lock of the network namespace, the socket and the listeners, and
// connects health checks, discovery, announcements and PCP to the engine.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/cluster"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/discovery"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/pcp"
	"github.com/sluice-lb/sluice/server"
	"github.com/sluice-lb/sluice/store"
	"github.com/sluice-lb/sluice/uplink"
)

// Options are the configuration of a daemon that is not in its file.
type Options struct {
	Paths
	File    string
	Node    string // Name of this host in the cluster; "" for the host name.
	Keep    bool   // The rules remain in the kernel at the end.
	Verbose bool   // The log contains every change of every object.
	TCP     server.TCPOptions
	Nftlb   NftlbOptions
	Version string
	Log     *slog.Logger
}

// daemon is one running gateway.
type daemon struct {
	Options

	tcp     *server.TCP // nil if --listen is not set
	engine  *engine.Engine
	control *control.Control
	events  *event.Log
	watcher *event.Watch // reports full tables, drops and warnings as events
	audit   *audit.Log
	finder  *discovery.Finder
	holder  *hold.Holder
	routes  *announce.Announcer
	uplinks *uplink.Tracker
	cluster *cluster.Member
	applied chan struct{} // Has one element after an apply.
	nftlb   *nftlbServer  // nil without --nftlb-api.
	mapper  *pcp.Server   // nil on a host without a datapath that makes mappings.
	end     context.CancelFunc

	hup      chan os.Signal // SIGHUP since the start: an early one is a reload too
	keepOnce sync.Once
}

// Run runs a gateway until the context ends or a client stops it.
func Run(ctx context.Context, o Options) error {
	return (&daemon{Options: o}).run(ctx)
}

func (d *daemon) run(ctx context.Context) error {
	ctx, d.end = context.WithCancel(ctx)
	defer d.end()
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50) // 131 MB instead of 166 with 10,000 services: a gateway needs its memory for tables
	}
	// net/http logs data that a server sends before a request, at each health check, and has no
	// other destination for it.
	log.SetFlags(0)
	log.SetOutput(slog.NewLogLogger(d.Log.Handler(), slog.LevelDebug).Writer())
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a closed log pipe must not end the gateway
	d.hup = make(chan os.Signal, 1)
	signal.Notify(d.hup, syscall.SIGHUP)
	defer signal.Stop(d.hup)
	file := &polledFile{name: d.File, seen: identify(d.File)} // before reading, so that no change is missed
	cfg, err := config.Load(d.File)
	if err != nil {
		return err
	}
	abs, err := filepath.Abs(d.File)
	if err != nil {
		return err
	}
	lock, err := Acquire(d.Directory(), "sluice run -c "+abs, d.Log)
	if err != nil {
		return err
	}
	defer lock.Release()
	changes, err := store.Open(d.ChangesDirectory(), abs)
	if err != nil {
		return err
	}
	// Before the first change to the kernel: a daemon without an API must not replace the state of
	// an earlier one.
	listener, err := listen(d.SocketPath())
	if err != nil {
		return err
	}
	defer listener.Close()
	d.audit = audit.Open(d.ChangesDirectory(), d.Log)
	defer d.audit.Close()
	defer d.closeTCP()
	if err := d.listenTCP(ctx); err != nil {
		return err
	}
	paths, err := OpenDatapaths(d.Directory(), d.Log)
	if err != nil {
		return err
	}
	monitor := newMonitor(d)
	network, err := netdev.Open() // before the first apply, which must not miss a change
	if err != nil {
		d.Log.Warn("changes of interfaces and routes take effect with the next reload", "error", err)
	}
	if d.holder, err = hold.New(hold.Options{StateDir: d.Directory(), Log: d.Log}); err != nil {
		return errors.Join(err, monitor.Close())
	}
	d.mapper = newMapper(paths, d.Log)
	d.events = event.New(event.Held)
	d.routes = announce.New(announce.Options{StateDir: d.Directory(), Log: d.Log, Events: d.events})
	d.uplinks = uplink.New(uplink.Options{Log: d.Log, Events: d.events, OnChange: func() {
		if d.engine != nil {
			d.engine.BackendChanged()
		}
	}})
	d.watcher = &event.Watch{Log: d.events, Read: d.readTables}
	d.engine = engine.New(engine.Options{Datapaths: paths, Health: monitor, Log: d.Log, Verbose: d.Verbose, Applied: d.tellApplied, Addresses: d.holder, Announcer: d.routes, Uplinks: d.uplinks, Events: d.events, Node: Node(d.Node),
		Coming: filepath.Join(d.ChangesDirectory(), "slow-start.json")})
	d.control = control.New(abs, changes, d.engine, d.Log)
	d.control.Events, d.control.Audit = d.events, d.audit
	d.cluster = cluster.New(cluster.Options{Gateway: &member{daemon: d}, Version: d.Version, Log: d.Log})
	d.control.Changed = d.cluster.Kick
	d.newFinder(ctx)
	if err := d.control.Start(ctx, cfg); err != nil {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) { // stopped while waiting for the first probes
			d.Log.Info("ending before anything was applied")
			err = nil
		}
		return errors.Join(err, d.engine.Stop(context.Background(), true), monitor.Close())
	}
	d.startHelpers(ctx, network)
	err = d.serve(ctx, listener, file, paths, metricsPage(d, paths, monitor))
	d.Log.Info("ending", "keep", d.Keep)
	stopped := errors.Join(d.engine.Stop(context.Background(), d.Keep), monitor.Close())
	lock.Leave(stopped)
	return errors.Join(err, stopped)
}

// listenTCP opens the TCP listener of the flags. Connections wait until serve.
func (d *daemon) listenTCP(ctx context.Context) (err error) {
	if d.TCP.Address != "" {
		d.TCP.Log, d.TCP.Audit = d.Log, d.audit
		if d.tcp, err = server.ListenTCP(ctx, d.TCP); err != nil {
			return err
		}
	}
	if d.Nftlb.Address != "" {
		d.nftlb, err = d.newNftlb(ctx)
	}
	return err
}

func (d *daemon) closeTCP() {
	if d.tcp != nil {
		d.tcp.Close()
	}
	if d.nftlb != nil {
		d.nftlb.server.Close()
	}
}

// startHelpers starts the goroutines around the engine. They run until the context ends.
func (d *daemon) startHelpers(ctx context.Context, network *netdev.Watcher) {
	if network != nil {
		go d.followNetwork(ctx, network)
	}
	if d.nftlb != nil {
		d.nftlb.api.Start(ctx)
		go d.nftlb.api.Run(ctx)
	}
	if d.mapper != nil {
		go d.mapper.Run(ctx)
	}
	go d.holder.Run(ctx)
	go d.routes.Run(ctx)
	go d.uplinks.Run(ctx)
	go d.control.Run(ctx)
	go d.cluster.Run(ctx)
	go d.followSources(ctx)
	go d.watcher.Run(ctx)
}

// followNetwork passes changes of the network to the engine until the context ends.
func (d *daemon) followNetwork(ctx context.Context, network *netdev.Watcher) {
	err := network.Run(ctx, func(e netdev.Event) {
		switch {
		case e.Kind == netdev.Neighbour: // The datapaths watch neighbours themselves.
		case e.Kind == netdev.Route && d.routes.Writes(e.Table, e.Protocol): // No packet uses these.
			d.routes.Kick()
		case e.Kind == netdev.Route && d.uplinks.Writes(e.Table, e.Protocol): // No rule of the engine depends on these routes.
			d.uplinks.Kick()
		case e.Kind == netdev.Link || e.Kind == netdev.Lost:
			d.routes.Kick()
			d.uplinks.Kick()
			d.engine.NetworkChanged()
		default:
			d.uplinks.Kick()
			d.engine.NetworkChanged()
		}
	})
	if err != nil {
		d.Log.Warn("changes of interfaces and routes take effect with the next reload", "error", err)
	}
}

// serve answers the API and follows health, signals and the file until the
// context ends.
func (d *daemon) serve(ctx context.Context, listener net.Listener, file *polledFile, paths Datapaths, metrics http.Handler) error {
	opt := server.Options{Engine: d.engine, Control: d.control, Cluster: d.cluster, Daemon: d, Version: d.Version, File: d.File, Datapaths: paths.names(), Metrics: metrics, Warnings: d.warnings, Sources: d.finder.Statuses, Events: d.events, Audit: d.audit}
	if d.mapper != nil {
		opt.Mappings = d.mapper.Mappings
	}
	handler := server.New(opt)
	local := server.NewLocal(listener, d.Log)
	failed := make(chan error, 3)
	go func() { failed <- fmt.Errorf("socket %s: %w", d.SocketPath(), local.Serve(ctx, handler)) }()
	ready := []any{"socket", d.SocketPath(), "pid", os.Getpid()}
	if d.tcp != nil {
		go func() { failed <- fmt.Errorf("listen on %s: %w", d.tcp.Addr(), d.tcp.Serve(ctx, handler)) }()
		ready = append(ready, "listen", d.tcp.Addr())
	}
	if d.nftlb != nil {
		go func() {
			failed <- fmt.Errorf("nftlb API on %s: %w", d.nftlb.addr, d.nftlb.server.Serve(ctx, d.nftlb.api))
		}()
		ready = append(ready, "nftlb", d.nftlb.addr)
	}
	go d.engine.Run(ctx)
	_, _ = sd.SdNotify(false, sd.SdNotifyReady) // no supervisor is not an error
	d.Log.Info("ready", ready...)
	err := d.watch(ctx, file.changes(ctx), failed)
	_, _ = sd.SdNotify(false, sd.SdNotifyStopping)
	closing, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	shut := []error{local.Shutdown(closing)}
	if d.tcp != nil {
		shut = append(shut, d.tcp.Shutdown(closing))
	}
	if d.nftlb != nil {
		shut = append(shut, d.nftlb.server.Shutdown(closing))
	}
	for _, e := range shut {
		if !errors.Is(e, context.DeadlineExceeded) {
			err = errors.Join(err, e)
		}
	}
	return err
}

// watch reloads on SIGHUP and when the file changes.
func (d *daemon) watch(ctx context.Context, changes <-chan struct{}, failed <-chan error) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return err
		case <-d.hup:
			d.reloadAndLog(ctx, control.Author{Who: "SIGHUP", What: "reload"})
			if d.tcp != nil {
				d.tcp.Reread()
			}
		case <-changes:
			d.reloadAndLog(ctx, d.control.FileChanged())
		}
	}
}

func (d *daemon) reloadAndLog(ctx context.Context, by control.Author) {
	if _, err := d.control.Reload(ctx, by); err != nil {
		d.Log.Error("reload refused, the configuration in force stays", "file", d.File, "error", err)
	}
}

// Stop ends the daemon; keep adds to the flag of the command line.
func (d *daemon) Stop(keep bool) {
	d.keepOnce.Do(func() {
		d.Keep = d.Keep || keep
		d.end()
	})
}

// listen opens the socket, with access for root and its group alone. It replaces a socket without a
// listener, as a killed daemon leaves one, and no other file.
func listen(path string) (net.Listener, error) {
	info, err := os.Lstat(path)
	if err == nil && info.Mode().Type() != os.ModeSocket {
		return nil, fmt.Errorf("socket %s: the file exists and is no socket: name another path with --socket, or remove it", path)
	}
	if err == nil {
		if c, err := net.Dial("unix", path); err == nil {
			c.Close()
			return nil, fmt.Errorf("socket %s: another process listens there: name another path with --socket, or stop that process", path)
		}
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	old := syscall.Umask(0o117) // srw-rw----
	defer syscall.Umask(old)
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return l, nil
}
