// SPDX-License-Identifier: Apache-2.0

package rfc

import (
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/packet"
)

// wire sends and receives raw frames of a host.
type wire struct {
	fd      int
	ifindex int
	own     packet.MAC
	gateway packet.MAC
	again   time.Duration // until carried sends again
}

// wire opens the host's interface.
func (g *gateway) wire(node string) *wire {
	g.t.Helper()
	side := "lan0"
	if node[0] == 'o' {
		side = "wan0"
	}
	iface, err := g.Node(node).Interface("eth0")
	if err != nil {
		g.t.Fatal(err)
	}
	far, err := g.Node("gateway").Interface(side)
	if err != nil {
		g.t.Fatal(err)
	}
	w := &wire{ifindex: iface.Index, own: packet.MAC(iface.HardwareAddr), gateway: packet.MAC(far.HardwareAddr), again: g.again}
	err = g.Node(node).Do(func() (err error) {
		const every = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, every); err != nil {
			return err
		}
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: every, Ifindex: w.ifindex})
	})
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { unix.Close(w.fd) })
	return w
}

// send puts an IP packet in text form on the wire to the gateway.
func (w *wire) send(format string, args ...any) error {
	p, err := packet.Text(fmt.Sprintf(format, args...))
	if err != nil {
		return err
	}
	return w.sendFrame(append(packet.Packet{&packet.Ethernet{Src: w.own, Dst: w.gateway}}, p...).Build())
}

func (w *wire) sendFrame(frame []byte) error {
	return unix.Sendto(w.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: w.ifindex, Halen: 6})
}

// frame builds the frame of a packet for the gateway.
func (w *wire) frame(p packet.Packet) []byte {
	return append(packet.Packet{&packet.Ethernet{Src: w.own, Dst: w.gateway}}, p...).Build()
}

var errSilence = errors.New("nothing came")

// await returns the first packet of another host that matches the filter.
func (w *wire) await(wait time.Duration, take func(packet.Packet) bool) (packet.Packet, error) {
	deadline := time.Now().Add(wait)
	b := make([]byte, 65536)
	for {
		// Packets that have already arrived are checked, even after the deadline.
		left := max(time.Until(deadline), 0)
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLIN}}, int((left+time.Millisecond-1)/time.Millisecond)); err != nil && !errors.Is(err, unix.EINTR) {
			return nil, err
		} else if n <= 0 {
			if left == 0 {
				return nil, errSilence
			}
			continue
		}
		n, _, err := unix.Recvfrom(w.fd, b, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		p := packet.Parse(b[:n])
		if e, ok := p[0].(*packet.Ethernet); ok && e.Src != w.own && take(p) {
			return p, nil
		}
	}
}

// carried sends a packet until a matching one leaves on another host's wire. The first may wait for a neighbour.
func (w *wire) carried(to *wire, take func(packet.Packet) bool, format string, args ...any) (packet.Packet, error) {
	for range 5 {
		if err := w.send(format, args...); err != nil {
			return nil, err
		}
		if p, err := to.await(w.again, take); err == nil {
			return p, nil
		}
	}
	return nil, errSilence
}

// udpTo matches datagrams to a port.
func udpTo(port uint16) func(packet.Packet) bool {
	return func(p packet.Packet) bool {
		u, ok := packet.Find[*packet.UDP](p)
		_, quoted := packet.Find[*packet.ICMP](p)
		return ok && !quoted && u.DstPort == port
	}
}

// icmp matches ICMP errors of a type and code.
func icmp(kind, code uint8) func(packet.Packet) bool {
	return func(p packet.Packet) bool {
		m, ok := packet.Find[*packet.ICMP](p)
		return ok && m.Type == kind && m.Code == code
	}
}

// transfer copies text over a TCP connection in both directions.
func (g *gateway) transfer(client, server net.Conn) error {
	for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
		text := []byte("PORT 10,0,2,2,7,1\r\n over and out")
		if err := way[0].SetDeadline(time.Now().Add(g.patience)); err != nil {
			return err
		}
		if err := way[1].SetDeadline(time.Now().Add(g.patience)); err != nil {
			return err
		}
		if _, err := way[0].Write(text); err != nil {
			return err
		}
		b := make([]byte, len(text))
		for n := 0; n < len(b); {
			m, err := way[1].Read(b[n:])
			if err != nil {
				return fmt.Errorf("read after %d bytes: %w", n, err)
			}
			n += m
		}
		if string(b) != string(text) {
			return fmt.Errorf("sent %q, arrived %q", text, b)
		}
	}
	return nil
}
