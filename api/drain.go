// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
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
