// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const never = time.Hour // longer than any test

// dialFrom connects to a server on loopback from 127.0.0.N, which counts as a separate client.
func dialFrom(t *testing.T, n byte, to net.Addr) net.Conn {
	t.Helper()
	from := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, n)}}
	c, err := from.DialContext(t.Context(), to.Network(), to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestRefusedRequestsClose: clients without credentials use all connections and announce bodies that they do not
// send. Each request is refused, and its connection is closed without a timeout.
func TestRefusedRequestsClose(t *testing.T) {
	d := newTCPDaemon(t)
	d.timeout = never
	d.open("tokens", true, hello)
	var conns []net.Conn
	for i := range maxConnections {
		c := dialFrom(t, byte(2+i/maxOfClient), d.tcp.Addr())
		fmt.Fprint(c, "POST /api/v1/plan HTTP/1.1\r\nHost: sluice\r\nContent-Type: application/yaml\r\nContent-Length: 1000\r\n\r\n")
		conns = append(conns, c)
	}
	for _, c := range conns {
		answer, err := io.ReadAll(c) // reads to the end of the connection
		if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 401") {
			t.Fatalf("%q, %v", answer, err)
		}
	}
	resp, text, err := d.ask(d.client(), "GET", "/", "Authorization", "Bearer "+secret)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("a client with a token: %s, %v", text, err)
	}
}

// TestRefusalsOfEveryKindClose: a request can be refused before its body arrives, for every reason known by
// then. The connection is closed.
func TestRefusalsOfEveryKindClose(t *testing.T) {
	bearer := "Authorization: Bearer " + secret + "\r\n"
	for name, head := range map[string]string{
		"no token":       "PUT /api/v1/config HTTP/1.1\r\n",
		"read only":      "PUT /api/v1/config HTTP/1.1\r\n" + bearer,
		"another origin": "POST /api/v1/plan HTTP/1.1\r\nSec-Fetch-Site: cross-site\r\n" + bearer,
		"no such path":   "POST /api/v1/nothing HTTP/1.1\r\n" + bearer,
		"wrong method":   "GET /api/v1/nothing HTTP/1.1\r\n" + bearer,
	} {
		t.Run(name, func(t *testing.T) {
			d := newTCPDaemon(t)
			d.timeout = never
			d.open("tokens", false, New(Options{}))
			c := dialFrom(t, 1, d.tcp.Addr())
			fmt.Fprint(c, head+"Host: sluice\r\nContent-Length: 1000\r\n\r\n")
			if answer, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 4") {
				t.Errorf("%q, %v", answer, err)
			}
		})
	}
}

// TestEveryRequestHasADeadline: on each listener, with and without credentials, a header or body that
// does not arrive ends the connection. The deadlines are short, and nothing else ends the connections.
func TestEveryRequestHasADeadline(t *testing.T) {
	const soon = time.Millisecond
	bearer := "Authorization: Bearer " + secret + "\r\n"
	takes := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err != nil {
			w.WriteHeader(http.StatusRequestTimeout)
		}
	})
	listeners := map[string]func(t *testing.T) net.Addr{
		"tcp": func(t *testing.T) net.Addr {
			d := newTCPDaemon(t)
			d.timeout = soon
			d.open("tokens", true, takes)
			return d.tcp.Addr()
		},
	}
	for name, create := range map[string]func(net.Listener, *slog.Logger) *Local{"unix": NewLocal, "tcp4": NewPlain} {
		listeners[name] = func(t *testing.T) net.Addr {
			at := map[string]string{"unix": filepath.Join(t.TempDir(), "s"), "tcp4": "127.0.0.1:0"}[name]
			l, err := net.Listen(name, at)
			if err != nil {
				t.Fatal(err)
			}
			local := create(l, slog.New(slog.DiscardHandler))
			local.http.ReadTimeout, local.http.ReadHeaderTimeout = soon, soon
			go func() { _ = local.Serve(t.Context(), takes) }()
			t.Cleanup(func() { local.Close() })
			return l.Addr()
		}
	}
	for name, listen := range listeners {
		for what, sent := range map[string]string{
			"nothing": "", "half a header": "POST /api/v1/plan HTTP/1.1\r\nHost:", "no token, no body": "POST /api/v1/plan HTTP/1.1\r\nHost: sluice\r\nContent-Length: 9\r\n\r\n",
			"no body":        "POST /api/v1/plan HTTP/1.1\r\nHost: sluice\r\n" + bearer + "Content-Length: 9\r\n\r\n",
			"half a body":    "POST /api/v1/plan HTTP/1.1\r\nHost: sluice\r\n" + bearer + "Content-Length: 9\r\n\r\nabc",
			"half a chunk":   "POST /api/v1/plan HTTP/1.1\r\nHost: sluice\r\n" + bearer + "Transfer-Encoding: chunked\r\n\r\n9\r\nabc",
			"an odd chunk":   "POST /api/v1/plan HTTP/1.1\r\nHost: sluice\r\n" + bearer + "Transfer-Encoding: chunked\r\n\r\n",
			"GET and a body": "GET /metrics HTTP/1.1\r\nHost: sluice\r\n" + bearer + "Content-Length: 9\r\n\r\n",
		} {
			t.Run(name+"/"+what, func(t *testing.T) {
				to := listen(t)
				c, err := net.Dial(to.Network(), to.String())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				fmt.Fprint(c, sent)
				_, _ = io.ReadAll(c) // returns when the connection ends, with or without an answer
			})
		}
	}
}

// noted is a listener whose connections record their read deadline.
type noted struct {
	net.Listener
	deadline atomic.Pointer[time.Time]
}

func (n *noted) Accept() (net.Conn, error) {
	c, err := n.Listener.Accept()
	return &notedConn{c, n}, err
}

type notedConn struct {
	net.Conn
	of *noted
}

func (c *notedConn) SetReadDeadline(at time.Time) error {
	c.of.deadline.Store(&at)
	return c.Conn.SetReadDeadline(at)
}

// TestStreamsOutliveTheDeadline: the read deadline of a connection ends when the request is complete, with and
// without a body. Otherwise net/http would end the context of the response.
func TestStreamsOutliveTheDeadline(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &noted{Listener: l}
	local := NewPlain(n, slog.New(slog.DiscardHandler))
	go func() {
		_ = local.Serve(t.Context(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if before := n.deadline.Load(); r.ContentLength > 0 && before.IsZero() {
				t.Error("no deadline before the body")
			}
			_, _ = io.ReadAll(r.Body)
			if at := n.deadline.Load(); !at.IsZero() {
				t.Errorf("%s: the connection ends at %v", r.Method, at)
			}
		}))
	}()
	t.Cleanup(func() { local.Close() })
	for _, body := range []io.Reader{nil, strings.NewReader("abc")} {
		resp, err := http.Post("http://"+l.Addr().String(), "text/plain", body)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v, %v", resp, err)
		}
		resp.Body.Close()
	}
}
