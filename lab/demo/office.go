// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/program"
)

// officeWithClients is the office whose node pc owns all addresses that DHCP leases.
func officeWithClients() lab.Topology {
	t := lab.Office()
	for i := range t.Nodes {
		if t.Nodes[i].Name == "pc" {
			t.Nodes[i].Owns = program.LeasedPrefixes
		}
	}
	return t
}

// playOffice shows the whole router: dnsmasq and OpenVPN on the same host as Sluice, all in use at the same time.
func playOffice(ctx context.Context, s *stage) error {
	const example = "office.yaml"
	if why := program.Missing("dnsmasq", "openvpn"); why != "" {
		s.printText("not shown: %s", why)
		s.report.Results = append(s.report.Results, Result{Example: example, Promise: "(not shown on this host)", Measured: why, Skipped: why})
		return nil
	}
	all, err := s.serveOffice()
	defer func() { all.stop() }()
	if err != nil {
		return err
	}
	dns, err := host.ServeDNS(s.lab.Node("outside"), "internet", "203.0.113.10:53")
	if err != nil {
		return err
	}
	all = append(all, dns)
	gw, err := s.start(ctx, "gateway", example, nil)
	if err != nil || gw == nil {
		return err
	}
	programs, err := s.startPrograms(ctx)
	defer func() { programs.stop() }()
	if err != nil {
		return err
	}
	leased := make(chan int)
	go func() { leased <- s.leaseAddresses(ctx) }()
	s.passRouter(ctx)
	s.fetchFiles(ctx)
	s.useVPN(ctx)
	n := <-leased
	s.recordPromise(n == program.Leases, "the DHCP server gives out and renews all leases meanwhile", "%d of %d clients", n, program.Leases)
	s.askRouter(ctx)
	if err := ctx.Err(); err != nil {
		return err
	}
	return gw.Stop()
}

// startPrograms runs dnsmasq and OpenVPN in the gateway, and a client of the VPN outside.
func (s *stage) startPrograms(ctx context.Context) (all servers, err error) {
	gateway := s.lab.Node("gateway")
	dir := filepath.Join(gateway.StateDir(), "programs") // the directory is removed with the lab
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	for _, start := range []func() (*program.Program, error){
		func() (*program.Program, error) { return program.StartDnsmasq(ctx, gateway, dir) },
		func() (*program.Program, error) { return program.StartOpenVPNServer(ctx, gateway, dir) },
		func() (*program.Program, error) { return program.StartOpenVPNClient(ctx, s.lab.Node("outside"), dir) },
	} {
		p, err := start()
		if err != nil {
			return all, err
		}
		all = append(all, p)
	}
	return all, nil
}

// leaseAddresses obtains and renews every address. It returns the number of clients that succeeded.
func (s *stage) leaseAddresses(ctx context.Context) (leased int) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	clients, err := host.OpenDHCP(s.lab.Node("pc"), "eth0")
	if err != nil {
		s.printText("DHCP: %v", err)
		return 0
	}
	defer clients.Close()
	var group sync.WaitGroup
	results := make(chan error, program.Leases)
	for i := range program.Leases {
		group.Go(func() {
			lease, err := clients.Lease(ctx, net.HardwareAddr{2, 0, 0, 10, 0, byte(i)})
			if err == nil {
				_, err = clients.Renew(ctx, lease)
			}
			results <- err
		})
	}
	group.Wait()
	close(results)
	for err := range results {
		if err == nil {
			leased++
		}
	}
	return leased
}

// useVPN sends requests from a client of the VPN to the office.
func (s *stage) useVPN(ctx context.Context) {
	load := host.Load{From: s.lab.Node("outside"), Target: netip.MustParseAddrPort("10.1.10.2:80"), Ask: host.AskWeb, Count: 500}
	t := s.run(ctx, load)
	s.recordPromise(len(t.Failures) == 0 && t.Clients()["10.8.0.2"] == t.Sent(), "clients of the VPN reach the office's servers",
		"%d of %d requests came from 10.8.0.2%s", t.Clients()["10.8.0.2"], t.Sent(), causes(t.Failures))
}

// askRouter sends questions to the router's DNS server from inside and from outside. No answer outside is the
// expected result, so these do not count as failures.
func (s *stage) askRouter(ctx context.Context) {
	t := s.run(ctx, host.Load{From: s.lab.Node("pc"), Target: netip.MustParseAddrPort("10.1.10.1:53"), Ask: host.AskDNS, Count: 100})
	s.recordPromise(len(t.Failures) == 0, "the router answers the office's DNS questions", "%d of %d answered%s", t.Good(), t.Sent(), causes(t.Failures))
	t = host.Load{
		From: s.lab.Node("outside"), Target: netip.AddrPortFrom(officePublic, 53), Ask: host.AskDNS, Count: 20, Parallel: 20, Timeout: 500 * time.Millisecond,
	}.Run(ctx)
	s.recordPromise(t.Good() == 0 && t.Sent() == 20, "and none from outside", "%d of %d got an answer", t.Good(), t.Sent())
}
