// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/store"
)

// ErrShared is returned for a change of the configuration of one node while the cluster's configuration is in force.
var ErrShared = errors.New("the configuration in force is that of the cluster: change it on all nodes with 'sluice apply --cluster FILE'")

// inPlaceOf returns the configuration that takes the place of the operator's file: the last document of the cluster's
// store that was in force, or the file itself. It needs no connection to the store.
func (c *Control) inPlaceOf(own *config.Config) (*config.Config, store.Shared) {
	shared, document := c.store.Shared(), c.store.Accepted()
	if own.Store() == nil || shared.Cluster != own.Cluster.Name || document == nil {
		return own, store.Shared{}
	}
	return document.WithStoreOf(own), shared
}

// Shared returns the operator's file as last accepted, the document of the store that is in force, and whether the node
// drains. The file decides which store is used.
func (c *Control) Shared() (own *config.Config, shared store.Shared, drains bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	drains = slices.ContainsFunc(c.store.States(), func(s store.Override) bool { return s.Node })
	return c.own, c.store.Shared(), drains
}

// ApplyShared puts a document of the cluster's store in force in place of the operator's file. Changes made at run time
// end, except states set by the operator.
func (c *Control) ApplyShared(ctx context.Context, by Author, document *config.Config, shared store.Shared) (applied engine.Applied, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() { c.report(by, err) }()
	if err := c.checkShared(document); err != nil {
		return engine.Applied{}, err
	}
	before := c.file
	c.file = document.WithStoreOf(c.own)
	if applied, err = c.replace(ctx, by, store.Content{Config: c.file, States: c.store.States(), Shared: &shared}); err != nil {
		c.file = before
		return applied, err
	}
	c.conflict = nil
	c.updateWarnings(nil)
	return applied, nil
}

// PlanShared returns the error with which this node would refuse a document of the cluster's store.
func (c *Control) PlanShared(ctx context.Context, document *config.Config) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.trial != nil {
		return ErrTrial
	}
	if err := c.checkShared(document); err != nil {
		return err
	}
	document = document.WithStoreOf(c.own)
	if err := document.CheckPrograms(c.own, c.engine.Config()); err != nil {
		return err
	}
	_, err := c.engine.Forecast(ctx, document)
	return err
}

// checkShared returns an error for a document without nodes, or while the operator's file names no store.
func (c *Control) checkShared(document *config.Config) error {
	switch {
	case c.own.Store() == nil:
		return fmt.Errorf("%s has no cluster.store any more", c.path)
	case len(document.Nodes()) == 0:
		return errors.New("the configuration has no cluster.nodes: list the gateways of the cluster")
	}
	return nil
}
