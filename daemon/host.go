// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"

	"github.com/sluice-lb/sluice/conntrack"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/datapath/ebpf"
	"github.com/sluice-lb/sluice/datapath/nft"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/health"
	"github.com/sluice-lb/sluice/hold"
	"github.com/sluice-lb/sluice/metrics"
	"github.com/sluice-lb/sluice/netdev"
	"github.com/sluice-lb/sluice/pcp"
)

// Datapaths are the datapaths of this host, in the order in which they process a packet.
type Datapaths []datapath.Datapath

func (d Datapaths) names() []string {
	var names []string
	for _, p := range d {
		names = append(names, p.Name())
	}
	return names
}

// OpenDatapaths opens the datapaths that this host supports. An unsupported one is logged and
// omitted. Without any, the error contains the remedy.
func OpenDatapaths(dir string, log *slog.Logger) (d Datapaths, err error) {
	var errs []error
	if e, err := ebpf.Open(ebpf.Options{StateDir: dir, Log: log}); err != nil {
		errs = append(errs, err)
	} else {
		d = append(d, e)
	}
	if n, err := nft.Open(); err != nil {
		errs = append(errs, fmt.Errorf("nftables: %w", err))
	} else {
		d = append(d, n)
	}
	if len(d) == 0 && errors.Is(errors.Join(errs...), os.ErrPermission) {
		return nil, ErrNoRoot
	}
	if len(d) == 0 {
		return nil, fmt.Errorf("no datapath on this host: %w", errors.Join(errs...))
	}
	for _, err := range errs {
		log.Warn("a datapath is not available", "error", err)
	}
	return d, nil
}

// hasLeftovers reports whether an earlier process left something in the kernel.
func (d Datapaths) hasLeftovers() (bool, error) {
	for _, p := range d {
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
	return health.New(health.Options{OnChange: func(e health.Transition) {
		d.Log.Info("backend changed", "service", e.Service, "backend", e.Backend, "up", e.Up, "reason", e.Reason)
		if d.engine != nil {
			d.engine.BackendChanged()
		}
	}, OnLack: func(lack string) {
		d.Log.Warn("health checks cannot run; keeping the last known states", "cause", lack)
	}})
}

// newMapper returns the PCP server of a daemon, for the datapath that can make
// mappings; nil when there is none on this host.
func newMapper(paths Datapaths, log *slog.Logger) *pcp.Server {
	for _, p := range paths {
		if m, ok := p.(datapath.Mapper); ok {
			return pcp.New(m, log)
		}
	}
	return nil
}

// readTables returns the fill level of the tables, including conntrack, and the drops.
func (d *daemon) readTables(ctx context.Context) event.Reading {
	r := d.engine.Reading(ctx)
	r.Warnings = append(r.Warnings, d.partWarnings()...)
	limits, counters, err := conntrack.ReadNumbers(ctx, netdev.CurrentNamespace())
	if err != nil { // connection tracking is unavailable
		return r
	}
	r.Gauges = append(r.Gauges, event.Gauge{Kind: event.Table, Object: "kernel/conntrack", Used: int(limits.Count), Size: int(limits.Max)})
	r.Drops = append(r.Drops, event.Dropped{Object: "kernel/conntrack", Packets: uint64(counters.Drop)})
	return r
}

// metricsPage is the Prometheus page of a daemon.
func metricsPage(d *daemon, paths Datapaths, monitor *health.Monitor) http.Handler {
	src := metrics.Sources{Version: d.Version, Health: monitor, LastApply: func() metrics.Apply {
		a := d.engine.View().Applied
		return metrics.Apply{Revision: a.Revision, At: a.At, Err: a.Err, Changes: a.Changes}
	}}
	src.Addresses = func() map[string]int { return hold.CountByState(d.engine.View().Addresses) }
	src.Announcements = d.routes.Counts
	src.Uplinks = d.uplinks
	src.Cluster = d.cluster
	if d.mapper != nil {
		src.PCP = d.mapper
	}
	if d.tcp != nil {
		src.API = d.tcp
	}
	for _, p := range paths {
		src.Datapaths = append(src.Datapaths, p)
	}
	return metrics.Handler(src)
}
