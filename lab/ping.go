// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// pingRetry is the time between two echo requests.
const pingRetry = 200 * time.Millisecond

var pingSequence atomic.Uint32

// Ping sends ICMP echo requests from the node to an address until it receives a reply or ctx ends. For the zero
// source address the kernel chooses one.
func (n *Node) Ping(ctx context.Context, source, target netip.Addr) error {
	conn, err := n.listenICMP(source, target)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	id := os.Getpid() & 0xffff
	for ctx.Err() == nil {
		seq := int(pingSequence.Add(1) & 0xffff)
		if err := sendEcho(conn, target, id, seq); err != nil {
			return fmt.Errorf("node %s: ping %s: %w", n.spec.Name, target, err)
		}
		if awaitReply(ctx, conn, target, id, seq) {
			return nil
		}
	}
	return fmt.Errorf("node %s: ping %s: no reply: %w", n.spec.Name, target, ctx.Err())
}

func (n *Node) listenICMP(source, target netip.Addr) (conn *icmp.PacketConn, err error) {
	network, address := "ip4:icmp", "0.0.0.0"
	if target.Is6() {
		network, address = "ip6:ipv6-icmp", "::"
	}
	if source.IsValid() {
		address = source.String()
	}
	err = n.Do(func() (err error) {
		conn, err = icmp.ListenPacket(network, address)
		return err
	})
	return conn, err
}

func sendEcho(conn *icmp.PacketConn, target netip.Addr, id, seq int) error {
	m := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: id, Seq: seq, Data: []byte("sluice")}}
	if target.Is6() {
		m.Type = ipv6.ICMPTypeEchoRequest // the kernel fills in the checksum
	}
	b, err := m.Marshal(nil)
	if err != nil {
		return err
	}
	_, err = conn.WriteTo(b, &net.IPAddr{IP: target.AsSlice()})
	return err
}

// awaitReply reports whether the reply arrived within pingRetry. A raw socket receives every ICMP message of the
// namespace, so it skips others.
func awaitReply(ctx context.Context, conn *icmp.PacketConn, target netip.Addr, id, seq int) bool {
	conn.SetReadDeadline(time.Now().Add(pingRetry))
	buf := make([]byte, 1500)
	for ctx.Err() == nil {
		size, _, err := conn.ReadFrom(buf)
		if err != nil {
			return false
		}
		proto := 1 // ICMP
		if target.Is6() {
			proto = 58 // ICMPv6
		}
		m, err := icmp.ParseMessage(proto, buf[:size])
		if err != nil || (m.Type != ipv4.ICMPTypeEchoReply && m.Type != ipv6.ICMPTypeEchoReply) {
			continue
		}
		if echo, ok := m.Body.(*icmp.Echo); ok && echo.ID == id && echo.Seq == seq {
			return true
		}
	}
	return false
}
