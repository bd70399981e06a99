// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
)

const tunnelsYAML = `
services:
  - {name: 4in4, listen: [{address: 192.0.2.30, ports: [44]}], protocol: tcp, mode: tunnel, scheduler: maglev, backends: [{name: a, address: 10.0.2.2}]}
  - {name: 4in6, listen: [{address: 192.0.2.30, ports: [46]}], protocol: tcp, mode: tunnel, scheduler: maglev, backends: [{name: a, address: "fd00:2::2"}]}
  - {name: 6in6, listen: [{address: "2001:db8::30", ports: [66]}], protocol: tcp, mode: tunnel, scheduler: maglev, backends: [{name: a, address: "fd00:2::2"}]}
  - {name: gue4, listen: [{address: 192.0.2.30, ports: [80]}], protocol: tcp, mode: tunnel, tunnel: {type: gue}, scheduler: rr, backends: [{name: a, address: 10.0.2.2}]}
  - {name: gue6, listen: [{address: "2001:db8::30", ports: [80]}], protocol: tcp, mode: tunnel, tunnel: {type: gue}, scheduler: rr, backends: [{name: a, address: "fd00:2::2"}]}
tables: {flows: 4096, flows6: 4096}
`

// TestTunnelBackends lets a backend's kernel decapsulate every kind of tunnel, set up by the lines of
// examples/tunnel-backend.sh. Connections open and transfer more than a segment.
func TestTunnelBackends(t *testing.T) {
	recipe, err := os.ReadFile("../../examples/tunnel-backend.sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, lab.Balancer(), hook)
			backend := l.Node("s1")
			for line := range strings.Lines(string(recipe)) {
				words := strings.Fields(line)
				switch {
				case len(words) == 0 || words[0] == "#" || words[0] == "#!/bin/sh":
				case words[0] == "sysctl":
					key, value, _ := strings.Cut(words[2], "=")
					if err := backend.Sysctl(key, value); err != nil {
						t.Error(err)
					}
				default:
					out, err := backend.Command(t.Context(), words[0], words[1:]...).CombinedOutput()
					if strings.Contains(string(out), "Unknown device type") || strings.Contains(string(out), "not supported") {
						t.Skipf("this kernel unwraps no tunnels: %s%s", line, out)
					}
					if err != nil {
						t.Fatalf("%s%v: %s", line, err, out)
					}
				}
			}
			for _, port := range []string{":44", ":46", ":66", ":80"} {
				mirror(t, backend, port)
			}
			d := gateway(t, l.Node("gateway"), hook, tunnelsYAML)
			for _, to := range []string{"192.0.2.30:44", "192.0.2.30:46", "[2001:db8::30]:66", "192.0.2.30:80", "[2001:db8::30]:80"} {
				c := transfer(t, l.Node("client"), to)
				if err := roundTrip(c); err != nil {
					t.Errorf("%s: %v\n%s", to, err, describeReasons(d))
				} else if err := sendMuch(c); err != nil {
					t.Errorf("%s, much: %v\n%s", to, err, describeReasons(d))
				}
			}
		})
	}
}

// TestTunnelPathMTU: a router behind the gateway cannot forward the packets of a tunnel. The client learns what fits: the
// MTU of that link without the headers of the tunnel.
func TestTunnelPathMTU(t *testing.T) {
	const small = 1400
	topology := lab.Topology{
		Name: "tunnelmtu",
		Nodes: []lab.NodeSpec{
			{Name: "client", Routes: []lab.Route{{To: "default", Via: "10.0.1.1"}, {To: "default6", Via: "fd00:1::1"}}},
			{Name: "gateway", Forward: true, Routes: []lab.Route{{To: "10.0.2.0/24", Via: "10.0.3.2"}, {To: "fd00:2::/64", Via: "fd00:3::2"}}},
			{Name: "router", Forward: true, Routes: []lab.Route{{To: "default", Via: "10.0.3.1"}, {To: "default6", Via: "fd00:3::1"}}},
			{Name: "s1", Routes: []lab.Route{{To: "default", Via: "10.0.2.1"}, {To: "default6", Via: "fd00:2::1"}}},
		},
		Links: []lab.LinkSpec{
			{A: lab.End{Node: "client", Iface: "eth0", Addresses: []string{"10.0.1.2/24", "fd00:1::2/64"}}, B: lab.End{Node: "gateway", Iface: "wan0", Addresses: []string{"10.0.1.1/24", "fd00:1::1/64"}}},
			{A: lab.End{Node: "gateway", Iface: "lan0", Addresses: []string{"10.0.3.1/24", "fd00:3::1/64"}}, B: lab.End{Node: "router", Iface: "up0", Addresses: []string{"10.0.3.2/24", "fd00:3::2/64"}}},
			{MTU: small, A: lab.End{Node: "router", Iface: "down0", Addresses: []string{"10.0.2.1/24", "fd00:2::1/64"}}, B: lab.End{Node: "s1", Iface: "eth0", Addresses: []string{"10.0.2.2/24", "fd00:2::2/64"}}},
		},
	}
	tunnels := []struct {
		to, backend, kind string
		headers           int
	}{ // each with an address of its own: the client has one MTU for an address
		{"192.0.2.30", "10.0.2.2", "ipip", 20}, {"192.0.2.31", "fd00:2::2", "ipip", 40}, {"2001:db8::30", "fd00:2::2", "ipip", 40},
		{"192.0.2.32", "10.0.2.2", "gue", 32}, {"2001:db8::31", "fd00:2::2", "gue", 52},
	}
	yaml := "tables: {flows: 4096, flows6: 4096}\nservices:\n"
	for i, c := range tunnels {
		yaml += fmt.Sprintf("  - {name: t%d, listen: [{address: %q, ports: [80]}], protocol: udp, mode: tunnel, tunnel: {type: %s}, backends: [{address: %q}]}\n", i, c.to, c.kind, c.backend)
	}
	for _, hook := range hooks {
		t.Run(string(hook), func(t *testing.T) {
			l := labFor(t, topology, hook)
			d := gateway(t, l.Node("gateway"), hook, yaml)
			for _, c := range tunnels {
				conn, err := l.Node("client").Dial(t.Context(), &net.Dialer{}, "udp", net.JoinHostPort(c.to, "80"))
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				mtu := 0
				for deadline := time.Now().Add(20 * time.Second); mtu != small-c.headers && time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
					_, _ = conn.Write(make([]byte, 1390)) // with the tunnel's headers it fits 1500 bytes, and not 1400; an error is the MTU
					mtu = pathMTU(t, conn)
				}
				if mtu != small-c.headers {
					t.Errorf("%s: the client uses an MTU of %d, want %d\n%s", c.to, mtu, small-c.headers, describeReasons(d))
				}
			}
		})
	}
}

// pathMTU returns the MTU of a connected socket's route (IP_MTU). The socket sends no fragments.
func pathMTU(t *testing.T, conn net.Conn) (mtu int) {
	t.Helper()
	raw, err := conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	level, discover, name := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_MTU
	if strings.HasPrefix(conn.RemoteAddr().String(), "[") {
		level, discover, name = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_MTU
	}
	e := raw.Control(func(fd uintptr) {
		if err = unix.SetsockoptInt(int(fd), level, discover, unix.IP_PMTUDISC_DO); err == nil {
			mtu, err = unix.GetsockoptInt(int(fd), level, name)
		}
	})
	if err := errors.Join(e, err); err != nil {
		t.Fatal(err)
	}
	return mtu
}
