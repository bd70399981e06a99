// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"
)

// Bounds of what clients can hold open, over TCP and at the socket each: together less than
// the 1,024 files that a process may have open where nobody raised it. Who has proved
// nothing keeps a connection for readHeaderTimeout at most.
const (
	maxConnections = 256 // in all
	maxOfClient    = 32  // of one process, IPv4 address or IPv6 /64, so that none of them can have them all
)

// writeTimeout bounds the wait for a client that does not read its answer: 64 KiB are to be
// gone in this time. Who pages through 'sluice conns --list' looks at a page for a while.
const (
	writeTimeout = 2 * time.Minute
	writePiece   = 64 << 10
)

// limited is a listener that serves what is within the bounds, and cuts off who does not read.
type limited struct {
	net.Listener
	total, each int
	patience    time.Duration                  // with a client that does not read
	client      func(net.Conn) string          // whose connection it is
	surplus     func(c net.Conn, cause string) // ends a connection beyond the bounds
	refused     func(client, cause string)     // tells of it

	mu   sync.Mutex // protects the rest
	open int
	of   map[string]int // by client, entries above 0 only
}

func newLimited(l net.Listener, total, each int, refused func(client, cause string)) *limited {
	return &limited{
		Listener: l, total: total, each: each, patience: writeTimeout, refused: refused, of: map[string]int{},
		client:  func(c net.Conn) string { return clientOf(c.RemoteAddr()).String() },
		surplus: func(c net.Conn, _ string) { c.Close() }, // strangers are told nothing
	}
}

// Accept implements net.Listener.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		client := l.client(c)
		if cause := l.take(client); cause != "" {
			l.refused(name(c, client), cause)
			l.surplus(c, cause)
			continue
		}
		return &counted{
			Conn: c, client: client, patience: l.patience,
			deaf:    func() { l.refused(name(c, client), "it does not read its answer") },
			release: sync.OnceFunc(func() { l.give(client) }),
		}, nil
	}
}

// name is what the log calls the other end: its address, or the client where it has none.
func name(c net.Conn, client string) string {
	if _, unix := c.(*net.UnixConn); unix {
		return client
	}
	return c.RemoteAddr().String()
}

// clientOf returns what one host has: an IPv4 address or an IPv6 /64.
func clientOf(a net.Addr) netip.Prefix {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{}
	}
	at, bits := ap.Addr().Unmap().WithZone(""), 64
	if at.Is4() {
		bits = 32
	}
	return netip.PrefixFrom(at, bits).Masked()
}

func (l *limited) take(client string) (cause string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.open >= l.total:
		return "too many connections"
	case l.of[client] >= l.each:
		return "too many connections of this client"
	}
	l.open++
	l.of[client]++
	return ""
}

func (l *limited) give(client string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.of[client]--; l.of[client] == 0 {
		delete(l.of, client)
	}
}

// counted gives its place back when it is closed, and ends where the other end does not read.
type counted struct {
	net.Conn
	client   string
	patience time.Duration
	deaf     func()
	release  func()

	mu       sync.Mutex // protects the rest
	deadline time.Time  // of writing, that a handler set; zero: none
}

// SetWriteDeadline implements net.Conn.
func (c *counted) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	return c.Conn.SetWriteDeadline(t)
}

// SetDeadline implements net.Conn.
func (c *counted) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// allow gives the next piece its time: what a handler has set, and patience at most.
func (c *counted) allow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	end := time.Now().Add(c.patience)
	if !c.deadline.IsZero() && c.deadline.Before(end) {
		end = c.deadline
	}
	_ = c.Conn.SetWriteDeadline(end) // fails on a closed connection, as Write does
}

// Write implements net.Conn.
func (c *counted) Write(b []byte) (written int, err error) {
	for err == nil && written < len(b) {
		var n int
		c.allow()
		n, err = c.Conn.Write(b[written:min(written+writePiece, len(b))])
		written += n
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.deaf()
	}
	return written, err
}

func (c *counted) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// refusalsEvery is how often the log tells of refusals.
const refusalsEvery = 10 * time.Second

// refusals tells the log who was refused: a line in ten seconds, with the number of those
// that it has not named.
type refusals struct {
	log *slog.Logger
	now func() time.Time

	mu     sync.Mutex // protects the rest
	next   time.Time  // when there may be another line
	untold int
	total  uint64
}

func (r *refusals) tell(client, cause string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total++
	now := r.now()
	if now.Before(r.next) {
		r.untold++
		return
	}
	r.log.Warn("a client was refused", "client", client, "cause", cause, "others", r.untold)
	r.next, r.untold = now.Add(refusalsEvery), 0
}
