// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/engine"
	"github.com/sluice-lb/sluice/flow"
)

// endless returns flows as long as a reader takes them, and reports when the reader stops.
type endless struct {
	still
	ended chan struct{}
}

func (d *endless) Flows(_ context.Context, yield func(flow.Flow) bool) error {
	t := flow.Tuple{Protocol: flow.TCP, Source: addrPort("198.51.100.7", 40000), Dest: addrPort("192.0.2.10", 80)}
	for yield(flow.Flow{Original: t, Reply: t.Reverse(), Datapath: "nftables"}) {
	}
	d.ended <- struct{}{}
	return nil
}

// serveLocal serves the datapath's flows at a socket and returns the socket's path.
func serveLocal(t *testing.T, d datapath.Datapath, stallTimeout time.Duration) (string, *logged) {
	t.Helper()
	e := engine.New(engine.Options{Datapaths: []datapath.Datapath{d}})
	cfg, err := config.Decode("test.yaml", []byte(web))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Apply(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	said := &logged{}
	local := NewLocal(l, slog.New(slog.NewTextHandler(said, nil)))
	local.listener.stallTimeout = stallTimeout
	go func() { _ = local.Serve(context.Background(), New(Options{Engine: e})) }()
	t.Cleanup(func() { local.http.Close() })
	return at, said
}

func dialLocal(t *testing.T, at string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a request and returns the response with an unread body.
func ask(t *testing.T, c net.Conn, path string) *http.Response {
	t.Helper()
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: sluice\r\n\r\n", path); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// TestSocketBoundsConnections: a process with too many connections gets an error, and its other connections are
// served.
func TestSocketBoundsConnections(t *testing.T) {
	at, said := serveLocal(t, &still{}, writeTimeout)
	var served net.Conn
	for range maxOfClient {
		served = dialLocal(t, at)
		if answer := ask(t, served, "/api/v1/status"); answer.StatusCode != http.StatusOK { // it is being served
			t.Fatal(answer.Status)
		}
	}
	want := fmt.Sprintf("daemon on %s: too many connections of this client: try again in a moment", at)
	if _, err := api.NewClient(at).Status(t.Context()); err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
	if got := said.take(); !strings.Contains(got, fmt.Sprintf("process %d of user %d", os.Getpid(), os.Getuid())) {
		t.Errorf("the log: %s", got)
	}
	served.Close()
	for { // until the daemon has noticed it
		if _, err := api.NewClient(at).Status(t.Context()); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestManyRequestsOfOneClient: a program with more concurrent requests than its limit of connections is still
// served.
func TestManyRequestsOfOneClient(t *testing.T) {
	at, _ := serveLocal(t, &still{}, writeTimeout)
	c := api.NewClient(at)
	var all sync.WaitGroup
	for range 8 * maxOfClient {
		all.Go(func() {
			if _, err := c.Status(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// TestListsOfFlowsAreFew: both operations write flows while the table is read, so that the first flows of
// a table without an end reach the client. More requests than a few at a time are refused.
func TestListsOfFlowsAreFew(t *testing.T) {
	for _, path := range []string{"/api/v1/flows/stream", "/api/v1/flows?limit=100000"} {
		t.Run(path, func(t *testing.T) {
			d := &endless{ended: make(chan struct{}, 1+maxStreams)}
			at, _ := serveLocal(t, d, time.Hour)
			var one net.Conn
			for range maxStreams {
				one = dialLocal(t, at)
				if answer := ask(t, one, path); answer.StatusCode != http.StatusOK {
					t.Fatal(answer.Status)
				}
			}
			err := api.NewClient(at).EachFlow(t.Context(), url.Values{}, func(*api.Flow) error { return nil })
			_, all := api.NewClient(at).Flows(t.Context(), url.Values{})
			for _, err := range []error{err, all} {
				if want := "16 lists of flows are being read: try again in a moment"; err == nil || err.Error() != want {
					t.Errorf("%v\nwant %s", err, want)
				}
			}
			one.Close()
			<-d.ended
			for ask(t, dialLocal(t, at), path).StatusCode != http.StatusOK {
				time.Sleep(10 * time.Millisecond) // its slot is released after the last flow
			}
		})
	}
}

// breaking is a datapath that fails in the middle of its table.
type breaking struct {
	still
	after int // number of flows before the failure
}

func (d *breaking) Flows(ctx context.Context, yield func(flow.Flow) bool) error {
	for range d.after {
		_ = d.still.Flows(ctx, yield)
	}
	return errors.New("the dump was interrupted")
}

// TestFlowsThatBreakOff: an error before the first flow is a problem document. A later error ends the
// connection, so that the client does not take a part of the flows for all.
func TestFlowsThatBreakOff(t *testing.T) {
	for after, want := range map[int]string{3: "nftables: the dump was interrupted", 100_000: "unexpected EOF"} {
		at, _ := serveLocal(t, &breaking{after: after}, time.Hour)
		if list, err := api.NewClient(at).Flows(t.Context(), url.Values{"limit": {"100000"}}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("after %d: %v, %v, want %s", after, list, err, want)
		}
	}
}

// TestStreamThatNobodyReads checks that an unread stream ends, and that the log names its client.
func TestStreamThatNobodyReads(t *testing.T) {
	d := &endless{ended: make(chan struct{})}
	at, said := serveLocal(t, d, 50*time.Millisecond)
	ask(t, dialLocal(t, at), "/api/v1/flows/stream")
	<-d.ended
	if got := said.take(); !strings.Contains(got, fmt.Sprintf("process %d ", os.Getpid())) || !strings.Contains(got, "it does not read its answer") {
		t.Errorf("the log: %s", got)
	}
}

// paced is a connection on which each write takes nearly all of the allowed time.
type paced struct {
	net.Conn
	allowed bool
	longest int
	written int
}

func (c *paced) SetWriteDeadline(time.Time) error { c.allowed = true; return nil }

func (c *paced) Write(b []byte) (int, error) {
	if !c.allowed {
		return 0, os.ErrDeadlineExceeded
	}
	c.allowed, c.longest, c.written = false, max(c.longest, len(b)), c.written+len(b)
	return len(b), nil
}

// TestDeadlineOfAHandler: a handler may shorten the deadline of its listener, not extend it.
func TestDeadlineOfAHandler(t *testing.T) {
	one, other := net.Pipe() // nothing reads from it
	defer other.Close()
	cut := 0
	c := &countedConn{Conn: one, stallTimeout: 200 * time.Millisecond, slowReader: func() { cut++ }, release: func() {}}
	defer c.Close()
	for _, handler := range []time.Duration{time.Millisecond, time.Hour} {
		if err := c.SetWriteDeadline(time.Now().Add(handler)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte{1}); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a handler that allows %v: %v", handler, err)
		}
	}
	if cut != 2 {
		t.Errorf("cut off %d times", cut)
	}
}

// TestSlowReaders: a response may take any time while the client reads parts.
func TestSlowReaders(t *testing.T) {
	c := &paced{}
	n, err := (&countedConn{Conn: c, slowReader: func() { t.Error("cut off") }}).Write(make([]byte, 10*writePiece+1))
	if err != nil || n != 10*writePiece+1 || c.written != n || c.longest != writePiece {
		t.Errorf("%d bytes, %v: %+v", n, err, c)
	}
}

// TestBodiesInProgress: the socket bounds the bytes of the bodies in progress, also of bodies with
// unknown length. Requests without a body are served meanwhile.
func TestBodiesInProgress(t *testing.T) {
	for name, length := range map[string]int64{"large": maxConfig, "unknown": -1, "larger than allowed": maxConfig + 1} {
		t.Run(name, func(t *testing.T) {
			begun, end := make(chan bool), make(chan bool)
			h := withinBodies(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodPost {
					begun <- true
					<-end
				}
			}), semaphore.NewWeighted(maxBodies*maxConfig))
			ask := func(method string, length int64) int {
				r := httptest.NewRequest(method, "/api/v1/plan", nil)
				r.ContentLength = length
				w := httptest.NewRecorder()
				h.ServeHTTP(w, r)
				return w.Code
			}
			codes := make(chan int)
			for range maxBodies {
				go func() { codes <- ask(http.MethodPost, length) }()
				<-begun
			}
			if code := ask(http.MethodPost, 1); code != http.StatusServiceUnavailable {
				t.Errorf("a body beyond the limit: %d", code)
			}
			if code := ask(http.MethodGet, 0); code != http.StatusOK {
				t.Errorf("a request without a body: %d", code)
			}
			close(end)
			for range maxBodies {
				if code := <-codes; code != http.StatusOK {
					t.Errorf("a body within the limit: %d", code)
				}
			}
			go func() { <-begun }()
			if code := ask(http.MethodPost, length); code != http.StatusOK {
				t.Errorf("after the bodies: %d", code)
			}
		})
	}
}
