// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/url"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/lab/labtest"
)

func TestHTTP(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "hello")
	}))
	defer s.Close()
	for name, spec := range map[string]HTTPSpec{
		"closed-loop": {Requests: 300, Connections: 10},
		"kept alive":  {Requests: 300, Connections: 10, KeepAlive: true},
		"open-loop":   {Requests: 100, Connections: 20, Rate: 2000},
	} {
		t.Run(name, func(t *testing.T) {
			spec.URL = s.URL
			r, err := RunHTTP(context.Background(), spec, nil)
			if err != nil {
				t.Fatal(err)
			}
			if r.Complete != uint64(spec.Requests) || r.Failed != 0 || r.Bytes != 5*r.Complete || r.Statuses[200] != spec.Requests {
				t.Errorf("%+v", r)
			}
			if r.Total.Count != r.Complete || r.Total.P50 == 0 {
				t.Errorf("times %+v", r.Total)
			}
			if connects := r.Connect.Count; spec.KeepAlive && connects > 20 || !spec.KeepAlive && connects != r.Complete {
				t.Errorf("%d connects", connects)
			}
		})
	}
}

// TestHTTPManyConnections: the server answers only after all clients have sent a request, so the test ends only if
// all connections are open at once.
func TestHTTPManyConnections(t *testing.T) {
	const connections = 6000
	if err := allowFiles(2*connections + 256); err != nil { // both ends are this process
		labtest.Require(t, labtest.Root)
		t.Fatal(err)
	}
	var asked atomic.Int64
	everybody := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if asked.Add(1) == connections {
			close(everybody)
		}
		<-everybody
	}))
	defer s.Close()
	r, err := RunHTTP(context.Background(), HTTPSpec{URL: s.URL, Connections: connections, Requests: connections, Timeout: 2 * time.Minute}, nil)
	if err != nil || r.Complete != connections || r.Failed != 0 {
		t.Errorf("%v, %d complete, %d failed, %v", err, r.Complete, r.Failed, r.Errors)
	}
}

// TestHTTPOpenLoop has a server that takes ten times longer than the schedule
// allows: no request is left out, and waiting for the schedule is latency.
func TestHTTPOpenLoop(t *testing.T) {
	const slow, requests = 20 * time.Millisecond, 20
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { time.Sleep(slow) }))
	defer s.Close()
	r, err := RunHTTP(context.Background(), HTTPSpec{URL: s.URL, Requests: requests, Rate: 500}, nil)
	if err != nil || r.Complete != requests {
		t.Fatalf("%v, %+v", err, r)
	}
	// The last was due after 38 ms and answered after 400 ms at the earliest.
	if least := requests*slow - requests*2*time.Millisecond; r.Total.Max < least*9/10 {
		t.Errorf("the last request took %v since it was due, less than %v", r.Total.Max, least)
	}
}

// TestHTTPUnanswered has a server that accepts and never answers. The result at the end of the run includes requests
// in progress and requests that were due meanwhile.
func TestHTTPUnanswered(t *testing.T) {
	const lasts = 2 * time.Second
	gone := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-gone }))
	defer s.Close()
	defer close(gone)
	for _, c := range []struct {
		spec            HTTPSpec
		due, unanswered uint64
	}{
		{HTTPSpec{Connections: 5}, 0, 5},
		{HTTPSpec{Connections: 2, Rate: 100}, 200, 2},
		{HTTPSpec{Connections: 2, Rate: 100, Requests: 10}, 10, 2},
	} {
		c.spec.URL, c.spec.Duration = s.URL, lasts
		r, err := RunHTTP(context.Background(), c.spec, nil)
		if err != nil {
			t.Fatal(err)
		}
		if r.Complete+r.Failed != 0 || r.Unanswered != c.unanswered || r.Unsent != c.due-min(c.due, c.unanswered) {
			t.Errorf("%+v: complete %d, failed %d, unanswered %d, unsent %d", c.spec, r.Complete, r.Failed, r.Unanswered, r.Unsent)
		}
		if r.Total.Count != c.unanswered || r.Total.Max < lasts/2 {
			t.Errorf("%+v: times %+v", c.spec, r.Total)
		}
	}
}

// TestHTTPConnectTime: only a request on a new connection has a connect time. It counts from the first address tried
// to the one that answered.
func TestHTTPConnectTime(t *testing.T) {
	fail := errors.New("refused")
	for name, c := range map[string]struct {
		does func(*httptrace.ClientTrace)
		want bool
	}{
		"made": {func(h *httptrace.ClientTrace) {
			h.ConnectStart("", "")
			h.ConnectDone("", "", nil)
			h.GotConn(httptrace.GotConnInfo{})
		}, true},
		"failed": {func(h *httptrace.ClientTrace) { h.ConnectStart("", ""); h.ConnectDone("", "", fail) }, false},
		"reused": {func(h *httptrace.ClientTrace) {
			h.ConnectStart("", "")
			h.GotConn(httptrace.GotConnInfo{Reused: true})
			h.ConnectDone("", "", nil)
		}, false},
		"second address": {func(h *httptrace.ClientTrace) {
			h.ConnectStart("", "")
			time.Sleep(10 * time.Millisecond)
			h.ConnectStart("", "")
			h.ConnectDone("", "", fail)
			h.ConnectDone("", "", nil)
			h.GotConn(httptrace.GotConnInfo{})
		}, true},
	} {
		var s requestTimes
		c.does(s.trace())
		took, ok := s.connect()
		if ok != c.want || name == "second address" && took < 10*time.Millisecond {
			t.Errorf("%s: %v, %v", name, took, ok)
		}
	}
}

// TestHTTPProgress is called every second.
func TestHTTPProgress(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer s.Close()
	told := 0
	_, err := RunHTTP(context.Background(), HTTPSpec{URL: s.URL, Duration: 2500 * time.Millisecond, Rate: 100}, func(uint64, uint64) { told++ })
	if err != nil || told < 1 {
		t.Errorf("%v, told %d times", err, told)
	}
}

func TestHTTPErrors(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		panic(http.ErrAbortHandler)
	}))
	gone := httptest.NewServer(nil)
	gone.Close()
	defer s.Close()
	for url, kind := range map[string]string{gone.URL: "connection refused", s.URL: "closed early"} {
		r, err := RunHTTP(context.Background(), HTTPSpec{URL: url, Requests: 3, Timeout: time.Minute}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if r.Failed != 3 || r.Errors[kind] != 3 {
			t.Errorf("%s: %+v", kind, r.Errors)
		}
	}
	for _, spec := range []HTTPSpec{{URL: s.URL}, {URL: "nothing", Requests: 1}, {URL: s.URL, Requests: 1, Rate: -1}, {URL: s.URL, Requests: 1, Timeout: -1}} {
		if _, err := RunHTTP(context.Background(), spec, nil); err == nil {
			t.Errorf("%+v: no error", spec)
		}
	}
}

// TestHTTPTimeouts: timeouts are part of the latencies, with their waiting time; refused requests are not.
func TestHTTPTimeouts(t *testing.T) {
	const timeout = 50 * time.Millisecond
	gone := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-gone }))
	defer s.Close()
	defer close(gone)
	r, err := RunHTTP(context.Background(), HTTPSpec{URL: s.URL, Requests: 3, Timeout: timeout}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if r.Failed != 3 || r.TimedOut() != 3 || r.Total.Count != 3 || r.Total.P50 < timeout {
		t.Errorf("%d failed, %d timed out: %v; times %+v", r.Failed, r.TimedOut(), r.Errors, r.Total)
	}
	refuses := httptest.NewServer(nil)
	refuses.Close()
	if r, err = RunHTTP(context.Background(), HTTPSpec{URL: refuses.URL, Requests: 3, Timeout: time.Minute}, nil); err != nil || r.Total.Count != 0 || r.TimedOut() != 0 {
		t.Errorf("%v; %+v", err, r)
	}
}

// TestHTTPConnectTimeouts: a request without a connection within its timeout is reported as such.
func TestHTTPConnectTimeouts(t *testing.T) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", name.(*unix.SockaddrInet4).Port)
	for { // nothing is accepted: with a full queue, SYNs get no answer
		queue, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
		if err != nil {
			t.Fatal(err)
		}
		if queue.Unacked > queue.Sacked { // of a listener: those that wait, and the room for them
			break
		}
		c, err := net.DialTimeout("tcp", address, slowest)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	r, err := RunHTTP(context.Background(), HTTPSpec{URL: "http://" + address, Requests: 3, Timeout: 20 * time.Millisecond}, nil)
	if err != nil || r.Errors[connectTimeout] != 3 || r.TimedOut() != 3 || r.Total.Count != 3 {
		t.Errorf("%v; %+v", err, r)
	}
}

// TestErrorKinds: failures of one kind are counted together for all connections.
func TestErrorKinds(t *testing.T) {
	kinds := map[string]bool{}
	for port := range 3 {
		kinds[errorKind(&url.Error{Op: "Get", URL: "http://192.0.2.1/", Err: &net.OpError{
			Op: "write", Net: "tcp", Source: &net.TCPAddr{Port: 40000 + port}, Err: os.NewSyscallError("write", syscall.EPIPE),
		}})] = true
	}
	if len(kinds) != 1 || !kinds["other: broken pipe"] {
		t.Errorf("kinds %v", kinds)
	}
}
