// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/lab"
)

const partialYAML = `
services:
  - {name: down4, listen: [{address: 192.0.2.10, ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}
  - {name: down6, listen: [{address: "2001:db8::10", ports: [80]}], protocol: tcp, mode: dnat, backends: [{name: a, address: "fd00:2::2"}]}
  - {name: none4, listen: [{address: 192.0.2.10, ports: [53]}], protocol: udp, mode: dnat, backends: [{name: a, address: 10.0.2.2}]}
  - {name: none6, listen: [{address: "2001:db8::10", ports: [53]}], protocol: udp, mode: dnat, backends: [{name: a, address: "fd00:2::2"}]}
  - {name: big4, listen: [{address: 192.0.2.20, ports: [4]}], protocol: tcp, mode: dnat, backends: [{name: a, address: 10.0.2.2, port: 8080}]}
  - {name: big6, listen: [{address: "2001:db8::20", ports: [6]}], protocol: tcp, mode: dnat, backends: [{name: a, address: "fd00:2::2", port: 8080}]}
tables: {flows: 4096, flows6: 4096}
`

// TestAnswersSummedLater sends packets with a partial checksum (CHECKSUM_PARTIAL), as GRO of a card does too. An
// answer that the program writes into such a packet must be valid after the kernel completes the checksum.
func TestAnswersSummedLater(t *testing.T) {
	topology := lab.Balancer()
	for i := range topology.Links {
		for _, e := range []*lab.End{&topology.Links[i].A, &topology.Links[i].B} {
			e.NoTxChecksum = e.Node == "gateway"
		}
	}
	topology.Links[1].MTU = 1400
	l := labFor(t, topology, config.AttachTC)
	client := l.Node("client")
	const much = 1 << 20 // one direction: the server's packets must fit the link with an MTU of 1400
	listen(t, l.Node("s1"), ":8080", func(c net.Conn) {
		io.CopyN(io.Discard, c, much)
		c.Write([]byte("all"))
	})
	d := gateway(t, l.Node("gateway"), config.AttachTC, partialYAML)
	s := snapshotOf(t, config.AttachTC, partialYAML)
	for i := range s.Services[:4] {
		s.Services[i].State[0] = datapath.Down
	}
	if _, err := d.Apply(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{"192.0.2.10:80", "[2001:db8::10]:80"} {
		err := client.Do(func() error { _, err := net.DialTimeout("tcp", addr, patience); return err })
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("connection to %s: %v: %s", addr, err, describeReasons(d))
		}
	}
	for _, addr := range []string{"192.0.2.10:53", "[2001:db8::10]:53"} {
		for _, size := range []int{10, 1300} { // the datagram fits the error completely, or in part
			if err := refusedDatagram(client, addr, size); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%d bytes to %s: %v: %s", size, addr, err, describeReasons(d))
			}
		}
	}
	if n := counted(t, d, "too-big"); n != 0 {
		t.Fatalf("%d packets were too big already", n)
	}
	for _, addr := range []string{"192.0.2.20:4", "[2001:db8::20]:6"} {
		c := transfer(t, client, addr)
		c.SetDeadline(time.Now().Add(patience))
		_, err := c.Write(make([]byte, much))
		if err == nil {
			_, err = io.ReadFull(c, make([]byte, 3))
		}
		if err != nil {
			t.Errorf("much to %s: %v: %s", addr, err, describeReasons(d))
		}
	}
	if n := counted(t, d, "too-big"); n < 2 {
		t.Errorf("%d packets were too big, want two and more: nothing was tested", n)
	}
}

// refusedDatagram sends datagrams until an ICMP error reports the fate of one.
func refusedDatagram(n *lab.Node, addr string, size int) error {
	return n.Do(func() error {
		c, err := net.Dial("udp", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		for end := time.Now().Add(patience); !errors.Is(err, syscall.ECONNREFUSED) && time.Now().Before(end); {
			if _, err = c.Write(make([]byte, size)); err == nil {
				c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
				_, err = c.Read(make([]byte, 1))
			}
		}
		return err
	})
}
