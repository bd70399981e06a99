// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"

	"github.com/sluice-lb/sluice/cluster"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/store"
)

// member is this daemon as a node of a cluster with a store.
type member struct {
	*daemon
	known *config.Config // of which node is the node
	node  string
}

// Local implements cluster.Gateway.
func (m *member) Local() cluster.Local {
	own, shared, drains := m.control.Shared()
	inForce := m.engine.Config()
	if own.Store() == nil || inForce == nil {
		return cluster.Local{}
	}
	if m.known != inForce {
		m.known, m.node = inForce, m.engine.View().Node
	}
	return cluster.Local{Settings: cluster.Settings{Name: own.Cluster.Name, Node: m.node, Store: own.Store()}, InForce: shared, Drains: drains}
}

// Plan implements cluster.Gateway.
func (m *member) Plan(ctx context.Context, cfg *config.Config) error {
	return m.control.PlanShared(ctx, cfg)
}

// Apply implements cluster.Gateway.
func (m *member) Apply(ctx context.Context, d *cluster.Document, cfg *config.Config, revision store.Shared) error {
	_, err := m.control.ApplyShared(ctx, control.Author{Who: d.By, What: fmt.Sprintf("apply --cluster %s, revision %d", d.Name, revision.Revision)}, cfg, revision)
	return err
}

// Drain implements cluster.Gateway.
func (m *member) Drain(ctx context.Context, by string, drain bool) error {
	what := "auto"
	if drain {
		what = "drain"
	}
	return m.control.SetNode(ctx, control.Author{Who: by, What: "node " + m.node + " " + what}, drain)
}
