// SPDX-License-Identifier: Apache-2.0

package published

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"
)

// Cost is the time that a path adds to a connection. A connection is opened, closed by the client, and closed by the
// server in return: a proxy relays both. The connections alternate between the published port and the container.
type Cost struct {
	Published   time.Duration `json:"published_ns"` // Median by the published port.
	Direct      time.Duration `json:"direct_ns"`    // Median by the container's address.
	Added       time.Duration `json:"added_ns"`
	Connections int           `json:"connections"` // of each kind
	// OnlyOpened reports that the server does not close in return, so only the opening is measured. A proxy opens its
	// own connection later than that.
	OnlyOpened bool `json:"only_opened,omitempty"`
}

// Bounds of a measurement.
const (
	connections    = 200
	measureTime    = 3 * time.Second
	connectTimeout = 2 * time.Second
	closeTimeout   = 300 * time.Millisecond
)

// Measure sets the cost of each port, or the reason why it is not measured. This host opens the connections.
func Measure(ctx context.Context, ports []Port) error {
	for i := range ports {
		p := &ports[i]
		cost, err := p.measure(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			p.NotMeasured = err.Error()
			continue
		}
		p.Cost = cost
	}
	return nil
}

func (p *Port) measure(ctx context.Context) (*Cost, error) {
	switch {
	case p.Protocol != "tcp":
		return nil, fmt.Errorf("%s has no handshake to measure", p.Protocol)
	case p.Path == None:
		return nil, errors.New("no path leads to the container")
	case !p.To.IsValid():
		return nil, errors.New("the container has no address of its own")
	}
	at, err := p.reachedAt()
	if err != nil {
		return nil, err
	}
	c := &Cost{}
	_, err = connect(ctx, p.To, false)
	if c.OnlyOpened = errors.Is(err, errOpen); err != nil && !c.OnlyOpened {
		return nil, fmt.Errorf("the container: %w", err)
	}
	var published, direct []time.Duration
	for end := time.Now().Add(measureTime); len(direct) < connections && time.Now().Before(end); {
		by, err := connect(ctx, at, c.OnlyOpened)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		to, err := connect(ctx, p.To, c.OnlyOpened)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.To, err)
		}
		published, direct = append(published, by), append(direct, to)
	}
	slices.Sort(published)
	slices.Sort(direct)
	c.Connections = len(direct)
	c.Published, c.Direct = published[len(published)/2], direct[len(direct)/2]
	c.Added = c.Published - c.Direct
	return c, nil
}

// errOpen reports that the server does not close a connection that the client has closed.
var errOpen = errors.New("the server does not close the connection")

// connect opens a connection and returns the time until the server has closed it in return, or only until it is open.
func connect(ctx context.Context, to netip.AddrPort, onlyOpen bool) (time.Duration, error) {
	start := time.Now()
	c, err := (&net.Dialer{Timeout: connectTimeout}).DialContext(ctx, "tcp", to.String())
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if onlyOpen {
		return time.Since(start), nil
	}
	if err := errors.Join(c.(*net.TCPConn).CloseWrite(), c.SetReadDeadline(time.Now().Add(closeTimeout))); err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, c)
	var late net.Error
	if errors.As(err, &late) && late.Timeout() {
		return 0, errOpen
	}
	return time.Since(start), nil // a reset closes as well
}

// reachedAt returns the address by which this host reaches the port. For all addresses it is one of an interface that
// does not belong to the container's network: rules of Docker do not translate packets from there.
func (p *Port) reachedAt() (netip.AddrPort, error) {
	if !p.Address.IsUnspecified() {
		return netip.AddrPortFrom(p.Address, p.Port), nil
	}
	list, err := net.InterfaceAddrs()
	if err != nil {
		return netip.AddrPort{}, err
	}
	for _, a := range list {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil {
			continue
		}
		addr := prefix.Addr()
		if addr.Is4() == p.Address.Is4() && !addr.IsLoopback() && !addr.IsLinkLocalUnicast() && !prefix.Contains(p.To.Addr()) {
			return netip.AddrPortFrom(addr, p.Port), nil
		}
	}
	if p.Path == Proxy {
		if p.Address.Is6() {
			return netip.AddrPortFrom(netip.IPv6Loopback(), p.Port), nil
		}
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), p.Port), nil
	}
	return netip.AddrPort{}, errors.New("the host has only addresses of the container's network")
}
