// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/pause"
)

// Bounds of the Docker engine.
const (
	dockerEvery   = 30 * time.Second // polling interval in addition to events
	dockerTimeout = 5 * time.Second
	mostOfDocker  = 64 << 20 // maximum size of an answer in bytes
)

// docker finds containers with a label.
type docker struct {
	label   string
	network string
	v4, v6  bool
	client  *http.Client
	since   string // start time of the next request for events; only changed uses it
}

func newDocker(s sourceSpec) *docker {
	return &docker{label: s.from.Docker, network: s.from.Network, v4: s.v4, v6: s.v6, client: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: dockerTimeout}).DialContext(ctx, "unix", s.from.Socket)
		},
	}}}
}

// container is the engine's description of a container.
type container struct {
	ID       string            `json:"Id"`
	Names    []string          `json:"Names"`
	State    string            `json:"State"`
	Status   string            `json:"Status"`
	Labels   map[string]string `json:"Labels"`
	Settings struct {
		Networks map[string]struct {
			IPAddress         string `json:"IPAddress"`
			GlobalIPv6Address string `json:"GlobalIPv6Address"`
		} `json:"Networks"`
	} `json:"NetworkSettings"`
}

func (d *docker) find(ctx context.Context) (found []config.Backend, again time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, dockerTimeout)
	defer cancel()
	answer, err := d.get(ctx, "/containers/json", map[string][]string{"label": {d.label}, "status": {"running"}}, "")
	if err != nil {
		return nil, 0, err
	}
	defer answer.Close()
	var list []container
	if err := json.NewDecoder(io.LimitReader(answer, mostOfDocker)).Decode(&list); err != nil {
		return nil, 0, fmt.Errorf("docker: %w", err)
	}
	slices.SortFunc(list, func(a, b container) int { return cmp.Compare(a.ID, b.ID) })
	for _, c := range list {
		if !c.isHealthy() {
			continue
		}
		b := config.Backend{Name: c.name(), Address: d.address(c)}
		if !b.Address.IsValid() {
			continue // it uses the network of the host, or of another container
		}
		if port, err := strconv.ParseUint(c.Labels["sluice.port"], 10, 16); err == nil {
			b.Port = uint16(port)
		}
		if weight, err := strconv.Atoi(c.Labels["sluice.weight"]); err == nil {
			b.Weight = min(max(weight, 1), mostWeight)
		}
		found = append(found, b)
	}
	return found, dockerEvery, nil
}

// isHealthy reports whether the container runs and its check, if any, is good.
func (c container) isHealthy() bool {
	return c.State == "running" && !strings.Contains(c.Status, "(unhealthy)") && !strings.Contains(c.Status, "(health: starting)")
}

func (c container) name() string {
	if len(c.Names) == 0 {
		return backendName(c.ID)
	}
	return backendName(strings.TrimPrefix(c.Names[0], "/"))
}

// address returns the container's address in the requested network, or in the first network by name.
func (d *docker) address(c container) netip.Addr {
	networks := slices.Sorted(maps.Keys(c.Settings.Networks))
	if d.network != "" {
		networks = []string{d.network}
	}
	for _, name := range networks {
		n := c.Settings.Networks[name]
		if a, err := netip.ParseAddr(n.IPAddress); err == nil && d.v4 {
			return a
		}
		if a, err := netip.ParseAddr(n.GlobalIPv6Address); err == nil && d.v6 {
			return a
		}
	}
	return netip.Addr{}
}

// awaitChange waits for an event of a container with the label.
func (d *docker) awaitChange(ctx context.Context) {
	answer, err := d.get(ctx, "/events", map[string][]string{"type": {"container"}, "label": {d.label}}, d.since)
	if err != nil {
		_ = pause.For(ctx, firstTry)
		return
	}
	defer answer.Close()
	var event struct {
		At int64 `json:"timeNano"`
	}
	if err := json.NewDecoder(answer).Decode(&event); err != nil {
		_ = pause.For(ctx, firstTry)
		return
	}
	next := event.At + 1 // so that no event is lost until the next call
	d.since = fmt.Sprintf("%d.%09d", next/int64(time.Second), next%int64(time.Second))
}

// get sends a request to the engine.
func (d *docker) get(ctx context.Context, path string, filters map[string][]string, since string) (io.ReadCloser, error) {
	text, err := json.Marshal(filters)
	if err != nil {
		return nil, err
	}
	query := url.Values{"filters": {string(text)}}
	if since != "" {
		query.Set("since", since)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker"+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, err
	}
	answer, err := d.client.Do(r)
	if err != nil {
		return nil, fmt.Errorf("docker: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		defer answer.Body.Close()
		why, _ := io.ReadAll(io.LimitReader(answer.Body, 512))
		return nil, fmt.Errorf("docker: %s answers %s: %s", path, answer.Status, strings.TrimSpace(string(why)))
	}
	return answer.Body, nil
}
