// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-lb/sluice/api"
)

// counting counts the connections of a listener.
type counting struct {
	net.Listener
	n atomic.Int64
}

func (c *counting) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err == nil {
		c.n.Add(1)
	}
	return conn, err
}

// TestManyRequestsAtATime: a client with many concurrent requests reuses its connections.
func TestManyRequestsAtATime(t *testing.T) {
	const clients, rounds = 25, 10
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	answer := []byte("{}" + strings.Repeat(" ", 5000) + "\n") // too long for a Content-Length
	connections := &counting{Listener: l}
	var together sync.WaitGroup // outstanding requests of a round
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		together.Done()
		together.Wait() // so that all are open at the same time
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(answer)
	})}
	go func() { _ = srv.Serve(connections) }()
	defer srv.Close()
	c := api.NewClient(at)
	for range rounds {
		together.Add(clients)
		var done sync.WaitGroup
		for range clients {
			done.Go(func() {
				if _, err := c.Status(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		done.Wait()
	}
	if n := connections.n.Load(); n > clients+3 { // api.maxConns
		t.Errorf("%d requests at a time, %d times, took %d connections", clients, rounds, n)
	}
}
