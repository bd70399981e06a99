// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/semaphore"
)

// Local serves the API on a Unix socket. Access is controlled by the socket's permissions.
type Local struct {
	listener *limitedListener
	http     *http.Server
	refusals *refusals
	bodies   *semaphore.Weighted // bytes of request bodies in progress; nil: no limit
}

// NewLocal returns a Local for the listener of the socket.
func NewLocal(l net.Listener, log *slog.Logger) *Local {
	refusals := newRefusals(log)
	limited := newLimited(l, maxConnections, maxOfClient, refusals.logRefused)
	limited.client, limited.surplus = processOf, refusalWriter(l.Addr())
	return &Local{listener: limited, refusals: refusals, bodies: semaphore.NewWeighted(maxBodies * maxConfig), http: &http.Server{
		ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: requestTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ConnContext: withPeer, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelError),
	}}
}

// NewPlain returns a Local for a TCP listener, with the same limits, for an API with a handler that
// authenticates its clients.
func NewPlain(l net.Listener, log *slog.Logger) *Local {
	refusals := newRefusals(log)
	return &Local{listener: newLimited(l, maxConnections, maxOfClient, refusals.logRefused), refusals: refusals, http: &http.Server{
		ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: requestTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelError),
	}}
}

// Serve answers by the handler until Shutdown, and always returns an error. The contexts of
// requests end with ctx.
func (l *Local) Serve(ctx context.Context, h http.Handler) error {
	if l.bodies != nil {
		h = withinBodies(h, l.bodies)
	}
	l.http.Handler = closeAfterRefusal(h)
	l.http.BaseContext = func(net.Listener) context.Context { return ctx }
	return l.http.Serve(l.listener)
}

// withinBodies refuses requests whose bodies would exceed the limit together with those in progress.
// A body of unknown length counts as maxConfig bytes.
func withinBodies(next http.Handler, bodies *semaphore.Weighted) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		size := r.ContentLength
		if size < 0 || size > maxConfig {
			size = maxConfig
		}
		if !bodies.TryAcquire(size) {
			w.Header().Set("Retry-After", "1")
			writeProblem(w, http.StatusServiceUnavailable, fmt.Sprintf("requests with %d MiB of bodies are in progress: try again in a moment", maxBodies*maxConfig>>20))
			return
		}
		defer bodies.Release(size)
		next.ServeHTTP(w, r)
	})
}

// Refused logs a client that the handler refused. Clients that are refused often have few lines in the log.
func (l *Local) Refused(client, cause string) { l.refusals.logRefused(client, cause) }

// Close closes everything at once, also before Serve.
func (l *Local) Close() error {
	_ = l.listener.Close() // http.Server knows the listener only after Serve, and may have closed it
	return l.http.Close()
}

// Shutdown waits until ctx ends for requests that are being answered, and closes everything.
func (l *Local) Shutdown(ctx context.Context) error { return l.http.Shutdown(ctx) }

// processOf names the process that opened the other end of a Unix socket.
func processOf(c net.Conn) string {
	peer := peerCredentials(c)
	if peer == nil {
		return "an unknown process"
	}
	return fmt.Sprintf("process %d of user %d", peer.Pid, peer.Uid)
}

// Limits of the answers to refused clients.
const (
	maxRefusing   = 64 // concurrently; further connections are closed without
	refuseTimeout = time.Second
)

// refusalWriter returns a function that reports to a client why its connection is refused.
func refusalWriter(at net.Addr) func(net.Conn, string) {
	places := make(chan struct{}, maxRefusing)
	return func(c net.Conn, cause string) {
		select {
		case places <- struct{}{}:
		default:
			c.Close()
			return
		}
		go func() {
			defer func() { <-places }()
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(refuseTimeout))
			if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil { // a client expects a response only after its request
				return
			}
			w := &bufferedWriter{header: http.Header{}}
			writeProblem(w, http.StatusServiceUnavailable, fmt.Sprintf("daemon on %s: %s: try again in a moment", at, cause))
			_ = w.send(c) // fails if the client has closed the connection
		}()
	}
}
