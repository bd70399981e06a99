// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/flow"
	"github.com/sluice-lb/sluice/netdev"
)

// batch is the number of requests per datagram. 128 requests fit the default send buffer, and their acknowledgements
// fit the receive buffer.
const batch = 128

// Delete removes the entry with e's original tuple and zone. If e.ID is set, the kernel removes the entry only if it
// is the same connection. It reports false if the entry did not exist.
func (c *Conn) Delete(ctx context.Context, e *Entry) (bool, error) {
	n, err := c.sendAcknowledged(ctx, 1, func(b []byte, _ int) []byte { return c.deletion(b, e) }, unix.ENOENT)
	return n == 1, err
}

// DeleteAll removes every entry that matches f in one read of the table, and returns how many it removed. A nil or
// empty filter is an error: removing every entry cuts every connection.
func (c *Conn) DeleteAll(ctx context.Context, f *Filter) (deleted int, err error) {
	if f == nil || *f == (Filter{}) {
		return 0, errors.New("conntrack delete: no filter given: that would cut every connection of the namespace")
	}
	return c.DeleteIf(ctx, f, func(*Entry) bool { return true })
}

// DeleteIf is DeleteAll for the entries that wanted accepts. f may be nil; conditions in f are faster, because the
// kernel can apply them.
func (c *Conn) DeleteIf(ctx context.Context, f *Filter, wanted func(*Entry) bool) (deleted int, err error) {
	reader, err := c.Sibling()
	if err != nil {
		return 0, err
	}
	defer reader.Close()
	var (
		victims  = make([]Entry, 0, batch)
		complete = func() error {
			n, err := c.sendAcknowledged(ctx, len(victims), func(b []byte, i int) []byte { return c.deletion(b, &victims[i]) }, unix.ENOENT)
			deleted += n
			victims = victims[:0]
			return err
		}
	)
	err = reader.Dump(ctx, f, func(e *Entry) error {
		if !wanted(e) {
			return nil
		}
		if victims = append(victims, *e); len(victims) < batch {
			return nil
		}
		return complete()
	})
	if err != nil && !errors.Is(err, ErrInterrupted) {
		return deleted, err
	}
	return deleted, complete()
}

// DeleteOf removes the entries with these original tuples and returns how many it removed. Missing entries are
// skipped.
func (c *Conn) DeleteOf(ctx context.Context, entries []Entry) (deleted int, err error) {
	return c.inParts(ctx, entries, batch, c.deletion, unix.ENOENT)
}

// Sibling opens a second socket in the namespace of c. A netlink socket stays in its namespace, whatever the
// namespace of the calling thread. Any goroutine may call Sibling at any time: concurrent users of c open one socket
// per request and close it afterwards.
func (c *Conn) Sibling() (*Conn, error) {
	ns := netdev.Namespace{Name: "of the connection"}
	var fd int
	var err error
	if poll := c.raw.Control(func(s uintptr) { fd, err = unix.IoctlRetInt(int(s), unix.SIOCGSKNS) }); poll != nil {
		return nil, poll
	}
	if err != nil {
		return nil, fmt.Errorf("conntrack: namespace of the socket: %w", err)
	}
	defer unix.Close(fd)
	ns.Path = fmt.Sprintf("/proc/self/fd/%d", fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("conntrack: namespace of the socket: %w", err)
	}
	ns.Inode = st.Ino
	return OpenIn(ns)
}

// Insert creates the entries and returns how many it created. Each entry supplies original and reply tuple, state,
// timeout, mark and zone; Status may contain Assured, SeenReply and FixedTimeout. An entry with a used tuple is
// skipped.
//
// Inserted entries carry no NAT extension. The kernel tracks them, but translates their packets only if a rule or
// InsertNAT set up the reply tuple.
func (c *Conn) Insert(ctx context.Context, entries []Entry) (made int, err error) {
	return c.inParts(ctx, entries, batch, c.appendEntry, unix.EEXIST)
}

// InsertNAT creates the entries like Insert, and makes the kernel translate their packets to the reply tuple. This
// requires a NAT chain of the family.
func (c *Conn) InsertNAT(ctx context.Context, entries []Entry) (made int, err error) {
	return c.inParts(ctx, entries, natBatch, c.insertionNAT, unix.EEXIST)
}

// natBatch is batch for requests of twice the length.
const natBatch = batch / 2

func (c *Conn) insertionNAT(b []byte, e *Entry) []byte {
	// The kernel sets the reply tuple from the translation, so the tuple begins untranslated.
	plain := *e
	plain.Reply.Source, plain.Reply.SourcePort = e.Original.Dest, e.Original.DestPort
	plain.Reply.Dest, plain.Reply.DestPort = e.Original.Source, e.Original.SourcePort
	b = c.appendEntry(b, &plain)
	b = e.appendNAT(b, ctaNATSource, e.SourceTranslated(), e.Reply.Dest, e.Reply.DestPort)
	return e.appendNAT(b, ctaNATDest, e.DestTranslated(), e.Reply.Source, e.Reply.SourcePort)
}

// inParts sends one request per entry, size requests per datagram, and returns how many succeeded.
func (c *Conn) inParts(ctx context.Context, entries []Entry, size int, build func([]byte, *Entry) []byte, tolerated unix.Errno) (ok int, err error) {
	for part := range slices.Chunk(entries, size) {
		n, err := c.sendAcknowledged(ctx, len(part), func(b []byte, i int) []byte { return build(b, &part[i]) }, tolerated)
		ok += n
		if err != nil {
			return ok, err
		}
	}
	return ok, nil
}

// sendAcknowledged sends n requests in one datagram and waits for every answer. An answer with the tolerated error does
// not count as a success. Any other error is returned after all answers were read.
func (c *Conn) sendAcknowledged(ctx context.Context, n int, build func(b []byte, i int) []byte, tolerated unix.Errno) (ok int, err error) {
	if n == 0 {
		return 0, nil
	}
	done := c.guard(ctx)
	first := c.seq + 1
	b := c.buf[:0]
	for i := range n {
		c.seq++
		start := len(b)
		b = finish(build(b, i), start)
	}
	if err := c.send(b); err != nil {
		done()
		return 0, fmt.Errorf("conntrack request: %w", err)
	}
	for pending := n; pending > 0; {
		size, rerr := c.receive(c.buf)
		if rerr != nil {
			if cancelled := done(); cancelled != nil {
				return ok, cancelled
			}
			return ok, fmt.Errorf("conntrack answer: %w", rerr)
		}
		for rest := c.buf[:size]; ; {
			var m message
			var more bool
			if m, rest, more, rerr = nextMessage(rest); rerr != nil || !more {
				break
			}
			if m.kind != unix.NLMSG_ERROR || m.seq-first >= uint32(n) {
				continue
			}
			pending--
			switch e := m.errno(); {
			case e == nil:
				ok++
			case !errors.Is(e, tolerated) && err == nil:
				err = fmt.Errorf("conntrack request %d of %d: %w", m.seq-first+1, n, e)
			}
		}
	}
	if cancelled := done(); cancelled != nil {
		return ok, cancelled
	}
	return ok, err
}

// Flags of linux/netfilter/nf_conntrack_tcp.h.
const (
	tcpCloseInit = 0x04 // IP_CT_TCP_FLAG_CLOSE_INIT: a SYN opens another connection.
	tcpBeLiberal = 0x08 // IP_CT_TCP_FLAG_BE_LIBERAL: accept segments outside the windows.
)

func (c *Conn) deletion(b []byte, e *Entry) []byte {
	b = request(b, msgDelete, e.Family, unix.NLM_F_ACK, c.seq)
	b = e.appendTuple(b, ctaTupleOrig, &e.Original)
	if e.ID != 0 {
		b = attribute32(b, ctaID, e.ID)
	}
	return e.appendZone(b)
}

func (c *Conn) appendEntry(b []byte, e *Entry) []byte {
	b = request(b, msgNew, e.Family, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL, c.seq)
	b = e.appendTuple(b, ctaTupleOrig, &e.Original)
	b = e.appendTuple(b, ctaTupleReply, &e.Reply)
	b = attribute32(b, ctaStatus, uint32(e.Status&(Assured|SeenReply|FixedTimeout)|Confirmed))
	b = attribute32(b, ctaTimeout, e.Timeout)
	if e.Mark != 0 {
		b = attribute32(b, ctaMark, e.Mark)
	}
	if e.Protocol == flow.TCP {
		b = appendTCP(b, e.State, tcpBeLiberal) // the kernel has not seen the windows of this connection
	}
	return e.appendZone(b)
}

// Liberal makes the kernel accept segments of open TCP connections outside of their windows, and returns the number
// of changed connections. It is for connections whose packets the kernel does not see for a time.
func (c *Conn) Liberal(ctx context.Context, entries []Entry) (done int, err error) {
	return c.inParts(ctx, entries, batch, c.appendLiberal, unix.ENOENT)
}

func (c *Conn) appendLiberal(b []byte, e *Entry) []byte {
	b = request(b, msgNew, e.Family, unix.NLM_F_ACK, c.seq)
	b = e.appendTuple(b, ctaTupleOrig, &e.Original)
	b, info := openNest(b, ctaProtoInfo)
	b, tcp := openNest(b, ctaInfoTCP)
	b = appendTCPFlags(b, tcpBeLiberal)
	return e.appendZone(closeNest(closeNest(b, tcp), info))
}

// appendTCP appends a TCP state, and flags for both directions.
func appendTCP(b []byte, state, flags byte) []byte {
	b, info := openNest(b, ctaProtoInfo)
	b, tcp := openNest(b, ctaInfoTCP)
	b = attribute(b, ctaState, state)
	return closeNest(closeNest(appendTCPFlags(b, flags), tcp), info)
}

func appendTCPFlags(b []byte, flags byte) []byte {
	for direction := range uint16(2) {
		b = attribute(b, ctaTCPFlags+direction, flags, flags)
	}
	return b
}

// CutOff marks open TCP connections as closed in the kernel and returns how many it marked. Their entries stay until
// their timeout, whatever packets they see. Rules recognize both directions by the status FixedTimeout. A SYN opens a
// new connection in place of the entry.
func (c *Conn) CutOff(ctx context.Context, entries []Entry) (done int, err error) {
	return c.inParts(ctx, entries, batch, c.cutOff, unix.ENOENT)
}

func (c *Conn) cutOff(b []byte, e *Entry) []byte {
	b = request(b, msgNew, e.Family, unix.NLM_F_ACK, c.seq)
	b = e.appendTuple(b, ctaTupleOrig, &e.Original)
	b = attribute32(b, ctaStatus, uint32(e.Status|FixedTimeout))
	b = appendTCP(b, byte(TCPClose), tcpCloseInit|tcpBeLiberal)
	return e.appendZone(b)
}

// appendNAT appends a request to translate one side to an address and port.
func (e *Entry) appendNAT(b []byte, kind uint16, wanted bool, to Addr, port uint16) []byte {
	if !wanted {
		return b
	}
	b, nat := openNest(b, kind)
	if e.Family == unix.AF_INET {
		b = attribute(b, ctaNATv4Min, to[12:]...)
		b = attribute(b, ctaNATv4Max, to[12:]...)
	} else {
		b = attribute(b, ctaNATv6Min, to[:]...)
		b = attribute(b, ctaNATv6Max, to[:]...)
	}
	b, proto := openNest(b, ctaNATProto)
	b = attribute16(b, ctaProtoNATMin, port)
	b = attribute16(b, ctaProtoNATMax, port)
	return closeNest(closeNest(b, proto), nat)
}

func (e *Entry) appendZone(b []byte) []byte {
	if e.Zone == 0 {
		return b
	}
	return attribute16(b, ctaZone, e.Zone)
}

func (e *Entry) appendTuple(b []byte, kind uint16, t *Tuple) []byte {
	b, tuple := openNest(b, kind)
	b, ip := openNest(b, ctaTupleIP)
	if e.Family == unix.AF_INET {
		b = attribute(b, ctaIPv4Src, t.Source[12:]...)
		b = attribute(b, ctaIPv4Dst, t.Dest[12:]...)
	} else {
		b = attribute(b, ctaIPv6Src, t.Source[:]...)
		b = attribute(b, ctaIPv6Dst, t.Dest[:]...)
	}
	b = closeNest(b, ip)
	b, proto := openNest(b, ctaTupleProto)
	b = attribute(b, ctaProtoNum, byte(e.Protocol))
	switch e.Protocol {
	case flow.ICMP:
		b = attribute16(b, ctaProtoICMPID, t.SourcePort)
		b = attribute(b, ctaProtoICMPType, t.ICMPType)
		b = attribute(b, ctaProtoICMPCode, t.ICMPCode)
	case flow.ICMPv6:
		b = attribute16(b, ctaProtoICMPv6ID, t.SourcePort)
		b = attribute(b, ctaProtoICMPv6Type, t.ICMPType)
		b = attribute(b, ctaProtoICMPv6Code, t.ICMPCode)
	default:
		b = attribute16(b, ctaProtoSrcPort, t.SourcePort)
		b = attribute16(b, ctaProtoDstPort, t.DestPort)
	}
	return closeNest(closeNest(b, proto), tuple)
}
