// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Dump reads the table of c's namespace and calls visit for each entry that f
// lets through; a nil f lets all through. The entry is reused: visit must not
// keep the pointer. An error of visit ends the dump and is returned.
//
// What f asks for exactly (status and mark bits, zone, single addresses and
// ports) is sifted by the kernel, so that the rest is never copied; prefixes and
// ranges are sifted here. ErrInterrupted after a complete pass means that single
// entries may be missing or doubled.
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

// Drain reads the same dump as Dump and throws it away undecoded: the kernel's
// own share of the time. It returns the number of entries.
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

// pipeline is how many receive buffers are under way: one that the kernel fills,
// one that is decoded, two to even out the pace.
const pipeline = 4

// stream asks for a dump and hands the body of every entry's message to visit.
func (c *Conn) stream(ctx context.Context, f *Filter, visit func(body []byte) error) error {
	done := c.guard(ctx)
	err := c.request(msgGet, unix.NLM_F_DUMP, f)
	if err == nil {
		err = c.consume(visit)
	}
	if cancelled := done(); cancelled != nil {
		return cancelled
	}
	if err != nil && !errors.Is(err, ErrInterrupted) {
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

// consume reads the answer to the last request on one goroutine and decodes it
// on the caller's. When visit fails the rest is still read, so that c stays
// usable.
func (c *Conn) consume(visit func(body []byte) error) error {
	free := make(chan []byte, pipeline)
	filled := make(chan datagram, pipeline)
	free <- c.buf
	for range pipeline - 1 {
		free <- make([]byte, BufferSize)
	}
	stop := make(chan struct{})
	go c.fill(free, filled, stop)
	var (
		result, failed error
		finished       bool
	)
	for d := range filled {
		if d.err != nil {
			result = d.err
			continue
		}
		if finished {
			continue
		}
		var err error
		finished, err = c.walk(d.buf[:d.n], func(body []byte) error {
			if failed == nil {
				failed = visit(body)
			}
			return nil
		})
		if err != nil && (result == nil || !errors.Is(err, ErrInterrupted)) {
			result = err
		}
		if finished {
			close(stop)
			continue
		}
		free <- d.buf
	}
	if failed != nil {
		return failed
	}
	return result
}

// fill receives datagrams until the last message of the dump was seen.
func (c *Conn) fill(free <-chan []byte, filled chan<- datagram, stop <-chan struct{}) {
	defer close(filled)
	for {
		select {
		case <-stop:
			return
		case buf := <-free:
			n, err := c.receive(buf)
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			last := err != nil || lastOfDump(buf[:n], c.seq)
			filled <- datagram{buf, n, err}
			if last {
				return
			}
		}
	}
}

// lastOfDump reports whether the datagram ends the dump with the given sequence
// number. The kernel sends NLMSG_DONE and NLMSG_ERROR as the last message of a
// datagram; walking the headers costs a length per message.
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

// walk hands the messages of one datagram to visit. finished is true after the
// last message of the dump.
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
			continue // left over from a request that was given up
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
				return false, e
			}
		}
	}
}
