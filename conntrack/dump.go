// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"
)

// Dump reads the table of c's namespace and calls visit for each entry that matches f; a nil f matches all. The entry
// is reused: visit must not keep the pointer. An error of visit ends the dump and is returned. c can then only be
// closed, because the kernel has not finished its dump.
//
// The kernel filters by exact values (status and mark bits, zone, single addresses and ports) and does not copy other
// entries. Dump filters by prefixes and ranges. ErrInterrupted after a complete pass means that single entries may be
// missing or duplicated.
func (c *Conn) Dump(ctx context.Context, f *Filter, visit func(*Entry) error) error {
	m, err := f.compile()
	if err != nil {
		return err
	}
	var e Entry
	return c.stream(ctx, f, func(body []byte) error {
		if err := e.decode(body); err != nil {
			return err
		}
		if m != nil && !m.match(&e) {
			return nil
		}
		return visit(&e)
	})
}

// Drain reads the same dump as Dump without decoding it, to measure the kernel's share of the time. It returns the
// number of entries.
func (c *Conn) Drain(ctx context.Context) (entries int, err error) {
	err = c.stream(ctx, nil, func([]byte) error {
		entries++
		return nil
	})
	return entries, err
}

// datagram is one filled receive buffer on its way to the decoder.
type datagram struct {
	buf []byte
	n   int
	err error
}

// pipeline is the number of receive buffers in use: the kernel fills one, the decoder reads one, and two absorb
// variations.
const pipeline = 4

// stream requests a dump and passes the body of every entry's message to visit.
func (c *Conn) stream(ctx context.Context, f *Filter, visit func(body []byte) error) error {
	done := c.guard(ctx)
	err := c.request(msgGet, unix.NLM_F_DUMP, f)
	if err == nil {
		err = c.decodeDump(visit)
	}
	if cancelled := done(); cancelled != nil {
		return cancelled
	}
	if err != nil && !errors.Is(err, ErrInterrupted) {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("conntrack dump: %w: run as root of the host, or with CAP_NET_ADMIN", err)
		}
		return fmt.Errorf("conntrack dump: %w", err)
	}
	return err
}

// request sends one message of the given type with f's attributes.
func (c *Conn) request(kind uint8, flags uint16, f *Filter) error {
	c.seq++
	b := request(c.buf[:0], kind, f.family(), flags, c.seq)
	return c.send(finish(f.attributes(b), 0))
}

// decodeDump reads the answer to the last request on one goroutine and decodes it
// on the caller's, until the last message or until visit fails.
func (c *Conn) decodeDump(visit func(body []byte) error) (result error) {
	free := make(chan []byte, pipeline)
	filled := make(chan datagram, pipeline)
	free <- c.buf
	for range pipeline - 1 {
		free <- make([]byte, BufferSize)
	}
	stop := make(chan struct{})
	go c.fill(free, filled, stop)
	defer func() {
		close(stop)
		for range filled { // until the other goroutine stops reading the socket
		}
	}()
	for d := range filled {
		if d.err != nil {
			return d.err
		}
		finished, err := c.walk(d.buf[:d.n], visit)
		if err != nil {
			result = err
		}
		if finished {
			break
		}
		free <- d.buf
	}
	return result
}

// fill receives datagrams until the last message of the dump.
func (c *Conn) fill(free <-chan []byte, filled chan<- datagram, stop <-chan struct{}) {
	defer close(filled)
	for {
		var buf []byte
		select {
		case <-stop:
			return
		case buf = <-free:
		}
		n, err := c.receive(buf)
		filled <- datagram{buf, n, err}
		if err != nil || lastOfDump(buf[:n], c.seq) {
			return
		}
	}
}

// lastOfDump reports whether the datagram ends the dump with the given sequence number. The kernel sends NLMSG_DONE
// and NLMSG_ERROR as the last message of a datagram. The walk reads one length per message.
func lastOfDump(b []byte, seq uint32) bool {
	for {
		m, rest, ok, err := nextMessage(b)
		if err != nil {
			return true
		}
		if !ok {
			return false
		}
		if m.seq == seq && (m.kind == unix.NLMSG_DONE || m.kind == unix.NLMSG_ERROR) {
			return true
		}
		b = rest
	}
}

// walk passes the messages of one datagram to visit. finished is true after the last message of the dump, or if visit
// failed.
func (c *Conn) walk(b []byte, visit func(body []byte) error) (finished bool, err error) {
	for {
		m, rest, ok, bad := nextMessage(b)
		if bad != nil {
			return true, bad
		}
		if !ok {
			return false, err
		}
		b = rest
		if m.seq != c.seq {
			continue // from an earlier, abandoned request
		}
		if m.flags&unix.NLM_F_DUMP_INTR != 0 {
			err = ErrInterrupted
		}
		switch m.kind {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			if e := m.errno(); e != nil {
				err = e
			}
			return true, err
		case unix.NFNL_SUBSYS_CTNETLINK<<8 | msgNew:
			if e := visit(m.body); e != nil {
				return true, e
			}
		}
	}
}
