// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Event is why the kernel tells about an entry.
type Event uint8

// The events; values are bits, to be joined for Listen.
const (
	New     Event = 1 << iota // the first packet of a connection was let through
	Update                    // its state changed; about four for each TCP connection
	Destroy                   // it was forgotten; counters are final
)

// eventBuffer is the receive buffer of a Listener in bytes: at 300 bytes an
// event it holds a burst of some 10,000 (the kernel charges whole buffers).
const eventBuffer = 8 << 20

// Listener receives the kernel's events of one namespace. Listening costs the
// packet path: all events about 31 % of the connection rate, Destroy alone about
// 4 %. It is not safe for concurrent use.
type Listener struct {
	conn *Conn
	lost uint32
}

// Listen subscribes to the given events in the namespace.
func Listen(ns Namespace, events Event) (*Listener, error) {
	if events == 0 || events&^(New|Update|Destroy) != 0 {
		return nil, fmt.Errorf("conntrack events %#x: want a combination of New, Update and Destroy", uint8(events))
	}
	var c *Conn
	err := ns.Do(func() (err error) {
		c, err = open(uint32(events)) // bit n-1 is group n: NFNLGRP_CONNTRACK_NEW is group 1
		return err
	})
	if err != nil {
		return nil, err
	}
	err = c.control(func(fd int) error {
		// The first needs CAP_NET_ADMIN over the initial user namespace, the
		// second is cut at net.core.rmem_max.
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer) == nil {
			return nil
		}
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, eventBuffer)
	})
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("conntrack events: receive buffer: %w", err)
	}
	return &Listener{conn: c}, nil
}

func (c *Conn) control(fn func(fd int) error) error {
	var err error
	if poll := c.raw.Control(func(fd uintptr) { err = fn(int(fd)) }); poll != nil {
		return poll
	}
	return err
}

// Close ends the subscription; a Read that waits returns.
func (l *Listener) Close() error { return l.conn.Close() }

// Read waits for events and calls visit for each of at least one; the entry is
// reused. lost is how many events the kernel threw away since the last Read
// because this process was too slow: what is known of the table is then old,
// and only a dump makes it true again.
func (l *Listener) Read(ctx context.Context, visit func(Event, *Entry) error) (lost uint32, err error) {
	done := l.conn.guard(ctx)
	var n int
	for n == 0 && err == nil {
		if n, err = l.conn.receive(l.conn.buf); errors.Is(err, unix.ENOBUFS) {
			done()
			return l.dropped(), nil
		}
	}
	if cancelled := done(); cancelled != nil {
		return 0, cancelled
	}
	if err != nil {
		return 0, fmt.Errorf("conntrack events: %w", err)
	}
	var e Entry
	for b := l.conn.buf[:n]; ; {
		m, rest, ok, err := nextMessage(b)
		if err != nil || !ok {
			return l.dropped(), err
		}
		b = rest
		event := eventOf(m)
		if event == 0 {
			continue
		}
		if err := e.decode(m.body); err != nil {
			return l.dropped(), err
		}
		if err := visit(event, &e); err != nil {
			return l.dropped(), err
		}
	}
}

func eventOf(m message) Event {
	switch m.kind {
	case unix.NFNL_SUBSYS_CTNETLINK<<8 | msgNew:
		if m.flags&(unix.NLM_F_CREATE|unix.NLM_F_EXCL) != 0 {
			return New
		}
		return Update
	case unix.NFNL_SUBSYS_CTNETLINK<<8 | msgDelete:
		return Destroy
	}
	return 0
}

// dropped asks the socket how many messages it could not take (SK_MEMINFO_DROPS)
// and returns the growth since it was last asked.
func (l *Listener) dropped() uint32 {
	var total uint32
	_ = l.conn.control(func(fd int) error {
		info, err := socketMemory(fd)
		if err == nil {
			total = info[skMeminfoDrops]
		}
		return err
	})
	grown := total - l.lost
	l.lost = total
	return grown
}
