// SPDX-License-Identifier: Apache-2.0

package server

import (
	"io"
	"net/http"
	"sync/atomic"
	"time"
)

const (
	// requestTimeout is the time in which the header and the body of a request must arrive.
	requestTimeout = 20 * time.Second
	// lingerTimeout is the time for which the rest of a refused request is read. Closing a socket
	// with unread data resets the connection (RFC 1122, 4.2.2.13), and the client may lose the
	// response.
	lingerTimeout = 500 * time.Millisecond
)

// closeAfterRefusal serves requests with next. The server's ReadTimeout applies only until the body is
// complete, so that net/http does not end a stream. A refusal of a request with an incomplete body
// closes the connection after lingerTimeout. Otherwise a client without credentials would occupy
// the connection until the ReadTimeout.
func closeAfterRefusal(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e := &exchange{ResponseWriter: w, control: http.NewResponseController(w)}
		if r.Body == nil || r.Body == http.NoBody {
			e.complete.Store(true)
			_ = e.control.SetReadDeadline(time.Time{}) // fails on a closed connection, as all that follows does
		} else {
			r.Body = &requestBody{r.Body, e}
		}
		next.ServeHTTP(e, r)
	})
}

// exchange is the response to a request with a possibly incomplete body.
type exchange struct {
	http.ResponseWriter
	control  *http.ResponseController
	complete atomic.Bool // the body was read to its end
}

// Unwrap lets http.ResponseController find the writer.
func (e *exchange) Unwrap() http.ResponseWriter { return e.ResponseWriter }

// SetReadDeadline has no effect: huma sets a deadline of its own, which begins with the handler.
func (e *exchange) SetReadDeadline(time.Time) error { return nil }

func (e *exchange) WriteHeader(status int) {
	if status >= http.StatusBadRequest && !e.complete.Load() {
		e.Header().Set("Connection", "close")
		_ = e.control.SetReadDeadline(time.Now().Add(lingerTimeout))
	}
	e.ResponseWriter.WriteHeader(status)
}

// requestBody is the body of a request.
type requestBody struct {
	io.ReadCloser
	to *exchange
}

func (a *requestBody) Read(b []byte) (int, error) {
	n, err := a.ReadCloser.Read(b)
	if err == io.EOF {
		a.to.complete.Store(true)
		_ = a.to.control.SetReadDeadline(time.Time{})
	}
	return n, err
}
