// SPDX-License-Identifier: Apache-2.0

// Package conntrack reads the kernel's connection table over a raw ctnetlink socket. It dumps, counts, watches,
// deletes and inserts entries, for both address families, in any network namespace.
//
// A table of a million entries is read in one pass. The decoder reuses one Entry for all messages, so a dump does not
// allocate per flow. A second goroutine receives the next buffer during decoding, so the kernel's write speed limits
// the dump. Summary counts the entries by state, source, destination, service, SNAT address, remaining time and
// namespace. Walk reads large tables several times faster than a dump, by a BPF program.
//
// The kernel counts per network namespace, but nf_conntrack_max and nf_conntrack_buckets apply to the whole host. To
// examine a host, read all [netdev.Namespaces].
package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/netdev"
)

// BufferSize is the length of one receive buffer in bytes. The kernel writes at most 32 kB into one dump message
// (net/netlink/af_netlink.c). The rest is room for events that arrive together.
const BufferSize = 64 << 10

// ErrInterrupted reports that the kernel changed the table during the dump. Entries may be missing or reported twice
// (NLM_F_DUMP_INTR).
var ErrInterrupted = errors.New("the table changed during the dump")

// Conn is a ctnetlink socket of the network namespace in which it was opened. A Conn carries one request at a time
// and is not safe for concurrent use.
type Conn struct {
	file *os.File
	raw  syscall.RawConn
	port uint32 // netlink port ID of this socket
	seq  uint32
	buf  []byte
}

// Open opens a socket in the calling thread's network namespace. Reading and
// changing the table both need CAP_NET_ADMIN in the user namespace that owns it.
func Open() (*Conn, error) {
	return open(0)
}

// OpenIn opens a socket that reads the table of ns.
func OpenIn(ns netdev.Namespace) (*Conn, error) {
	var c *Conn
	err := ns.Do(func() (err error) {
		c, err = Open()
		return err
	})
	return c, err
}

// open creates the socket and joins the multicast groups in the bit mask.
func open(groups uint32) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("netlink socket for conntrack: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("netlink socket for conntrack: bind: %w (listening needs CAP_NET_ADMIN)", err)
	}
	// With these options, errors name the refused attribute, and acknowledgements do not repeat the request. An old
	// kernel may refuse them, which makes error messages less detailed.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	sa, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("netlink socket for conntrack: %w", err)
	}
	c := &Conn{buf: make([]byte, BufferSize)}
	if nl, ok := sa.(*unix.SockaddrNetlink); ok {
		c.port = nl.Pid
	}
	c.file = os.NewFile(uintptr(fd), "ctnetlink")
	if c.raw, err = c.file.SyscallConn(); err != nil {
		c.file.Close()
		return nil, fmt.Errorf("netlink socket for conntrack: %w", err)
	}
	return c, nil
}

// Close closes the socket. A blocked call returns.
func (c *Conn) Close() error { return c.file.Close() }

// receive fills buf with one datagram from the kernel and returns its length.
func (c *Conn) receive(buf []byte) (int, error) {
	var (
		n    int
		from unix.Sockaddr
		err  error
	)
	poll := c.raw.Read(func(fd uintptr) bool {
		for {
			n, from, err = unix.Recvfrom(int(fd), buf, unix.MSG_TRUNC)
			if err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	})
	switch nl, ok := from.(*unix.SockaddrNetlink); {
	case poll != nil:
		return 0, poll
	case err != nil:
		return 0, err
	case ok && nl.Pid != 0:
		return 0, nil // not from the kernel: treat as empty
	case n > len(buf):
		return 0, fmt.Errorf("conntrack: message of %d bytes cut at %d", n, len(buf))
	}
	return n, nil
}

// send writes one or more whole messages as one datagram.
func (c *Conn) send(b []byte) error {
	var err error
	poll := c.raw.Write(func(fd uintptr) bool {
		err = unix.Sendto(int(fd), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return err != unix.EAGAIN && err != unix.EINTR
	})
	if poll != nil {
		return poll
	}
	return err
}

// guard makes blocked calls on c return when ctx ends; c can then only be closed. The returned function ends the
// guard and returns the context's error.
func (c *Conn) guard(ctx context.Context) func() error {
	stop := context.AfterFunc(ctx, func() { _ = c.file.SetDeadline(time.Unix(1, 0)) })
	return func() error {
		if stop() {
			return nil
		}
		return ctx.Err()
	}
}
