// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-lb/sluice/datapath"
)

// Client accesses a daemon over its Unix socket, or over TCP.
type Client struct {
	base   string // of URLs
	at     string // Location of the daemon, for messages.
	remote bool   // Over TCP.
	token  string // "": none.
	http   *http.Client
}

// NewClient returns a client for the daemon that listens on the socket. It does
// not connect yet.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	return &Client{base: "http://sluice", at: socket, http: &http.Client{Transport: &http.Transport{DialContext: dial, MaxConnsPerHost: maxConns, MaxIdleConnsPerHost: maxConns, IdleConnTimeout: idleTimeout}}}
}

// A client has fewer connections than a daemon allows (32), because the daemon may notice a closed
// one later. Further requests wait. Idle connections are reused, and closed before the daemon
// closes them.
const (
	maxConns    = 28
	idleTimeout = 20 * time.Second
)

// ErrNoDaemon is wrapped if no daemon answers on the socket or address.
var ErrNoDaemon = errors.New("no daemon answers")

// Problem is an error response of the daemon (RFC 9457).
type Problem struct {
	Status int    `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Errors []struct {
		Message  string `json:"message"`
		Location string `json:"location"`
	} `json:"errors"`
}

// Error returns the detail and the single errors, a line each.
func (p *Problem) Error() string {
	lines := []string{p.Detail}
	if p.Detail == "" {
		lines[0] = p.Title
	}
	for _, e := range p.Errors {
		line := e.Message
		if where := strings.TrimPrefix(strings.TrimPrefix(e.Location, "body"), "."); where != "" {
			line = where + ": " + line
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// Status returns the daemon at a glance.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	return get[Status](ctx, c, "/status", nil)
}

// Services lists the services.
func (c *Client) Services(ctx context.Context) ([]Service, error) {
	return list[Service](ctx, c, "/services")
}

// Backends lists the backends of all services.
func (c *Client) Backends(ctx context.Context) ([]Backend, error) {
	return list[Backend](ctx, c, "/backends")
}

// NAT lists the NAT rules.
func (c *Client) NAT(ctx context.Context) ([]NATRule, error) {
	return list[NATRule](ctx, c, "/nat")
}

// Interfaces lists the interfaces that are up.
func (c *Client) Interfaces(ctx context.Context) ([]Interface, error) {
	return list[Interface](ctx, c, "/interfaces")
}

// Uplinks lists the uplinks with their states.
func (c *Client) Uplinks(ctx context.Context) ([]Uplink, error) {
	return list[Uplink](ctx, c, "/uplinks")
}

// Announcements lists the addresses that are announced to routers, or withdrawn.
func (c *Client) Announcements(ctx context.Context) ([]Announcement, error) {
	return list[Announcement](ctx, c, "/announcements")
}

// Nodes lists the gateways of the cluster.
func (c *Client) Nodes(ctx context.Context) ([]Node, error) {
	return list[Node](ctx, c, "/nodes")
}

// Addresses lists the addresses of services and pools.
func (c *Client) Addresses(ctx context.Context) ([]Address, error) {
	return list[Address](ctx, c, "/addresses")
}

// Mappings lists the mappings that inside hosts have asked for.
func (c *Client) Mappings(ctx context.Context) ([]Mapping, error) {
	return list[Mapping](ctx, c, "/mappings")
}

// Flows lists flows. The query has the keys of GET /api/v1/flows.
func (c *Client) Flows(ctx context.Context, query url.Values) (*Flows, error) {
	return get[Flows](ctx, c, "/flows", query)
}

// EachFlow calls visit for every matching flow while the daemon reads the table. The query has the
// keys of Flows except limit. The flow is valid until visit returns. An error of visit ends the
// walk and is returned.
func (c *Client) EachFlow(ctx context.Context, query url.Values, visit func(*Flow) error) error {
	resp, err := c.sendRequest(ctx, http.MethodGet, "/flows/stream?"+query.Encode(), "", nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := json.NewDecoder(resp.Body)
	var f Flow
	for n := 0; ; n++ {
		f = Flow{}
		line := FlowLine{Flow: &f}
		switch err := lines.Decode(&line); {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return fmt.Errorf("flows of the daemon on %s: cut off after %d; its log says why", c.at, n)
		case err != nil:
			return fmt.Errorf("flows of the daemon on %s: after %d: %w", c.at, n, err)
		case line.End != nil && line.End.Error != "":
			return fmt.Errorf("flows of the daemon on %s: after %d: %s", c.at, n, line.End.Error)
		case line.End != nil:
			return nil
		}
		if err := visit(&f); err != nil {
			return err
		}
	}
}

// Explain returns the treatment of a packet. The query has the keys of GET /api/v1/explain.
func (c *Client) Explain(ctx context.Context, query url.Values) (*datapath.Explanation, error) {
	return get[datapath.Explanation](ctx, c, "/explain", query)
}

// Apply puts a configuration in force.
func (c *Client) Apply(ctx context.Context, name string, yaml []byte) (*Outcome, error) {
	return send[Outcome](ctx, c, http.MethodPut, "/config?name="+url.QueryEscape(name), "application/yaml", yaml)
}

// ApplyTrial is Apply of a change that is reverted after some seconds unless it is confirmed.
func (c *Client) ApplyTrial(ctx context.Context, name string, yaml []byte, seconds int) (*Outcome, error) {
	return send[Outcome](ctx, c, http.MethodPut, fmt.Sprintf("/config?confirm=%d&name=%s", seconds, url.QueryEscape(name)), "application/yaml", yaml)
}

// ApplyCluster makes a configuration that of all nodes of the cluster, if the store has a revision; -1: any.
func (c *Client) ApplyCluster(ctx context.Context, name string, yaml []byte, revision int64) (*ClusterOutcome, error) {
	return send[ClusterOutcome](ctx, c, http.MethodPut, fmt.Sprintf("/cluster/config?name=%s&revision=%d", url.QueryEscape(name), revision), "application/yaml", yaml)
}

// DrainNode asks a node of the cluster to drain, or to end its drain.
func (c *Client) DrainNode(ctx context.Context, node string, set SetNode) (*ClusterDrain, error) {
	body, err := json.Marshal(set)
	if err != nil {
		return nil, err
	}
	return send[ClusterDrain](ctx, c, http.MethodPut, "/cluster/nodes/"+url.PathEscape(node)+"/state", "application/json", body)
}

// Confirm ends the trial of a change and keeps it.
func (c *Client) Confirm(ctx context.Context) error {
	_, err := send[struct{}](ctx, c, http.MethodPost, "/config/confirm", "", nil)
	return err
}

// Plan returns what Apply would change.
func (c *Client) Plan(ctx context.Context, name string, yaml []byte) (*Outcome, error) {
	return send[Outcome](ctx, c, http.MethodPost, "/plan?name="+url.QueryEscape(name), "application/yaml", yaml)
}

// Reload makes the daemon read its file again.
func (c *Client) Reload(ctx context.Context) (*Outcome, error) {
	return send[Outcome](ctx, c, http.MethodPost, "/reload", "", nil)
}

// Changes returns the run-time changes and the last revisions.
func (c *Client) Changes(ctx context.Context) (*ConfigChanges, error) {
	return get[ConfigChanges](ctx, c, "/config/changes", nil)
}

// Revert restores an earlier revision, or the daemon's file.
func (c *Client) Revert(ctx context.Context, to Revert) (*Outcome, error) {
	body, err := json.Marshal(to)
	if err != nil {
		return nil, err
	}
	return send[Outcome](ctx, c, http.MethodPost, "/config/revert", "application/json", body)
}

// Save writes the configuration in force into the daemon's file.
func (c *Client) Save(ctx context.Context) error {
	_, err := send[struct{}](ctx, c, http.MethodPost, "/config/save", "", nil)
	return err
}

// Change makes several changes, all or none. With dryRun it returns their effect.
func (c *Client) Change(ctx context.Context, changes []ObjectChange, dryRun bool) (*Outcome, error) {
	body, err := json.Marshal(changes)
	if err != nil {
		return nil, err
	}
	return send[Outcome](ctx, c, http.MethodPost, fmt.Sprintf("/changes?dry-run=%t", dryRun), "application/json", body)
}

// Object returns an object or a list of the configuration in force, as JSON: services,
// services/NAME, services/NAME/backends, nat, firewall/sets.
func (c *Client) Object(ctx context.Context, path string) (json.RawMessage, error) {
	object, _, err := c.TaggedObject(ctx, path)
	return object, err
}

// Config returns the configuration in force as YAML.
func (c *Client) Config(ctx context.Context) ([]byte, error) {
	resp, err := c.sendRequest(ctx, http.MethodGet, "/config", "", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// Stop ends the daemon; it returns when the daemon has accepted.
func (c *Client) Stop(ctx context.Context, stop Stop) error {
	body, err := json.Marshal(stop)
	if err != nil {
		return err
	}
	_, err = send[struct{}](ctx, c, http.MethodPost, "/stop", "application/json", body)
	return err
}

// SetBackend sets the state of a backend.
func (c *Client) SetBackend(ctx context.Context, service, backend string, state BackendState) error {
	body, err := json.Marshal(state)
	if err != nil {
		return err
	}
	path := "/services/" + url.PathEscape(service) + "/backends/" + url.PathEscape(backend) + "/state"
	_, err = send[struct{}](ctx, c, http.MethodPut, path, "application/json", body)
	return err
}

func get[T any](ctx context.Context, c *Client, path string, query url.Values) (*T, error) {
	if len(query) > 0 {
		path += "?" + query.Encode()
	}
	return send[T](ctx, c, http.MethodGet, path, "", nil)
}

func list[T any](ctx context.Context, c *Client, path string) ([]T, error) {
	v, err := get[[]T](ctx, c, path, nil)
	if err != nil {
		return nil, err
	}
	return *v, nil
}

func send[T any](ctx context.Context, c *Client, method, path, contentType string, body []byte) (*T, error) {
	resp, err := c.sendRequest(ctx, method, path, contentType, body)
	return decode[T](c, resp, err)
}

// decode reads a response of type T, or returns the request's error.
func decode[T any](c *Client, resp *http.Response, err error) (*T, error) {
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	v := new(T)
	if resp.StatusCode == http.StatusNoContent {
		return v, nil
	}
	if err := json.NewDecoder(resp.Body).Decode(v); err != nil {
		return nil, fmt.Errorf("answer of the daemon on %s: %w", c.at, err)
	}
	_, _ = io.Copy(io.Discard, resp.Body) // a connection is reused only after its response was read completely
	return v, nil
}

// sendRequest sends a request. A status of 300 and above is returned as a *Problem.
func (c *Client) sendRequest(ctx context.Context, method, path, contentType string, body []byte) (*http.Response, error) {
	return c.doWith(ctx, method, path, contentType, body, nil)
}

// doWith is do with additional headers.
func (c *Client) doWith(ctx context.Context, method, path, contentType string, body []byte, more http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+"/api/v1"+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, more)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(err)
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		p := &Problem{Status: resp.StatusCode, Title: resp.Status}
		raw, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
		_ = json.Unmarshal(raw, p) // a body that is no problem document leaves the status line
		if p.Status == http.StatusUnauthorized && c.token == "" {
			return nil, fmt.Errorf("daemon on %s: %w: name a file that holds it with --token-file FILE", c.at, p)
		}
		return nil, p
	}
	return resp, nil
}

// explain adds the cause and the next step to a connection error.
func (c *Client) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		if c.remote {
			return fmt.Errorf("%w on %s: run one there with --listen ADDRESS:PORT", ErrNoDaemon, c.at)
		}
		return fmt.Errorf("%w on %s: start one with 'sluice run -c FILE', or name its socket with --socket", ErrNoDaemon, c.at)
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE),
		strings.HasSuffix(err.Error(), "server closed idle connection"): // before the request was written; net/http exports no such error
		return fmt.Errorf("daemon on %s: it closed the connection without an answer: it has too many, or it is ending; its log says which", c.at)
	case c.remote:
		return c.explainRemote(err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("socket %s: permission denied: run the command as root or as a member of the socket's group", c.at)
	}
	return err
}
