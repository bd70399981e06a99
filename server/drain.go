// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-lb/sluice/announce"
	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/control"
	"github.com/sluice-lb/sluice/engine"
)

func (s *server) registerStates(g huma.API) {
	huma.Put(g, "/services/{service}/backends/{backend}/state", s.setBackend, describe("set-backend", "Change a backend by hand"))
	huma.Get(g, "/drain", s.gatewayDrain, describe("get-drain", "Whether the whole gateway takes new connections, and how far its drain is"))
	huma.Put(g, "/drain", s.startDrain, describe("start-drain", "Let the whole gateway take no new connections to services"))
	huma.Delete(g, "/drain", s.cancelDrain, describe("cancel-drain", "Let the gateway take new connections again"))
	huma.Put(g, "/node/state", s.setNode, describe("set-node", "Withdraw the addresses that other nodes of the cluster serve too, or announce them again"))
	huma.Get(g, "/ready", s.setReady, describe("ready", "Whether new connections are to come here: 204, or 503 while the gateway or its node drains"), func(o *huma.Operation) {
		o.Errors = append(o.Errors, http.StatusServiceUnavailable)
	})
}

type backendInput struct {
	Service string `path:"service" minLength:"1"`
	Backend string `path:"backend" minLength:"1"`
	IfMatch string `header:"If-Match" doc:"refuse unless the ETag of the backend in the configuration is among these; * is any that exists"`
	Body    api.BackendState
}

func (s *server) setBackend(ctx context.Context, in *backendInput) (*struct{}, error) {
	to := stateOf(in.Body.State, in.Body.Deadline, in.Body.Then)
	what := fmt.Sprintf("backend %s %s %s", in.Service, in.Backend, stateText(to))
	var expected func(*config.Config) bool
	if in.IfMatch != "" {
		path := config.Join("services", in.Service, "backends", in.Backend)
		expected = func(c *config.Config) bool {
			yaml, err := c.Text(path)
			return err == nil && matches(in.IfMatch, etagOf(yaml))
		}
	}
	if err := s.opt.Control.SetState(ctx, requestAuthor(ctx, what), in.Service, in.Backend, to, expected); err != nil {
		return nil, statusError(err)
	}
	return nil, nil
}

func stateOf(state string, deadline int, then string) control.Override {
	return control.Override{State: state, Deadline: time.Duration(deadline) * time.Second, Then: then}
}

// stateText returns a state change in the form of the command line.
func stateText(to control.Override) string {
	text := to.State
	if to.Deadline > 0 {
		text += " --deadline " + to.Deadline.String()
	}
	if to.Then != "" {
		text += " --then " + to.Then
	}
	return text
}

func (s *server) gatewayDrain(context.Context, *struct{}) (*body[api.GatewayDrain], error) {
	drains := s.drains()
	whole, draining := drains[engine.Backend{}]
	out := api.GatewayDrain{Draining: draining, Backends: len(drains)}
	if draining {
		out.Drain = drainOf(whole)
		out.Backends--
	}
	return &body[api.GatewayDrain]{out}, nil
}

func (s *server) startDrain(ctx context.Context, in *body[api.StartDrain]) (*body[api.GatewayDrain], error) {
	to := stateOf("drain", in.Body.Deadline, in.Body.Then)
	if err := s.opt.Control.SetState(ctx, requestAuthor(ctx, stateText(to)), "", "", to, nil); err != nil {
		return nil, statusError(err)
	}
	return s.gatewayDrain(ctx, nil)
}

func (s *server) cancelDrain(ctx context.Context, _ *struct{}) (*body[api.GatewayDrain], error) {
	if err := s.opt.Control.SetState(ctx, requestAuthor(ctx, "drain --cancel"), "", "", control.Override{State: "auto"}, nil); err != nil {
		return nil, statusError(err)
	}
	return s.gatewayDrain(ctx, nil)
}

func (s *server) setNode(ctx context.Context, in *body[api.SetNode]) (*body[api.NodeState], error) {
	if err := s.opt.Control.SetNode(ctx, requestAuthor(ctx, "node "+in.Body.State), in.Body.State == nodeDrain); err != nil {
		return nil, statusError(err)
	}
	view := s.opt.Engine.View()
	out := api.NodeState{Node: view.Node, State: nodeState(view)}
	for _, a := range view.Announcements {
		if a.State == announce.Announced {
			out.Announced++
		} else {
			out.Withdrawn++
		}
	}
	return &body[api.NodeState]{out}, nil
}

// States of this node.
const (
	nodeDrain = "drain"
	nodeAuto  = "auto"
)

func nodeState(v engine.View) string { return drainText(v.NodeDrains) }

func drainText(drains bool) string {
	if drains {
		return nodeDrain
	}
	return nodeAuto
}

func (s *server) setReady(context.Context, *struct{}) (*struct{}, error) {
	if _, draining := s.drains()[engine.Backend{}]; draining {
		return nil, huma.Error503ServiceUnavailable("the gateway drains: it takes no new connections")
	}
	if s.opt.Engine.View().NodeDrains {
		return nil, huma.Error503ServiceUnavailable("the node drains: its addresses are withdrawn")
	}
	if s.opt.Engine.Config() == nil {
		return nil, huma.Error503ServiceUnavailable("no configuration is in force yet")
	}
	return nil, nil
}

// drains returns the draining backends. The generator of the document has no control.
func (s *server) drains() map[engine.Backend]control.Drain {
	if s.opt.Control == nil {
		return nil
	}
	return s.opt.Control.Drains()
}

func drainOf(d control.Drain) *api.Drain {
	return &api.Drain{Until: d.Until, Then: d.Then, Left: d.Left, Counted: d.Counted, Estimate: d.Estimate.Seconds()}
}
