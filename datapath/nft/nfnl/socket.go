// SPDX-License-Identifier: Apache-2.0

// Package nfnl implements nf_tables netlink. It writes a ruleset.Delta as one transaction, attributes every refusal
// to its object, and reads the tables of Sluice as ruleset values.
package nfnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/datapath/nft/ruleset"
)

// Conn is a netlink socket to the nf_tables of the network namespace in which it was opened. It is safe for
// concurrent use.
type Conn struct {
	mu  sync.Mutex
	fd  int
	seq uint32
	buf []byte
	// sndbuf is the current size of the send buffer.
	sndbuf int
}

// receiveBuffer fits the answers to one datagram of requests. The kernel sends dumps in pieces of up to 32 KiB.
const receiveBuffer = 1 << 20

// Open opens a socket in the network namespace of the calling thread.
func Open() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("netfilter netlink socket: %w: the kernel needs CONFIG_NETFILTER_NETLINK", err)
	}
	c := &Conn{fd: fd, buf: make([]byte, receiveBuffer)}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("netfilter netlink socket: bind: %w", err)
	}
	for _, opt := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK} {
		_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, opt, 1) // optional: it only improves error messages
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20); err != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 16<<20)
	}
	return c, nil
}

// Close closes the socket.
func (c *Conn) Close() error { return unix.Close(c.fd) }

// raiseSendBuffer makes room for a transaction of n bytes: netlink accepts a datagram only if it fits the socket's
// buffer.
func (c *Conn) raiseSendBuffer(n int) error {
	if n <= c.sndbuf {
		return nil
	}
	err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, n+4096)
	if err != nil {
		err = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, n+4096)
	}
	if err != nil {
		return fmt.Errorf("netlink send buffer of %d bytes: %w", n, err)
	}
	c.sndbuf = n
	return nil
}

// header sizes: struct nlmsghdr and struct nfgenmsg.
const (
	nlHeader  = unix.SizeofNlMsghdr
	genHeader = 4
)

// message appends the header of one nf_tables message; done sets its length.
func message(b []byte, kind, flags uint16, family uint8, seq uint32) ([]byte, int) {
	start := len(b)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	return append(b, family, unix.NFNETLINK_V0, 0, 0), start
}

func finishMessage(b []byte, start int) []byte {
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

func kind(msg int) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | uint16(msg) }

// receive reads one datagram; flags may hold MSG_DONTWAIT.
func (c *Conn) receive(flags int) ([]byte, error) {
	for {
		n, _, err := unix.Recvfrom(c.fd, c.buf, flags)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return c.buf[:n], nil
	}
}

// netlinkMessage is one received message.
type netlinkMessage struct {
	kind, flags uint16
	seq         uint32
	body        []byte // after struct nlmsghdr
}

func nextMessage(b []byte) (m netlinkMessage, rest []byte, ok bool) {
	if len(b) < nlHeader {
		return m, nil, false
	}
	h := (*unix.NlMsghdr)(unsafe.Pointer(&b[0]))
	if h.Len < nlHeader || int(h.Len) > len(b) {
		return m, nil, false
	}
	m = netlinkMessage{h.Type, h.Flags, h.Seq, b[nlHeader:h.Len]}
	return m, b[min(int(h.Len+3)&^3, len(b)):], true
}

// errInterrupted reports that a dump spans two generations and must be repeated.
var errInterrupted = errors.New("the ruleset changed while it was read")

// attempts bounds the repetitions of an interrupted dump.
const attempts = 50

// dump sends a request and calls visit with the attributes of every answer.
func (c *Conn) dump(msg int, flags uint16, family uint8, attrs []byte, visit func(family uint8, attrs []byte)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	b, start := message(nil, kind(msg), unix.NLM_F_REQUEST|flags, family, c.seq)
	b = finishMessage(append(b, attrs...), start)
	if err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	interrupted := false
	for {
		b, err := c.receive(0)
		if err != nil {
			return err
		}
		for {
			m, rest, ok := nextMessage(b)
			if !ok {
				break
			}
			b = rest
			if m.seq != c.seq {
				continue
			}
			interrupted = interrupted || m.flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case m.kind == unix.NLMSG_ERROR:
				if errno := errnoOf(m.body); errno != 0 {
					return errno
				}
				return interruptedError(interrupted)
			case m.kind == unix.NLMSG_DONE:
				return interruptedError(interrupted)
			case len(m.body) >= genHeader:
				visit(m.body[0], m.body[genHeader:])
			}
		}
	}
}

func interruptedError(yes bool) error {
	if yes {
		return errInterrupted
	}
	return nil
}

func errnoOf(body []byte) unix.Errno {
	if len(body) < 4 {
		return 0
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(body)))
}

// Generation returns the kernel's count of ruleset transactions in this namespace.
func (c *Conn) Generation() (id uint32, err error) {
	err = c.dump(unix.NFT_MSG_GETGEN, unix.NLM_F_ACK, unix.AF_UNSPEC, nil, func(_ uint8, attrs []byte) {
		for {
			k, _, v, rest, ok := ruleset.NextAttr(attrs)
			if !ok {
				return
			}
			if attrs = rest; k == unix.NFTA_GEN_ID {
				id = be32(v)
			}
		}
	})
	if err != nil {
		return 0, Explain(err)
	}
	return id, nil
}

// Explain converts an error of the whole subsystem to a sentence with the remedy.
func Explain(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("nf_tables: %w: run as root or with CAP_NET_ADMIN (uid is %d)", err, os.Geteuid())
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("nf_tables: %w: the kernel has no nf_tables; load it with \"modprobe nf_tables\" or use a kernel with CONFIG_NF_TABLES", err)
	}
	return fmt.Errorf("nf_tables: %w", err)
}

func be32(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}

func be64(v []byte) uint64 {
	if len(v) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(v)
}

func cstring(v []byte) string {
	for i, b := range v {
		if b == 0 {
			return string(v[:i])
		}
	}
	return string(v)
}
