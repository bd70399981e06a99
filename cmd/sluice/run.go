// SPDX-License-Identifier: Apache-2.0

package main

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
	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/discovery"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/pcp"
	"github.com/sluice-lb/sluice/server"
	"github.com/sluice-lb/sluice/store"
)

func newRun(a *app) *cobra.Command {
	var d daemon
	cmd := &cobra.Command{
		Use:     "run -c FILE",
		GroupID: "gateway",
		Short:   "Run the gateway in the foreground",
		Long: `Run in the foreground: apply a configuration, check the backends, watch the file
and serve the other commands.

SIGHUP and a change of the file reload it; a file with errors changes nothing.
Changes made by apply, backend and config are merged with the file and survive a
restart; 'sluice config diff' shows them.
SIGTERM and Ctrl-C end the daemon and restore the host; with --keep the rules stay
in the kernel and traffic continues. After kill -9 the rules stay too, and the
next start takes them over without an interruption.

With --listen the daemon also listens on TCP, for Prometheus and 'sluice show
--server'. It serves only clients that authenticate there: by a certificate signed
by the CA of --client-ca, by a token of --token-file, or by both if both are
given. They may read everything, and change something only with --listen-changes.
Without --tls-cert and --tls-key it listens on loopback addresses only. A changed
file takes effect with the next request; if it has an error, the previous content
stays in force. --listen does not change who may use the socket.

With --nftlb-api clients of nftlb, the nftables load balancer, manage farms,
backends and policies here as they do there. Their farms become services whose
names begin with nftlb-.`,
		Example: `  sluice run -c /etc/sluice/sluice.yaml
  ip netns exec gateway sluice run -c lb-dnat.yaml
  sluice run -c sluice.yaml --listen 127.0.0.1:9443 --token-file token
  sluice run -c sluice.yaml --listen :9443 --tls-cert cert.pem \
      --tls-key key.pem --client-ca ca.pem
  sluice run -c sluice.yaml --nftlb-api 127.0.0.1:5555 --nftlb-key key`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if d.file == "" {
				return usageError(cmd, "name the configuration with -c FILE")
			}
			if d.tcpOpt.Address == "" {
				if d.tcpOpt != (server.TCPOptions{}) {
					return usageError(cmd, "--tls-cert, --tls-key, --client-ca, --token-file and --listen-changes go with --listen ADDRESS:PORT")
				}
			} else if err := d.tcpOpt.Check(); err != nil {
				return usageError(cmd, "%w", err)
			}
			if err := d.nftlbOpt.check(); err != nil {
				return usageError(cmd, "%w", err)
			}
			d.app = a
			return d.run(cmd.Context())
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&d.file, "config", "c", "", "configuration file")
	flags.BoolVar(&d.keep, "keep", false, "leave the rules in the kernel at the end")
	flags.BoolVar(&d.verbose, "verbose", false, "log every change of every object")
	flags.StringVar(&d.tcpOpt.Address, "listen", "", "listen on TCP too, at ADDRESS:PORT, or :PORT for all addresses")
	flags.StringVar(&d.tcpOpt.Files.Cert, "tls-cert", "", "with --listen: the daemon's certificate and its chain to the CA, PEM")
	flags.StringVar(&d.tcpOpt.Files.Key, "tls-key", "", "with --listen: key of that certificate, PEM")
	flags.StringVar(&d.tcpOpt.Files.ClientCA, "client-ca", "", "with --listen: CA of the certificates that clients must present, PEM")
	flags.StringVar(&d.tcpOpt.Files.Tokens, "token-file", "", "with --listen: file of tokens; clients must send one of them")
	flags.BoolVar(&d.tcpOpt.Changes, "listen-changes", false, "with --listen: clients over TCP may also change and stop the gateway")
	d.nftlbOpt.addFlags(flags)
	for _, name := range []string{"nftlb-key", "tls-cert", "tls-key", "client-ca", "token-file"} {
		_ = cmd.MarkFlagFilename(name)
	}
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	return cmd
}

// daemon is one running gateway.
type daemon struct {
	*app
	file    string
	keep    bool
	verbose bool
	tcpOpt  server.TCPOptions

	nftlbOpt nftlbOptions

	log     *slog.Logger
	tcp     *server.TCP // nil without --listen
	engine  *engine.Engine
	control *control.Control
	events  *event.Log
	watcher *event.Watch // reports full tables, drops and warnings as events
	audit   *audit.Log
	finder  *discovery.Finder
	holder  *announce.Holder
	applied chan struct{} // has one element after an apply
	nftlb   *nftlbServer  // nil without --nftlb-api
	mapper  *pcp.Server   // nil on a host without a datapath that makes mappings
	end     context.CancelFunc

	hup      chan os.Signal // SIGHUP since the start: an early one is a reload too
	keepOnce sync.Once
}

func (d *daemon) run(ctx context.Context) error {
	ctx, d.end = context.WithCancel(ctx)
	defer d.end()
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(50) // 131 MB instead of 166 with 10,000 services: a gateway needs its memory for tables
	}
	d.log = d.logger()
	// net/http logs data that a server sends before a request, at each health check, and has no
	// other destination for it.
	log.SetFlags(0)
	log.SetOutput(slog.NewLogLogger(d.log.Handler(), slog.LevelDebug).Writer())
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a closed log pipe must not end the gateway
	d.hup = make(chan os.Signal, 1)
	signal.Notify(d.hup, syscall.SIGHUP)
	defer signal.Stop(d.hup)
	file := &watched{name: d.file, seen: identify(d.file)} // before reading, so that no change is missed
	cfg, err := config.Load(d.file)
	if err != nil {
		return err
	}
	abs, err := filepath.Abs(d.file)
	if err != nil {
		return err
	}
	lock, err := acquireAlone(d.directory(), "sluice run -c "+abs, d.log)
	if err != nil {
		return err
	}
	defer lock.release()
	changes, err := store.Open(d.storeDirectory(), abs)
	if err != nil {
		return err
	}
	// Before the first change to the kernel: a daemon without an API must not replace the state of
	// an earlier one.
	listener, err := listen(d.socketPath())
	if err != nil {
		return err
	}
	defer listener.Close()
	d.audit = audit.Open(d.storeDirectory(), d.log)
	defer d.audit.Close()
	defer d.closeTCP()
	if err := d.listenTCP(ctx); err != nil {
		return err
	}
	paths, err := openDatapaths(d.directory(), d.log)
	if err != nil {
		return err
	}
	monitor := newMonitor(d)
	network, err := netdev.Open() // before the first apply, which must not miss a change
	if err != nil {
		d.log.Warn("changes of interfaces and routes take effect with the next reload", "error", err)
	}
	if d.holder, err = newHolder(d.directory(), d.log); err != nil {
		return errors.Join(err, monitor.Close())
	}
	d.mapper = newMapper(paths, d.log)
	d.events = event.New(event.Held)
	d.watcher = &event.Watch{Log: d.events, Read: d.reading}
	d.engine = engine.New(engine.Options{Datapaths: paths.list, Health: monitor, Log: d.log, Verbose: d.verbose, Applied: d.tellApplied, Addresses: d.holder, Events: d.events,
		Coming: filepath.Join(d.storeDirectory(), "slow-start.json")})
	d.control = control.New(abs, changes, d.engine, d.log)
	d.control.Events, d.control.Audit = d.events, d.audit
	d.newFinder(ctx)
	if err := d.control.Start(ctx, cfg); err != nil {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) { // stopped while waiting for the first probes
			d.log.Info("ending before anything was applied")
			err = nil
		}
		return errors.Join(err, d.engine.Stop(context.Background(), true), monitor.Close())
	}
	d.accompany(ctx, network)
	err = d.serve(ctx, listener, file, paths, metricsPage(d, paths, monitor))
	d.log.Info("ending", "keep", d.keep)
	stopped := errors.Join(d.engine.Stop(context.Background(), d.keep), monitor.Close())
	lock.leave(stopped)
	return errors.Join(err, stopped)
}

// listenTCP opens the TCP listener of the flags. Connections wait until serve.
func (d *daemon) listenTCP(ctx context.Context) (err error) {
	if d.tcpOpt.Address != "" {
		d.tcpOpt.Log, d.tcpOpt.Audit = d.log, d.audit
		if d.tcp, err = server.ListenTCP(ctx, d.tcpOpt); err != nil {
			return err
		}
	}
	if d.nftlbOpt.address != "" {
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

// accompany starts the goroutines around the engine. They run until the context ends.
func (d *daemon) accompany(ctx context.Context, network *netdev.Watcher) {
	if network != nil {
		go d.follow(ctx, network)
	}
	if d.nftlb != nil {
		d.nftlb.api.Start(ctx)
		go d.nftlb.api.Run(ctx)
	}
	if d.mapper != nil {
		go d.mapper.Run(ctx)
	}
	go d.holder.Run(ctx)
	go d.control.Run(ctx)
	go d.followSources(ctx)
	go d.watcher.Run(ctx)
}

// follow passes changes of the network to the engine until the context ends.
func (d *daemon) follow(ctx context.Context, network *netdev.Watcher) {
	err := network.Run(ctx, func(e netdev.Event) {
		if e.Kind != netdev.Neighbour { // the datapaths watch neighbours themselves
			d.engine.NetworkChanged()
		}
	})
	if err != nil {
		d.log.Warn("changes of interfaces and routes take effect with the next reload", "error", err)
	}
}

// serve answers the API and follows health, signals and the file until the
// context ends.
func (d *daemon) serve(ctx context.Context, listener net.Listener, file *watched, paths *datapaths, metrics http.Handler) error {
	opt := server.Options{Engine: d.engine, Control: d.control, Daemon: d, Version: version(), File: d.file, Datapaths: paths.names(), Metrics: metrics, Warnings: d.warnings, Sources: d.finder.Statuses, Events: d.events, Audit: d.audit}
	if d.mapper != nil {
		opt.Mappings = d.mapper.Mappings
	}
	handler := server.New(opt)
	local := server.NewLocal(listener, d.log)
	failed := make(chan error, 3)
	go func() { failed <- fmt.Errorf("socket %s: %w", d.socketPath(), local.Serve(ctx, handler)) }()
	ready := []any{"socket", d.socketPath(), "pid", os.Getpid()}
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
	d.log.Info("ready", ready...)
	err := d.watch(ctx, file.follow(ctx), failed)
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
		d.log.Error("reload refused, the configuration in force stays", "file", d.file, "error", err)
	}
}

// Stop ends the daemon; keep adds to the flag of the command line.
func (d *daemon) Stop(keep bool) {
	d.keepOnce.Do(func() {
		d.keep = d.keep || keep
		d.end()
	})
}

func (d *daemon) logger() *slog.Logger {
	if d.json {
		return slog.New(slog.NewJSONHandler(d.stderr, nil))
	}
	return slog.New(slog.NewTextHandler(d.stderr, &slog.HandlerOptions{ReplaceAttr: shortTime}))
}

// shortTime omits the date, which journals and terminals add.
func shortTime(groups []string, attr slog.Attr) slog.Attr {
	if attr.Key == slog.TimeKey && len(groups) == 0 {
		return slog.String(slog.TimeKey, attr.Value.Time().Format("15:04:05.000"))
	}
	return attr
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
