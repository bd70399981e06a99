// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// TestFullNATMixes sends real TCP through the four combinations of families. The server sees an address of the
// pool.
func TestFullNATMixes(t *testing.T) {
	const yaml = `
services:
  - {name: m44, listen: [{address: 192.0.2.20, ports: [44]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103], backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: m66, listen: [{address: "2001:db8::20", ports: [66]}], protocol: tcp, mode: fullnat, source-pool: ["fd00:2::100"], backends: [{name: a, address: "fd00:2::2", port: 8080}]}
  - {name: m64, listen: [{address: "2001:db8::20", ports: [64]}], protocol: tcp, mode: fullnat, source-pool: [10.0.2.100-10.0.2.103], backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: m46, listen: [{address: 192.0.2.20, ports: [46]}], protocol: tcp, mode: fullnat, source-pool: ["fd00:2::100"], backends: [{name: a, address: "fd00:2::2", port: 8080}]}
tables: {flows: 4096, flows6: 4096}
`
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			serve(t, l.Node("s1"), ":8080")
			d := gateway(t, l.Node("gateway"), hook, yaml)
			for _, c := range []struct{ addr, pool string }{
				{"192.0.2.20:44", "10.0.2.100/30"}, {"[2001:db8::20]:66", "fd00:2::100/128"},
				{"[2001:db8::20]:64", "10.0.2.100/30"}, {"192.0.2.20:46", "fd00:2::100/128"},
			} {
				for range 5 {
					_, client, err := ask(l.Node("client"), "tcp", c.addr)
					if err != nil {
						t.Fatalf("%s: %v\n%s", c.addr, err, describeReasons(d))
					}
					if a := netip.MustParseAddrPort(client).Addr().Unmap(); !netip.MustParsePrefix(c.pool).Contains(a) {
						t.Errorf("%s: the server sees %s, want one of %s", c.addr, a, c.pool)
					}
				}
			}
			if n := counted(t, d, "flow"); n == 0 {
				t.Error("no packet of a known flow was counted")
			}
		})
	}
}

// transfer opens a connection that exists as long as the test writes to it.
func transfer(t *testing.T, n *lab.Node, addr string) net.Conn {
	t.Helper()
	var c net.Conn
	err := n.Do(func() (err error) { c, err = net.DialTimeout("tcp", addr, patience); return err })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// mirror echoes the received bytes.
func mirror(t *testing.T, n *lab.Node, addr string) {
	t.Helper()
	listen(t, n, addr, func(c net.Conn) { io.Copy(c, c) })
}

func roundTrip(c net.Conn) error {
	c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 5))
	return err
}

const oneServer = `
services:
  - {name: web, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
tables: {flows: 4096, flows6: 4096}
`

// TestAdoption closes a process without cleaning up and starts a second one. Connections continue without a
// process and afterwards, and ids do not change.
func TestAdoption(t *testing.T) {
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			mirror(t, l.Node("s1"), ":8080")
			pins := pinsOf(t)
			open := func() *Datapath {
				var d *Datapath
				err := l.Node("gateway").Do(func() (err error) {
					d, err = Open(Options{StateDir: t.TempDir(), Dir: pins, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				apply(t, d, hook, oneServer)
				return d
			}
			first := open()
			c := transfer(t, l.Node("client"), "192.0.2.10:80")
			if err := roundTrip(c); err != nil {
				t.Fatal(err)
			}
			if err := first.Close(); err != nil {
				t.Fatal(err)
			}
			if err := roundTrip(c); err != nil {
				t.Fatalf("while no process is there: %v", err)
			}
			second := open()
			if err := roundTrip(c); err != nil {
				t.Fatalf("after adoption: %v", err)
			}
			counters, err := second.Counters(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if s := counters.Services[0]; s.Connections != 1 || s.Active != 1 {
				t.Errorf("adopted counters: %+v", s)
			}
			if err := second.Remove(context.Background()); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(pins); !os.IsNotExist(err) {
				t.Errorf("pins are left behind: %v", err)
			}
			second.Close()
		})
	}
}

// TestSNATOffice sends the traffic of an office from one address, and back in by a port-forward.
func TestSNATOffice(t *testing.T) {
	const yaml = `
nat:
  - {name: office, type: snat, source: [10.1.10.0/24], out: wan0, to: [211.155.226.121]}
  - {name: http, type: port-forward, listen: {address: 211.155.226.121, ports: [80]}, protocol: tcp, to: {address: 10.1.10.2, port: 8080}}
tables: {flows: 4096, flows6: 4096}
`
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Office(), hook)
			serve(t, l.Node("outside"), "203.0.113.10:7000")
			echo(t, l.Node("outside"), "203.0.113.10:7001")
			serve(t, l.Node("web"), ":8080")
			d := gateway(t, l.Node("gateway"), hook, yaml)
			for _, network := range []string{"tcp", "udp"} {
				addr := map[string]string{"tcp": "203.0.113.10:7000", "udp": "203.0.113.10:7001"}[network]
				_, client, err := ask(l.Node("pc"), network, addr)
				if err != nil {
					t.Fatalf("%s: %v\n%s", network, err, describeReasons(d))
				}
				if !strings.HasPrefix(client, "211.155.226.121:") {
					t.Errorf("%s: the outside sees %s", network, client)
				}
			}
			if server, _, err := ask(l.Node("outside"), "tcp", "211.155.226.121:80"); err != nil || server != "web" {
				t.Errorf("port-forward from outside: %q %v\n%s", server, err, describeReasons(d))
			}
			server, client, err := ask(l.Node("pc"), "tcp", "211.155.226.121:80") // hairpin
			if err != nil || server != "web" || !strings.HasPrefix(client, "211.155.226.121:") {
				t.Errorf("port-forward from inside: %q sees %q: %v\n%s", server, client, err, describeReasons(d))
			}
		})
	}
}
