// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
)

// echoRequest holds the ICMP types of echo requests, RFC 792 and RFC 4443.
var echoRequest = map[flow.Protocol]uint8{flow.ICMP: 8, flow.ICMPv6: 128}

// Get returns the entry of a packet with the tuple, in either direction, or nil if none exists. For ICMP the packet
// is an echo request, with the tuple's source port as identifier.
func (c *Conn) Get(ctx context.Context, t flow.Tuple) (*Entry, error) {
	e := Entry{Protocol: t.Protocol, Family: unix.AF_INET6, Original: tupleOf(t)}
	if t.Source.Addr().Is4() {
		e.Family = unix.AF_INET
	}
	e.Original.ICMPType = echoRequest[t.Protocol]
	done := c.guard(ctx)
	found, err := c.get(&e)
	if cancelled := done(); cancelled != nil {
		return nil, cancelled
	}
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("conntrack entry of %s: %w", t, err)
	}
	return found, nil
}

func (c *Conn) get(e *Entry) (*Entry, error) {
	c.seq++
	b := request(c.buf[:0], msgGet, e.Family, 0, c.seq)
	if err := c.send(finish(e.appendTuple(b, ctaTupleOrig, &e.Original), 0)); err != nil {
		return nil, err
	}
	for {
		size, err := c.receive(c.buf)
		if err != nil {
			return nil, err
		}
		for rest := c.buf[:size]; ; {
			m, after, more, err := nextMessage(rest)
			if err != nil {
				return nil, err
			}
			if !more {
				break
			}
			rest = after
			switch {
			case m.seq != c.seq:
			case m.kind == unix.NLMSG_ERROR:
				return nil, m.errno()
			default:
				found := new(Entry)
				return found, found.decode(m.body)
			}
		}
	}
}
