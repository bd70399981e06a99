// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/lab"
	"github.com/sluice-lb/sluice/packet"
)

// Flags of TCP, byte 13 of its header.
const (
	tcpSYN = 0x02
	tcpACK = 0x10
)

// spray sends one packet of each of n flows from a node: UDP, or TCP with the given flags.
// They differ in their source ports, which begin at first; 0: at others than the last time.
func spray(node string, protocol flow.Protocol, flags byte, n int, from string, first uint16, to string, port uint16) setup {
	var sprayed atomic.Uint32
	return func(_ context.Context, l *lab.Lab) error {
		start := uint32(first)
		if first == 0 {
			start = 2000 + sprayed.Add(uint32(n)) - uint32(n)
		}
		return l.Node(node).Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			target := &unix.SockaddrInet4{Addr: netip.MustParseAddr(to).As4()}
			for i := range uint32(n) {
				s := segment(protocol, flags, netip.AddrPortFrom(netip.MustParseAddr(from), uint16(start+i)), netip.AddrPortFrom(netip.MustParseAddr(to), port))
				if err := unix.Sendto(fd, s, 0, target); err != nil && err != unix.EPERM {
					return fmt.Errorf("packet %d of %d: %w", i, n, err)
				}
			}
			return nil
		})
	}
}

// segment returns an IPv4 packet without data. The kernel fills in length and checksum of the IP
// header; UDP has no checksum.
func segment(protocol flow.Protocol, flags byte, from, to netip.AddrPort) []byte {
	b := make([]byte, 28, 40)
	b[0], b[8], b[9] = 0x45, 64, byte(protocol)
	copy(b[12:], from.Addr().AsSlice())
	copy(b[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(b[20:], from.Port())
	binary.BigEndian.PutUint16(b[22:], to.Port())
	if protocol == flow.UDP {
		b[25] = 8 // length
		return b
	}
	b = b[:40]
	b[27], b[32], b[33], b[34] = 1, 5<<4, flags, 64 // sequence, length of the header in words, flags, window
	binary.BigEndian.PutUint16(b[36:], packet.TransportChecksum(from.Addr(), to.Addr(), byte(protocol), b[20:]))
	return b
}

// paced sends UDP packets of the same flow, one every 12 ms.
func paced(n int, to string, port uint16) setup {
	one := sending(sendUDP(1, Client, to, port, 100, false))
	return func(ctx context.Context, l *lab.Lab) error {
		for range n {
			if err := one(ctx, l); err != nil {
				return err
			}
			time.Sleep(12 * time.Millisecond)
		}
		return nil
	}
}

// hold opens n connections from one node to the server, one after the other, and does
// with each what then says. They are closed when ctx ends.
func hold(node string, n int, then func(net.Conn) error) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		listener, err := l.Node("server").Listen(Server + ":80")
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { listener.Close() })
		go acceptAndHold(ctx, listener)
		return l.Node(node).Do(func() error {
			for i := range n {
				c, err := (&net.Dialer{}).DialContext(ctx, "tcp4", Server+":80")
				if err != nil {
					return fmt.Errorf("connection %d of %d: %w", i, n, err)
				}
				context.AfterFunc(ctx, func() { c.Close() })
				if then != nil {
					if err := then(c); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
}

// acceptAndHold takes connections and does nothing with them until ctx ends.
func acceptAndHold(ctx context.Context, l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		context.AfterFunc(ctx, func() { c.Close() })
	}
}

func halfClosed(c net.Conn) error { return c.(*net.TCPConn).CloseWrite() }

// listening has a program on the router listen, with room for so many connections, until
// ctx ends. It never accepts any.
func listening(port, backlog int) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		return l.Node("gateway").Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			context.AfterFunc(ctx, func() { unix.Close(fd) })
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
				return err
			}
			if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port}); err != nil {
				return err
			}
			return unix.Listen(fd, backlog)
		})
	}
}

// unreadSocket has a program on the router hold a UDP socket with a receive buffer of so many
// bytes, and read nothing, until ctx ends.
func unreadSocket(port, buffer int) setup {
	return func(ctx context.Context, l *lab.Lab) error {
		return l.Node("gateway").Do(func() error {
			c, err := (&net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
				if failed := raw.Control(func(fd uintptr) {
					err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer)
				}); failed != nil {
					return failed
				}
				return err
			}}).ListenPacket(ctx, "udp4", fmt.Sprint(":", port))
			if err == nil {
				context.AfterFunc(ctx, func() { c.Close() })
			}
			return err
		})
	}
}

// timeWait leaves n sockets of the router itself in TIME_WAIT.
func timeWait(n int) setup {
	return func(_ context.Context, l *lab.Lab) error {
		return l.Node("gateway").Do(func() error {
			listener, err := net.Listen("tcp4", GatewayLAN+":81")
			if err != nil {
				return err
			}
			defer listener.Close()
			for range n {
				client, err := net.Dial("tcp4", GatewayLAN+":81")
				if err != nil {
					return err
				}
				server, err := listener.Accept()
				if err != nil {
					return err
				}
				client.Close()
				server.Close()
			}
			return nil
		})
	}
}

// program runs in a node's namespace until it is stopped or its ctx ends.
type program struct {
	node  string
	words []string
	name  string             // Under which it is ready.
	ready func(pid int) bool // nil: as soon as it has that name.
	stop  setup
}

func (p *program) start(ctx context.Context, l *lab.Lab) error {
	ctx, cancel := context.WithCancel(ctx)
	cmd := l.Node(p.node).Command(ctx, p.words[0], p.words[1:]...)
	if err := cmd.Start(); err != nil {
		cancel()
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	p.stop = func(context.Context, *lab.Lab) error {
		cancel()
		<-ended
		return nil
	}
	return runs(ctx, cmd.Process.Pid, p.name, p.ready)
}

// runs waits until a process has become the program of a name, and that one is ready.
func runs(ctx context.Context, pid int, name string, ready func(pid int) bool) error {
	for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if err != nil {
			return fmt.Errorf("%s has ended: %w", name, err)
		}
		if string(comm) == name+"\n" && (ready == nil || ready(pid)) {
			return nil
		}
	}
	return ctx.Err()
}

// listener is conntrack -E on the router, ready when it hears the connection table's events.
func listener(options ...string) *program {
	return &program{node: "gateway", words: append([]string{"conntrack", "-E"}, options...), name: "conntrack", ready: func(pid int) bool {
		sockets, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/netlink", pid))
		for line := range strings.Lines(string(sockets)) {
			if f := strings.Fields(line); len(f) > 3 && f[1] == fmt.Sprint(unix.NETLINK_NETFILTER) && strings.Trim(f[3], "0") != "" {
				return true
			}
		}
		return false
	}}
}

// startConnect begins a connection, which is closed when ctx ends, and does not wait for it.
func startConnect(ctx context.Context, to string, port int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { unix.Close(fd) })
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: port, Addr: netip.MustParseAddr(to).As4()}); err != unix.EINPROGRESS {
		return err
	}
	return nil
}

// ResolveNeighbours has the nodes find each other's hardware addresses, so that no packet waits
// for them later. Nothing is tracked yet.
func ResolveNeighbours(ctx context.Context, l *lab.Lab) error {
	for node, address := range map[string]string{"client": Gateway, "gateway": Server} {
		c, err := l.Node(node).Dial(ctx, nil, "tcp", address+":9")
		if err == nil {
			c.Close()
		} else if !errors.Is(err, unix.ECONNREFUSED) {
			return err
		}
	}
	return nil
}
