// SPDX-License-Identifier: Apache-2.0

package published

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Bounds of the engine's answer.
const (
	engineTimeout = 5 * time.Second
	answerBytes   = 64 << 20
)

// container is the engine's description of a container.
type container struct {
	ID    string   `json:"Id"`
	Names []string `json:"Names"`
	Ports []struct {
		IP          string `json:"IP"`
		PrivatePort uint16 `json:"PrivatePort"`
		PublicPort  uint16 `json:"PublicPort"`
		Type        string `json:"Type"`
	} `json:"Ports"`
	Settings struct {
		Networks map[string]struct {
			IPAddress         string `json:"IPAddress"`
			GlobalIPv6Address string `json:"GlobalIPv6Address"`
		} `json:"Networks"`
	} `json:"NetworkSettings"`
}

// listContainers requests the running containers from the engine.
func listContainers(ctx context.Context, socket string) ([]Port, error) {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker/containers/json", nil)
	if err != nil {
		return nil, err
	}
	answer, err := client.Do(r)
	if err != nil {
		var dial *net.OpError
		if errors.As(err, &dial) {
			err = dial.Err
		}
		return nil, fmt.Errorf("docker: no engine answers at %s: %w: start Docker, or name its socket with --engine", socket, err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, answerBytes))
	if err != nil {
		return nil, fmt.Errorf("docker: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("docker: %s answers %s: %.200s", socket, answer.Status, strings.TrimSpace(string(body)))
	}
	var list []container
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("docker: %s is no engine: %w", socket, err)
	}
	ports := []Port{}
	for _, c := range list {
		ports = append(ports, c.ports()...)
	}
	slices.SortFunc(ports, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.Container, b.Container), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol), a.Address.Compare(b.Address))
	})
	return ports, nil
}

func (c container) ports() (ports []Port) {
	name := c.ID
	if len(c.Names) > 0 {
		name = strings.TrimPrefix(c.Names[0], "/")
	}
	for _, e := range c.Ports {
		address, err := netip.ParseAddr(e.IP)
		if e.PublicPort == 0 || err != nil {
			continue // exposed, not published
		}
		p := Port{Container: name, Address: address, Port: e.PublicPort, Protocol: e.Type}
		p.To = netip.AddrPortFrom(c.address(address.Is6()), e.PrivatePort)
		ports = append(ports, p)
	}
	return ports
}

// address returns the container's address in its first network by name, if possible of the family.
func (c container) address(six bool) (found netip.Addr) {
	for _, name := range slices.Sorted(maps.Keys(c.Settings.Networks)) {
		n := c.Settings.Networks[name]
		for _, text := range []string{n.IPAddress, n.GlobalIPv6Address} {
			a, err := netip.ParseAddr(text)
			switch {
			case err != nil:
			case a.Is6() == six:
				return a
			case !found.IsValid():
				found = a // a userland proxy connects to it
			}
		}
	}
	return found
}
