// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/sluice-lb/sluice/config"
)

// ChangeOptions of a change of one object.
type ChangeOptions struct {
	DryRun  bool   // Change nothing, and return the effect.
	IfMatch string // Refuse if the object has another ETag; "" accepts any.
}

// Ready returns nil while the gateway accepts new connections, and a *[Problem] while it drains.
func (c *Client) Ready(ctx context.Context) error {
	_, err := send[struct{}](ctx, c, http.MethodGet, "/ready", "", nil)
	return err
}

// AddObject adds an object to a list: services, services/NAME/backends, nat. The object marshals to
// keys of the configuration file.
func (c *Client) AddObject(ctx context.Context, list string, object any, opt ChangeOptions) (*Outcome, error) {
	return c.changeObject(ctx, http.MethodPost, list, object, opt)
}

// PutObject adds or replaces an object: services/NAME, services/NAME/backends/NAME, nat/NAME,
// firewall/sets/NAME. In names "~" is written ~0 and "/" is written ~1.
func (c *Client) PutObject(ctx context.Context, path string, object any, opt ChangeOptions) (*Outcome, error) {
	return c.changeObject(ctx, http.MethodPut, path, object, opt)
}

// PatchObject changes keys of an object by a JSON merge patch (RFC 7396).
func (c *Client) PatchObject(ctx context.Context, path string, patch any, opt ChangeOptions) (*Outcome, error) {
	return c.changeObject(ctx, http.MethodPatch, path, patch, opt)
}

// RemoveObject removes an object.
func (c *Client) RemoveObject(ctx context.Context, path string, opt ChangeOptions) (*Outcome, error) {
	return c.changeObject(ctx, http.MethodDelete, path, nil, opt)
}

// AddElements adds prefixes and addresses to a set.
func (c *Client) AddElements(ctx context.Context, set string, elements []string, opt ChangeOptions) (*Outcome, error) {
	return c.changeObject(ctx, http.MethodPost, config.Join("firewall", "sets", set, "elements"), elements, opt)
}

// RemoveElement removes an element from a set.
func (c *Client) RemoveElement(ctx context.Context, set, element string, opt ChangeOptions) (*Outcome, error) {
	return c.changeObject(ctx, http.MethodDelete, config.Join("firewall", "sets", set, "elements", element), nil, opt)
}

// TaggedObject is Object with its ETag, for [ChangeOptions].
func (c *Client) TaggedObject(ctx context.Context, path string) (object json.RawMessage, etag string, err error) {
	resp, err := c.sendRequest(ctx, http.MethodGet, "/config/"+inURL(path), "", nil)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	object, err = io.ReadAll(resp.Body)
	return object, resp.Header.Get("ETag"), err
}

// inURL encodes the path of an object as a part of a URL.
func inURL(path string) string {
	steps := config.Split(path)
	for i, step := range steps {
		steps[i] = url.PathEscape(step)
	}
	return strings.Join(steps, "/")
}

func (c *Client) changeObject(ctx context.Context, method, path string, object any, opt ChangeOptions) (*Outcome, error) {
	var body []byte
	if object != nil {
		var err error
		if body, err = json.Marshal(object); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	var header http.Header
	if opt.IfMatch != "" {
		header = http.Header{"If-Match": {opt.IfMatch}}
	}
	resp, err := c.doWith(ctx, method, fmt.Sprintf("/%s?dry-run=%t", inURL(path), opt.DryRun), "application/json", body, header)
	return decode[Outcome](c, resp, err)
}
