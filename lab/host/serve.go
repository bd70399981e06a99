// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/lab"
)

// Servers are the running servers of a node.
type Servers struct{ stops []func() error }

// Serve starts the servers that the lab's topology lists for the node, on every address of the node. If one fails to
// start, Serve stops all.
func Serve(l *lab.Lab, n *lab.Node) (*Servers, error) {
	s := &Servers{}
	for _, spec := range n.Spec().Servers {
		if err := s.serve(n, spec, l.Topology().AddressesOf(n.Short())); err != nil {
			return nil, errors.Join(fmt.Errorf("node %s: server %s: %w", n.Short(), spec, err), s.Stop())
		}
	}
	return s, nil
}

func (s *Servers) serve(n *lab.Node, spec lab.ServerSpec, addrs []netip.Addr) error {
	for _, addr := range addrs {
		at := netip.AddrPortFrom(addr, spec.Port).String()
		var err error
		switch spec.Kind {
		case "web":
			err = keep(s, at, n, func(n *lab.Node, name, at string) (*Web, error) { return ServeWeb(n, name, at) })
		case "dns":
			err = keep(s, at, n, ServeDNS)
		case "echo":
			if err = keep(s, at, n, ServeLines); err == nil {
				err = keep(s, at, n, ServeDatagrams)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// keep starts a server and stores its Stop function.
func keep[S interface{ Stop() error }](s *Servers, at string, n *lab.Node, start func(n *lab.Node, name, at string) (S, error)) error {
	server, err := start(n, n.Short(), at)
	if err == nil {
		s.stops = append(s.stops, server.Stop)
	}
	return err
}

// Stop stops all servers and closes their connections.
func (s *Servers) Stop() error {
	var errs []error
	for _, stop := range s.stops {
		errs = append(errs, stop())
	}
	s.stops = nil
	return errors.Join(errs...)
}
