// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/fsnotify/fsnotify"
	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/pcp"
	"github.com/sluice-lb/sluice/server"
)

func newRun(a *app) *cobra.Command {
	var d daemon
	cmd := &cobra.Command{
		Use:     "run -c FILE",
		GroupID: "gateway",
		Short:   "Run the gateway in the foreground",
		Long: `Apply a configuration, check the backends, watch the file and answer the other
commands, in the foreground.

SIGHUP and a change of the file reload it; a file with errors changes nothing.
SIGTERM and Ctrl-C end the daemon and leave the host as it was found; with
--keep the rules stay in the kernel and traffic goes on. After kill -9 the rules
stay too, and the next start adopts them without a gap.`,
		Example: "  sluice run -c /etc/sluice/sluice.yaml\n  ip netns exec gateway sluice run -c lb-dnat.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if d.file == "" {
				return usageError(cmd, "name the configuration with -c FILE")
			}
			d.app = a
			return d.run(cmd.Context())
		},
	}
	cmd.Flags().StringVarP(&d.file, "config", "c", "", "configuration file")
	cmd.Flags().BoolVar(&d.keep, "keep", false, "leave the rules in the kernel at the end")
	cmd.Flags().BoolVar(&d.verbose, "verbose", false, "log every change of every object")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	return cmd
}

// daemon is one running gateway.
type daemon struct {
	*app
	file    string
	keep    bool
	verbose bool

	log    *slog.Logger
	engine *engine.Engine
	mapper *pcp.Server // nil on a host without a datapath that makes mappings
	end    context.CancelFunc

	hup      chan os.Signal // SIGHUP, from the start on: one that comes early is a reload too
	mu       sync.Mutex     // serialises reloads
	keepOnce sync.Once
}

func (d *daemon) run(ctx context.Context) error {
	ctx, d.end = context.WithCancel(ctx)
	defer d.end()
	d.log = d.logger()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // a log that nobody reads ends no gateway
	d.hup = make(chan os.Signal, 1)
	signal.Notify(d.hup, syscall.SIGHUP)
	defer signal.Stop(d.hup)
	// Watching begins before the file is read, so that no change is missed.
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch %s: %w", d.file, err)
	}
	// Closing inotify waits for a grace period of the kernel, seconds on a machine that is busy
	// enough; the end of the daemon does not wait with it.
	defer func() { go watcher.Close() }()
	file := &watched{name: d.file}
	unwatched := file.follow(watcher)
	cfg, err := config.Load(d.file)
	if err != nil {
		return err
	}
	if unwatched != nil {
		return fmt.Errorf("watch %s: %w", filepath.Dir(d.file), unwatched)
	}
	abs, err := filepath.Abs(d.file)
	if err != nil {
		return err
	}
	lock, err := acquire(d.directory(), "sluice run -c "+abs)
	if err != nil {
		return err
	}
	defer lock.release()
	paths, err := openDatapaths(d.directory(), d.log)
	if err != nil {
		return err
	}
	monitor := newMonitor(d)
	network, err := netdev.Open() // before the first apply, which must not miss a change
	if err != nil {
		d.log.Warn("changes of interfaces and routes take effect with the next reload", "error", err)
	}
	applies := func() {}
	if d.mapper = newMapper(paths, d.log); d.mapper != nil {
		applies = d.mapper.Kick
	}
	d.engine = engine.New(engine.Options{Datapaths: paths.list, Health: monitor, Log: d.log, Applied: applies})
	applied, err := d.engine.Apply(ctx, cfg)
	if err != nil {
		return errors.Join(err, d.engine.Stop(context.Background(), true), monitor.Close())
	}
	d.report(applied)
	if network != nil {
		go d.follow(ctx, network)
	}
	if d.mapper != nil {
		go d.mapper.Run(ctx)
	}
	err = d.serve(ctx, watcher, file, paths, metricsPage(d, paths, monitor))
	d.log.Info("ending", "keep", d.keep)
	stopped := errors.Join(d.engine.Stop(context.Background(), d.keep), monitor.Close())
	lock.leave(stopped)
	return errors.Join(err, stopped)
}

// follow tells the engine of changes of the network until the context ends.
func (d *daemon) follow(ctx context.Context, network *netdev.Watcher) {
	err := network.Run(ctx, func(e netdev.Event) {
		if e.Kind != netdev.Neighbour { // datapaths look these up themselves
			d.engine.NetworkChanged()
		}
	})
	if err != nil {
		d.log.Warn("changes of interfaces and routes take effect with the next reload", "error", err)
	}
}

// serve answers the API and follows health, signals and the file until the
// context ends.
func (d *daemon) serve(ctx context.Context, watcher *fsnotify.Watcher, file *watched, paths *datapaths, metrics http.Handler) error {
	listener, err := listen(d.socketPath())
	if err != nil {
		return err
	}
	opt := server.Options{Engine: d.engine, Daemon: d, Version: version(), File: d.file, Datapaths: paths.names(), Metrics: metrics}
	if d.mapper != nil {
		opt.Mappings = d.mapper.Mappings
	}
	handler := server.New(opt)
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(listener) }()
	go d.engine.Run(ctx)
	_, _ = sd.SdNotify(false, sd.SdNotifyReady) // no supervisor is not an error
	d.log.Info("ready", "socket", d.socketPath(), "pid", os.Getpid())
	err = d.watch(ctx, watcher, file, failed)
	_, _ = sd.SdNotify(false, sd.SdNotifyStopping)
	closing, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if shut := srv.Shutdown(closing); shut != nil && !errors.Is(shut, context.DeadlineExceeded) {
		err = errors.Join(err, shut)
	}
	return err
}

// watch reloads on SIGHUP and when the file changes.
func (d *daemon) watch(ctx context.Context, watcher *fsnotify.Watcher, file *watched, failed <-chan error) error {
	var settled <-chan time.Time // a file is read when its writer has been quiet for a moment
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return fmt.Errorf("socket %s: %w", d.socketPath(), err)
		case <-d.hup:
			d.reloadAndLog(ctx)
		case ev := <-watcher.Events:
			changed, err := file.changed(watcher, ev)
			if changed {
				settled = time.After(50 * time.Millisecond)
			}
			if err != nil {
				d.log.Warn("watching the file", "file", d.file, "error", err)
			}
		case err := <-watcher.Errors:
			d.log.Warn("watching the file", "file", d.file, "error", err)
			if errors.Is(err, fsnotify.ErrEventOverflow) { // the file's event may be among those that are lost
				settled = time.After(50 * time.Millisecond)
			}
		case <-settled:
			settled = nil
			d.reloadAndLog(ctx)
		}
	}
}

func (d *daemon) reloadAndLog(ctx context.Context) {
	if _, err := d.Reload(ctx); err != nil {
		d.log.Error("reload refused, the configuration in force stays", "file", d.file, "error", err)
	}
}

// Reload reads the file again and applies it.
func (d *daemon) Reload(ctx context.Context) (engine.Applied, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	cfg, err := config.Load(d.file)
	if err != nil {
		d.engine.Refuse(err)
		return engine.Applied{}, err
	}
	applied, err := d.engine.Apply(ctx, cfg)
	if err == nil {
		d.report(applied)
	}
	return applied, err
}

// Stop ends the daemon; keep adds to the flag of the command line.
func (d *daemon) Stop(keep bool) {
	d.keepOnce.Do(func() {
		d.keep = d.keep || keep
		d.end()
	})
}

func (d *daemon) report(a engine.Applied) {
	for _, c := range a.Changes {
		if c.Empty() {
			continue
		}
		d.log.Info("applied", "datapath", c.Datapath, "revision", a.Revision, "rules", c.Rules, "elements", c.Elements, "took", c.Duration)
		if d.verbose {
			for _, line := range c.Lines {
				d.log.Info(line, "datapath", c.Datapath)
			}
		}
	}
	for _, w := range d.engine.View().Warnings {
		d.log.Warn(w)
	}
}

func (d *daemon) logger() *slog.Logger {
	if d.json {
		return slog.New(slog.NewJSONHandler(d.stderr, nil))
	}
	return slog.New(slog.NewTextHandler(d.stderr, &slog.HandlerOptions{ReplaceAttr: shortTime}))
}

// shortTime leaves the date out: journals and terminals know it.
func shortTime(groups []string, attr slog.Attr) slog.Attr {
	if attr.Key == slog.TimeKey && len(groups) == 0 {
		return slog.String(slog.TimeKey, attr.Value.Time().Format("15:04:05.000"))
	}
	return attr
}

// listen opens the socket for root and the group alone.
func listen(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
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
