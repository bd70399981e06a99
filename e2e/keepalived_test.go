// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/daemon"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// movedNames are services with addresses that keepalived moves.
const movedNames = `
hold-addresses: off
services:
  - name: names
    listen: [{address: 10.0.1.100, ports: [53]}]
    protocol: udp
    mode: dnat
    scheduler: maglev
    backends: [{name: a, address: 10.0.2.2}, {name: b, address: 10.0.2.3}]
  - name: names6
    listen: [{address: "fd00:1::100", ports: [53]}]
    protocol: udp
    mode: dnat
    scheduler: maglev
    backends: [{name: a, address: "fd00:2::2"}, {name: b, address: "fd00:2::3"}]
`

// TestKeepalived moves the addresses of services, and the servers' next hops, between two gateways with the example
// configuration of keepalived: while a gateway drains, and after an interface fails. The neighbour entries of the
// client change without a request.
func TestKeepalived(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Tool("keepalived"), labtest.Tool("curl"))
	l := labtest.New(t, lab.TwoGateways())
	serveDatagrams(t, l, "s1 a 10.0.2.2:53", "s2 b 10.0.2.3:53", "s1 a [fd00:2::2]:53", "s2 b [fd00:2::3]:53")
	text, err := os.ReadFile("../examples/keepalived.conf")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"10.0.1.1/24 dev wan0", "fd00:1::1/64 dev wan0", "10.0.2.1/24 dev lan0", "fd00:2::1/64 dev lan0"} {
		ip(t, l.Node("gw1"), "addr del "+a)
	}
	gateways := map[string]*daemon.Daemon{}
	for _, name := range []string{"gw1", "gw2"} {
		n := l.Node(name)
		gateways[name] = start(t, n, movedNames)
		own := strings.ReplaceAll(string(text), "/run/sluice/sluice.sock", filepath.Join(n.StateDir(), "sluice.sock"))
		if name == "gw2" {
			own = strings.NewReplacer("router_id gw1", "router_id gw2", "priority 150", "priority 100").Replace(own)
		}
		startKeepalived(t, n, own)
	}
	client := l.Node("client")
	ask := func(target, source string) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := host.AskDatagram(ctx, client, netip.MustParseAddrPort(source), netip.MustParseAddrPort(target))
		return err
	}
	on := func(what, gateway string) {
		t.Helper()
		mac, err := l.Node(gateway).Command(t.Context(), "cat", "/sys/class/net/wan0/address").Output()
		if err != nil {
			t.Fatal(err)
		}
		labtest.Eventually(t, patience, what, func() error {
			for _, a := range []string{"10.0.1.100", "fd00:1::100"} {
				out, err := client.Command(t.Context(), "ip", "neigh", "show", a).CombinedOutput()
				if err != nil || !strings.Contains(string(out), strings.TrimSpace(string(mac))) {
					return fmt.Errorf("%v: neighbour entry %q, not of %s", err, out, gateway)
				}
			}
			return nil
		})
		labtest.Eventually(t, patience, what, func() error {
			if err := ask("10.0.1.100:53", "10.0.1.2:0"); err != nil {
				return err
			}
			return ask("[fd00:1::100]:53", "[fd00:1::2]:0")
		})
	}
	labtest.Eventually(t, patience, "the first answers", func() error {
		if err := ask("10.0.1.100:53", "10.0.1.2:0"); err != nil {
			return err
		}
		return ask("[fd00:1::100]:53", "[fd00:1::2]:0")
	})
	on("the gateway with the higher priority", "gw1")
	output(t, gateways["gw1"], "drain --deadline 1h")
	on("a gateway drains", "gw2")
	if got := output(t, gateways["gw1"], "show"); strings.Contains(got, "warning: service") {
		t.Errorf("the first gateway warns of addresses that it leaves to keepalived:\n%s", got)
	}
	output(t, gateways["gw1"], "drain --cancel")
	on("the gateway drains no more", "gw1")
	ip(t, l.Node("gw1"), "link set lan0 down")
	on("an interface is down", "gw2")
}

// startKeepalived runs keepalived until the end of the test.
func startKeepalived(t *testing.T, n *lab.Node, config string) {
	t.Helper()
	dir := t.TempDir()
	file, log := filepath.Join(dir, "keepalived.conf"), filepath.Join(dir, "log")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := n.Command(ctx, "keepalived", "--dont-fork", "--log-console", "--no-syslog", "--use-file", file, "--vrrp",
		"--pid", filepath.Join(dir, "pid"), "--vrrp_pid", filepath.Join(dir, "vrrp"))
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it ends its child process
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait()
		if text, _ := os.ReadFile(log); t.Failed() {
			t.Logf("keepalived in %s:\n%s", n.Short(), text)
		}
	})
}
