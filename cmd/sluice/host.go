// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/health"
	"github.com/sluice-lb/sluice/metrics"
	"github.com/sluice-lb/sluice/pcp"
)

// datapaths are the datapaths of this host, in the order in which they process a packet.
type datapaths struct{ list []datapath.Datapath }

func (d *datapaths) names() []string {
	var names []string
	for _, p := range d.list {
		names = append(names, p.Name())
	}
	return names
}

// openDatapaths opens the datapaths that this host supports. An unsupported one is logged and
// omitted. Without any, the error contains the remedy.
func openDatapaths(dir string, log *slog.Logger) (*datapaths, error) {
	d := &datapaths{}
	var errs []error
	if e, err := ebpf.Open(ebpf.Options{StateDir: dir, Log: log}); err != nil {
		errs = append(errs, err)
	} else {
		d.list = append(d.list, e)
	}
	if n, err := nft.Open(); err != nil {
		errs = append(errs, fmt.Errorf("nftables: %w", err))
	} else {
		d.list = append(d.list, n)
	}
	if len(d.list) == 0 && errors.Is(errors.Join(errs...), os.ErrPermission) {
		return nil, errNoRoot
	}
	if len(d.list) == 0 {
		return nil, fmt.Errorf("no datapath on this host: %w", errors.Join(errs...))
	}
	for _, err := range errs {
		log.Warn("a datapath is not available", "error", err)
	}
	return d, nil
}

// newHolder returns the holder of addresses on this host's interfaces.
func newHolder(dir string, log *slog.Logger) (*announce.Holder, error) {
	return announce.New(announce.Options{StateDir: dir, Log: log})
}

// left reports whether an earlier process left something in the kernel.
func (d *datapaths) left() (bool, error) {
	for _, p := range d.list {
		l, ok := p.(datapath.Adopter)
		if !ok {
			continue
		}
		if left, err := l.Left(); left || err != nil {
			return left, err
		}
	}
	return false, nil
}

// newMonitor returns the backend checks of a daemon; they wake its engine.
func newMonitor(d *daemon) *health.Monitor {
	return health.New(health.Options{OnChange: func(e health.Event) {
		d.log.Info("backend changed", "service", e.Service, "backend", e.Backend, "up", e.Up, "reason", e.Reason)
		if d.engine != nil {
			d.engine.Kick()
		}
	}, OnLack: func(lack string) {
		d.log.Warn("health checks cannot run; keeping the last known states", "cause", lack)
	}})
}

// newMapper returns the PCP server of a daemon, for the datapath that can make
// mappings; nil when there is none on this host.
func newMapper(paths *datapaths, log *slog.Logger) *pcp.Server {
	for _, p := range paths.list {
		if m, ok := p.(datapath.Mapper); ok {
			return pcp.New(m, log)
		}
	}
	return nil
}

// reading returns the fill level of the tables, including conntrack, and the drops.
func (d *daemon) reading(ctx context.Context) event.Reading {
	r := d.engine.Reading(ctx)
	r.Warnings = slices.Concat(r.Warnings, d.control.Warnings(), d.audit.Warnings(), d.holder.Warnings())
	limits, counters, err := conntrack.ReadNumbers(ctx, conntrack.CurrentNamespace())
	if err != nil { // without conntrack
		return r
	}
	r.Gauges = append(r.Gauges, event.Gauge{Kind: event.Table, Object: "kernel/conntrack", Used: int(limits.Count), Size: int(limits.Max)})
	r.Drops = append(r.Drops, event.Dropped{Object: "kernel/conntrack", Packets: uint64(counters.Drop)})
	return r
}

// metricsPage is the Prometheus page of a daemon.
func metricsPage(d *daemon, paths *datapaths, monitor *health.Monitor) http.Handler {
	src := metrics.Sources{Version: version(), Health: monitor, LastApply: func() metrics.Apply {
		a := d.engine.View().Applied
		return metrics.Apply{Revision: a.Revision, At: a.At, Err: a.Err, Changes: a.Changes}
	}}
	src.Addresses = func() map[string]int { return announce.Count(d.engine.View().Addresses) }
	if d.mapper != nil {
		src.PCP = d.mapper
	}
	if d.tcp != nil {
		src.API = d.tcp
	}
	for _, p := range paths.list {
		src.Datapaths = append(src.Datapaths, p)
	}
	return metrics.Handler(src)
}
