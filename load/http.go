// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// HTTPSpec configures a real HTTP client. The zero value of a field is its default.
type HTTPSpec struct {
	URL string `json:"url"`
	// Connections is the number of concurrent connections; 0 means 1. In a closed loop, a connection sends its next
	// request after the response.
	Connections int `json:"connections"`
	// Requests in total; 0 means until Duration is over.
	Requests int `json:"requests,omitempty"`
	// Duration of the run; 0 means until all Requests are sent. One of both is required.
	Duration time.Duration `json:"duration_ns,omitempty"`
	// Rate of requests per second, open-loop: each request has a due time, and its latency counts from there. 0 means
	// closed-loop.
	Rate float64 `json:"rate,omitempty"`
	// KeepAlive uses a connection for more than one request.
	KeepAlive bool `json:"keep_alive"`
	// Timeout of one request; 0 means 30 s.
	Timeout time.Duration `json:"timeout_ns"`
	// Insecure disables the verification of certificates.
	Insecure bool `json:"insecure,omitempty"`
}

// Validate returns an error if the spec is impossible.
func (s HTTPSpec) Validate() error {
	if u, err := url.Parse(s.URL); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("http: %q is not a URL such as http://192.0.2.10/", s.URL)
	}
	if s.Requests == 0 && s.Duration == 0 {
		return errors.New("http: a number of requests or a duration is needed")
	}
	if err := checkRate(s.Rate); err != nil {
		return fmt.Errorf("http: %w", err)
	}
	if s.Timeout < 0 || s.Duration < 0 || s.Requests < 0 || s.Connections < 0 {
		return errors.New("http: connections, requests, duration and timeout are not negative")
	}
	return nil
}

// HTTPResult is the result of a run; times are in nanoseconds.
type HTTPResult struct {
	Spec     HTTPSpec      `json:"spec"`
	Took     time.Duration `json:"took_ns"`
	Complete uint64        `json:"complete"`
	Failed   uint64        `json:"failed"`
	// Unanswered requests were in progress at the end of the run. Unsent requests were due (Rate) and waited for a
	// connection.
	Unanswered uint64         `json:"unanswered"`
	Unsent     uint64         `json:"unsent"`
	Errors     map[string]int `json:"errors,omitempty"` // number of failures by kind
	Statuses   map[int]int    `json:"statuses"`
	Bytes      uint64         `json:"bytes"` // of bodies
	// RequestsPerSecond counts complete requests.
	RequestsPerSecond float64 `json:"requests_per_second"`
	// Times of Connect, Wait (request written to first byte) and Total. Total includes unanswered requests and
	// timeouts, with the time that they had waited.
	Connect Latency `json:"connect"`
	Wait    Latency `json:"wait"`
	Total   Latency `json:"total"`
	// Histogram of Total.
	Histogram *Histogram `json:"-"`
}

// httpRun is the state of a run.
type httpRun struct {
	spec   HTTPSpec
	client *http.Client
	taken  atomic.Int64 // requests taken by workers

	mu                   sync.Mutex // protects everything below
	result               HTTPResult
	sent                 uint64
	connect, wait, total Histogram
}

// RunHTTP sends requests from the calling process's network namespace. progress, if not nil, is called every second
// with the numbers of complete and failed requests.
func RunHTTP(ctx context.Context, spec HTTPSpec, progress func(complete, failed uint64)) (*HTTPResult, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	spec.Connections = max(spec.Connections, 1)
	if spec.Timeout == 0 {
		spec.Timeout = 30 * time.Second
	}
	if err := allowFiles(uint64(spec.Connections) + 256); err != nil {
		return nil, err
	}
	r := &httpRun{spec: spec, client: newHTTPClient(spec)}
	r.result = HTTPResult{Spec: spec, Errors: map[string]int{}, Statuses: map[int]int{}}
	if spec.Duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, spec.Duration)
		defer cancel()
	}
	stop := r.watch(progress)
	begin := time.Now()
	var workers sync.WaitGroup
	for range spec.Connections {
		workers.Go(func() { r.sendRequests(ctx, begin) })
	}
	workers.Wait()
	stop()
	r.client.CloseIdleConnections()
	return r.finish(time.Since(begin)), nil
}

func newHTTPClient(spec HTTPSpec) *http.Client {
	return &http.Client{
		Timeout: spec.Timeout,
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: spec.Timeout}).DialContext,
			MaxIdleConns:        spec.Connections,
			MaxIdleConnsPerHost: spec.Connections,
			DisableKeepAlives:   !spec.KeepAlive,
			DisableCompression:  true,
			TLSClientConfig:     &tls.Config{InsecureSkipVerify: spec.Insecure},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// allowFiles raises the limit of open files to n if it is lower.
func allowFiles(n uint64) error {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil || l.Cur >= n {
		return nil
	}
	was := l.Cur
	l.Cur = n
	l.Max = max(l.Max, n)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("http: %d open files are needed, the limit is %d: %w", n, was, err)
	}
	return nil
}

// sendRequests sends one request after another.
func (r *httpRun) sendRequests(ctx context.Context, begin time.Time) {
	for ctx.Err() == nil {
		n := r.taken.Add(1) - 1
		if r.spec.Requests > 0 && n >= int64(r.spec.Requests) {
			return
		}
		due := time.Now()
		if r.spec.Rate > 0 {
			due = begin.Add(time.Duration(float64(n) / r.spec.Rate * float64(time.Second)))
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Until(due)):
			}
		}
		r.sendRequest(ctx, due)
	}
}

// requestTimes are the times of one request. The transport reports them from its own goroutines. It may do so after the
// request has ended, because it continues to connect for later requests.
type requestTimes struct {
	mu                    sync.Mutex // protects everything below
	connecting, connected time.Time
	wrote, first          time.Time
	got, reused           bool // got a connection; reused an existing one
}

func (s *requestTimes) trace() *httptrace.ClientTrace {
	note := func(f func(now time.Time)) {
		s.mu.Lock()
		defer s.mu.Unlock()
		f(time.Now())
	}
	return &httptrace.ClientTrace{
		ConnectStart: func(string, string) {
			note(func(now time.Time) {
				if s.connecting.IsZero() { // the first of several addresses
					s.connecting = now
				}
			})
		},
		ConnectDone: func(_, _ string, err error) {
			note(func(now time.Time) {
				if err == nil && s.connected.IsZero() {
					s.connected = now
				}
			})
		},
		GotConn:              func(i httptrace.GotConnInfo) { note(func(time.Time) { s.got, s.reused = true, i.Reused }) },
		WroteRequest:         func(httptrace.WroteRequestInfo) { note(func(now time.Time) { s.wrote = now }) },
		GotFirstResponseByte: func() { note(func(now time.Time) { s.first = now }) },
	}
}

// connect returns the duration of the connection setup; false if the request reused a connection.
func (s *requestTimes) connect() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.connected.Sub(s.connecting), !s.reused && !s.connected.IsZero()
}

// hasConnection reports whether the request got a connection.
func (s *requestTimes) hasConnection() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got
}

// wait returns the time from the request to the first byte of the response; 0 if the server responded before the
// request was complete.
func (s *requestTimes) wait() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wrote.IsZero() {
		return 0
	}
	return max(s.first.Sub(s.wrote), 0)
}

// sendRequest sends a request and records its result.
func (r *httpRun) sendRequest(ctx context.Context, due time.Time) {
	var s requestTimes
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, s.trace()), http.MethodGet, r.spec.URL, nil)
	var status int
	var bytes int64
	if err == nil {
		var resp *http.Response
		if resp, err = r.client.Do(req); err == nil {
			status = resp.StatusCode
			bytes, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}
	total := time.Since(due)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent++
	r.result.Bytes += uint64(bytes)
	if err != nil && ctx.Err() != nil {
		r.result.Unanswered++
		r.total.Add(total)
		return
	}
	if err != nil {
		kind := errorKind(err)
		if kind == responseTimeout && !s.hasConnection() { // the request timed out before its dial
			kind = connectTimeout
		}
		r.result.Failed++
		r.result.Errors[kind]++
		if kind == connectTimeout || kind == responseTimeout {
			r.total.Add(total)
		}
		return
	}
	r.result.Complete++
	r.result.Statuses[status]++
	if took, ok := s.connect(); ok {
		r.connect.Add(took)
	}
	r.wait.Add(s.wait())
	r.total.Add(total)
}

// Timeouts count as latencies: the response would have taken at least that long.
const (
	connectTimeout  = "connect timeout"
	responseTimeout = "response timeout"
)

// TimedOut returns the number of requests that timed out.
func (r *HTTPResult) TimedOut() int { return r.Errors[connectTimeout] + r.Errors[responseTimeout] }

// errorKind classifies an error for the summary.
func errorKind(err error) string {
	var timeout net.Error
	var op *net.OpError
	var errno syscall.Errno
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, syscall.ECONNRESET):
		return "connection reset"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return "unreachable"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return "no local port left"
	case errors.As(err, &op) && op.Op == "dial" && op.Timeout():
		return connectTimeout
	case errors.As(err, &timeout) && timeout.Timeout():
		return responseTimeout
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "closed early"
	}
	if errors.As(err, &errno) { // without the port, which differs per connection
		return "other: " + errno.Error()
	}
	return "other: " + err.Error()
}

// watch reports the progress every second until it is stopped.
func (r *httpRun) watch(progress func(complete, failed uint64)) (stop func()) {
	if progress == nil {
		return func() {}
	}
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				r.mu.Lock()
				complete, failed := r.result.Complete, r.result.Failed
				r.mu.Unlock()
				progress(complete, failed)
			}
		}
	}()
	return func() { close(end); <-ended }
}

// unsentRequests returns the number of requests that were due before the end and not sent.
func (r *httpRun) unsentRequests(took time.Duration) uint64 {
	if r.spec.Duration > 0 {
		took = min(took, r.spec.Duration)
	}
	return unsentTurns(took, r.spec.Rate, shareOf(uint64(r.spec.Requests), 0, 1), r.sent)
}

func (r *httpRun) finish(took time.Duration) *HTTPResult {
	r.result.Took = took
	r.result.Unsent = r.unsentRequests(took)
	r.result.RequestsPerSecond = float64(r.result.Complete) / took.Seconds()
	r.result.Connect, r.result.Wait, r.result.Total = r.connect.Latency(), r.wait.Latency(), r.total.Latency()
	r.result.Histogram = &r.total
	return &r.result
}
