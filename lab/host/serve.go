// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluice-lb/sluice/examples"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/program"
)

// Servers are the running servers of a node.
type Servers struct {
	// Running are the servers that were started. Absent are the reasons why others were not, for example "dnsmasq:67:
	// dnsmasq is not installed".
	Running []lab.ServerSpec
	Absent  []string

	stops []func() error
}

// Serve starts the servers that the lab's topology lists for the node, on every address of the node. Programs that
// this host does not have are listed as absent. If a server fails to start, Serve stops all.
func Serve(ctx context.Context, l *lab.Lab, n *lab.Node) (*Servers, error) {
	s := &Servers{}
	for _, spec := range n.Spec().Servers {
		why := program.Missing(programsOf[spec.Kind]...)
		if why != "" {
			s.Absent = append(s.Absent, fmt.Sprintf("%s: %s", spec, why))
			continue
		}
		if err := s.serve(ctx, l, n, spec); err != nil {
			return nil, errors.Join(fmt.Errorf("node %s: server %s: %w", n.Short(), spec, err), s.Stop())
		}
		s.Running = append(s.Running, spec)
	}
	return s, nil
}

// programsOf are the programs that a kind of server requires, here or at the other end.
var programsOf = map[string][]string{
	"dnsmasq": {"dnsmasq"}, "dhcp-client": {"dnsmasq"}, "openvpn": {"openvpn"}, "openvpn-client": {"openvpn"},
}

func (s *Servers) serve(ctx context.Context, l *lab.Lab, n *lab.Node, spec lab.ServerSpec) error {
	dir := filepath.Join(n.StateDir(), "programs")
	if gateway, ok := l.Lookup("gateway"); ok {
		dir = filepath.Join(gateway.StateDir(), "programs") // both ends of a VPN read keys there
	}
	run := func(p runningServer, err error) error {
		if err == nil {
			s.stops = append(s.stops, p.Stop)
		}
		return err
	}
	switch spec.Kind {
	case "dnsmasq":
		p, err := program.StartDnsmasq(ctx, n, dir)
		return run(p, err)
	case "openvpn":
		p, err := program.StartOpenVPNServer(ctx, n, dir)
		return run(p, err)
	case "openvpn-client":
		p, err := program.StartOpenVPNClient(ctx, n, dir)
		return run(p, err)
	case "sluice":
		p, err := startSluice(ctx, n, l.Topology().Name+".yaml")
		return run(p, err)
	case "dhcp-client":
		p, err := configureByDHCP(ctx, n, "eth0")
		return run(p, err)
	}
	for _, addr := range l.Topology().AddressesOf(n.Short()) {
		if err := s.listen(n, spec.Kind, netip.AddrPortFrom(addr, spec.Port).String()); err != nil {
			return err
		}
	}
	return nil
}

// listen starts a server at one address.
func (s *Servers) listen(n *lab.Node, kind, at string) (err error) {
	switch kind {
	case "web":
		err = startServer(s, at, n, func(n *lab.Node, name, at string) (*Web, error) { return ServeWeb(n, name, at) })
	case "ftp":
		err = startServer(s, at, n, ServeFTP)
	case "dns":
		err = startServer(s, at, n, ServeDNS)
	case "echo":
		if err = startServer(s, at, n, ServeLines); err == nil {
			err = startServer(s, at, n, ServeDatagrams)
		}
	}
	return err
}

// runningServer is a running server.
type runningServer interface{ Stop() error }

// startServer starts a server and stores its Stop function.
func startServer[S runningServer](s *Servers, at string, n *lab.Node, start func(n *lab.Node, name, at string) (S, error)) error {
	server, err := start(n, n.Short(), at)
	if err == nil {
		s.stops = append(s.stops, server.Stop)
	}
	return err
}

// startSluice runs this program as the daemon of a node, with one of the examples.
func startSluice(ctx context.Context, n *lab.Node, example string) (*daemon.Daemon, error) {
	config, err := examples.Files.ReadFile(example)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return daemon.Start(ctx, n, self, example, config)
}

// Stop stops all servers in reverse order and closes their connections.
func (s *Servers) Stop() error {
	var errs []error
	for _, stop := range slices.Backward(s.stops) {
		errs = append(errs, stop())
	}
	s.stops = nil
	return errors.Join(errs...)
}
