// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// resetServices are services of one backend each, by port. Each normally drops some packets, but a sender with
// an ended connection must get its reset.
const resetServices = `
services:
  - {name: s1, listen: [{address: 192.0.2.10, ports: [1]}], protocol: tcp, mode: dnat, limits: {strict-tcp: true}, backends: [{name: a, address: 10.0.2.2}]}
  - {name: s2, listen: [{address: 192.0.2.10, ports: [2]}], protocol: tcp, mode: fullnat, when-down: drop, backends: [{name: a, address: 10.0.2.2}]}
  - {name: s3, listen: [{address: "2001:db8::10", ports: [3]}], protocol: tcp, mode: dnat, when-down: drop, backends: [{name: a, address: "fd00:2::2"}]}
  - {name: s4, listen: [{address: "2001:db8::10", ports: [4]}], protocol: tcp, mode: fullnat, limits: {strict-tcp: true}, backends: [{name: a, address: "fd00:2::2"}]}
`

// TestDrainResets ends idle connections by a drain. The next sender, on either side, gets a reset.
func TestDrainResets(t *testing.T) {
	t.Parallel()
	onDatapathsAtOnce(t, func(t *testing.T, force string) {
		l := labtest.New(t, lab.Balancer())
		// The client's stack would reset packets from the server's own address. A client behind a router without
		// a route to the server's network could not do that.
		for _, args := range []string{"route add blackhole 10.0.2.0/24", "-6 route add blackhole fd00:2::/64"} {
			if out, err := l.Node("client").Command(t.Context(), "ip", strings.Fields(args)...).CombinedOutput(); err != nil {
				t.Fatalf("ip %s: %v\n%s", args, err, out)
			}
		}
		d := start(t, l.Node("gateway"), force+resetServices)
		senders := map[string]net.Conn{}
		for port, vip := range []string{1: "192.0.2.10", 2: "192.0.2.10", 3: "2001:db8::10", 4: "2001:db8::10"} {
			if vip == "" {
				continue
			}
			server := map[bool]string{true: "10.0.2.2", false: "fd00:2::2"}[netip.MustParseAddr(vip).Is4()]
			listener, err := l.Node("s1").Listen(net.JoinHostPort(server, fmt.Sprint(port)))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { listener.Close() })
			for _, end := range []string{"client", "server"} {
				ends := openThrough(t, l.Node("client"), net.JoinHostPort(vip, fmt.Sprint(port)), listener)
				senders[fmt.Sprintf("s%d, the %s", port, end)] = ends[end]
			}
			if err := d.SetBackend(t.Context(), fmt.Sprintf("s%d", port), "a", api.BackendState{State: "drain", Deadline: 1, Then: "reset"}); err != nil {
				t.Fatal(err)
			}
		}
		labtest.Eventually(t, patience, "the end of the drains", func() error {
			all, err := d.Backends(t.Context())
			for _, b := range all {
				if err == nil && (b.State != "down" || b.Drain != nil) {
					err = fmt.Errorf("%s/%s is %s", b.Service, b.Name, b.State)
				}
			}
			return err
		})
		for who, c := range senders {
			// eBPF ends the connections within seconds: earlier packets arrive.
			var err error
			for deadline := time.Now().Add(patience); err == nil && time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
				_, err = c.Write([]byte("more"))
			}
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s sends: %v, want a reset", who, err)
			}
		}
	})
}

// openThrough opens a connection and waits until each end has data of the other one.
func openThrough(t *testing.T, from *lab.Node, to string, at net.Listener) map[string]net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client, err := from.Dial(ctx, nil, "tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	server, err := at.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
		if _, err := way[0].Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := way[1].SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := way[1].Read(make([]byte, 1)); err != nil {
			t.Fatalf("%s: %v", to, err)
		}
	}
	return map[string]net.Conn{"client": client, "server": server}
}
