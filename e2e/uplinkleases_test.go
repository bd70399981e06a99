// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

const leasedUplinks = `
uplinks:
  - {name: fiber, interface: wan0}
  - {name: radio, interface: wan1, gateway: 192.0.2.1, priority: 2}
nat:
  - {name: office, type: masquerade, source: [10.1.10.0/24]}
`

// leaseScript configures the interface as the scripts of distributions do. The address of a lease precedes its route.
const leaseScript = `#!/bin/sh
case "$1" in
deconfig) ip -4 addr flush dev "$interface"; ip link set "$interface" up ;;
bound|renew)
	ip addr replace "$ip/$mask" dev "$interface"
	ip route replace default via "$router" dev "$interface" metric 100 ;;
esac
echo "$1 $ip" >> "$(dirname "$0")/log"
`

// runOn starts a program on a node, and returns its end.
func runOn(t *testing.T, n *lab.Node, args ...string) (process *os.Process, stop func()) {
	t.Helper()
	cmd := n.Command(t.Context(), args[0], args[1:]...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", args[0], &out)
		}
	}
	t.Cleanup(stop)
	return cmd.Process, stop
}

// leases returns the start of a DHCP server of the first provider, which has one address.
func (o *uplinkOffice) leases(dir string) func(address string) (stop func()) {
	return func(address string) func() {
		_, stop := runOn(o.t, o.Node("fiber"), "dnsmasq", "--no-daemon", "--conf-file=/dev/null", "--user=root", "--group=root", "--pid-file=", "--port=0",
			"--interface=office", "--except-interface=lo", "--bind-interfaces", "--no-ping", "--dhcp-authoritative", "--dhcp-option=3,198.51.100.1",
			"--dhcp-leasefile="+filepath.Join(dir, "leases-"+address), "--dhcp-range="+address+","+address+",255.255.255.0,2m")
		return stop
	}
}

// TestUplinkLeases obtains, renews, changes, loses and obtains again the address of the first uplink from a real DHCP
// server. New connections follow, connections on the other uplink continue, and no packet leaves an uplink with the
// address of the other one, answers of the DHCP server included.
func TestUplinkLeases(t *testing.T) {
	labtest.Require(t, labtest.Tool("dnsmasq"), labtest.Tool("busybox"))
	if out, err := exec.Command("busybox", "udhcpc", "--help").CombinedOutput(); err != nil && strings.Contains(string(out), "applet not found") {
		labtest.Lacks(t, "busybox has no udhcpc")
	}
	l := labtest.New(t, lab.TwoUplinks())
	gateway, dir := l.Node("gateway"), t.TempDir()
	ip(t, gateway, "-4 addr flush dev wan0")
	script := filepath.Join(dir, "script")
	if err := os.WriteFile(script, []byte(leaseScript), 0o755); err != nil {
		t.Fatal(err)
	}
	events := func(kind string) int {
		log, _ := os.ReadFile(filepath.Join(dir, "log"))
		return strings.Count("\n"+string(log), "\n"+kind)
	}
	o := uplinkOfficeOf(t, l, leasedUplinks)
	shows := func(want string) {
		t.Helper()
		labtest.Eventually(t, patience, want, func() error {
			if got := output(t, o.d, "show uplinks"); !strings.Contains(got, want) {
				return fmt.Errorf("%s", got)
			}
			return nil
		})
	}
	const lost = "fiber: not for IPv4: interface wan0 has no IPv4 address"
	shows(lost)
	o.newFlow(server4+":5060", radio4, "before the first lease")
	moved := o.dial("10.1.10.20:7001", server4+":7")
	o.asks(moved, radio4, "before the first lease")

	serve := o.leases(dir)
	stop := serve("198.51.100.50")
	client, _ := runOn(t, gateway, "busybox", "udhcpc", "-f", "-i", "wan0", "-s", script, "-t", "3", "-T", "1", "-A", "1")
	signal := func(s syscall.Signal) {
		t.Helper()
		if err := client.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	o.newFlow(server4+":5060", "198.51.100.50", "after the first lease")
	first := o.dial("10.1.10.20:7002", server4+":7")
	o.asks(first, "198.51.100.50", "with the first lease")
	signal(syscall.SIGUSR1)
	labtest.Eventually(t, patience, "a renewed lease", func() error {
		if events("renew") == 0 {
			return fmt.Errorf("no renewal")
		}
		return nil
	})
	o.asks(first, "198.51.100.50", "after a renewal")

	stop()
	stop = serve("198.51.100.60")
	signal(syscall.SIGUSR1) // the server refuses the old address
	o.newFlow(server4+":5060", "198.51.100.60", "after the change of the lease")
	second := o.dial("10.1.10.20:7003", server4+":7")
	o.asks(second, "198.51.100.60", "with the second lease")
	o.asks(moved, radio4, "on the other uplink, after the change of the lease")

	signal(syscall.SIGUSR2) // release
	shows(lost)
	o.newFlow(server4+":5060", radio4, "after the loss of the lease")
	if _, err := second.Ask(patience); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("the connection of the lost lease: %v, want a reset", err)
	}
	o.asks(moved, radio4, "on the other uplink, after the loss of the lease")

	signal(syscall.SIGUSR1)
	o.newFlow(server4+":5060", "198.51.100.60", "after the lease has returned")
	o.asks(moved, radio4, "on the other uplink, after the lease has returned")
	stop()
	o.noForeign()
}

// TestUplinkTransit sends packets of the first provider to the address that its uplink has lost. They must not leave by
// the other uplink.
func TestUplinkTransit(t *testing.T) {
	l := labtest.New(t, lab.TwoUplinks())
	gateway, fiber := l.Node("gateway"), l.Node("fiber")
	hardware, err := gateway.Command(t.Context(), "cat", "/sys/class/net/wan0/address").Output()
	if err != nil {
		t.Fatal(err)
	}
	ip(t, gateway, "-4 addr flush dev wan0")
	ip(t, fiber, "neigh replace "+fiber4+" lladdr "+strings.TrimSpace(string(hardware))+" dev office nud permanent")
	o := uplinkOfficeOf(t, l, leasedUplinks)
	o.newFlow(server4+":5060", radio4, "without an address of the first uplink")
	labtest.Eventually(t, patience, "a dropped packet", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, err := host.AskDatagram(ctx, fiber, netip.MustParseAddrPort("198.51.100.1:0"), netip.MustParseAddrPort(fiber4+":68")); err == nil {
			t.Error("an answer")
		}
		for line := range strings.Lines(nft(t, gateway, "", "list", "chain", "ip", "sluice", "uplink-foreign")) {
			if strings.Contains(line, "it came in by another uplink") && !strings.Contains(line, "packets 0 ") {
				return nil
			}
		}
		return errors.New("none")
	})
	if got := nft(t, o.Node("radio"), "", "list", "counter", "inet", "watch", "foreign"); !strings.Contains(got, "packets 0 ") {
		t.Errorf("packets of the first provider at the second:\n%s", got)
	}
}
