// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/host"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// vpnRouter is the office with a VPN: clients at 10.8.0.0/24 behind tun0. No rule names tun0.
const vpnRouter = `
nat:
  - {name: office, type: snat, source: [10.1.10.0/24, 10.8.0.0/24], out: wan0, to: [211.155.226.121]}
  - name: http
    type: port-forward
    listen: {address: 211.155.226.121, ports: [80]}
    protocol: tcp
    to: {address: 10.1.10.2, port: 80}
  - name: roaming
    type: port-forward
    listen: {address: 211.155.226.121, ports: [8080]}
    protocol: tcp
    to: {address: 10.8.0.2, port: 80}
  - {name: branch, type: masquerade, source: [10.1.10.20], out: tun0}
`

// TestVPN serves the clients of a VPN that ends on the gateway. Packets from a tun have no Ethernet header.
func TestVPN(t *testing.T) {
	onDatapaths(t, func(t *testing.T, force string) {
		for _, named := range []string{"", "interfaces: [wan0, lan0, tun0]\n"} {
			t.Run(strings.TrimSpace(named), func(t *testing.T) {
				topology := lab.Office()
				topology.Nodes = append(topology.Nodes, lab.NodeSpec{Name: "roamer"})
				l := labtest.New(t, topology)
				tunnel(t, l.Node("gateway"), l.Node("roamer"))
				serveWeb(t, l, "web web 10.1.10.2:80", "outside internet "+outsideWeb, "roamer roamer 10.8.0.2:80")
				serveDatagrams(t, l, "outside internet 203.0.113.10:53")
				rules := vpnRouter
				if strings.Contains(force, "ebpf") {
					rules += "  - {name: six, type: nat64, prefix: 64:ff9b::/96, source: [fd08::/64], pool: [211.155.226.121]}\n"
				}
				d := start(t, l.Node("gateway"), force+named+rules)
				for _, tc := range []struct {
					name, from, target string
					ask                host.Ask
					server, client     string // client: "" for any
				}{
					{"out by tcp", "roamer", outsideWeb, host.AskWeb, "internet", officePublic},
					{"out by udp", "roamer", "203.0.113.10:53", host.AskDatagram, "internet", officePublic},
					{"from IPv6", "roamer", "[64:ff9b::203.0.113.10]:80", host.AskWeb, "internet", officePublic},
					{"hairpin", "roamer", officePublic + ":80", host.AskWeb, "web", ""},
					{"to the office", "roamer", "10.1.10.2:80", host.AskWeb, "web", "10.8.0.2"},
					{"from the office", "pc", "10.8.0.2:80", host.AskWeb, "roamer", "10.8.0.1"},
					{"from outside", "outside", officePublic + ":8080", host.AskWeb, "roamer", "211.155.226.1"},
				} {
					target := netip.MustParseAddrPort(tc.target)
					if target.Addr().Is6() && !strings.Contains(force, "ebpf") {
						continue // nftables has no nat64
					}
					t.Run(tc.name, func(t *testing.T) {
						load := host.Load{From: l.Node(tc.from), Target: target, Ask: tc.ask, Count: 100, Timeout: patience}
						for seen, n := range mustAnswer(t, load).Answers {
							if seen.Server != tc.server || (tc.client != "" && seen.Client != tc.client) {
								t.Errorf("%d answers by %s, which saw %s: want %s and %s", n, seen.Server, seen.Client, tc.server, tc.client)
							}
						}
					})
				}
				if err := d.Stop(); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// tunnel connects two nodes by a tun0 each, 10.8.0.1 and 10.8.0.2; the test forwards between them. The second
// node sends everything through it.
func tunnel(t *testing.T, a, b *lab.Node) {
	t.Helper()
	from, to := openTun(t, a, "10.8.0.1/24", "fd08::1/64"), openTun(t, b, "10.8.0.2/24", "fd08::2/64")
	for _, family := range []string{"-4", "-6"} {
		if out, err := b.Command(t.Context(), "ip", family, "route", "add", "default", "dev", "tun0").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for _, way := range [][2]*os.File{{from, to}, {to, from}} {
		go func() {
			packet := make([]byte, 65536)
			for {
				n, err := way[0].Read(packet)
				if err != nil {
					return // closed
				}
				_, _ = way[1].Write(packet[:n]) // a tun that is down drops it
			}
		}()
	}
}

// openTun creates a node's tun0. It ends with the test.
func openTun(t *testing.T, n *lab.Node, addresses ...string) *os.File {
	t.Helper()
	fd := -1
	err := n.Do(func() (err error) {
		if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
			return fmt.Errorf("/dev/net/tun: %w", err)
		}
		ask, err := unix.NewIfreq("tun0")
		if err != nil {
			return err
		}
		ask.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		return unix.IoctlIfreq(fd, unix.TUNSETIFF, ask)
	})
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "tun0")
	t.Cleanup(func() { f.Close() })
	steps := [][]string{{"link", "set", "tun0", "up"}}
	for _, a := range addresses {
		steps = append(steps, []string{"addr", "add", a, "dev", "tun0"})
	}
	for _, args := range steps {
		if out, err := n.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	return f
}
