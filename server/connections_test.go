// SPDX-License-Identifier: Apache-2.0

package server

import (
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"
)

// TestLimitedListener counts opened and closed connections.
func TestLimitedListener(t *testing.T) {
	inner, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	causes := make(chan string, 8)
	l := newLimited(inner, 3, 2, func(_, cause string) { causes <- cause })
	defer l.Close()
	accepted := make(chan net.Conn, 8)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	from := func(source string) net.Conn {
		t.Helper()
		c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}).Dial("tcp4", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	want := func(source, cause string) (c net.Conn) {
		t.Helper()
		from(source)
		got := ""
		select {
		case c = <-accepted:
		case got = <-causes:
		}
		if got != cause {
			t.Fatalf("%s: %q, want %q", source, got, cause)
		}
		return c
	}
	first := want("127.0.0.1", "")
	want("127.0.0.1", "")
	want("127.0.0.1", "too many connections of this client")
	want("127.0.0.2", "")
	want("127.0.0.3", "too many connections")
	first.Close()
	first.Close() // a second Close does not release another slot
	want("127.0.0.3", "")
	want("127.0.0.4", "too many connections")
}

// TestClientOf: all addresses of a /64 count as one client.
func TestClientOf(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.7:1": "192.0.2.7/32", "[::ffff:192.0.2.7]:1": "192.0.2.7/32",
		"[2001:db8::1:2:3:4]:1": "2001:db8::/64", "[fe80::1%lo]:1": "fe80::/64",
	} {
		a, err := net.ResolveTCPAddr("tcp", text)
		if err != nil {
			t.Fatal(err)
		}
		if got := clientOf(a).String(); got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// TestRefusalsAreTold: a flood of refusals causes one log line in ten seconds.
func TestRefusalsAreTold(t *testing.T) {
	l := &logged{}
	now := time.Unix(1_700_000_000, 0)
	r := newRefusals(slog.New(slog.NewTextHandler(l, nil)))
	r.now = func() time.Time { return now }
	for range 1000 {
		r.logRefused("192.0.2.7:1", "the token is not known")
	}
	if said := l.take(); strings.Count(said, "\n") != 1 || !strings.Contains(said, "192.0.2.7:1") {
		t.Errorf("the log: %s", said)
	}
	now = now.Add(logEvery)
	r.logRefused("192.0.2.8:1", "the token is not known")
	if said := l.take(); strings.Count(said, "\n") != 1 || !strings.Contains(said, "others=999") {
		t.Errorf("the log: %s", said)
	}
}
