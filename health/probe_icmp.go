// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// icmpProber sends an echo request. It uses a connected raw socket, so that the kernel delivers only the packets of
// one backend. Without the privilege for a raw socket it uses a ping socket (net.ipv4.ping_group_range).
type icmpProber struct{}

// Probe implements Prober.
func (icmpProber) Probe(ctx context.Context, t *Target) error {
	conn, err := echoSocket(ctx, t.Address, t.Mark)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer applyDeadline(ctx, conn)()
	return echo(conn, t.Address.Is4())
}

// echo sends one request on conn and waits for its reply.
func echo(conn net.Conn, is4 bool) error {
	nonce := make([]byte, 18)
	rand.Read(nonce)
	id := int(binary.BigEndian.Uint16(nonce[16:]))
	request, reply, proto := icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply), 1
	if !is4 {
		request, reply, proto = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply, 58
	}
	packet, err := (&icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Seq: 1, Data: nonce[:16]}}).Marshal(nil)
	if err != nil {
		return err
	}
	if _, err := conn.Write(packet); err != nil {
		return err
	}
	buf := make([]byte, 1500)
	for {
		n, err := read(conn, buf)
		if err != nil {
			return err
		}
		m, err := icmp.ParseMessage(proto, buf[:n])
		if err != nil || m.Type != reply {
			continue
		}
		if e, ok := m.Body.(*icmp.Echo); ok && bytes.Equal(e.Data, nonce[:16]) {
			return nil
		}
	}
}

// read reads an ICMP message. For a raw IPv4 socket, ReadFrom omits the IP header and Read does not.
func read(conn net.Conn, buf []byte) (int, error) {
	if raw, ok := conn.(*net.IPConn); ok {
		n, _, err := raw.ReadFrom(buf)
		return n, err
	}
	return conn.Read(buf)
}

func echoSocket(ctx context.Context, a netip.Addr, mark uint32) (net.Conn, error) {
	network := "ip4:icmp"
	if !a.Is4() {
		network = "ip6:ipv6-icmp"
	}
	d := net.Dialer{Control: markSocket(mark)}
	conn, err := d.DialContext(ctx, network, a.String())
	if !errors.Is(err, os.ErrPermission) {
		return conn, err
	}
	if conn, err = pingSocket(a, mark); errors.Is(err, os.ErrPermission) {
		return nil, fmt.Errorf("icmp: %w; run as root, or let sysctl net.ipv4.ping_group_range hold the group", err)
	}
	return conn, err
}

// pingSocket opens a connected ICMP datagram socket, which needs no privilege.
func pingSocket(a netip.Addr, mark uint32) (net.Conn, error) {
	family, proto := unix.AF_INET, unix.IPPROTO_ICMP
	if !a.Is4() {
		family, proto = unix.AF_INET6, unix.IPPROTO_ICMPV6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	file := os.NewFile(uintptr(fd), "ping")
	defer file.Close()
	if mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
			return nil, os.NewSyscallError("mark", err)
		}
	}
	if err := unix.Connect(fd, sockaddr(a)); err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	return net.FileConn(file)
}

func sockaddr(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16()}
}
