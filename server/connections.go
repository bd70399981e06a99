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

// Limits of open connections, for TCP and for the socket each. Together they are below 1,024, the
// usual limit of open files of a process. A client that has not authenticated keeps a connection for
// at most readHeaderTimeout.
const (
	maxConnections = 256 // of all clients
	maxOfClient    = 32  // of one process, IPv4 address or IPv6 /64
)

// writeTimeout is the time in which a client must read 64 KiB of a response. It is long because a
// user may pause 'sluice conns --list' in a pager.
const (
	writeTimeout = 2 * time.Minute
	writePiece   = 64 << 10
)

// limitedListener is a listener that enforces the limits, and closes connections of clients that do not
// read.
type limitedListener struct {
	net.Listener
	total, each  int
	stallTimeout time.Duration                  // Maximum time without progress of the client.
	client       func(net.Conn) string          // The client of a connection, for counting.
	surplus      func(c net.Conn, cause string) // Closes a connection beyond the limits.
	refused      func(client, cause string)     // Reports a refused client.

	mu   sync.Mutex // protects the rest
	open int
	of   map[string]int // by client, entries above 0 only
}

func newLimited(l net.Listener, total, each int, refused func(client, cause string)) *limitedListener {
	return &limitedListener{
		Listener: l, total: total, each: each, stallTimeout: writeTimeout, refused: refused, of: map[string]int{},
		client:  func(c net.Conn) string { return clientOf(c.RemoteAddr()).String() },
		surplus: func(c net.Conn, _ string) { c.Close() }, // no response to an unauthenticated client
	}
}

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		client := l.client(c)
		if cause := l.acquire(client); cause != "" {
			l.refused(name(c, client), cause)
			l.surplus(c, cause)
			continue
		}
		return &countedConn{
			Conn: c, client: client, stallTimeout: l.stallTimeout,
			slowReader: func() { l.refused(name(c, client), "it does not read its answer") },
			release:    sync.OnceFunc(func() { l.release(client) }),
		}, nil
	}
}

// name returns the client's name in the log: its address, or the process at the socket.
func name(c net.Conn, client string) string {
	if _, unix := c.(*net.UnixConn); unix {
		return client
	}
	return c.RemoteAddr().String()
}

// clientOf returns the prefix that counts as one client: an IPv4 address or an IPv6 /64.
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

func (l *limitedListener) acquire(client string) (cause string) {
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

func (l *limitedListener) release(client string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.of[client]--; l.of[client] == 0 {
		delete(l.of, client)
	}
}

// countedConn is a connection that is counted until it is closed. It fails if the client does not read.
type countedConn struct {
	net.Conn
	client       string
	stallTimeout time.Duration
	slowReader   func()
	release      func()

	mu       sync.Mutex // Protects the rest.
	deadline time.Time  // Write deadline set by a handler; zero: none.
}

// SetWriteDeadline implements net.Conn.
func (c *countedConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	return c.Conn.SetWriteDeadline(t)
}

// SetDeadline implements net.Conn.
func (c *countedConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// allow sets the deadline of the next write: the handler's, but at most stallTimeout.
func (c *countedConn) allow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	end := time.Now().Add(c.stallTimeout)
	if !c.deadline.IsZero() && c.deadline.Before(end) {
		end = c.deadline
	}
	_ = c.Conn.SetWriteDeadline(end) // fails on a closed connection, as Write does
}

// Write implements net.Conn.
func (c *countedConn) Write(b []byte) (written int, err error) {
	for err == nil && written < len(b) {
		var n int
		c.allow()
		n, err = c.Conn.Write(b[written:min(written+writePiece, len(b))])
		written += n
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.slowReader()
	}
	return written, err
}

func (c *countedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// logEvery is the minimum interval between log lines of one kind about clients.
const logEvery = 10 * time.Second

// logLimiter permits one log line every logEvery and counts the suppressed ones.
type logLimiter struct {
	now func() time.Time

	mu     sync.Mutex // Protects the rest.
	next   time.Time  // Time of the next log line, at the earliest.
	untold int
	total  uint64
}

// allow reports whether a line may be logged, and the number of suppressed lines.
func (p *logLimiter) allow() (others int, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total++
	now := p.now()
	if now.Before(p.next) {
		p.untold++
		return 0, false
	}
	others, p.untold = p.untold, 0
	p.next = now.Add(logEvery)
	return others, true
}

// refusals logs refused clients.
type refusals struct {
	log *slog.Logger
	logLimiter
}

func newRefusals(log *slog.Logger) *refusals {
	return &refusals{log: log, logLimiter: logLimiter{now: time.Now}}
}

func (r *refusals) logRefused(client, cause string) {
	if others, ok := r.allow(); ok {
		r.log.Warn("a client was refused", "client", client, "cause", cause, "others", others)
	}
}
