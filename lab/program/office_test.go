// SPDX-License-Identifier: Apache-2.0

package program_test

import (
	"context"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
	"github.com/sluice-lb/sluice/lab/program"
)

// TestOfficePrograms: dnsmasq leases different addresses of the office, renews them and answers questions, and the
// VPN carries requests to an office host.
func TestOfficePrograms(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("dnsmasq"), labtest.Tool("openvpn"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l := labtest.New(t, lab.Office())
	gateway, pc, dir := l.Node("gateway"), l.Node("pc"), t.TempDir()
	for _, start := range []func() (*program.Program, error){
		func() (*program.Program, error) { return program.StartDnsmasq(ctx, gateway, dir) },
		func() (*program.Program, error) { return program.StartOpenVPNServer(ctx, gateway, dir) },
		func() (*program.Program, error) { return program.StartOpenVPNClient(ctx, l.Node("outside"), dir) },
	} {
		p, err := start()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := p.Stop(); err != nil {
				t.Error(err)
			}
		})
	}

	clients, err := host.OpenDHCP(pc, "eth0")
	if err != nil {
		t.Fatal(err)
	}
	defer clients.Close()
	seen := map[netip.Addr]bool{}
	for i := range 5 {
		lease, err := clients.Lease(ctx, net.HardwareAddr{2, 0, 0, 9, 0, byte(i)})
		if err != nil {
			t.Fatal(err)
		}
		if lease.Address.Masked() != netip.MustParsePrefix("10.1.10.0/24") || lease.Router != netip.MustParseAddr("10.1.10.1") ||
			lease.DNS != lease.Router || lease.Time != 2*time.Minute || seen[lease.Address.Addr()] {
			t.Errorf("client %d has %+v", i, lease)
		}
		seen[lease.Address.Addr()] = true
		if out, err := pc.Command(ctx, "ip", "addr", "add", lease.Address.String(), "dev", "eth0").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if again, err := clients.Renew(ctx, lease); err != nil || again.Address != lease.Address {
			t.Errorf("renewal of %s: %+v, %v", lease.Address, again, err)
		}
	}
	leases, err := os.ReadFile(dir + "/leases")
	if err != nil || strings.Count(string(leases), "\n") != 5 {
		t.Errorf("the leases of dnsmasq: %v\n%s", err, leases)
	}

	web, err := host.ServeWeb(l.Node("web"), "web", "10.1.10.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer web.Stop()
	dns, err := host.ServeDNS(l.Node("outside"), "outside", "203.0.113.10:53")
	if err != nil {
		t.Fatal(err)
	}
	defer dns.Stop()
	answer, err := host.AskWeb(ctx, l.Node("outside"), netip.AddrPort{}, netip.MustParseAddrPort("10.1.10.2:80"))
	if err != nil || answer.Name != "web" || !strings.HasPrefix(answer.Client, "10.8.0.2:") {
		t.Errorf("through the VPN: %v, %v", answer, err)
	}
	if answer, err := host.AskDNS(ctx, pc, netip.AddrPort{}, netip.MustParseAddrPort("10.1.10.1:53")); err != nil || answer.Name != "outside" {
		t.Errorf("through the router's DNS: %v, %v", answer, err)
	}
}

// TestMissing: a program that is not installed has a reason.
func TestMissing(t *testing.T) {
	if why := program.Missing("sh", "no-such-program"); why != "no-such-program is not installed" {
		t.Errorf("%q", why)
	}
	if why := program.Missing("sh"); why != "" {
		t.Errorf("%q", why)
	}
}
