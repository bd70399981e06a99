// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"path/filepath"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/discovery"
)

// newFinder creates the finder of backends. The engine gets the backends found before a restart, so that
// the first apply has them.
func (d *daemon) newFinder(ctx context.Context) {
	d.applied = make(chan struct{}, 1)
	d.finder = discovery.New(discovery.Options{Path: filepath.Join(d.ChangesDirectory(), "discovered.json"), Namespace: d.namespaceID(), Log: d.Log,
		Put: func(ctx context.Context, found map[string][]config.Backend) error {
			_, err := d.engine.SetFound(ctx, found)
			return err
		}})
	_, _ = d.engine.SetFound(ctx, d.finder.Last()) // before the first apply it only stores them
}

// tellApplied signals an apply to the discovery and to other followers. It never blocks.
func (d *daemon) tellApplied() {
	if d.mapper != nil {
		d.mapper.Kick()
	}
	select {
	case d.applied <- struct{}{}:
	default:
	}
}

// partWarnings returns the warnings of the parts of the daemon other than the engine and the discovery.
func (d *daemon) partWarnings() []string {
	return slices.Concat(d.control.Warnings(), d.audit.Warnings(), d.holder.Warnings(), d.routes.Warnings(), d.uplinks.Warnings(), d.cluster.Warnings())
}

// followSources has the finder follow the sources of the configuration in force.
func (d *daemon) followSources(ctx context.Context) {
	go d.finder.Run(ctx)
	for {
		if cfg := d.engine.Config(); cfg != nil {
			d.finder.Follow(cfg)
		}
		select {
		case <-ctx.Done():
			return
		case <-d.applied:
		}
	}
}

// warnings returns the warnings of all parts but the engine.
func (d *daemon) warnings() []string {
	list := slices.Concat(d.partWarnings(), d.finder.Warnings())
	if d.nftlb != nil {
		list = append(list, d.nftlb.api.Warnings()...)
	}
	return append(list, d.watcher.Full()...)
}
