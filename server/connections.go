// SPDX-License-Identifier: Apache-2.0

package server

import (
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Bounds of what strangers can hold open. Who has proved nothing keeps a connection for
// readHeaderTimeout at most.
const (
	maxConnections = 256 // in all
	maxOfClient    = 32  // of one IPv4 address or IPv6 /64, so that one host cannot have them all
)

// limited is a listener that closes at once what is beyond the bounds.
type limited struct {
	net.Listener
	total, each int
	refused     func(client, cause string)

	mu   sync.Mutex // protects the rest
	open int
	of   map[netip.Prefix]int // by client, entries above 0 only
}

func newLimited(l net.Listener, total, each int, refused func(client, cause string)) *limited {
	return &limited{Listener: l, total: total, each: each, refused: refused, of: map[netip.Prefix]int{}}
}

// Accept implements net.Listener.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		client := clientOf(c.RemoteAddr())
		if cause := l.take(client); cause != "" {
			c.Close()
			l.refused(c.RemoteAddr().String(), cause)
			continue
		}
		return &counted{Conn: c, release: sync.OnceFunc(func() { l.give(client) })}, nil
	}
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

func (l *limited) take(client netip.Prefix) (cause string) {
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

func (l *limited) give(client netip.Prefix) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.of[client]--; l.of[client] == 0 {
		delete(l.of, client)
	}
}

// counted gives its place back when it is closed.
type counted struct {
	net.Conn
	release func()
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
