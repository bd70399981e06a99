// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab"
)

const ownAddressYAML = `
services:
  - {name: web, listen: [{address: 192.0.2.20, ports: [9]}], protocol: udp, mode: fullnat, scheduler: rr, backends: [{name: a, address: 10.0.2.2}]}
nat:
  - {name: office, type: masquerade, source: [10.0.2.0/24], out: wan0}
tables: {flows: 4096, flows6: 4096}
`

// TestFragmentsOfOwnAddress sends datagrams without DF that are larger than the MTU of the next link, from an
// address of the gateway. The kernel would drop them as martians.
func TestFragmentsOfOwnAddress(t *testing.T) {
	for _, hook := range hooks {
		for _, c := range []struct {
			name, from, at, to string
			link               int
		}{
			{"masquerade", "s1", "client", "10.0.1.2:9", 0},
			{"fullnat", "client", "s1", "192.0.2.20:9", 1},
		} {
			t.Run(string(hook)+"/"+c.name, func(t *testing.T) {
				topology := lab.Balancer()
				topology.Links[c.link].MTU = 1400
				l := labFor(t, topology, hook)
				d := gateway(t, l.Node("gateway"), hook, ownAddressYAML)
				in, err := l.Node(c.at).ListenPacket(":9")
				if err != nil {
					t.Fatal(err)
				}
				defer in.Close()
				out := withoutDF(t, l.Node(c.from), c.to)
				for _, size := range []int{100, 1430} {
					want := bytes.Repeat([]byte{1}, size)
					if got := sendUntil(t, out, in, want); got != size {
						t.Errorf("%d bytes of %d arrived: %s", got, size, describeReasons(d))
					}
				}
			})
		}
	}
}

// withoutDF returns a socket that sends datagrams without DF.
func withoutDF(t *testing.T, n *lab.Node, to string) net.Conn {
	t.Helper()
	var c net.Conn
	err := n.Do(func() (err error) {
		d := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT)
			})
			return err
		}}
		c, err = d.Dial("udp", to)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// sendUntil sends a datagram until one of its size arrives, and returns the size of the last received one.
func sendUntil(t *testing.T, out net.Conn, in net.PacketConn, b []byte) (got int) {
	t.Helper()
	buf := make([]byte, 4096)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline) && got != len(b); {
		if _, err := out.Write(b); err != nil {
			t.Fatal(err)
		}
		in.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		got, _, _ = in.ReadFrom(buf)
	}
	return got
}
