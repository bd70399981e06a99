// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/cluster"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/engine"
)

// Cluster is the connection to the store of the cluster; see [cluster.Member].
type Cluster interface {
	Apply(ctx context.Context, d cluster.Document, expected int64) (*cluster.Outcome, error)
	Drain(ctx context.Context, by, node string, drain bool) (bool, error)
	Status() cluster.Status
	Peers() map[string]cluster.Peer
}

func (s *server) registerCluster(g huma.API) {
	huma.Put(g, "/cluster/config", s.applyCluster, describe("apply-cluster", "Put a configuration in force on all nodes of the cluster"), limitBody)
	huma.Put(g, "/cluster/nodes/{node}/state", s.drainNode, describe("drain-node", "Let a node of the cluster withdraw the addresses that other nodes serve too, or announce them again"))
}

type clusterInput struct {
	Name     string `query:"name" doc:"name of the file, for messages" default:"request"`
	Revision int64  `query:"revision" default:"-1" doc:"refuse unless the store has this revision of the configuration; 0: none; -1: any"`
	RawBody  []byte `contentType:"application/yaml"`
}

func (s *server) applyCluster(ctx context.Context, in *clusterInput) (*body[api.ClusterOutcome], error) {
	if _, err := decode(&configInput{Name: in.Name, RawBody: in.RawBody}); err != nil {
		return nil, err
	}
	if s.opt.Cluster == nil {
		return nil, clusterError(cluster.ErrNoStore)
	}
	by := requestAuthor(ctx, "apply --cluster "+in.Name).Who
	out, err := s.opt.Cluster.Apply(ctx, cluster.Document{By: s.atNode(by), Name: in.Name, YAML: string(in.RawBody)}, in.Revision)
	if err != nil {
		return nil, clusterError(err)
	}
	return &body[api.ClusterOutcome]{api.ClusterOutcome{Revision: out.Revision, InForce: append([]string{}, out.InForce...), Silent: append([]string{}, out.Silent...)}}, nil
}

// atNode adds the name of this node to a client.
func (s *server) atNode(by string) string {
	return fmt.Sprintf("%s at node %s", by, s.opt.Cluster.Status().Node)
}

type drainNodeInput struct {
	Node string `path:"node" minLength:"1"`
	Body api.SetNode
}

func (s *server) drainNode(ctx context.Context, in *drainNodeInput) (*body[api.ClusterDrain], error) {
	if s.opt.Cluster == nil {
		return nil, clusterError(cluster.ErrNoStore)
	}
	inForce := s.opt.Engine.Config()
	if inForce == nil || !slices.ContainsFunc(inForce.Nodes(), func(n config.Node) bool { return n.Name == in.Node }) {
		return nil, statusError(fmt.Errorf("node %s: %w in force: 'sluice show nodes' lists the nodes", in.Node, engine.ErrNotFound))
	}
	by := requestAuthor(ctx, "node "+in.Node+" "+in.Body.State).Who
	done, err := s.opt.Cluster.Drain(ctx, s.atNode(by), in.Node, in.Body.State == nodeDrain)
	if err != nil {
		return nil, clusterError(err)
	}
	return &body[api.ClusterDrain]{api.ClusterDrain{Node: in.Node, Done: done}}, nil
}

// clusterError is the response to a refused change of the cluster.
func clusterError(err error) error {
	var away *cluster.AwayError
	switch {
	case errors.Is(err, cluster.ErrConflict):
		return huma.Error412PreconditionFailed(err.Error())
	case errors.As(err, &away):
		return huma.Error503ServiceUnavailable(err.Error())
	}
	return statusError(err)
}

// sharedNode returns a node according to the store; nil without a store.
func (s *server) sharedNode(name string) *api.SharedNode {
	if s.opt.Cluster == nil || s.opt.Cluster.Status().Settings.Store == nil {
		return nil
	}
	p := s.opt.Cluster.Peers()[name]
	out := &api.SharedNode{Live: p.Live, Revision: p.Revision, Since: p.Since, Version: p.Version}
	if p.Refused != nil {
		out.Refused, out.Error = p.Refused.Revision, p.Refused.Error
	}
	return out
}
