// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/event"
)

// Events calls visit for each event as it happens. The query has the keys of GET /api/v1/events.
// The first event has the kind begin. An error of visit ends the stream and is returned. Otherwise
// Events returns when the daemon ends the stream.
func (c *Client) Events(ctx context.Context, query url.Values, visit func(*event.Event) error) error {
	resp, err := c.sendRequest(ctx, http.MethodGet, "/events?"+query.Encode(), "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue // the data contains the ID as well
		}
		var e event.Event
		if err := json.Unmarshal(data, &e); err != nil {
			return fmt.Errorf("events of the daemon on %s: %w", c.at, err)
		}
		if err := visit(&e); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("events of the daemon on %s: cut off: %w", c.at, err)
	}
	return nil
}

// Audit returns at most limit last requested changes, the oldest first.
func (c *Client) Audit(ctx context.Context, limit int) ([]audit.Entry, error) {
	v, err := get[[]audit.Entry](ctx, c, "/audit", url.Values{"limit": {strconv.Itoa(limit)}})
	if err != nil {
		return nil, err
	}
	return *v, nil
}
