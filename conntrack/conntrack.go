// SPDX-License-Identifier: Apache-2.0

// Package conntrack reads the kernel's connection table over a raw ctnetlink
// socket: it dumps, counts, watches, deletes and makes entries, for both
// address families, in any network namespace.
//
// A table of a million entries is read in one pass. The decoder fills one Entry
// that is used again for the next message, so that a dump allocates nothing for
// a flow, and a second goroutine keeps the kernel busy with the next buffer
// while the first is decoded: reading takes as long as the kernel takes to
// write. Summary adds the entries up by state, source, destination, service,
// SNAT address, remaining time and namespace.
//
// Everything the kernel counts is counted for one network namespace, except
// nf_conntrack_max and nf_conntrack_buckets, which rule all of them: whoever
// wants the truth about a host walks Namespaces.
package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// BufferSize is the length of one receive buffer in bytes. The kernel writes at
// most 32 kB into one dump message (net/netlink/af_netlink.c); the rest leaves
// room for events that arrive together.
const BufferSize = 64 << 10

// ErrInterrupted says that the kernel changed the table while it wrote it out, so
// that entries may be missing or reported twice (NLM_F_DUMP_INTR).
var ErrInterrupted = errors.New("the table changed during the dump")

// Conn is a ctnetlink socket. It belongs for ever to the network namespace in
// which it was opened. A Conn carries one request at a time and is not safe for
// concurrent use.
type Conn struct {
	file *os.File
	raw  syscall.RawConn
	port uint32 // the kernel's name for this socket
	seq  uint32
	buf  []byte
}

// Open opens a socket in the calling thread's network namespace. Reading and
// changing the table both need CAP_NET_ADMIN in the user namespace that owns it.
func Open() (*Conn, error) {
	return open(0)
}

// OpenIn opens a socket that reads the table of ns.
func OpenIn(ns Namespace) (*Conn, error) {
	var c *Conn
	err := ns.Do(func() (err error) {
		c, err = Open()
		return err
	})
	return c, err
}

// open makes the socket and joins the multicast groups whose bits are set.
func open(groups uint32) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("netlink socket for conntrack: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("netlink socket for conntrack: bind: %w (listening needs CAP_NET_ADMIN)", err)
	}
	// Answers name the attribute that was refused, and acknowledgements do not
	// repeat the request. Both options are younger than the kernel floor's
	// oldest relatives; a refusal changes only how much an error says.
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

// Close closes the socket; a call that waits in it returns.
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
		return 0, nil // not from the kernel: an empty datagram to our reader
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

// guard makes blocked calls on c return when ctx ends, after which c can only be
// closed. The returned function ends the watch and tells the context's error.
func (c *Conn) guard(ctx context.Context) func() error {
	stop := context.AfterFunc(ctx, func() { _ = c.file.SetDeadline(time.Unix(1, 0)) })
	return func() error {
		if stop() {
			return nil
		}
		return ctx.Err()
	}
}
