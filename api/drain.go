// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"time"

	"github.com/sluice-lb/sluice/pause"
)

// Service returns one service.
func (c *Client) Service(ctx context.Context, name string) (*Service, error) {
	return get[Service](ctx, c, "/services/"+url.PathEscape(name), nil)
}

// Drain stops new connections to the whole gateway.
func (c *Client) Drain(ctx context.Context, drain StartDrain) (*GatewayDrain, error) {
	body, err := json.Marshal(drain)
	if err != nil {
		return nil, err
	}
	return send[GatewayDrain](ctx, c, http.MethodPut, "/drain", "application/json", body)
}

// DrainState returns the progress of the gateway's drain, if any.
func (c *Client) DrainState(ctx context.Context) (*GatewayDrain, error) {
	return get[GatewayDrain](ctx, c, "/drain", nil)
}

// CancelDrain permits new connections again.
func (c *Client) CancelDrain(ctx context.Context) (*GatewayDrain, error) {
	return send[GatewayDrain](ctx, c, http.MethodDelete, "/drain", "", nil)
}

// SetNode begins or ends the drain of the node that answers.
func (c *Client) SetNode(ctx context.Context, set SetNode) (*NodeState, error) {
	body, err := json.Marshal(set)
	if err != nil {
		return nil, err
	}
	return send[NodeState](ctx, c, http.MethodPut, "/node/state", "application/json", body)
}

// BackendDrain returns the progress of a draining backend, or nil if it does not drain.
func (c *Client) BackendDrain(ctx context.Context, service, backend string) (*Drain, error) {
	s, err := c.Service(ctx, service)
	if err != nil {
		return nil, err
	}
	for _, b := range s.Backends {
		if b.Name == backend {
			return b.Drain, nil
		}
	}
	return nil, nil
}

// Times of [AwaitDrain].
const (
	firstCount       = 4 * time.Second        // The daemon counts connections soon after a drain begins.
	drainPoll        = 200 * time.Millisecond // Interval of polls.
	progressInterval = 5 * time.Second        // Interval of progress reports.
)

// AwaitDrain returns the state of a drain after the first count of its connections. With wait it returns when no
// connection remains, or at the deadline, and calls progress every five seconds until then. look reads the state. A nil
// state means that the drain has ended.
func AwaitDrain(ctx context.Context, wait bool, look func(context.Context) (*Drain, error), progress func(*Drain)) (*Drain, error) {
	began, reported, timed := time.Now(), time.Now(), false
	for {
		d, err := look(ctx)
		if err != nil || d == nil {
			return d, err
		}
		timed = timed || !d.Until.IsZero()
		counted := !d.Counted.Before(began.Add(-time.Second)) || time.Since(began) > firstCount
		over := d.Left == 0 || timed && d.Until.IsZero()
		if counted && (over || !wait) {
			return d, nil
		}
		if counted && time.Since(reported) > progressInterval {
			progress(d)
			reported = time.Now()
		}
		if err := pause.For(ctx, drainPoll); err != nil {
			return nil, err
		}
	}
}
