// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestAskedPorts distinguishes ports that programs have bound explicitly from ports chosen by the kernel, and
// from ports of connections.
func TestAskedPorts(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.BPF)
	l := labtest.New(t, lab.Topology{Name: "asked", Nodes: []lab.NodeSpec{{Name: "host", Addresses: []string{"192.0.2.1/32", "2001:db8::1/128"}}}})
	var open []io.Closer
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	udp := func(network, local, remote string) error {
		c, err := net.DialUDP(network, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(local)), net.UDPAddrFromAddrPort(netip.MustParseAddrPort(remote)))
		if err == nil {
			open = append(open, c)
		}
		return err
	}
	var asked map[LocalPort]bool
	err := l.Node("host").Do(func() error {
		for _, address := range []string{"192.0.2.1:40001", "[2001:db8::1]:40002", "[::]:40003", "127.0.0.1:0", ":0"} {
			tcp, err := net.Listen("tcp", address)
			if err != nil {
				return err
			}
			open = append(open, tcp)
			udp, err := net.ListenPacket("udp", address) // like the sockets of resolvers and QUIC clients: port 0
			if err != nil {
				return err
			}
			open = append(open, udp)
			if _, err := udp.WriteTo([]byte("x"), &net.UDPAddr{IP: net.ParseIP("::1"), Port: 9}); err != nil && address == ":0" {
				return err
			}
		}
		if err := udp("udp4", "192.0.2.1:40011", "192.0.2.1:9"); err != nil {
			return err
		}
		if err := udp("udp6", "[2001:db8::1]:40012", "[2001:db8::1]:9"); err != nil {
			return err
		}
		c, err := net.Dial("tcp", "192.0.2.1:40001")
		if err != nil {
			return err
		}
		open = append(open, c)
		asked, err = AskedPorts()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[LocalPort]bool{}
	for _, port := range []uint16{40001, 40002, 40003} {
		want[LocalPort{flow.TCP, port}], want[LocalPort{flow.UDP, port}] = true, true
	}
	if diff := cmp.Diff(want, asked); diff != "" {
		t.Error(diff)
	}
}
