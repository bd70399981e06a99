// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"log"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-lb/sluice/lab"
)

// Web is an HTTP server that answers every request with its [Answer].
type Web struct {
	node     *lab.Node
	name     string
	addrs    []string
	requests atomic.Uint64
	status   atomic.Int32

	mu      sync.Mutex // protects running
	running *http.Server
}

// ServeWeb starts a web server in the node on all addresses, literals such as "10.0.2.2:8080".
func ServeWeb(n *lab.Node, name string, addrs ...string) (*Web, error) {
	w := &Web{node: n, name: name, addrs: addrs}
	w.status.Store(http.StatusOK)
	if err := w.Start(); err != nil {
		return nil, err
	}
	return w, nil
}

// Start starts the server again after [Web.Stop]. It does nothing while the server runs.
func (w *Web) Start() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running != nil {
		return nil
	}
	server := &http.Server{
		Handler:           w,
		ReadHeaderTimeout: 10 * time.Second,
		ErrorLog:          log.New(discard{}, "", 0), // a disconnect is not an error here
	}
	var listeners []net.Listener
	for _, a := range w.addrs {
		l, err := w.node.Listen(a)
		if err != nil {
			for _, open := range listeners {
				open.Close()
			}
			return fmt.Errorf("web server %s: %w", w.name, err)
		}
		listeners = append(listeners, l)
	}
	for _, l := range listeners {
		go server.Serve(l) //nolint:errcheck // ends with Stop
	}
	w.running = server
	return nil
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// Stop closes the listeners and every open connection immediately, as the exit of its process would.
func (w *Web) Stop() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.running == nil {
		return nil
	}
	err := w.running.Close()
	w.running = nil
	return err
}

// ServeHTTP answers one request.
func (w *Web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w.requests.Add(1)
	rw.WriteHeader(int(w.status.Load()))
	fmt.Fprintln(rw, Answer{w.name, r.RemoteAddr})
}

// Name returns the name in the server's answers.
func (w *Web) Name() string { return w.name }

// Requests returns the number of received requests, including health checks.
func (w *Web) Requests() uint64 { return w.requests.Load() }

// SetStatus sets the HTTP status of further answers.
func (w *Web) SetStatus(code int) { w.status.Store(int32(code)) }
